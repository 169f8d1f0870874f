"""How good a training is after an epoch: first guesses on photos that it does not learn from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tntprune.analysis.evaluate import Tally
from tntprune.backbones.attach import device_of, reduction_of
from tntprune.data.folders import Photo, Photos, input_mode, transform_for
from tntprune.data.loading import in_order
from tntprune.data.streams import Stream
from tntprune.errors import UserError
from tntprune.system.distributed import ALONE, World


class Validation:
    """Top-1 and top-5 of a model that is being trained, as it is at the time; several processes share the photos.

    Args:
        model: A reduced model.
        photos: With labels.
        batch_size: Images at a time.
        workers: Processes that read.
        world: The processes that train together.
    """

    def __init__(
        self,
        model: nn.Module,
        photos: Sequence[Photo] | Stream,
        batch_size: int = 64,
        workers: int = 1,
        world: World = ALONE,
    ) -> None:
        self.model, self.world = model, world
        reader = Photos(photos, transform_for(model), input_mode(model))
        self.loader = in_order(reader, batch_size, workers, world.rank, world.size)

    def __call__(self) -> dict[str, float]:
        """Percent of the photos whose label is the first guess, "top1", or among the first five, "top5".

        Raises:
            UserError: a photo cannot be read.
        """
        tally, device = Tally(self.model), device_of(self.model)
        tally.variable = False  # nobody asks what each image costs, which takes another pass
        modes = {module: module.training for module in self.model.modules()}
        reduction_of(self.model).eval()
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
        tally.gather(self.world)
        return {"top1": 100 * tally.first / tally.images, "top5": 100 * tally.five / tally.images}
