"""The command line: finds the command, and turns a user's mistake into one line."""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import dropwhile, pairwise, takewhile
from typing import Any

import tyro

from tntprune import __version__
from tntprune.cli import console
from tntprune.errors import INTERRUPTED, UsageError, UserError, UserNote
from tntprune.system.flags import check_flags, hints_of
from tntprune.system.memory import lack_of_memory
from tntprune.system.messages import one_line, warn

PARSING = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)
SMALLER = ("batch_size", "batch_sizes", "micro_batches", "together", "workers", "img_size")  # what takes memory
RESUMED = (["sweep"], ["paper"], ["embed"])  # commands that go on where they stopped
ABOUT = """Faster vision transformers: remove or merge tokens that they do not need.

Exit codes: 0 done, 1 something given cannot be used, 2 wrong usage, 3 done but photos or settings were skipped,
130 interrupted by Ctrl-C, or a training by SIGTERM."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Without the program's name; None takes those of the process.

    Returns:
        The exit code.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    console.prepare_streams()
    try:
        with _noted():
            return _run(given or ["--help"])
    except UserError as error:
        if error.told:
            return error.exit_code
        return _failed(given, str(error), error.exit_code)
    except KeyboardInterrupt:
        more = "; what was finished is kept, and the same command goes on" if given[:1] in RESUMED else ""
        return _failed(given, f"interrupted{more}", INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has gone, as in `tntprune info ... | head -1`
        console.forget_output()
        return 1
    except OSError as error:  # a path that is too long, or that lies under a folder we may not enter
        name = f"{error.filename}: "[:200] if error.filename else ""
        return _failed(given, f"{name}{error.strerror or error}")
    except RecursionError:
        return _failed(given, "nested too deeply: a file or an option; expected less nesting")


def _failed(given: Sequence[str], message: str, code: int = 1) -> int:
    """Print an error as one line, or with --json as one object, and return the exit code."""
    line = one_line(" ".join(message.split()))
    print(json.dumps({"error": line}) if "--json" in given else f"tntprune: {line}", file=sys.stderr)
    return code


@contextlib.contextmanager
def _noted() -> Iterator[None]:
    """Print notes to the user as one line each, like errors."""
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, UserNote):
                warn(f"tntprune: note: {message}")
            else:
                others(message, category, *where, **more)

        warnings.showwarning = show
        yield


def _run(given: list[str]) -> int:
    for before, word in pairwise(["tntprune", *given]):
        if word == "" or (word.startswith("--") and word.endswith("=")):
            raise UsageError(f"an empty value after {word[:-1] or before}; expected a value, or no such flag")
    try:
        if given == ["--version"]:
            print(f"tntprune {__version__}")
            return 0
        return _parse(given)()
    except UserError:
        raise
    except Exception as error:
        if _came_of_interrupt(error):
            raise KeyboardInterrupt from None
        line = lack_of_memory(error, _smaller(given[0])) if isinstance(error, MemoryError | RuntimeError) else None
        if line is None:
            raise
        raise UserError(line) from None
    finally:
        sys.stdout.flush()  # or a reader that has gone would be noticed where nobody can catch it


def _came_of_interrupt(error: BaseException | None) -> bool:
    """Tell whether Ctrl-C caused an error; Python 3.11 wraps what is raised while a class is made in a RuntimeError."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _smaller(name: str) -> list[str]:
    """Return the flags of a command that decide how much memory it takes."""
    from tntprune.cli.commands import COMMANDS

    names = hints_of(COMMANDS[name]) if name in COMMANDS else {}
    return [f"--{name.replace('_', '-')}" for name in SMALLER if name in names]


def _parse(given: list[str]) -> Callable[[], int]:
    """Read a command line; what is returned runs the command."""
    from tntprune.cli.commands import COMMANDS  # and with them torch
    from tntprune.cli.values import VALUES

    name, errors = given[0], io.StringIO()
    if name not in COMMANDS and not name.startswith("-"):
        near = difflib.get_close_matches(name, COMMANDS, n=1) or ["train"] * (name == "calibrate")
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise UsageError(f"unknown command {name!r}{meant}; expected one of {', '.join(COMMANDS)}; see tntprune --help")
    prog = f"tntprune {name}" if name in COMMANDS else "tntprune"
    try:
        with contextlib.redirect_stderr(errors), _readable_width(), _short_help(given):
            if name in COMMANDS:
                return tyro.cli(_later(COMMANDS[name]), prog=prog, args=given[1:], config=PARSING, registry=VALUES)
            return tyro.extras.subcommand_cli_from_dict(  # type: ignore[no-any-return]
                {name: _later(command, brief=True) for name, command in COMMANDS.items()},
                prog=prog, description=ABOUT, args=given, config=PARSING, registry=VALUES,
            )  # fmt: skip
    except SystemExit as end:
        if end.code in (0, None):
            raise
        told = (_unknown_flag(name, given[1:]) if name in COMMANDS else "") or _one_line(errors.getvalue())
        told = told if told.endswith("...") else told.removesuffix(".")  # of a list of values
        if listed := next((word for word in given if re.fullmatch(r"[\d.]+(,[\d.]+)+", word)), None):
            told += f" (write {listed.replace(',', ' ')})"
        raise UsageError(f"{told}; see {prog} --help") from None


def _short_help(given: Sequence[str]) -> contextlib.AbstractContextManager[Any]:
    """Let the help show the options of the method that is named, instead of those of every method."""
    from tntprune.cli.options import shown_for

    if not {"-h", "--help"} & set(given):
        return contextlib.nullcontext()
    words = " ".join(given).replace("--method=", "--method ").split()
    return shown_for(next((word for flag, word in pairwise(words) if flag == "--method"), ""))


def _unknown_flag(command: str, given: Sequence[str]) -> str:
    """Name the first flag that a command does not have, and those that are spelt like it; return "" where all exist."""
    from tntprune.cli.commands import COMMANDS
    from tntprune.cli.values import VALUES

    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit), _readable_width():
        tyro.cli(_later(COMMANDS[command]), prog="", args=["--help"], config=PARSING, registry=VALUES)
    known = set(re.findall(r"--[a-z][a-z0-9-]*", text.getvalue()))
    flags = (word.partition("=")[0] for word in given if re.match(r"--[a-z]", word))
    for flag in flags:
        if flag.replace("_", "-") not in known:
            near = difflib.get_close_matches(flag, known, n=1)
            return f"unknown flag {flag}" + (f" (did you mean {near[0]}?)" if near else "")
    return ""


@contextlib.contextmanager
def _readable_width() -> Iterator[None]:
    """Let the parser draw its help between 40 and 400 columns wide; below 6 it never ends."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(min(max(shutil.get_terminal_size().columns, 40), 400))
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def _later(command: Callable[..., int], brief: bool = False) -> Callable[..., Callable[[], int]]:
    """Make a command that checks its flags when it is parsed, and runs when the result is called.

    Args:
        command: The command.
        brief: Let its help be no more than the first paragraph.
    """

    @functools.wraps(command)
    def parsed(**options: Any) -> Callable[[], int]:
        check_flags(command, options)
        return functools.partial(command, **options)

    if brief:
        parsed.__doc__ = (command.__doc__ or "").split("\n\n")[0]
    return parsed


def _one_line(box: str) -> str:
    """Return what the parser's box says above its first rule, without its title."""
    lines = filter(None, (line.strip("│╭╮╰╯ ") for line in box.splitlines()))
    is_rule = re.compile("[─-]{5}").match
    told = " ".join(takewhile(lambda line: not is_rule(line), dropwhile(is_rule, list(lines)[1:])))
    return re.sub(r"^Error parsing (\S+):", r"\1", told) or "wrong usage"
