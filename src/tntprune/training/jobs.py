"""A whole training on photos of this machine, from the folders to the saved reduction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from tntprune.backbones.attach import device_of
from tntprune.data.datasets import open_photos
from tntprune.data.folders import default_workers
from tntprune.data.photo import Packed, packed
from tntprune.methods.checks import check_whole
from tntprune.system.distributed import ALONE, World
from tntprune.training.calibrate import needs_labels, photo_source
from tntprune.training.recipes import Recipe
from tntprune.training.run_log import read_log
from tntprune.training.runs import BEST, said, train_run
from tntprune.training.validation import Validation


class Trained(NamedTuple):
    """A training that has ended.

    Args:
        path: What it left, as it was after the last step.
        photos: That it learned from.
        batch_size: Photos a step.
        epochs: Passes over them.
        steps: In all.
        seconds: In all, over all the times that it was resumed.
        best: The epoch whose figures on the photos to validate on were the best, with those figures; None without such.
    """

    path: Path
    photos: int
    batch_size: int
    epochs: int
    steps: int
    seconds: float
    best: dict[str, float] | None

    def __str__(self) -> str:
        passes, steps = f"{self.epochs} epoch{'s'[: self.epochs > 1]}", f"{self.steps} step{'s'[: self.steps > 1]}"
        told = f"trained {passes} of {self.photos} photos, {steps} of {self.batch_size}, in {self.seconds:.0f} s: "
        if self.best is not None:
            epoch, figures = int(self.best["epoch"]), {n: v for n, v in self.best.items() if n.startswith("top")}
            return f"{told}{self.path}\nthe best epoch was {epoch}, {said(figures)}: {self.path.parent / BEST}"
        return told + str(self.path)


def train_folder(
    model: nn.Module,
    data: str | Path,
    out: Path,
    recipe: Recipe,
    *,
    val: str | Path | None = None,
    split: str | None = None,
    val_split: str | None = None,
    root: Path | None = None,
    samples: int | None = None,
    workers: int | None = None,
    resume: bool = False,
    save_every: int = 50,
    about: dict[str, Any] | None = None,
    backbone: bool = False,
    tensorboard: bool = False,
    world: World = ALONE,
    progress: bool = True,
) -> Trained:
    """Train a reduced model on a folder of photos, in a folder of its own; see `runs.train_run`.

    Args:
        model: Reduced with the recipe's config.
        data: The photos, with a subfolder a class where it is trained against labels; or what timm's `create_dataset`
            opens.
        out: The folder of the training.
        recipe: How.
        val: Labelled photos to validate on after each epoch; the best epoch is kept.
        split: Of the data, if it is not "train"; see `datasets.open_photos`, for the next three too.
        val_split: Of the photos to validate on, if it is not "validation".
        root: Where data sets lie.
        samples: How many photos a stream to train on has.
        workers: Processes that read photos.
        resume: Continue what is there.
        save_every: Steps between checkpoints.
        about: What else has to be the same in a resumed training, such as the model's name.
        backbone: Only the model is trained and saved; see `pretraining.untrained`.
        tensorboard: Also log for TensorBoard.
        world: The processes that train together.
        progress: Show a bar.

    Raises:
        UsageError: an option is out of range, or the folder's training is another one.
        UserError: something cannot be read or written.
    """
    workers = default_workers() if workers is None else workers
    check_whole("workers", workers, 0)
    training = recipe.training.on(device_of(model))
    with world.main_first():  # what has to be fetched is fetched once
        labelled = needs_labels(model, training)
        source = photo_source(model, data, recipe, labelled, workers, split=split, root=root, samples=samples)
        photos = None if val is None else open_photos(val, model, split=val_split, root=root)
    photos = packed(photos) if isinstance(photos, Sequence) else photos
    validate = None if photos is None else Validation(model, photos, workers=workers, world=world)
    told: dict[str, Any] = {
        "data": _told(data),
        "split": split,
        "photos": len(source.photos),
        "val": None if val is None else _told(val),  # or the best epoch would be chosen among different figures
        "val_split": val_split,
        "augmentation": asdict(recipe.augmentation),
    }
    looked = {"data_digest": (data, source.photos.photos), "val_digest": (val or "", photos)}
    told |= world.agree(
        lambda: {name: one.digest(Path(place)) for name, (place, one) in looked.items() if isinstance(one, Packed)}
    )
    path = train_run(
        model, source, training, out, resume=resume, save_every=save_every, about={**(about or {}), **told},
        validate=validate, backbone=backbone, tensorboard=tensorboard, world=world, progress=progress,
    )  # fmt: skip
    lines = read_log(out)
    validated = [line for line in lines if "top1" in line]
    best = max(validated, key=lambda line: line["top1"], default=None)  # the first of equals
    last = lines[-1] if lines else dict.fromkeys(("epoch", "step", "seconds"), 0)
    return Trained(
        path, len(source.photos), min(training.batch_size, len(source.photos)),
        int(last["epoch"]), int(last["step"]), float(last["seconds"]),
        best and {name: value for name, value in best.items() if name not in ("step", "seconds")},
    )  # fmt: skip


def _told(data: str | Path) -> str:
    return str(Path(data).resolve()) if Path(data).exists() else str(data)
