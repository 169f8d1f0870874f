"""A folder of embeddings: one array of them all, the names of the photos, and what they were made with.

While photos are embedded the folder holds pieces of `PIECE` photos each. A piece is there whole or not at all, so that
a killed job, with however many processes, goes on with those that are missing. The last step puts them together.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from tntprune.data.photo import Packed
from tntprune.errors import UsageError, UserError
from tntprune.methods import from_dict
from tntprune.methods.text import described
from tntprune.system.storage import find_target, forget_leftovers, make_folder, packed, write, write_by

INDEX, VECTORS, FILES, PIECES = "index.json", "vectors.npy", "files.txt", "pieces"
PIECE = 512  # photos
DIGESTS = {"model_digest": "weights", "photos_digest": "photos"}  # in the settings
VectorType = Literal["float32", "float16"]


class VectorFolder:
    """The folder that embeddings are written into.

    Args:
        path: The folder.
        photos: All photos, in order.
        root: The folder of the photos; their names are told from there.
        settings: What the embeddings depend on, as JSON values; see `begin`.
    """

    def __init__(self, path: Path, photos: Packed, root: Path, settings: dict[str, Any]) -> None:
        self.path, self.photos, self.root = path, photos, root
        self.settings = json.loads(json.dumps(settings))  # as they are read again
        self.count = -(-len(photos) // PIECE)  # pieces

    def begin(self) -> dict[str, Any] | list[int]:
        """Begin in an empty folder, or find what is there.

        Returns:
            The numbers of the pieces that are missing; or the finished index, if all photos were embedded before.

        Raises:
            UserError: it cannot be written, holds other files or is broken, or the name of a photo has a line break.
            UsageError: embeddings that were made with other settings are there.
        """
        index = self.path / INDEX
        if not index.exists():
            others = sorted(one for one in self.path.iterdir() if not one.name.startswith("."))
            if others:
                raise UserError(f"{self.path}: holds other files ({others[0].name}); expected a new or an empty folder")
            self._check_names()
            write(index, self._packed({"complete": False}))
        found = self._read(index)
        names = found["settings"].keys() | self.settings.keys()
        for name in sorted(names, key=lambda name: (name in DIGESTS, name)):  # the options say more
            old, new = found["settings"].get(name), self.settings.get(name)
            if old != new:
                what = f"other {DIGESTS[name]}" if name in DIGESTS else f"{name}={_short(old)}, not {_short(new)}"
                raise UsageError(
                    f"{self.path}: was begun with {what}; expected the same command to go on, or another --out"
                )
        if found["complete"]:
            gone = next((name for name in (VECTORS, FILES) if not (self.path / name).is_file()), None)
            if gone is not None:
                raise UserError(f"{self.path / gone}: gone; expected it beside {INDEX}, or another --out")
            shutil.rmtree(self.path / PIECES, ignore_errors=True)  # of a job that was killed at the very end
            return found
        make_folder(self.path / PIECES)
        return [number for number in range(self.count) if not self._piece(number).exists()]

    def places(self, piece: int) -> range:
        """Return the positions of a piece's photos."""
        return range(piece * PIECE, min((piece + 1) * PIECE, len(self.photos)))

    def add(self, piece: int, vectors: torch.Tensor, positions: torch.Tensor, bad: Sequence[str]) -> None:
        """Write a piece; it is on the disk when this returns.

        Args:
            piece: Its number.
            vectors: The embeddings (n, D), on the CPU, of the photos that could be read.
            positions: Of these among all photos, (n,).
            bad: A line for each of the other photos of the piece.
        """
        write(self._piece(piece), packed({"vectors": vectors, "positions": positions}, {"bad": json.dumps(list(bad))}))

    def finish(self, skip: bool) -> dict[str, Any]:
        """Put the pieces together, and return the finished index.

        Args:
            skip: Whether photos may have been left out.

        Raises:
            UserError: no photo could be read, or one could not and none may be left out; or a piece is broken.
        """
        places: list[int] = []
        bad: list[str] = []
        width = 0
        for piece in range(self.count):
            vectors, positions, lines = self._load(piece)
            width = vectors.shape[1] if len(vectors) else width
            places += positions.tolist()
            bad += lines
        if bad and not skip:
            raise UserError(f"{bad[0]} (or leave such images out with --on-bad-image skip)")
        if not places:
            raise UserError(f"no image could be read, {len(bad)} were skipped; expected at least one")
        dtype = np.dtype(self.settings["dtype"]).newbyteorder("<")
        head = {"descr": dtype.str, "fortran_order": False, "shape": (len(places), width)}

        def fill(file: BinaryIO) -> None:
            np.lib.format.write_array_header_1_0(file, head)
            for piece in range(self.count):
                file.write(self._load(piece)[0].numpy().astype(dtype, copy=False).tobytes())

        write_by(self.path / VECTORS, fill)
        write(self.path / FILES, b"".join(self._name(place) + b"\n" for place in places))
        told = {"complete": True, "images": len(places), "dimensions": width, "skipped": bad}
        write(self.path / INDEX, self._packed(told))
        shutil.rmtree(self.path / PIECES, ignore_errors=True)
        for name in (INDEX, VECTORS, FILES):
            forget_leftovers(self.path / name)
        return told

    def _packed(self, told: dict[str, Any]) -> bytes:
        return json.dumps({**told, "settings": self.settings}, indent=2).encode() + b"\n"

    def _piece(self, number: int) -> Path:
        return self.path / PIECES / f"{number:07}.safetensors"

    def _load(self, number: int) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
        path = self._piece(number)
        try:
            with safe_open(path, framework="pt") as file:
                bad = json.loads((file.metadata() or {})["bad"])
                return file.get_tensor("vectors"), file.get_tensor("positions"), bad
        except (OSError, SafetensorError, KeyError, ValueError):
            raise UserError(f"{path}: broken; remove it, and run the same command again") from None

    def _read(self, index: Path) -> dict[str, Any]:
        find_target(index)  # a pipe would be waited for
        try:
            found = json.loads(index.read_text(encoding="utf-8"))
            kinds: dict[str, type] = {"complete": bool, "settings": dict}
            kinds |= {"images": int, "dimensions": int, "skipped": list} if found["complete"] else {}
            if all(isinstance(found[name], kind) for name, kind in kinds.items()):
                return dict(found)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass
        raise UserError(f"{index}: not written by tntprune embed, or broken; expected another --out")

    def _name(self, place: int) -> bytes:
        return os.fsencode(os.path.relpath(self.photos[place].path, self.root))

    def _check_names(self) -> None:
        for place in range(len(self.photos)):
            name = os.fsdecode(self._name(place))
            if len(name.splitlines()) != 1:
                raise UserError(f"{name}: a line break in its name; expected none, for {FILES} has one name per line")


def _short(value: Any) -> str:
    """Write a setting as a person reads it."""
    return described(from_dict(value)) if isinstance(value, dict) else str(value)
