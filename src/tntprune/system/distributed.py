"""The processes that work together: one, unless torchrun or accelerate launch started several."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch

from tntprune.errors import UserError
from tntprune.system.messages import first_line

T = TypeVar("T")
PATIENCE = timedelta(days=7)
MOST = 65535  # processes, and ports


@contextmanager
def _others() -> Iterator[None]:
    """Name in each process what fails when another one has ended."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(f"ended with another process, which says why ({first_line(error)})") from None


class ProcessGroup:
    """One process among those that work together.

    Args:
        rank: Its number among all.
        size: How many there are.
        local: Its number among those of its machine.

    Raises:
        ConnectionError: from whatever they do together, when one of them has ended.
    """

    def __init__(self, rank: int = 0, size: int = 1, local: int = 0) -> None:
        self.rank, self.size, self.local = rank, size, local

    @property
    def main(self) -> bool:
        """Whether this is the one that writes files and talks to the user."""
        return self.rank == 0

    def device(self, asked: str) -> str:
        """Name the device of this process: "cuda" becomes "cuda:0", "cuda:1", ... where there are several."""
        return f"{asked}:{self.local}" if self.size > 1 and asked != "cpu" and ":" not in asked else asked

    def share(self, items: Sequence[T]) -> list[T]:
        """Return this process's share of what there is to do: every `size`-th."""
        return list(items[self.rank :: self.size])

    @_others()
    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up over all processes, the same in each; exact for whole numbers."""
        if self.size > 1:
            tensor = tensor.clone()
            torch.distributed.all_reduce(tensor)
        return tensor

    @_others()
    def gather(self, value: T) -> list[T]:
        """Return what each process gives, in the order of their numbers; in all of them."""
        found: list[Any] = [value] * self.size
        if self.size > 1:
            torch.distributed.all_gather_object(found, value)
        return found

    def any(self, told: bool) -> bool:
        """Say whether one of them says so; the same in all."""
        return any(self.gather(told))

    @_others()
    def wait(self) -> None:
        """Wait until all are here."""
        if self.size > 1:
            torch.distributed.barrier()

    def agree(self, find: Callable[[], T]) -> T:
        """Return in all of them what the main process finds; a mistake of the user's that it finds is raised in all."""
        found: T | None = None
        mistake: UserError | None = None
        if self.main:
            try:
                found = find()
            except UserError as error:
                mistake = error
        found, mistake = self.gather((found, mistake))[0]
        if mistake is not None:
            mistake.told = not self.main  # it is the main process that says so
            raise mistake
        return found  # type: ignore[return-value]

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Let the main process go through, and then the others; see `agree` for mistakes that it finds."""
        mistake: list[UserError] = []
        if self.main:
            try:
                yield
            except UserError as error:
                mistake.append(error)

        def found() -> None:
            if mistake:
                raise mistake[0]

        self.agree(found)
        if not self.main:
            yield


ALONE = ProcessGroup()


def join(device: str = "cpu") -> ProcessGroup:
    """Join the processes that torchrun or accelerate launch started, on "cpu", "cuda" or "mps", or be alone.

    Raises:
        UserError: there are several, and accelerate is not installed or their address is not told.
    """
    size = count_of("WORLD_SIZE")
    if size == 1:
        return ALONE
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise UserError(
            f"WORLD_SIZE={size}, but {missing[0]} is not set; expected torchrun or accelerate "
            "launch to start the processes, or WORLD_SIZE unset"
        )
    count_of("RANK", 0, size - 1)
    count_of("MASTER_PORT")
    try:
        from accelerate import PartialState
    except ImportError:
        raise UserError("several processes need accelerate; install it with: pip install 'tntprune[train]'") from None
    # over gloo on CPU and nccl on CUDA; one that has done its share may wait for long
    state = PartialState(cpu=device.split(":")[0] == "cpu", timeout=PATIENCE)
    return ProcessGroup(state.process_index, state.num_processes, state.local_process_index)


def count_of(name: str, least: int = 1, most: int = MOST) -> int:
    """Read a whole number that a launcher sets in the environment, 1 if unset; a UserError refuses anything else."""
    text = os.environ.get(name, "1")
    if not (text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most):
        raise UserError(f"{name}={text[:40]}: expected a whole number from {least} to {most}, or {name} unset")
    return int(text)
