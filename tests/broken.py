"""Generators of broken files: the same ones for the same number, in any process and on any system."""

from __future__ import annotations

import base64
import io
import json
import random
import shutil
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load, load_file, save_file

HUGE = 10**400
VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 7, 10**6, HUGE, -HUGE, 0.5, -0.5, 1e308, float("nan"), float("inf"), "", "x", "3",
    "\x1b[31mred\n", "\ud800", "../..", "/dev/zero", "pipe:touch PWNED", [], {}, [[]], [None], [1, "a"], {"a": {}},
    [0.5] * 500, "x" * 5000, {"method": "tnt"}, "[" * 3000, "NaN",
]  # fmt: skip


def nodes(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, below in inner for place in nodes(below, (*path, key)))]


def wrong(value: Any, draw: random.Random) -> Any:
    """A JSON value with something wrong at one to three of its places."""
    value = json.loads(json.dumps(value))
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        path = draw.choice(nodes(value))
        if not path:
            return draw.choice(VALUES)
        outer = value
        for key in path[:-1]:
            outer = outer[key]
        if draw.random() < 0.2:
            del outer[path[-1]]
        else:
            outer[path[-1]] = draw.choice(VALUES)
    return value


def text_of(value: Any) -> str:
    return json.dumps(value)


def torn(data: bytes, draw: random.Random) -> bytes:
    """Bytes of which some are others, missing or too many."""
    kind = draw.randrange(6)
    place = draw.randrange(max(1, len(data)))
    if kind == 0:
        return data[:place]
    if kind == 1:
        return data[:place] + draw.randbytes(draw.randrange(1, 40)) + data[place:]
    if kind == 2:
        return data[:place] + data[place + draw.randrange(1, 40) :]
    if kind == 3:
        return draw.choice((b"", b"\0" * 300, b"<html>404</html>", b"\xff\xfe", b"{}", b"[]", b"null", b"PK\x03\x04"))
    if kind == 4:
        return draw.randbytes(300)
    changed = bytearray(data)
    for _ in range(draw.randrange(1, 30)):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


# Images


def encoded(draw: random.Random, kind: str) -> bytes:
    file = io.BytesIO()
    noise = Image.frombytes("RGB", (32, 32), draw.randbytes(3 * 32 * 32))
    noise.save(file, kind)
    return file.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, depth: int = 8, colour: int = 2, data: bytes = b"") -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


SHAPES = [
    (0, 0),
    (1, 2**31 - 1),
    (2**31 - 1, 2**31 - 1),
    (60000, 60000),
    (1, 5000),
    (32, 32),
    (2**16, 1),
    (20000, 9000),
]


def image(draw: random.Random) -> tuple[str, bytes]:
    """The name and the bytes of a broken image."""
    kind, suffix = draw.choice(
        [
            ("PNG", "png"),
            ("JPEG", "jpg"),
            ("WEBP", "webp"),
            ("BMP", "bmp"),
            ("TIFF", "tif"),
            ("GIF", "gif"),
            ("PPM", "ppm"),
        ]
    )
    choice = draw.randrange(6)
    if choice == 0:
        width, height = draw.choice(SHAPES)
        data = png(width, height, draw.choice((1, 3, 8, 16, 255)), draw.choice((0, 1, 2, 3, 6, 9)), draw.randbytes(99))
        return "broken.png", data
    if choice == 1:
        header = draw.choice((b"P6 %d %d 255\n", b"P5 %d %d 65535\n", b"P6 %d %d 0\n", b"P6 -%d %d 255\n"))
        return "broken.ppm", header % draw.choice(SHAPES) + draw.randbytes(99)
    if choice == 2:
        return f"broken.{suffix}", encoded(draw, kind)[: draw.randrange(1, 40)]
    return f"broken.{suffix}", torn(encoded(draw, kind), draw)


# Safetensors, pickles and what stands in them


class Trap:
    """Something that would leave a file behind if a pickle were run."""

    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self) -> Any:
        return Path.touch, (self.touched,)


def safetensors(header: str, body: bytes) -> bytes:
    text = header.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + body


def tensors_of(path: Path, draw: random.Random) -> dict[str, torch.Tensor]:
    """The tensors of a file with one of them wrong."""
    tensors = load_file(path)
    name = draw.choice(sorted(tensors))
    value = tensors[name]
    changes: list[Callable[[], Any]] = [
        lambda: value * float("nan"), lambda: value / 0 * value.sign(), lambda: value.double() * 1e300,
        lambda: value.long(),
        lambda: value.to(torch.int8), lambda: value > 0, lambda: value.to(torch.complex64), lambda: value.flatten()[:1],
        lambda: value[None], lambda: torch.zeros(0), lambda: value.flatten(), lambda: torch.zeros(3, 3, 3),
        lambda: value.to(torch.float8_e4m3fn),
    ]  # fmt: skip
    choice = draw.randrange(len(changes) + 3)
    if choice < len(changes):
        return {**tensors, name: changes[choice]().contiguous()}
    if choice == len(changes):
        return {known: other for known, other in tensors.items() if known != name}
    if choice == len(changes) + 1:
        return {**tensors, "one.more": value.clone()}
    return {f"x.{known}": other for known, other in tensors.items()}


def weights(good: Path, folder: Path, draw: random.Random) -> Path:
    """A broken file of weights."""
    choice = draw.randrange(5)
    if choice == 0:
        path = folder / draw.choice(("w.safetensors", "w.SAFETENSORS"))
        path.write_bytes(torn(good.read_bytes(), draw))
    elif choice == 1:
        path = folder / "w.safetensors"
        save_file(tensors_of(good, draw), path)
    elif choice == 2:
        path = folder / "w.safetensors"
        data = good.read_bytes()
        end = 8 + struct.unpack("<Q", data[:8])[0]
        path.write_bytes(safetensors(text_of(wrong(json.loads(data[8:end]), draw)), data[end:]))
    elif choice == 3:
        path = folder / draw.choice(("w.pth", "w.bin", "w.pt", "w.safetensors"))
        things = [
            Trap(folder / "PWNED"), {"model": Trap(folder / "PWNED")}, {**load_file(good), "x": Trap(folder / "PWNED")},
            [1], None, {}, {"model": {}}, "x", {"a": 3}, {1: torch.zeros(1)}, {"state_dict": {"model": 3}},
            {"a": torch.zeros(2).to_sparse()}, {"a": torch.zeros(2, device="meta")}, tensors_of(good, draw),
            {"model": tensors_of(good, draw)},
        ]  # fmt: skip
        torch.save(draw.choice(things), path, _use_new_zipfile_serialization=draw.random() < 0.7)
    else:
        path = folder / "w.pth"
        file = io.BytesIO()
        torch.save(load_file(good), file, _use_new_zipfile_serialization=draw.random() < 0.7)
        path.write_bytes(torn(file.getvalue(), draw))
    return path


def with_entries(path: Path, draw: random.Random) -> None:
    """Make one of the text entries of a safetensors file wrong, in what it says or in its JSON."""
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    about = header["__metadata__"]
    name = draw.choice(sorted(about))
    try:
        inner = json.loads(about[name])
    except ValueError:
        inner = about[name]
    kind = draw.randrange(4)
    if kind == 0:
        del about[name]
    elif kind == 1:
        about[name] = torn(about[name].encode() or b"x", draw).decode("latin-1")
    else:
        about[name] = text_of(wrong(inner, draw))
    path.write_bytes(safetensors(text_of(header), data[end:]))


def reducer(folder: Path, draw: random.Random) -> None:
    """Break the saved reduction in a folder."""
    path = folder / "reducer.safetensors"
    kind = draw.randrange(5)
    if kind == 0:
        path.write_bytes(torn(path.read_bytes(), draw))
    elif kind == 1:
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            about = file.metadata()
        save_file(tensors_of(path, draw), path, metadata=about)
    else:
        with_entries(path, draw)


def plan(path: Path, draw: random.Random) -> None:
    """Break a plan."""
    data = json.loads(path.read_text())
    kind = draw.randrange(5)
    if kind == 0:
        path.write_bytes(torn(path.read_bytes(), draw))
    elif kind == 1:
        data["learned"] = base64.b64encode(torn(base64.b64decode(data["learned"]), draw)).decode()
        path.write_text(text_of(data))
    elif kind == 2:
        for name in ("config", "backbone", "model"):
            data[name] = wrong(data[name], draw) if draw.random() < 0.6 else data[name]
        path.write_text(text_of(data))
    elif kind == 3:
        tensors = load(base64.b64decode(data["learned"]))
        save_file(tensors, path.with_suffix(".tmp"))
        save_file(tensors_of(path.with_suffix(".tmp"), draw), path.with_suffix(".tmp"))
        data["learned"] = base64.b64encode(path.with_suffix(".tmp").read_bytes()).decode()
        path.with_suffix(".tmp").unlink()
        path.write_text(text_of(data))
    else:
        path.write_text(text_of(wrong(data, draw)))


def rows(path: Path, draw: random.Random) -> None:
    """Break a line of results."""
    lines = path.read_text().splitlines()
    number = draw.randrange(len(lines))
    if draw.random() < 0.3:
        path.write_bytes(torn(path.read_bytes(), draw))
        return
    changed = wrong(json.loads(lines[number]), draw)
    lines[number] = text_of(changed)
    path.write_text("\n".join(lines) + "\n")


def shards(root: Path, draw: random.Random) -> None:
    """Break the index or a shard of a webdataset."""
    kind = draw.randrange(5)
    index = root / "_info.json"
    if kind == 0:
        index.write_bytes(torn(index.read_bytes(), draw))
    elif kind == 1:
        path = root / "train-0.tar"
        path.write_bytes(torn(path.read_bytes(), draw))
    elif kind == 2:
        broken = tarred(root / "train-0.tar", draw, 10)
        assert broken
    else:
        data = json.loads(index.read_text())
        split = data["splits"]["train"]
        if draw.random() < 0.5:
            split["filenames"] = [
                draw.choice(("pipe:touch PWNED", "../x.tar", "/dev/zero", "/etc/passwd", "", "\0", "."))
            ]
        else:
            data = wrong(data, draw)
        index.write_text(text_of(data))


def tarred(path: Path, draw: random.Random, count: int, good: bool = False) -> bool:
    """Write a shard of so many photos, of which one is broken in its own way."""
    bad = -1 if good else draw.randrange(count)
    with tarfile.open(path, "w") as tar:
        for number in range(count):
            files: dict[str, bytes] = {"png": encoded(draw, "PNG"), "cls": str(number % 10).encode()}
            if number == bad:
                files = draw.choice(
                    [{"png": files["png"]}, {"cls": b"1"}, {**files, "cls": b"99"}, {**files, "cls": b"x"},
                     {**files, "cls": b"\xff"}, {**files, "png": b"no image"}, {**files, "png": b""}, {"json": b"{"}]
                )  # fmt: skip
            for suffix, data in files.items():
                entry = tarfile.TarInfo(f"{number:04}.{suffix}")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    return not good


def run(folder: Path, draw: random.Random) -> None:
    """Break a training that was interrupted: its state, its log or its files."""
    state, log = folder / "checkpoint.safetensors", folder / "log.jsonl"
    kind = draw.randrange(6)
    if kind == 0:
        state.write_bytes(torn(state.read_bytes(), draw))
    elif kind == 1:
        from safetensors import safe_open

        with safe_open(state, framework="pt") as file:
            about = file.metadata()
        save_file(tensors_of(state, draw), state, metadata=about)
    elif kind == 2:
        log.write_bytes(torn(log.read_bytes(), draw))
        with_entries(state, draw)
    elif kind == 3:
        victim = draw.choice((state, log, folder / ".lock", folder / "reducer.safetensors"))
        if victim.exists():
            victim.unlink()
        draw.choice(
            (lambda: victim.mkdir(), lambda: victim.symlink_to(victim.name), lambda: victim.write_bytes(b"x"))
        )()
    else:
        with_entries(state, draw)


def copied(source: Path, to: Path) -> Path:
    """A copy of a file or of a folder."""
    if source.is_dir():
        return Path(shutil.copytree(source, to / source.name))
    return Path(shutil.copy(source, to / source.name))
