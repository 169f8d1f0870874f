"""One model of a sweep in memory, and its photos."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import nn
from torch.utils.data import DataLoader

from tntprune.backbones.attach import device_of
from tntprune.backbones.models import load_model, random_model
from tntprune.bench.benchmark import inputs
from tntprune.data.loading import Batch, Photos, in_order
from tntprune.data.transforms import input_mode, transform_for
from tntprune.errors import UserError
from tntprune.sweep.planning import PlannedSetting, SweepPlan, SweptModel
from tntprune.sweep.request import built
from tntprune.system.precision import exact_head_


class Host:
    """One model in memory, and its photos; each made when it is first asked for."""

    def __init__(self, plan: SweepPlan, swept: SweptModel, device: str, workers: int) -> None:
        self.plan, self.swept, self.device, self.workers = plan, swept, device, workers

    @cached_property
    def model(self) -> nn.Module:
        """The unpruned model."""
        name, size = self.swept.name, self.plan.img_size
        if not self.plan.random_weights:
            return exact_head_(load_model(name, self.swept.weights, self.device, size))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return exact_head_(random_model(name, self.device, size))

    @cached_property
    def loader(self) -> DataLoader[Batch]:
        """All photos, batch by batch, whenever they are asked for."""
        return self._loader(self.workers)

    def _loader(self, workers: int) -> DataLoader[Batch]:
        photos = Photos(self.swept.photos, transform_for(self.model), input_mode(self.model))
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
    def models(self, group: Sequence[PlannedSetting]) -> Iterator[list[nn.Module]]:
        """Make the models of a group; they share their weights, but for those trained with their reduction."""
        hosts: dict[str, nn.Module] = {}
        found = []
        for planned in group:
            host, saved = self.model, planned.saved
            if saved is not None and saved.tuned:
                if saved.digest not in hosts:
                    hosts[saved.digest] = copy.deepcopy(self.model)
                host = hosts[saved.digest]
            found.append(built(self.model, host, planned.config, saved))
        yield found
        found.clear()
