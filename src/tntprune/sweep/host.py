"""One model of a sweep in memory, and its photos."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from tntprune.backbones.attach import device_of
from tntprune.backbones.models import load_model, random_model
from tntprune.bench.measure import inputs
from tntprune.data.folders import Batch, Photos, input_mode, transform_for
from tntprune.data.loading import in_order
from tntprune.errors import UserError
from tntprune.sweep.jobs import built
from tntprune.sweep.planning import Backbone, Plan, Task
from tntprune.system.precision import exact_head_

TIMED = "setting"  # what a bar counts where there are no photos to count


class Host:
    """One model in memory, and its photos; each made when it is first asked for."""

    def __init__(self, plan: Plan, backbone: Backbone, device: str, workers: int) -> None:
        self.plan, self.backbone, self.device, self.workers = plan, backbone, device, workers

    @cached_property
    def model(self) -> nn.Module:
        """The unpruned model."""
        name, size = self.backbone.name, self.plan.img_size
        if not self.plan.random_weights:
            return exact_head_(load_model(name, self.backbone.weights, self.device, size))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return exact_head_(random_model(name, self.device, size))

    @cached_property
    def loader(self) -> DataLoader[Batch]:
        """All photos, batch by batch, whenever they are asked for."""
        return self._loader(self.workers)

    def _loader(self, workers: int) -> DataLoader[Batch]:
        photos = Photos(self.backbone.photos, transform_for(self.model), input_mode(self.model))
        return in_order(photos, self.plan.batch_size, workers, pin=device_of(self.model).type == "cuda")

    @cached_property
    def images(self) -> torch.Tensor:
        """A batch on the device to take times with: the first photos, as often as it takes to fill it."""
        batches: Iterator[Batch] = iter(self._loader(0))
        first = next((batch.images for batch in batches if len(batch.images)), None)
        if first is None:
            raise UserError("no image could be read; expected at least one")
        return inputs(self.model, first, self.plan.batch_size).to(device_of(self.model))

    @contextmanager
    def models(self, group: list[Task]) -> Iterator[list[nn.Module]]:
        """The models of a group: they share their weights, but for those that were trained with their reduction."""
        hosts: dict[str, nn.Module] = {}
        found = []
        for task in group:
            host = self.model
            if task.saved is not None and task.saved.tuned:
                if task.saved.digest not in hosts:
                    hosts[task.saved.digest] = copy.deepcopy(self.model)
                host = hosts[task.saved.digest]
            found.append(built(self.model, host, task.job.config, task.saved))
        yield found
        found.clear()

    def bar(self, counted: int, timed: int, progress: bool) -> Any:
        """Progress in photos, of all settings that are counted together; in settings, where they are only timed."""
        total, unit, desc = counted * len(self.backbone.photos), "image", self.backbone.name
        if counted == 0:
            total, unit, desc = timed, TIMED, f"timing {desc}"
        return tqdm(total=total, unit=unit, desc=desc, disable=not progress or not total)
