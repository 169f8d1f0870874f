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
from tntprune.backbones.models import ImgSize, files_of_model, shape_of
from tntprune.data.photo import Photo
from tntprune.errors import UserError
from tntprune.methods import Config, options, to_dict
from tntprune.methods.text import described
from tntprune.sweep.request import SweepRequest, TrainedReducer, digest, name_of, scheme_of, shaped
from tntprune.sweep.results import Setting
from tntprune.sweep.sweep_photos import Listing
from tntprune.system.precision import Precision


@dataclass(frozen=True)
class PlannedSetting:
    """A setting that is to be measured.

    Args:
        request: What was asked for; of the unpruned model it may be that nobody did.
        setting: Everything that decides the result.
        name: Of its line in tables and figures.
        scheme: "unpruned", "single" or "multi".
        macs: Multiply-accumulates of one image; the most that is possible where they differ from image to image.
        base_macs: Of the unpruned model.
        config: What is run: of a saved reduction its own config with the request's options.
        saved: What was learned.
        command: A command that measures the setting again.
    """

    request: SweepRequest
    setting: Setting
    name: str
    scheme: str
    macs: int
    base_macs: int
    config: Config | None
    saved: TrainedReducer | None
    command: str

    @property
    def key(self) -> str:
        """What tells its setting from all others."""
        return self.setting.key


@dataclass(frozen=True)
class SweptModel:
    """One model of a sweep.

    Args:
        name: That our commands take.
        weights: Their file; None for timm's own, or random ones.
        photos: With the model's classes.
        settings: Its settings, each once, the unpruned model first.
    """

    name: str
    weights: Path | None
    photos: list[Photo]
    settings: list[PlannedSetting] = field(default_factory=list)


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep is going to do.

    Args:
        settings: One for each request that can be measured, in the requests' order, after the unpruned model where that
            is no request of its own. Two of them may be the same setting.
        left_out: One line for each request that cannot be measured.
        models: In the order in which the requests name them first.
        precision: Of the forward pass.
        batch_size: Images at a time.
        img_size: Rows and columns of pixels, None for the models' own.
        random_weights: Whether the models have random weights.
    """

    settings: list[PlannedSetting]
    left_out: list[str]
    models: list[SweptModel]
    precision: Precision
    batch_size: int
    img_size: ImgSize
    random_weights: bool


def plan_sweep(
    requests: Sequence[SweepRequest],
    data: Path,
    *,
    weights: Mapping[str, Path | None] | None = None,
    batch_size: int = 32,
    precision: Precision = "fp32",
    limit: int | None = None,
    img_size: ImgSize = None,
    random_weights: bool = False,
) -> SweepPlan:
    """Work out what to measure. Runs nothing; of weights it wants their hash, and how many classes they have.

    Args:
        requests: What is asked for; the unpruned model of each is measured as well.
        data: A folder of photos with one subfolder a class.
        weights: Files of weights by the models' names; timm asks the Hub for the others.
        batch_size: Images at a time, for accuracy and for speed.
        precision: Of the forward passes; "bf16" and "fp16" under autocast, with the head in fp32.
        limit: Take so many of the photos, chosen at random and always the same.
        img_size: Rows and columns of pixels, if not the models' own size.
        random_weights: Models with random weights: for timing.

    Raises:
        UserError: there is nothing that can be measured, or the photos or saved reductions cannot be used.
        UsageError: there is no such model.
    """
    if not requests:
        raise UserError("no setting was given; expected at least one")
    files = {} if random_weights else {name: file for name, file in (weights or {}).items() if file is not None}
    names = list(dict.fromkeys(request.model for request in requests))
    shapes = {name: shape_of(name, img_size, files.get(name)) for name in names}
    listing = Listing(data, shapes[names[0]], limit)
    models, planners = {}, {}
    for name in names:
        photos, file = listing.photos(shapes[name]), files.get(name)
        decisive = [file] if file else files_of_model(name)
        kind = "random" if random_weights else digest(*decisive) if decisive else "hub"
        setting = partial(
            Setting, name, kind, data=listing.digest(photos), images=len(photos), precision=precision,
            batch_size=batch_size, img_size=img_size,
        )  # fmt: skip
        given = {"--data": data, "--out": "again.jsonl", "--weights": file, "--batch-size": batch_size,
                 "--precision": precision, "--limit": limit}  # fmt: skip
        flags = [text for flag, value in given.items() if value is not None for text in (flag, str(value))]
        flags += ["--random-weights"] if random_weights else []
        flags += [] if img_size is None else ["--img-size", *map(str, img_size)]
        models[name] = SweptModel(name, file, photos)
        planners[name] = _Planner(name, shapes[name], setting, flags)
    settings: list[PlannedSetting] = []
    left_out: list[str] = []
    for request in requests:
        planner, own = planners[request.model], models[request.model].settings
        if not own:
            own.append(planner.plan(SweepRequest(request.model, None)))
            if not any(one.model == request.model and one.config is None and one.reducer is None for one in requests):
                settings.append(own[0])
        try:
            planned = planner.plan(request)
        except UserError as error:
            told = request.name or (described(request.config) if request.config is not None else "as it was saved")
            of = f" of {request.reducer}" if request.reducer else ""
            left_out.append(f"{request.model}, {told}{of}: {error}")
            continue
        settings.append(planned)
        if planned.key not in {one.key for one in own}:
            own.append(planned)
    if len(left_out) == len(requests):
        raise UserError(f"no setting can be measured: {left_out[0]}")
    return SweepPlan(settings, left_out, list(models.values()), precision, batch_size, img_size, random_weights)


class _Planner:
    """Plans the settings of one model."""

    def __init__(self, name: str, shape: nn.Module, setting: Any, flags: list[str]) -> None:
        self.name, self.shape, self.setting, self.flags = name, shape, setting, flags
        self.saved: dict[Path | str, TrainedReducer] = {}
        self.base = macs(shape).macs
        self.depth = find_backbone(shape).layout(shape).depth

    def plan(self, request: SweepRequest) -> PlannedSetting:
        """Plan what a request asks for.

        Raises:
            UserError: it cannot be measured, and why.
        """
        saved, config = None, request.config
        if request.reducer is not None:
            saved = self._saved(request.reducer)
            config = saved.config.changed(**saved.changes(config))
        return PlannedSetting(
            request=request,
            setting=self.setting(
                config=None if config is None else json.loads(json.dumps(to_dict(config))),
                reducer=None if saved is None else saved.digest,
            ),
            name=request.name or name_of(config, saved is not None and saved.tuned),
            scheme=request.scheme or scheme_of(config, self.depth),
            macs=macs(shaped(self.shape, config, saved)).macs,
            base_macs=self.base,
            config=config,
            saved=saved,
            command=shlex.join(["tntprune", "sweep", self.name, *_what(config, saved), *self.flags]),
        )

    def _saved(self, source: Path | str) -> TrainedReducer:
        if source not in self.saved:
            saved = TrainedReducer(source, self.shape)
            saved.check(self.shape)
            self.saved[source] = saved
        return self.saved[source]


def _what(config: Config | None, saved: TrainedReducer | None) -> list[str]:
    """Return the flags of a setting."""
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
