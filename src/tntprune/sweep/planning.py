"""What a sweep is going to do, worked out before anything is measured: every setting, and those that cannot be."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from tntprune.analysis.macs import macs
from tntprune.backbones.base import find_backbone
from tntprune.backbones.models import ImgSize, shape_of
from tntprune.bench.candidates import described
from tntprune.data.folders import Photo
from tntprune.errors import UserError
from tntprune.methods import Config, options, to_dict
from tntprune.sweep.jobs import Job, Saved, digest, name_of, scheme_of, shaped
from tntprune.sweep.results import Setting
from tntprune.sweep.sweep_photos import Listing
from tntprune.system.precision import Precision


@dataclass(frozen=True)
class Task:
    """A setting that is to be measured.

    Args:
        job: What was asked for; of the unpruned model it may be that nobody did.
        setting: Everything that decides the result.
        name: Of its line in tables and figures.
        scheme: "unpruned", "single" or "multi".
        macs: Multiply-accumulates of one image; the most that is possible where they differ from image to image.
        base_macs: Of the unpruned model.
        config: What is run: of a saved reduction its own config with the job's options.
        saved: What was learned.
        command: A command that measures the setting again.
    """

    job: Job
    setting: Setting
    name: str
    scheme: str
    macs: int
    base_macs: int
    config: Config | None
    saved: Saved | None
    command: str

    @property
    def key(self) -> str:
        """What tells its setting from all others."""
        return self.setting.key


@dataclass(frozen=True)
class Backbone:
    """One model of a sweep.

    Args:
        name: That our commands take.
        weights: Their file; None for timm's own, or random ones.
        photos: With the model's classes.
        tasks: Its settings, each once, the unpruned model first.
    """

    name: str
    weights: Path | None
    photos: list[Photo]
    tasks: list[Task] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """What a sweep is going to do.

    Args:
        tasks: One for each job that can be measured, in the jobs' order, after the unpruned model of each backbone
            where that is no job of its own. Two of them may be the same setting.
        left_out: One line for each job that cannot be measured.
        backbones: The models, in the order in which the jobs name them first.
        precision: Of the forward pass.
        batch_size: Images at a time.
        img_size: Rows and columns of pixels, None for the models' own.
        random_weights: Whether the models have random weights.
    """

    tasks: list[Task]
    left_out: list[str]
    backbones: list[Backbone]
    precision: Precision
    batch_size: int
    img_size: ImgSize
    random_weights: bool


def plan(
    jobs: Sequence[Job],
    data: Path,
    *,
    weights: Mapping[str, Path | None] | None = None,
    batch_size: int = 32,
    precision: Precision = "fp32",
    limit: int | None = None,
    img_size: ImgSize = None,
    random_weights: bool = False,
) -> Plan:
    """Work out what to measure. Runs nothing; of weights it wants their hash, and how many classes they have.

    Args: as `sweep` has them.

    Raises:
        UserError: there is nothing that can be measured, or the photos or saved reductions cannot be used.
        UsageError: there is no such model.
    """
    if not jobs:
        raise UserError("no setting was given; expected at least one")
    files = {name: file for name, file in (weights or {}).items() if file is not None}
    names = list(dict.fromkeys(job.model for job in jobs))
    shapes = {name: shape_of(name, img_size, None if random_weights else files.get(name)) for name in names}
    listing = Listing(data, shapes[names[0]], limit)
    backbones, makers = {}, {}
    for name in names:
        photos = listing.photos(shapes[name])
        kind = "random" if random_weights else digest(files[name]) if name in files else "hub"
        setting = partial(
            Setting, name, kind, data=listing.digest(photos), images=len(photos), precision=precision,
            batch_size=batch_size, img_size=img_size,
        )  # fmt: skip
        more = _flags(data, files.get(name), batch_size, precision, limit, img_size, random_weights)
        backbones[name] = Backbone(name, None if random_weights else files.get(name), photos)
        makers[name] = _Maker(name, shapes[name], setting, more)
    tasks: list[Task] = []
    left_out: list[str] = []
    known: set[str] = set()
    for job in jobs:
        maker, backbone = makers[job.model], backbones[job.model]
        if not backbone.tasks:
            unpruned = maker.task(Job(job.model, None))
            backbone.tasks.append(unpruned)
            known.add(unpruned.key)
            if not any(one.model == job.model and one.config is None and one.reducer is None for one in jobs):
                tasks.append(unpruned)
        try:
            task = maker.task(job)
        except UserError as error:
            told = job.name or (described(job.config) if job.config is not None else "as it was saved")
            left_out.append(f"{job.model}, {told}{f' of {job.reducer}' if job.reducer else ''}: {error}")
            continue
        tasks.append(task)
        if task.key not in known:
            known.add(task.key)
            backbone.tasks.append(task)
    if len(left_out) == len(jobs):
        raise UserError(f"no setting can be measured: {left_out[0]}")
    return Plan(tasks, left_out, list(backbones.values()), precision, batch_size, img_size, random_weights)


class _Maker:
    """Makes the tasks of one model."""

    def __init__(self, name: str, shape: nn.Module, setting: Any, flags: list[str]) -> None:
        self.name, self.shape, self.setting, self.flags = name, shape, setting, flags
        self.saved: dict[Path | str, Saved] = {}
        self.base = macs(shape).macs
        self.depth = find_backbone(shape).layout(shape).depth

    def task(self, job: Job) -> Task:
        """The task of a job.

        Raises:
            UserError: it cannot be measured, and why.
        """
        saved = None if job.reducer is None else self._saved(job.reducer)
        config = job.config if saved is None else saved.with_(job.config)
        count = macs(shaped(self.shape, config, saved)).macs
        plain = None if config is None else json.loads(json.dumps(to_dict(config)))
        return Task(
            job=job,
            setting=self.setting(config=plain, reducer=None if saved is None else saved.digest),
            name=job.name or name_of(config, saved is not None and saved.tuned),
            scheme=job.scheme or scheme_of(config, self.depth),
            macs=count,
            base_macs=self.base,
            config=config,
            saved=saved,
            command=shlex.join(["tntprune", "sweep", self.name, *_what(config, saved), *self.flags]),
        )

    def _saved(self, source: Path | str) -> Saved:
        if source not in self.saved:
            saved = Saved(source, self.shape)
            saved.check(self.shape)
            self.saved[source] = saved
        return self.saved[source]


def _what(config: Config | None, saved: Saved | None) -> list[str]:
    """The flags of a setting."""
    if config is None:
        return []
    if saved is None:
        return ["--methods", described(config)]
    words = [str(saved.given)]
    for name in options(type(config)):
        value = getattr(config, name)
        if value != getattr(saved.config, name) and (value is not None or name not in config.rivals):
            many = value if isinstance(value, tuple) else (value,)
            words.append(f"{name}={','.join('null' if one is None else str(one) for one in many)}")
    return ["--reducers", " ".join(words)]


def _flags(
    data: Path, weights: Path | None, batch_size: int, precision: str, limit: int | None, img_size: ImgSize,
    random_weights: bool,
) -> list[str]:  # fmt: skip
    """The flags that all settings of a model share."""
    found = ["--data", str(data), "--out", "again.jsonl"]
    if random_weights:
        found.append("--random-weights")
    elif weights is not None:
        found += ["--weights", str(weights)]
    found += ["--batch-size", str(batch_size), "--precision", precision]
    if limit is not None:
        found += ["--limit", str(limit)]
    if img_size is not None:
        found += ["--img-size", *map(str, img_size)]
    return found
