"""How good a training is after an epoch: first guesses on photos that it does not learn from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tntprune.analysis.evaluate import Tally
from tntprune.backbones.attach import device_of, reduction_of
from tntprune.data.loading import Photos, in_order
from tntprune.data.photo import Photo
from tntprune.data.streams import Stream
from tntprune.data.transforms import input_mode, transform_for
from tntprune.errors import UserError
from tntprune.system.distributed import ALONE, ProcessGroup


class Validation:
    """Top-1 and top-5 of a model that is being trained, as it is at the time; several processes share the photos."""

    def __init__(
        self,
        model: nn.Module,
        photos: Sequence[Photo] | Stream,
        batch_size: int = 64,
        workers: int = 1,
        group: ProcessGroup = ALONE,
    ) -> None:
        self.model, self.group = model, group
        reader = Photos(photos, transform_for(model), input_mode(model))
        self.loader = in_order(reader, batch_size, workers, group.rank, group.size)

    def __call__(self) -> dict[str, float]:
        """Return the percent of photos whose label is the first guess, "top1", or among the first five, "top5"."""
        tally, device = Tally(self.model), device_of(self.model)
        tally.variable = False  # nobody asks what each image costs, which takes another pass
        method = reduction_of(self.model)
        modes = {module: module.training for module in method.modules()}  # all else is in eval mode
        method.eval()
        try:
            with torch.inference_mode():
                for batch in self.loader:
                    if batch.bad:
                        raise UserError(batch.bad[0])
                    images = batch.images.to(device)
                    tally.count(images, tally.backbone.output(self.model, images), batch.labels.to(device))
        finally:
            for module, mode in modes.items():
                module.training = mode
        tally.gather(self.group)
        return dict(zip(("top1", "top5"), tally.accuracy(), strict=True))
