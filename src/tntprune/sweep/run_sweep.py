"""The sweep itself: one model at a time, its settings in groups, and a line in the file for each as soon as it is."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from tntprune.backbones.models import ImgSize
from tntprune.data.folders import default_workers
from tntprune.errors import UserError
from tntprune.methods.checks import check_whole
from tntprune.sweep.host import TIMED, Host
from tntprune.sweep.jobs import Job
from tntprune.sweep.measure import Counted, Speed, accuracy, speeds
from tntprune.sweep.planning import Backbone, Plan, Task, plan
from tntprune.sweep.results import Row
from tntprune.sweep.results_file import LOCKS, Ledger
from tntprune.system.distributed import ALONE, World
from tntprune.system.environment import surroundings
from tntprune.system.messages import warn
from tntprune.system.precision import Precision


def sweep(
    jobs: Sequence[Job],
    data: Path,
    out: Path,
    *,
    weights: Mapping[str, Path | None] | None = None,
    device: str = "cpu",
    batch_size: int = 32,
    workers: int | None = None,
    precision: Precision = "fp32",
    together: int = 8,
    speed: bool = True,
    rounds: int = 10,
    limit: int | None = None,
    img_size: ImgSize = None,
    on_bad_image: Literal["error", "skip"] = "error",
    world: World = ALONE,
    random_weights: bool = False,
    progress: bool = True,
) -> list[Row]:
    """Measure settings that a results file does not have yet, and add a line to it for each.

    The unpruned model of every backbone is measured as well. A setting that its model cannot take is told on standard
    error and left out. Killed at any moment, the same call goes on where it stopped.

    Args:
        jobs: What to measure.
        data: A folder of photos with one subfolder a class.
        out: The results file, see `Ledger`.
        weights: Files of weights by the models' names; timm asks the Hub for the others.
        device: "cpu", "cuda" or "mps".
        batch_size: Images at a time, for accuracy and for speed.
        workers: Processes that read photos; None is half the processors, at most 8.
        precision: Of the forward passes; "bf16" and "fp16" under autocast, with the head in fp32.
        together: Settings that are run on each batch that was read. A kill loses the work on so many at most.
        speed: Time each setting in turns with the unpruned model. Rows that lack it are completed.
        rounds: How often each is timed, at least 3.
        limit: Take so many of the photos, chosen at random and always the same.
        img_size: Rows and columns of pixels, if not the models' own size.
        on_bad_image: "error" stops at a photo that cannot be read; "skip" leaves it out and counts it.
        world: The processes that share the settings.
        random_weights: Models with random weights: for timing.
        progress: Show a bar.

    Returns:
        A row for each job that can be measured, in the jobs' order and with the jobs' names; before them that of each
        unpruned model that is no job of its own.

    Raises:
        UserError: no setting can be measured, or a file cannot be read or written.
        UsageError: a model, device or number is none.
    """
    made = plan(
        jobs, data, weights=weights, batch_size=batch_size, precision=precision, limit=limit, img_size=img_size,
        random_weights=random_weights,
    )  # fmt: skip
    if world.main:
        for line in made.left_out:
            warn(f"left out: {line}")
    return carry_out(
        made, out, device=device, workers=workers, together=together, speed=speed, rounds=rounds,
        on_bad_image=on_bad_image, world=world, progress=progress,
    )  # fmt: skip


def carry_out(
    made: Plan,
    out: Path,
    *,
    device: str = "cpu",
    workers: int | None = None,
    together: int = 8,
    speed: bool = True,
    rounds: int = 10,
    on_bad_image: Literal["error", "skip"] = "error",
    world: World = ALONE,
    progress: bool = True,
) -> list[Row]:
    """Measure what a plan says and the file does not have yet; see `sweep`."""
    check_whole("together", together, 1)
    check_whole("rounds", rounds, 3)
    workers = default_workers() if workers is None else workers
    check_whole("workers", workers, 0)
    if world.size > 1 and LOCKS is None:
        raise UserError("several processes need a system with file locks to write into one file; expected a single one")
    ledger = Ledger(out)
    ledger.prepare()
    runner = _Runner(
        made, ledger, world.device(device), workers, together, speed, rounds, on_bad_image, world, progress
    )
    for backbone in made.backbones:
        runner.backbone(backbone)
    world.wait()
    rows = ledger.rows()
    return [replace(rows[task.key], name=task.name, scheme=task.scheme) for task in made.tasks]


class _Runner:
    """Carries out a plan, one model at a time."""

    def __init__(
        self, plan: Plan, ledger: Ledger, device: str, workers: int, together: int, speed: bool, rounds: int,
        on_bad_image: Literal["error", "skip"], world: World, progress: bool,
    ) -> None:  # fmt: skip
        self.plan, self.ledger, self.device, self.workers = plan, ledger, device, workers
        self.together, self.speed, self.rounds = together, speed, rounds
        self.on_bad_image, self.world, self.progress = on_bad_image, world, progress and world.main
        # the same ones in all processes, although some may be writing already
        self.rows = world.gather(ledger.rows() if world.main else {})[0]
        self.told: set[str] = set()  # photos that could not be read, of which each is told once

    def backbone(self, backbone: Backbone) -> None:
        """Measure the settings of one model that the file does not have yet."""
        keys = [task.key for task in backbone.tasks]
        missing = {key for key in keys if key not in self.rows}
        slow = {key for key in keys if self.speed and self._lacks_speed(key)}
        # on a processor that all share, the main process takes the times when the others have ended
        alone = self.world.size == 1 or torch.device(self.device).type != "cpu"
        wanted = missing | slow if alone else missing
        mine = self.world.share([task for task in backbone.tasks if task.key in wanted])
        host = Host(self.plan, backbone, self.device, self.workers)
        counted, timed = (sum(task.key in lacking for task in mine) for lacking in (missing, slow))
        with host.bar(counted, timed, self.progress) as bar:
            for group in _chunks(mine, self.together):
                with host.models(group) as models:
                    self._count(host, group, models, bar)
                    if alone:
                        self._time(host, group, models, bar)
            if slow and not alone:
                self.world.wait()
                if self.world.main:
                    now = self.ledger.rows()
                    self.rows |= {key: now[key] for key in keys}  # of other models: what all processes know
                    for group in _chunks([task for task in backbone.tasks if task.key in slow], self.together):
                        with host.models(group) as models:
                            self._time(host, group, models, bar)
                self.world.wait()

    def _count(self, host: Host, group: list[Task], models: list[nn.Module], bar: Any) -> None:
        """Measure the accuracy of those of a group that lack it."""
        lacking = [number for number, task in enumerate(group) if task.key not in self.rows]
        if not lacking:
            return
        begin = time.perf_counter()
        counted, bad = accuracy(
            host.model, [models[number] for number in lacking], host.loader, self.plan.precision, self.on_bad_image,
            lambda images: bar.update(images * len(lacking)),
        )  # fmt: skip
        seconds = time.perf_counter() - begin
        for line in bad:
            if line not in self.told:
                self.told.add(line)
                warn(f"skipped {line}")
        for number, one in zip(lacking, counted, strict=True):
            row = _row(group[number], one, len(bad), self.device, seconds / len(lacking))
            self._add(row)

    def _time(self, host: Host, group: list[Task], models: list[nn.Module], bar: Any) -> None:
        """Measure the speed of those of a group that lack it."""
        lacking = [number for number, task in enumerate(group) if self._lacks_speed(task.key)]
        if not self.speed or not lacking:
            return
        bar.set_postfix_str("timing")
        begin = time.perf_counter()
        found = speeds(
            host.model, [models[number] for number in lacking], host.images, self.plan.precision, self.rounds
        )
        seconds = (time.perf_counter() - begin) / len(lacking)
        for number, one in zip(lacking, found, strict=True):
            row = _timed(self.rows[group[number].key], one, self.device, seconds, self.rounds)
            self._add(row)
        bar.set_postfix_str("")
        if getattr(bar, "unit", "") == TIMED:  # one that is not shown has none
            bar.update(len(lacking))

    def _lacks_speed(self, key: str) -> bool:
        return key not in self.rows or self.rows[key].images_per_s is None

    def _add(self, row: Row) -> None:
        self.ledger.add(row)
        self.rows[row.setting.key] = row


def _chunks(tasks: Sequence[Task], size: int) -> list[list[Task]]:
    return [list(tasks[first : first + size]) for first in range(0, len(tasks), size)]


def _row(task: Task, counted: Counted, skipped: int, device: str, seconds: float) -> Row:
    tally = counted.tally
    return Row(
        setting=task.setting,
        name=task.name,
        scheme=task.scheme,
        images=tally.images,
        skipped=skipped,
        right=tally.first,
        right5=tally.five,
        agreeing=counted.agreeing,
        macs=round(tally.cost / tally.images) if tally.variable else task.macs,
        base_macs=task.base_macs,
        tokens=[float(count) for count in tally.tokens()],
        command=_again(task.command, skipped, device),
        about={**surroundings(device), "seconds": round(seconds, 3)},
    )


def _again(command: str, skipped: int, device: str) -> str:
    """The command of a setting, with what only measuring tells."""
    kind = torch.device(device).type
    words = ["", *(["--on-bad-image skip"] if skipped else []), *([f"--device {kind}"] if kind != "cpu" else [])]
    return command + " ".join(words)


def _timed(row: Row, speed: Speed, device: str, seconds: float, rounds: int) -> Row:
    told = {**surroundings(device), "seconds": round(seconds, 3), "rounds": rounds}
    return replace(row, **speed._asdict(), about={**row.about, "speed": told})
