"""`tntprune train` and `tntprune pretrain`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tntprune.cli.console import tell
from tntprune.cli.flags import (
    GROUP,
    Classifier,
    Device,
    HostFlags,
    ImgSize,
    Json,
    Model,
    Reduction,
    Seed,
    Sources,
    Split,
    Workers,
    flag,
)  # fmt: skip
from tntprune.cli.options import ScratchFlags, TrainingFlags
from tntprune.errors import UsageError
from tntprune.system.flags import MANY, Whole, Written

if TYPE_CHECKING:
    from torch import nn

    from tntprune.training.recipes import Recipe


@dataclass(frozen=True, kw_only=True)
class RunFlags(Sources):
    """What a training reads beside its photos, and leaves in its folder."""

    val: Annotated[
        str | None, flag("labelled photos to validate on after each epoch; the best epoch goes to RUN/best", "DIR")
    ] = None
    val_split: Split = None
    workers: Workers = None
    save_every: Annotated[int, flag("steps between checkpoints", "STEPS"), Whole(1, MANY)] = 50
    tensorboard: Annotated[bool, flag("also log for TensorBoard, in RUN/tensorboard")] = False
    resume: Annotated[bool, flag("continue the training in RUN")] = False

    def train(self, built: nn.Module, recipe: Recipe, about: dict[str, Any], json: bool, **given: Any) -> int:
        """Train in a folder, and tell what is left there.

        Args:
            built: The model, reduced.
            recipe: How to train.
            about: What has to be the same in a resumed training.
            json: Whether to tell it as JSON.
            given: The rest of what `train_folder` takes.
        """
        from tntprune.training.run_folder import ended
        from tntprune.training.runs import train_folder

        over = self.resume and ended(given["out"]) is not None
        found = train_folder(built, recipe=recipe, about=about, **vars(self), **given)
        if given["group"].main:
            told = {**found._asdict(), "seconds": round(found.seconds, 1)}
            path = str(told.pop("path"))
            left = {"weights": path, "classes": about["classes"]} if "classes" in about else {"reducer": path}
            tell(json, left | told, f"the training had ended already: {path}" if over else str(found))
        return 0


@dataclass(frozen=True, kw_only=True)
class TrainedFlags(Reduction):
    """What is trained, or what a model is fine-tuned under."""

    method: Annotated[str | None, flag("method to train (tnt), or with --unfreeze to fine-tune for", "NAME")] = None


def train(
    model: Model,
    data: Annotated[
        str,
        flag("photos, in class folders if the loss needs labels; or hfds/NAME, hfids/NAME, wds/DIR, torch/NAME", "DIR"),
    ],
    out: Annotated[Path, flag("folder for the reducer, the log and checkpoints", "RUN"), Written()],
    reduction: Annotated[TrainedFlags, GROUP] = TrainedFlags(),
    preset: Annotated[
        Literal["none", "short", "published"],
        flag(
            "none: the defaults below; short: values for 1,000 photos and minutes; published: the authors' values for "
            "ImageNet"
        ),
    ] = "none",
    training: TrainingFlags = TrainingFlags(),
    run: Annotated[RunFlags, GROUP] = RunFlags(),
    host: Annotated[HostFlags, GROUP] = HostFlags(),
    classifier: Classifier = True,
    correct: Annotated[
        bool,
        flag("then correct the model in closed form; with --reducer RUN or a method without training: nothing else"),
    ] = False,
    seed: Seed = 0,
    json: Json = False,
) -> int:
    """Train what a method learns, such as scorers. The model is frozen unless --backbone-lr or --preset says otherwise.

    With --unfreeze: fine-tune a model that is already reduced; the unpruned model is the teacher.

    Several processes: torchrun --nproc-per-node 8 -m tntprune train ...
    """
    from dataclasses import replace
    from itertools import product

    from tntprune.backbones.attach import reduction_of
    from tntprune.methods import Random
    from tntprune.reduce import reduce_
    from tntprune.serialization.checkpoint import FILE, WEIGHTS, files_of
    from tntprune.system.distributed import join
    from tntprune.system.storage import check_output
    from tntprune.training.config import Training
    from tntprune.training.recipes import Recipe, changed, published, short
    from tntprune.training.run_folder import EMA
    from tntprune.training.runs import BEST

    reducer, options = reduction.reducer, {**vars(training), "seed": seed}
    tunes = options["unfreeze"] is not None
    only = correct and not tunes and reducer is not None
    if not only:
        _check(tunes, reduction, preset)
    if tunes or only:
        recipe = changed(Recipe(Random(), Training()), options)  # what is wrong is told before a model is loaded
    else:
        config = reduction.config("tnt")
        recipe = {"none": lambda c: Recipe(c, Training()), "short": short, "published": published}[preset](config)
        recipe = changed(recipe, options)
    places = () if out.is_file() else (out, out / BEST, out / EMA)  # a file is told in other words
    for place, name in product(places, (FILE, WEIGHTS)):
        check_output(place / name, [host.weights, *files_of(reducer)])
    group = join(host.device)
    built = host.load(model, group.device(host.device), classifier)
    if tunes or only:
        built = reduction.apply(built)
        recipe = replace(recipe, config=reduction_of(built).config)
    else:
        built = reduce_(built, recipe.config, last_block=reduction.last_block)
    about: dict[str, Any] = {"model": model, "weights": host.weights and str(host.weights.resolve())}
    if host.img_size is not None:
        about["img_size"] = list(host.img_size)
    if not classifier:
        about["classifier"] = False
    if reducer is not None:
        about["reducer"] = str(Path(reducer).resolve()) if Path(reducer).exists() else reducer
    return run.train(built, recipe, about, json, data=data, out=out, correct="only" if only else correct, group=group)


def _check(tunes: bool, reduction: Reduction, preset: str) -> None:
    """Refuse what does not go with fine-tuning, or goes with nothing else."""
    reducer = reduction.reducer
    if not tunes and (reducer is not None or reduction.then):
        what = "--then" if reducer is None else f"--reducer {reducer}"
        raise UsageError(f"{what} without --unfreeze; expected --unfreeze norms, for example, --correct, or neither")
    if tunes and reduction.method is None and reducer is None:
        raise UsageError("--unfreeze, and nothing that removes tokens; expected --reducer RUN or --method tome too")
    if tunes and preset != "none":
        raise UsageError(f"--preset {preset} is for what a method learns, and with --unfreeze it learns nothing")


def pretrain(
    model: Model,
    data: Annotated[
        str,
        flag(
            "photos in class folders (WordNet ids for ImageNet); or hfds/NAME, hfids/NAME, wds/DIR, torch/NAME", "DIR"
        ),
    ],
    out: Annotated[Path, flag("folder for the weights, the log and checkpoints", "RUN"), Written()],
    num_classes: Annotated[int | None, flag("number of classes (one per class folder)"), Whole(1, 1_000_000)] = None,
    training: ScratchFlags = ScratchFlags(),
    run: Annotated[RunFlags, GROUP] = RunFlags(),
    img_size: ImgSize = None,
    device: Device = "cpu",
    seed: Seed = 0,
    json: Json = False,
) -> int:
    """Train a backbone from random weights, by DeiT's recipe. Use it with --weights RUN/model.safetensors.

    The default of --lr is for 1024 photos per step and is scaled with --batch-size.

    Several processes: torchrun --nproc-per-node 8 -m tntprune pretrain ...
    """
    from tntprune.system.distributed import join
    from tntprune.training.pretraining import classes_in, untrained
    from tntprune.training.recipes import changed, scratch

    recipe = changed(scratch(), {**vars(training), "backbone_lr": vars(training)["lr"], "seed": seed})
    group = join(device)
    classes, names = classes_in(data, run.split, num_classes)
    built = untrained(model, recipe, classes, group.device(device), img_size, names)
    about: dict[str, Any] = {"model": model, "classes": classes}
    if img_size is not None:
        about["img_size"] = list(img_size)
    return run.train(built, recipe, about, json, data=data, out=out, backbone=True, group=group)
