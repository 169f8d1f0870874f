"""The command line: finds the command, and turns a user's mistake into one line."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tyro

from tntprune import __version__, console
from tntprune.commands import (
    bench,
    demo,
    evaluate,
    export,
    info,
    macs,
    paper,
    pretrain,
    push,
    report,
    search,
    show,
    sweep,
    train,
)
from tntprune.errors import UserError, UserNote
from tntprune.lean import start_lean

COMMANDS: dict[str, Callable[..., int]] = {
    "demo": demo.demo,
    "info": info.info,
    "macs": macs.macs,
    "pretrain": pretrain.pretrain,
    "train": train.train,
    "eval": evaluate.evaluate,
    "sweep": sweep.sweep,
    "search": search.search,
    "show": show.show,
    "bench": bench.bench,
    "paper": paper.paper,
    "report": report.report,
    "export": export.export,
    "push": push.push,
}
COUNTING = (["info"], ["macs"])  # commands that run no model
RESUMED = (["sweep"], ["paper"])  # commands that go on where they stopped
ABOUT = """Faster vision transformers: drop the tokens they do not need.

Exit codes: 0 done, 1 something given cannot be used (or Ctrl-C), 2 wrong usage, 3 done but some images were skipped."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Without the program's name; None takes those of the process.

    Returns:
        The exit code.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    console.replace_closed()
    try:
        with _noted():
            return _run(given or ["--help"])
    except UserError as error:
        if error.told:
            return error.exit_code
        message = " ".join(str(error).split())
        if "--json" in given:
            print(json.dumps({"error": message}), file=sys.stderr)
        else:
            print(f"tntprune: {message}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        more = "; what was finished is kept, and the same command goes on" if given[:1] in RESUMED else ""
        print(f"tntprune: interrupted{more}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output has gone, as in `tntprune info ... | head -1`
        console.forget_output()
        return 1
    except OSError as error:  # a path that is too long, or that lies under a folder we may not enter
        name = f"{error.filename}: "[:200] if error.filename else ""
        print(f"tntprune: {name}{error.strerror or error}", file=sys.stderr)
        return 1


@contextlib.contextmanager
def _noted() -> Iterator[None]:
    """Notes to the user as one line each, like errors."""
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, UserNote):
                print(f"tntprune: note: {message}", file=sys.stderr)
            else:
                others(message, category, *where, **more)

        warnings.showwarning = show
        yield


def _run(given: list[str]) -> int:
    try:
        if given == ["--version"]:
            print(f"tntprune {__version__}")
            return 0
        return _parse(given)()
    finally:
        sys.stdout.flush()  # or a reader that has gone would be noticed where nobody can catch it


class _WrongUsage(UserError):
    exit_code = 2


def _parse(given: list[str]) -> Callable[[], int]:
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            chosen: Any = tyro.extras.subcommand_cli_from_dict(
                {name: _later(command) for name, command in COMMANDS.items()},
                prog="tntprune",
                description=ABOUT,
                args=given,
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
            )
    except SystemExit as end:
        if end.code in (0, None):
            raise
        raise _WrongUsage(_one_line(errors.getvalue(), given)) from None
    return chosen  # type: ignore[no-any-return]


def _later(command: Callable[..., int]) -> Callable[..., Callable[[], int]]:
    """The same command, parsed now and run afterwards."""

    @functools.wraps(command)
    def parsed(*args: Any, **options: Any) -> Callable[[], int]:
        return functools.partial(command, *args, **options)

    return parsed


def _one_line(box: str, given: list[str]) -> str:
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
    command = next((word for word in given if word in COMMANDS), None)
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


def run() -> None:
    """The console script."""
    if sys.argv[1:2] in COUNTING:
        start_lean()
    sys.exit(main())


if __name__ == "__main__":
    run()
