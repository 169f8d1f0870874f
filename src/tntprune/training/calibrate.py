"""Train the reduction of a model on tensors, a folder of photos or a loader."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn
from tqdm import tqdm

from tntprune.backbones.attach import device_of, reduction_of
from tntprune.backbones.base import find_backbone, tower_of
from tntprune.backbones.replacing import undo
from tntprune.data.batches import LoaderSource, PhotoSource, Source, TensorSource
from tntprune.data.datasets import open_photos
from tntprune.data.loading import Photos, default_workers
from tntprune.data.mixing import Mixer
from tntprune.data.transforms import input_mode, transform_for
from tntprune.errors import UsageError, UserError
from tntprune.methods.checks import check_whole
from tntprune.system.distributed import ALONE, ProcessGroup
from tntprune.training.config import Training
from tntprune.training.correction import check_correctable, correct_, images_of
from tntprune.training.learning import learning, weights_of
from tntprune.training.recipes import Recipe
from tntprune.training.trainer import Diverged, Trainer

Model = TypeVar("Model", bound=nn.Module)


def fit(
    model: nn.Module,
    source: Source,
    training: Training,
    first: int = 0,
    trainer: Trainer | None = None,
    after: Callable[[int, float, Trainer], None] | None = None,
    progress: bool = True,
    group: ProcessGroup = ALONE,
    keep: bool = False,
) -> None:
    """Train a reduced model from step `first` to the end.

    Args:
        model: A reduced model.
        source: Of batches.
        training: How.
        first: Steps that are done already.
        trainer: With the state of those steps; made here if not given.
        after: Called after each step with its number from 1, its loss and the trainer.
        progress: Show a bar with the loss and the time left.
        group: The processes that train together.
        keep: Keep what a frozen model makes of images in memory for all epochs, where it fits; what is learned is the
            same up to rounding.

    Raises:
        UserError: the images cannot be used, or the loss is not finite; what the reduction had learned before the
            training is put back then.
    """
    method = reduction_of(model)
    if any(value.is_inference() for value in (*model.parameters(), *model.buffers())):
        raise UserError(
            "the model was made under torch.inference_mode(), so it cannot be trained; expected one made outside of it"
        )
    if method.corrected:
        if training.backbone_lr:
            raise UserError(
                "the model was corrected for its reduction, which goes with its own weights as they are; expected the "
                "reduction without a correction to fine-tune the model under (tntprune.reduce_ again)"
            )
        undo(tower_of(model))
    was, before = (
        (method.calibrated, method.unsaved),
        {name: value.clone() for name, value in method.state_dict().items()},
    )
    epochs = training.passes(source.per_epoch, method.learners)
    total = epochs * source.per_epoch
    training = replace(training, epochs=epochs)
    devices = [device_of(model)] if device_of(model).type == "cuda" else []
    with (
        learning(model, training.backbone_lr > 0, training.unfreeze),
        torch.random.fork_rng(devices=devices),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        # a shuffling loader of the user's draws its order before the first step
        torch.default_generator.manual_seed(training.seed)
        trainer = trainer or Trainer(model, training, total, group)
        if keep and isinstance(source, TensorSource) and source.mixer is None and epochs > 1:
            features = trainer.features(source.images, progress)
            source = source if features is None else source.of(features)
        average, parts = math.nan, source.batches(first, total, trainer.share)
        hidden = not (progress and group.main)
        with tqdm(total=total, initial=first, unit="step", disable=hidden, desc="training") as bar:
            for number in range(first, total):
                try:
                    loss = trainer.step(number, list(islice(parts, len(trainer.share.mine)))).item()
                except Diverged:
                    method.load_state_dict(before)
                    method.set_calibrated(was[0])
                    method.unsaved = was[1]
                    raise
                average = loss if math.isnan(average) else 0.95 * average + 0.05 * loss
                bar.set_postfix(loss=f"{average:.4f}", refresh=False)
                bar.update()
                if after is not None:
                    after(number + 1, loss, trainer)


def photo_source(
    model: nn.Module, data: str | Path, recipe: Recipe, labelled: bool, workers: int | None, **where: Any
) -> PhotoSource:
    """Open photos for training, augmented; `where` they are in a data set is as in `datasets.open_photos`.

    Raises:
        UsageError: the number of workers is below 0.
        UserError: there are no such photos.
    """
    workers = default_workers() if workers is None else workers
    check_whole("workers", workers, 0)
    training, images = recipe.training, recipe.augmentation
    found = open_photos(data, model, training=True, labelled=labelled, **where)
    photos = Photos(found, transform_for(model, images), input_mode(model), training.seed)
    classes, mixer = find_backbone(model).classes(model), None
    if images.mixes:
        mixer = Mixer(images, classes, training.label_smoothing, training.seed)
    pin = device_of(model).type == "cuda"
    return PhotoSource(photos, training.batch_size, training.seed, workers, labelled, images.repeats, mixer, pin)


def calibrate_(
    model: Model,
    data: torch.Tensor | str | Path | Iterable[Any],
    labels: torch.Tensor | None = None,
    *,
    progress: bool = True,
    workers: int | None = None,
    correct: bool | Literal["only"] = False,
    **training: Any,
) -> Model:
    """Train what a reduction learns, in place; the model itself is not changed unless `backbone_lr` is above 0.

    With `correct` the model is then corrected in closed form for what it lacks under its reduction; `restore_` takes
    that back bit for bit. With `unfreeze` the model is fine-tuned under the reduction that it has, and the reduction
    learns nothing.

    Args:
        model: A reduced model.
        data: Images (n, C, H, W), normalised as the model wants them; or a DataLoader of images or of (images,
            labels); or a folder of photos, with a subfolder a class if it is trained against labels. For a
            vision-language model a DataLoader or a list of batches as its processor makes them: it is trained to tell
            the next token as the unpruned model does, wherever text follows an image.
        labels: (n,), with a tensor of images. Only training against labels needs them.
        progress: Show a bar.
        workers: Processes that read photos from a folder.
        correct: Correct the model, see `training.correction`; "only" trains nothing, for a reduction that is trained
            already. A method without anything to train is only corrected.
        **training: Options of `Training`: epochs, batch_size, lr, backbone_lr, unfreeze, weight_decay, label_smoothing,
            warmup, seed, amp, and more.

    Returns:
        The same model.

    Raises:
        UserError: the data cannot be used, the method has nothing to learn, or the model cannot be corrected.
        UsageError: an option is out of range.
    """
    if correct not in (True, False, "only"):
        raise UsageError(f"correct={correct!r}; expected True, False or 'only'")
    unknown = set(training) - set(Training.__dataclass_fields__)
    if unknown:
        raise UsageError(f"no training option {min(unknown)!r}; there are {', '.join(Training.__dataclass_fields__)}")
    options = Training(**training)
    source: Source
    if labels is not None and not isinstance(data, torch.Tensor):
        raise UsageError("labels go with a tensor of images; a loader gives its own, and a folder's are its subfolders")
    backbone = find_backbone(model)
    classes = backbone.classes(model)
    if backbone.prompts and isinstance(data, torch.Tensor | str | Path):
        backbone.check_images(model, cast(Any, data))  # which says what is missing
    if labels is not None and classes and not bool(((labels >= 0) & (labels < classes)).all()):
        raise UserError(f"labels from {labels.min()} to {labels.max()}; the model has classes 0 to {classes - 1}")
    if isinstance(data, torch.Tensor):
        source = TensorSource(data, labels, options.batch_size, options.seed)
    elif isinstance(data, str | Path):
        labelled = weights_of(model, options)[0] > 0
        source = photo_source(model, data, Recipe(reduction_of(model).config, options), labelled, workers)
    else:
        source = LoaderSource(data, backbone.prompts)
    if correct:
        check_correctable(model, options)
    if correct and (correct == "only" or not reduction_of(model).trains):
        if training:
            told = f"{min(training)}={training[min(training)]!r}"
            raise UsageError(f"{told}: nothing is trained here; expected no options of a training beside correct")
    else:
        fit(model, source, options, progress=progress, keep=True)
    if correct:
        correct_(model, images_of(model, data, progress, workers), progress)
    return model
