"""Processes that work together over gloo, as torchrun starts them, forked from one that has imported everything."""

from __future__ import annotations

import multiprocessing
import os
import socket
from typing import Any

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tntprune.training.runs", "tntprune.sweep", "timm", "accelerate"])


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _one(rank: int, size: int, port: int, work: Any, arguments: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    import torch

    torch.set_num_threads(1)
    from tntprune.system.distributed import join

    group = join("cpu")
    try:
        work(group, *arguments)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def start(size: int, work: Any, *arguments: Any) -> list[Any]:
    """Run `work(group, *arguments)` in so many processes, which are given back as soon as they have started."""
    port = free_port()
    started = [processes.Process(target=_one, args=(rank, size, port, work, arguments)) for rank in range(size)]
    for process in started:
        process.start()
    return started


def together(size: int, work: Any, *arguments: Any) -> None:
    """Run `work(group, *arguments)` in so many processes, and fail if one of them does."""
    started = start(size, work, *arguments)
    for process in started:
        process.join(120)
    codes = [process.exitcode for process in started]
    for process in started:
        if process.is_alive():
            process.kill()
    assert codes == [0] * size, f"processes ended with {codes}"
