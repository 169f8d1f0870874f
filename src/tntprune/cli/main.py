"""The command line: finds the command, and turns a user's mistake into one line."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from itertools import pairwise
from typing import Any

import tyro

from tntprune import __version__
from tntprune.cli import console
from tntprune.errors import INTERRUPTED, UsageError, UserError, UserNote
from tntprune.system.flags import check_flags
from tntprune.system.memory import lack_of_memory
from tntprune.system.messages import one_line, warn

PARSING = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)
RESUMED = (["sweep"], ["paper"])  # commands that go on where they stopped
ABOUT = """Faster vision transformers: drop the tokens they do not need.

Exit codes: 0 done, 1 something given cannot be used, 2 wrong usage, 3 done but some images were skipped,
130 interrupted by Ctrl-C."""


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
    """Notes to the user as one line each, like errors."""
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
    except (MemoryError, RuntimeError) as error:
        line = lack_of_memory(error, _smaller(given))
        if line is None:
            raise
        raise UserError(line) from None
    finally:
        sys.stdout.flush()  # or a reader that has gone would be noticed where nobody can catch it


SMALLER = ("batch_size", "batch_sizes", "parts", "together", "workers", "img_size")  # what takes memory


def _smaller(given: Sequence[str]) -> list[str]:
    """Return the flags of a command that decide how much memory it takes."""
    from tntprune.cli.commands import COMMANDS

    command = COMMANDS.get(next((word for word in given if word in COMMANDS), ""))
    parameters = {} if command is None else inspect.signature(command).parameters
    inner = (vars(parameter.default) for parameter in parameters.values() if is_dataclass(parameter.default))
    names = {*parameters, *(name for fields in inner for name in fields)}
    return [f"--{name.replace('_', '-')}" for name in SMALLER if name in names]


def _parse(given: list[str]) -> Callable[[], int]:
    from tntprune.cli.commands import COMMANDS  # and with them torch

    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), _readable_width():
            chosen: Any = tyro.extras.subcommand_cli_from_dict(
                {name: _later(command) for name, command in COMMANDS.items()},
                prog="tntprune",
                description=ABOUT,
                args=given,
                config=PARSING,
            )
    except SystemExit as end:
        if end.code in (0, None):
            raise
        raise UsageError(_one_line(errors.getvalue(), given, COMMANDS)) from None
    return chosen  # type: ignore[no-any-return]


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


def _later(command: Callable[..., int]) -> Callable[..., Callable[[], int]]:
    """Make a command that checks its flags when it is parsed, and runs when the result is called."""

    @functools.wraps(command)
    def parsed(**options: Any) -> Callable[[], int]:
        return functools.partial(_checked, command, options)

    return parsed


def _checked(command: Callable[..., int], options: dict[str, Any]) -> int:
    check_flags(command, options)
    return command(**options)


def _one_line(box: str, given: list[str], commands: Iterable[str]) -> str:
    """What the parser's box says, up to its first rule, and where to read more."""
    lines = [line.strip("│╭╮╰╯ ") for line in box.splitlines()]
    lines = [line for line in lines if line and not re.match(r"^─ .* ─+$", line)]
    if len(lines) > 1 and re.match(r"^-{5,}$", lines[1]):  # drawn in ASCII: a title above a rule
        lines = lines[2:]
    told = []
    for line in lines:
        if line.startswith(("───", "-----")):
            break
        told.append(line)
    told = [_union(" ".join(" ".join(told).split()))]
    command = next((word for word in given if word in commands), None)
    see = f"tntprune {command} --help" if command else "tntprune --help"
    return f"{told[0] or 'wrong usage'}; see {see}"


def _union(told: str) -> str:
    """The parser's words on a value that is none of several types, in ours; all else as it is."""
    found = re.match(r"Error parsing (--\S+): no type matching (\S.*) could be instantiated from \[(.*?)\]\.", told)
    if found is None:
        return told
    flag, types, value = found.groups()
    kinds = [kind for kind in re.findall(r"\{([^{}]*)\}", types) if kind != "None"]
    kinds = [re.sub(r"\[(\w+) \[\1 \.\.\.\]\]", r"\1...", kind) for kind in kinds]
    return f"{flag} {value.strip(chr(39))}: expected {' or '.join(kinds)}"
