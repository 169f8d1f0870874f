"""The processes that work together: one, unless torchrun or accelerate launch started several."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch

from tntprune.errors import UserError

T = TypeVar("T")
PATIENCE = timedelta(days=7)
MOST = 65535  # processes, and ports


class World:
    """One process among those that work together, as accelerate finds them; here alone.

    Args:
        rank: Its number among all.
        size: How many there are.
        local: Its number among those of its machine.
    """

    def __init__(self, rank: int = 0, size: int = 1, local: int = 0) -> None:
        self.rank, self.size, self.local = rank, size, local

    @property
    def main(self) -> bool:
        """Whether this is the one that writes files and talks to the user."""
        return self.rank == 0

    def device(self, asked: str) -> str:
        """The device of this process, where each of a machine has its own: "cuda" becomes "cuda:0", "cuda:1", ..."""
        return f"{asked}:{self.local}" if self.size > 1 and asked != "cpu" and ":" not in asked else asked

    def share(self, items: Sequence[T]) -> list[T]:
        """This process's share of what there is to do: every `size`-th."""
        return list(items[self.rank :: self.size])

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all processes, the same in each; exact for whole numbers."""
        return tensor

    def gather(self, value: T) -> list[T]:
        """What each process gives, in the order of their numbers; in all of them."""
        return [value]

    def any(self, told: bool) -> bool:
        """Whether one of them says so; the same in all."""
        return any(self.gather(told))

    def agree(self, find: Callable[[], T]) -> T:
        """What the main process finds, in all of them; if it finds a mistake of the user's, that is raised in all."""
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

    def wait(self) -> None:
        """Until all are here."""

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """The main process goes through first, and then the others; a mistake of the user's that it finds is raised in
        all.
        """
        mistake: UserError | None = None
        if self.main:
            try:
                yield
            except UserError as error:
                mistake = error
        mistake = self.gather(mistake)[0]
        if mistake is not None:
            mistake.told = not self.main
            raise mistake
        if not self.main:
            yield


class Several(World):
    """One process among several.

    Raises:
        ConnectionError: from whatever they do together, when one of them has ended.
    """

    def __init__(self, device: str) -> None:
        try:
            from accelerate import PartialState
        except ImportError:
            raise UserError(
                "several processes need accelerate; install it with: pip install 'tntprune[train]'"
            ) from None
        # Joins the others, over gloo on CPU and nccl on CUDA. One that has done its share may wait for long.
        state = PartialState(cpu=device == "cpu", timeout=PATIENCE)
        super().__init__(state.process_index, state.num_processes, state.local_process_index)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone()
        with _others():
            torch.distributed.all_reduce(total)
        return total

    def gather(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.size
        with _others():
            torch.distributed.all_gather_object(found, value)
        return found

    def wait(self) -> None:
        with _others():
            torch.distributed.barrier()


@contextmanager
def _others() -> Iterator[None]:
    """What the processes do together, which fails in each when one of them has ended; that one says why."""
    try:
        yield
    except RuntimeError as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConnectionError(f"ended with another process, which says why ({reason[:200]})") from None


ALONE = World()


def join(device: str = "cpu") -> World:
    """Join the processes that torchrun or accelerate launch started, or be alone.

    Args:
        device: "cpu", "cuda" or "mps": what the processes work on.

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
    return Several(device.split(":")[0])


def count_of(name: str, least: int = 1, most: int = MOST) -> int:
    """Read a whole number that torchrun or accelerate launch sets in the environment; 1 where it is not set.

    Raises:
        UserError: it is set to something else.
    """
    text = os.environ.get(name, "1")
    if not (text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most):
        raise UserError(f"{name}={text[:40]}: expected a whole number from {least} to {most}, or {name} unset")
    return int(text)
