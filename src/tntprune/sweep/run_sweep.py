"""The sweep itself: one model at a time, its settings in groups, and a line in the file for each as soon as it is."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from tqdm import tqdm

from tntprune.data.loading import default_workers
from tntprune.methods.checks import check_whole
from tntprune.sweep.host import Host
from tntprune.sweep.measure import Counted, accuracy, speeds
from tntprune.sweep.planning import PlannedSetting, SweepPlan, SweptModel
from tntprune.sweep.results import ResultRow
from tntprune.sweep.results_file import ResultsFile
from tntprune.system.distributed import ALONE, ProcessGroup
from tntprune.system.environment import surroundings
from tntprune.system.messages import warn

TIMED = "setting"  # what a bar counts where there are no photos to count


def carry_out(
    plan: SweepPlan,
    out: Path,
    *,
    device: str = "cpu",
    workers: int | None = None,
    together: int = 8,
    speed: bool = True,
    rounds: int = 10,
    on_bad_image: Literal["error", "skip"] = "error",
    group: ProcessGroup = ALONE,
    progress: bool = True,
) -> list[ResultRow]:
    """Measure what a plan says and a results file does not have yet, and add a line to it for each.

    What the plan leaves out is told on standard error. Killed at any moment, the same call goes on where it stopped.

    Args:
        plan: What to measure.
        out: The results file, see `ResultsFile`.
        device: "cpu", "cuda" or "mps".
        workers: Processes that read photos; None is half the processors, at most 8.
        together: Settings that are run on each batch that was read. A kill loses the work on so many at most.
        speed: Time each setting in turns with the unpruned model. Rows that lack it are completed.
        rounds: How often each is timed, at least 3.
        on_bad_image: "error" stops at a photo that cannot be read; "skip" leaves it out and counts it.
        group: The processes that share the settings.
        progress: Show a bar.

    Returns:
        A row for each of the plan's settings, in its order and with its names.

    Raises:
        UserError: a file cannot be read or written.
        UsageError: a device or number is none.
    """
    workers = default_workers() if workers is None else workers
    for name, value, least in (("together", together, 1), ("rounds", rounds, 3), ("workers", workers, 0)):
        check_whole(name, value, least)
    file = ResultsFile(out)
    file.prepare()
    if group.main:
        for line in plan.left_out:
            warn(f"left out: {line}")
    # the same ones in all processes, although some may be writing already
    there = group.gather(file.rows() if group.main else {})[0]
    runner = _Runner(
        plan, file, there, group.device(device), workers, together, speed, rounds, on_bad_image, group,
        progress and group.main, set(),
    )  # fmt: skip
    for swept in plan.models:
        runner.run(swept)
    group.wait()
    rows = file.rows()
    return [replace(rows[one.key], name=one.name, scheme=one.scheme) for one in plan.settings]


@dataclass
class _Runner:
    """Carries out a plan, one model at a time. Beside what `carry_out` was given: the rows, and photos told of."""

    plan: SweepPlan
    file: ResultsFile
    rows: dict[str, ResultRow]
    device: str
    workers: int
    together: int
    speed: bool
    rounds: int
    on_bad_image: Literal["error", "skip"]
    group: ProcessGroup
    progress: bool
    told: set[str]

    def run(self, swept: SweptModel) -> None:
        """Measure the settings of one model that the file does not have yet."""
        missing = {one.key for one in swept.settings if one.key not in self.rows}
        slow = {one.key for one in swept.settings if self.speed and self._lacks_speed(one)}
        # on a processor that all share, the main process takes the times when the others have ended
        alone = self.group.size == 1 or torch.device(self.device).type != "cpu"
        mine = self.group.share([one for one in swept.settings if one.key in missing or (alone and one.key in slow)])
        host = Host(self.plan, swept, self.device, self.workers)
        counted, timed = (sum(one.key in lacking for one in mine) for lacking in (missing, slow))
        total, unit, desc = counted * len(swept.photos), "image", swept.name
        if counted == 0:
            total, unit, desc = timed, TIMED, f"timing {desc}"
        with tqdm(total=total, unit=unit, desc=desc, disable=not self.progress or not total) as bar:
            for group in self._groups(mine):
                with host.models(group) as models:
                    self._count(host, group, models, bar)
                    if alone:
                        self._time(host, group, models, bar)
            if slow and not alone:
                self.group.wait()
                if self.group.main:
                    now = self.file.rows()
                    self.rows |= {one.key: now[one.key] for one in swept.settings}  # of other models: what all know
                    for group in self._groups([one for one in swept.settings if one.key in slow]):
                        with host.models(group) as models:
                            self._time(host, group, models, bar)
                self.group.wait()

    def _groups(self, settings: Sequence[PlannedSetting]) -> Iterator[Sequence[PlannedSetting]]:
        for first in range(0, len(settings), self.together):
            yield settings[first : first + self.together]

    def _count(self, host: Host, group: Sequence[PlannedSetting], models: list[nn.Module], bar: Any) -> None:
        """Measure the accuracy of those of a group that lack it."""
        lacking = [(one, model) for one, model in zip(group, models, strict=True) if one.key not in self.rows]
        if not lacking:
            return
        begin = time.perf_counter()
        counted, bad = accuracy(
            host.model, [model for _, model in lacking], host.loader, self.plan.precision, self.on_bad_image,
            lambda images: bar.update(images * len(lacking)),
        )  # fmt: skip
        seconds = (time.perf_counter() - begin) / len(lacking)
        for line in bad:
            if line not in self.told:
                self.told.add(line)
                warn(f"skipped {line}")
        for (planned, _), found in zip(lacking, counted, strict=True):
            self._add(self._row(planned, found, len(bad), seconds))

    def _time(self, host: Host, group: Sequence[PlannedSetting], models: list[nn.Module], bar: Any) -> None:
        """Measure the speed of those of a group that lack it."""
        lacking = [(one, model) for one, model in zip(group, models, strict=True) if self._lacks_speed(one)]
        if not self.speed or not lacking:
            return
        bar.set_postfix_str("timing")
        begin = time.perf_counter()
        measured = speeds(host.model, [model for _, model in lacking], host.images, self.plan.precision, self.rounds)
        about = self._about((time.perf_counter() - begin) / len(lacking)) | {"rounds": self.rounds}
        for (planned, _), found in zip(lacking, measured, strict=True):
            row = self.rows[planned.key]
            self._add(replace(row, **found._asdict(), about={**row.about, "speed": about}))
        bar.set_postfix_str("")
        if getattr(bar, "unit", "") == TIMED:  # one that is not shown has none
            bar.update(len(lacking))

    def _lacks_speed(self, planned: PlannedSetting) -> bool:
        return planned.key not in self.rows or self.rows[planned.key].images_per_s is None

    def _add(self, row: ResultRow) -> None:
        self.file.add(row)
        self.rows[row.setting.key] = row

    def _about(self, seconds: float) -> dict[str, Any]:
        return {**surroundings(self.device), "seconds": round(seconds, 3)}

    def _row(self, planned: PlannedSetting, counted: Counted, skipped: int, seconds: float) -> ResultRow:
        tally, kind = counted.tally, torch.device(self.device).type
        words = [planned.command, *(["--on-bad-image skip"] if skipped else [])]
        return ResultRow(
            setting=planned.setting,
            name=planned.name,
            scheme=planned.scheme,
            images=tally.images,
            skipped=skipped,
            right=tally.first,
            right5=tally.five,
            agreeing=counted.agreeing,
            macs=round(tally.cost / tally.images) if tally.variable else planned.macs,
            base_macs=planned.base_macs,
            tokens=[float(count) for count in tally.tokens()],
            command=" ".join([*words, *([f"--device {kind}"] if kind != "cpu" else [])]),
            about=self._about(seconds),
        )
