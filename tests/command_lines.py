"""Random command lines, the same for the same seed, and a way to run them in this process one after another.

Commands and flags are read from the parsers. Values are half valid and half hostile.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
import tyro

from tntprune.cli import commands
from tntprune.cli import main as cli
from tntprune.cli.values import VALUES
from tntprune.methods import METHODS, options

CHEAP = {  # so that a valid line ends within seconds
    "--epochs": "1", "--minutes": "0.01", "--moves": "1", "--rounds": "3", "--workers": "0", "--limit": "8",
    "--batch-size": "4", "--batch-sizes": "2", "--check-size": "2", "--calibration-size": "4", "--together": "4",
}  # fmt: skip
ALWAYS = {  # the same for whole commands: a demo takes half a minute, and methods that learn are trained by search
    "app": (("--port", "-1"), ("--port", "1e9"), ("--port", "x"), ("--model", "nonsense")),  # it would serve for good
    "demo": (("--seed", "-1"), ("--seed", "1e38"), ("--seed", "x"), ("--seed", str(2**64))),
    "search": (("--method", "topk"), ("--method", "tome"), ("--method", "random"), ("--method", "evit")),
    "paper": (("--backbones", "digits_vit", "--dry-run"), ("--backbones", "digits_vit", "--only", "single", "topk")),
}  # fmt: skip
WEIGHT = {"demo": 0.3, "export": 0.6, "search": 0.6, "paper": 0.7}  # the slow commands come less often
NUMBERS = (
    "0", "-1", "-0", "1", "2", "3", "0.5", "-0.5", "1.5", "nan", "inf", "-inf", "1e38", "-1e38", "1e-320", "1e20",
    "1e308", "1e400", "1" + "0" * 400, "9" * 5000, str(2**31), str(-(2**31) - 1), str(2**63 - 1), str(2**64), "1_000",
    "0x10", "\u0661\u0662",
)  # fmt: skip
WORDS = (
    "x", " ", "", "-", "--", "-x", "--x", "=", "a=b", "None", "True", "[1,2", "{}", "[1]", "1,2", "1;2", "at=3", "*",
    "$x$", "\\frac{1}{0}", "é", "名前", "\U0001f600", "a\nb", "a\tb", "\x1b[31mred", "\udcff", "a\udc80b", "x" * 300,
    ".", "~", "%s", "%", "{0}", "user/repo", "a/b/c", "user/repo@", "hfds/x", "hfids/", "wds/x",
    "torch/x", "torch/", "wds/.", "pretrained", "digits_vit", "vit16", "test_vit", "resnet18", "no_such_model", "cpu",
    "cuda", "cuda:99", "meta", "mps", "cpu:1", "abacus", "tnt", "tome", "tome r=3", "tome r=1e400",
    "topk at=99 keep=0.5", "topk keep=" + "9" * 400, "evit keep=nan", "random at=[[1]]", "random order=-1",
    "tnt hidden=0", "ats tokens=true", "tome at=2 then topk at=3", "12ms", "0ms", "1e9s", "9" * 400 + "s",
    "[" * 5000,
)  # fmt: skip


@dataclass(frozen=True)
class Flag:
    """A flag, or a positional argument, whose `name` is "".

    Args:
        name: With its dashes.
        dest: The parameter.
        metavar: What stands for its value.
        several: Whether it takes any number of values.
        values: Whether it takes a value at all.
        choices: The allowed words, if only some are.
        required: Whether it must be given.
    """

    name: str
    dest: str
    metavar: str
    several: bool
    values: bool
    choices: tuple[str, ...]
    required: bool


@cache
def flags_of(command: str) -> tuple[Flag, ...]:
    """Read the flags of a command from its parser."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of get_parser, for which tyro has nothing else yet
        parser = tyro.extras.get_parser(commands.COMMANDS[command], config=cli.PARSING, registry=VALUES)
    return tuple(
        Flag(
            (action.option_strings or [""])[-1], action.dest.rpartition(".")[2], str(action.metavar),
            action.nargs == "*", action.nargs != 0, tuple(sorted(map(str, action.choices or ()))), action.required,
        )
        for action in parser._actions
    )  # fmt: skip


@dataclass(frozen=True)
class Things:
    """What valid values name: files and folders that are there.

    Args:
        run: The folder of a training. `push` writes a card into it, so each line gets a copy.
    """

    photos: Path
    run: Path
    weights: Path
    rows: Path
    picture: Path

    def valid(self, flag: Flag, draw: random.Random) -> str:
        """Draw a valid value for a flag."""
        if flag.choices:
            return draw.choice(flag.choices)
        if flag.dest in ("out", "figures", "plot", "curve"):
            ends = {"PNG": ".png", "JSON": ".json", "JSONL": ".jsonl", "HTML": ".html"}
            return (
                "new/" * draw.randrange(2) + "made" + ends.get(flag.metavar, draw.choice(("", ".onnx", ".pt2", ".xml")))
            )
        if flag.dest == "results":
            return str(self.rows)
        if flag.dest in ("photos", "maps") and "INT" not in flag.metavar:
            return str(self.picture)
        found: dict[str, Sequence[str]] = {
            "INT": ("1", "2", "4"), "STEPS": ("1", "5"), "FLOAT": ("0.5", "0.25", "1", "0.01"),
            "BOOL": ("True", "False"), "MODEL": ("digits_vit",) * 9 + ("test_vit",), "DIR": (str(self.photos),),
            "RUN": ("run", "pretrained"), "FILE": (str(self.weights),), "DEVICE": ("cpu",),
            "H W": ("64", "32"), "TIME": ("2ms",), "AT": ("2", "2,4"), "RATE": ("0.5", "0.9,0.5"), "ID": ("mit",),
            "TEXT": ("tome at=4 r=4", "topk at=2 keep=0.5", "random at=5"), "USER/REPO": ("user/repo",),
            "NAME": tuple(METHODS) if flag.dest in ("method", "only") else ("digit3", "train"),
        }  # fmt: skip
        kind = flag.metavar.removesuffix("...").split("|")[0]
        return draw.choice(found.get(kind, ("1",)))

    def hostile(self, flag: Flag, draw: random.Random) -> str:
        """Draw a value that is wrong more often than not."""
        there = [str(path) for path in (self.photos, self.weights, self.rows, self.picture, "run", "missing")]
        reads = flag.dest not in ("out", "figures", "plot", "curve", "trainings")
        numeric = any(kind in flag.metavar for kind in ("INT", "FLOAT", "STEPS", "H W"))
        pools: list[Sequence[str]] = [NUMBERS] * (4 if numeric else 1) + [WORDS] + [there] * reads
        found = draw.choice(draw.choice(pools))
        return "none" if flag.name in CHEAP and found == "None" else found  # None would be the default: hours


def line(things: Things, draw: random.Random) -> list[str]:
    """Draw one command line."""
    names = list(commands.COMMANDS)
    (command,) = draw.choices(names, [WEIGHT.get(name, 1.0) for name in names])
    flags = flags_of(command)
    words: list[list[str]] = []

    boldness = draw.choice((0.0, 0.2, 0.6))

    def give(flag: Flag, hostile: float) -> None:
        many = 2 if flag.metavar == "H W" else draw.choice((0, 1, 1, 1, 2, 3))
        values = [
            things.hostile(flag, draw) if draw.random() < hostile else things.valid(flag, draw)
            for _ in range((many if flag.several else 1) * flag.values)
        ]
        if flag.name == "--workers":  # a fork beside the threads that earlier lines left in this process may hang
            values = ["0" if value.isdigit() and len(value) == 1 else value for value in values]
        words.append([*([flag.name] if flag.name else []), *values])

    for flag in flags:
        if (flag.required or not flag.name) and draw.random() < 0.97:
            give(flag, 0.04)
        elif flag.name in CHEAP:
            words.append([flag.name, CHEAP[flag.name]])
    if command == "search":
        words += [["--photos", "16"], [draw.choice(("--macs", "--speedup", "--drop")), draw.choice(("0.6", "1.5"))]]
    others = {name for config in METHODS.values() for name in options(config)}
    if command in ALWAYS:
        words.append([*draw.choice(ALWAYS[command])])
    elif "--method" in [flag.name for flag in flags] and draw.random() < 0.7:
        method = draw.choice(sorted(METHODS))
        words.append(["--method", method])
        others -= set(options(METHODS[method]))
    kept = [word for group in ALWAYS.get(command, ()) for word in group]
    optional = [flag for flag in flags if flag.name and not flag.required and flag.name not in ("--help", *kept)]
    if draw.random() < 0.9:  # else also options that the method does not have
        optional = [flag for flag in optional if flag.dest.replace("-", "_") not in others]
    for number, flag in enumerate(draw.sample(optional, min(len(optional), draw.choice((0, 1, 1, 2, 2, 3, 5))))):
        words = [group for group in words if group[:1] != [flag.name]]  # given twice is refused: that comes below
        give(flag, boldness if number else min(1.0, 1.5 * boldness))
    if draw.random() < 0.3:
        words.append(["--json"])
    if draw.random() < 0.5:
        draw.shuffle(words)
    found = [command, *(word for group in words for word in group)]
    for _ in range(draw.choice((0, 0, 0, 0, 0, 0, 0, 1, 2))):  # and damage it
        place = draw.randrange(len(found))
        match draw.randrange(5):
            case 0:
                del found[place]
            case 1:
                found.insert(place, found[draw.randrange(len(found))])
            case 2:
                found.insert(place, draw.choice(WORDS))
            case 3:
                found[place] = found[place][: draw.randrange(len(found[place]) + 1)]
            case 4:
                found.insert(
                    place, draw.choice(("--help", "-h", "--version", *[flag.name for flag in flags if flag.name]))
                )
        if not found:
            break
    return found


@dataclass
class Ended:
    """How a command line ended."""

    words: list[str]
    code: object = None
    out: str = ""
    err: str = ""
    seconds: float = 0.0
    failure: str = ""
    strayed: list[str] = field(default_factory=list)

    def faults(self) -> list[str]:
        """List what is wrong with how it ended."""
        found = []
        if self.failure:
            return [self.failure]
        if self.code not in (0, 1, 2, 3):
            found.append(f"exit code {self.code!r}")
        if "Traceback" in self.err + self.out:
            found.append("a traceback is printed")
        errors = [one for one in self.err.split("\n") if is_error(one)]
        if len(errors) != (self.code in (1, 2)):
            found.append(f"exit code {self.code!r} with {len(errors)} error lines: {self.err[-500:]!r}")
        if any(not one.isprintable() for one in errors):
            found.append(f"an error line has control characters: {errors}")
        if self.code in (1, 2) and self.out:
            found.append(f"an error, and output: {self.out[:100]!r}")
        if "--json" in self.words and any(one.startswith("tntprune: ") for one in errors):
            found.append(f"with --json the error is text: {errors}")
        if self.strayed:
            found.append(f"written outside: {self.strayed}")
        return found


def is_error(text: str) -> bool:
    """Tell an error line from notes and progress."""
    return (text.startswith("tntprune: ") and not text.startswith("tntprune: note: ")) or text.startswith('{"error": ')


class TooLong(BaseException):
    """A command line ran past its limit; no handler of errors catches this."""


STRAYED: list[str] = []
ALLOWED: list[str] = []


def _watch(event: str, details: tuple[object, ...]) -> None:
    """Note a file that is opened for writing, made, renamed or removed where it must not be."""
    if not ALLOWED:
        return
    if event == "open":
        mode, flags = details[1], details[2]
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        paths = details[:1] if writes or (isinstance(mode, str) and set(mode) & set("wax+")) else ()
    elif event in ("os.mkdir", "os.remove", "os.rmdir", "os.truncate"):
        paths = details[:1]
    elif event in ("os.rename", "os.link", "os.symlink"):
        paths = details[:2]
    else:
        return
    for path in paths:
        if isinstance(path, str | bytes):
            full = os.path.realpath(os.fsdecode(path))
            if not full.startswith(tuple(ALLOWED)):
                STRAYED.append(f"{event} {full}")


_watching: list[bool] = []


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Work in a folder, noting files that are written anywhere else but in temporary folders and caches."""
    if not _watching:
        sys.addaudithook(_watch)  # for the life of the process: it looks only while ALLOWED has entries
        _watching.append(True)
    before = Path.cwd()
    os.chdir(folder)
    STRAYED.clear()
    caches = [str(Path(home).expanduser()) for home in ("~/.cache", "~/.config/matplotlib", "~/intel")]
    ALLOWED.extend((str(folder.resolve()), "/dev/null", "/dev/shm/", "/tmp/torchinductor_", *caches))
    temporary, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        ALLOWED.clear()
        tempfile.tempdir = temporary
        os.chdir(before)


def run(words: list[str], folder: Path, encoding: str = "utf-8", limit: float = 60) -> Ended:
    """Run one command line in this process, in a folder of its own.

    Args:
        words: Without the program's name.
        folder: An empty folder to work in.
        encoding: Of standard output and standard error.
        limit: Seconds it may take.
    """
    ended = Ended(words)
    out, err = io.BytesIO(), io.BytesIO()
    threads, arguments, environment = torch.get_num_threads(), sys.argv, dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}

    def stop(number: int, frame: object) -> None:
        raise TooLong("".join(traceback.format_stack(frame)[-6:]))  # type: ignore[arg-type]

    begin = time.perf_counter()
    with _inside(folder), warnings.catch_warnings():
        sys.argv = ["tntprune", *words]
        saved = sys.stdout, sys.stderr
        streams = io.TextIOWrapper(out, encoding, errors="strict"), io.TextIOWrapper(err, encoding, "backslashreplace")
        sys.stdout, sys.stderr = streams
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, limit)
        try:
            ended.code = cli.main(words)
        except SystemExit as end:
            ended.code = end.code or 0
        except (Exception, TooLong):
            ended.failure = traceback.format_exc()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for stream in streams:
                stream.flush()
            sys.stdout, sys.stderr = saved
            sys.argv = arguments
            for number, handler in handlers.items():
                signal.signal(number, handler)
            os.environ.clear()
            os.environ.update(environment)
            torch.set_num_threads(threads)
    ended.seconds = time.perf_counter() - begin
    ended.out, ended.err = out.getvalue().decode(encoding, "replace"), err.getvalue().decode(encoding, "replace")
    ended.strayed = list(STRAYED)
    return ended
