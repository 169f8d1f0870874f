"""The two kinds of mistakes a user can make. The command line prints them as one line and never as a traceback."""

from __future__ import annotations

INTERRUPTED = 130  # the exit code after Ctrl-C: 128 and the number of SIGINT, as in shells


class UserError(ValueError):
    """Something given cannot be used: a file, a model, a set of weights. Exit code 1."""

    exit_code = 1
    told = False  # whether another process tells the user


class UsageError(UserError):
    """Something asked for does not exist or is out of range: a name, an option, a number. Exit code 2."""

    exit_code = 2


class UserNote(UserWarning):
    """Something that a user should know of, though it stops nothing; commands print it as one line."""
