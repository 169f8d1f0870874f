"""The trainings and settings that benchmarks/method.py compares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tntprune import TNT
from tntprune.methods import Config
from tntprune.serialization.checkpoint import read

KEEPS = (0.5, 0.35, 0.25)
EVERYWHERE = TNT(at=tuple(range(1, 13)), inside=True, metric="mean", keep=1.0)
COUNTS = (196, 173, 148, 124, 102, 82, 65, 51, 39, 30, 22, 1)  # inside each block: about half of the MACs saved
LEARNED = {  # what each of the learned numbers is good for
    "equal weights in means": {"weights": 0.0},
    "sizes count in full, as in ToMe": {"powers": 1.0},
    "unlike tokens are merged in full": {"merge_gates": 0.0},
    "means are not made longer": {"norm_corrections": 0.0},
}


LATER = {  # variants that are trained last, where time is short
    "the image's mean with noise of its spread", "capacity of half", "MLP scorer", "whole, tokens compared",
    "whole, prune_prob 0.0", "whole, noise after all blocks at once", "whole, 310 steps", "310 steps",
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One way to train and to reduce.

    Args:
        name: Of its line and of its folder.
        config: What is trained.
        training: Options that are not the benchmark's own.
        augmented: Whether photos are cropped and mirrored in training.
        keeps: Shares that it is judged at, if it acts after one block; else at the counts of `COUNTS`.
        changes: Options that differ when it is judged.
        like: Another variant that is trained in the same way, so that it is trained once.
        learned: What takes the place of learned numbers when it is judged, by the beginning of their names.
    """

    name: str
    config: TNT
    training: dict[str, Any] = field(default_factory=dict)
    augmented: bool = True
    keeps: tuple[float, ...] = (0.5, 0.25)
    changes: dict[str, Any] = field(default_factory=dict)
    like: str = ""
    learned: dict[str, float] = field(default_factory=dict)

    @property
    def labelled(self) -> bool:
        """Tell whether its training needs labels."""
        return self.config.resolved.objective == "ce"

    def settings(self) -> dict[str, Config]:
        """Return the settings at which it is judged, by name."""
        if len(self.config.locations) > 1:
            return {"everywhere": self.config.changed(tokens=COUNTS, **self.changes)}
        return {f"K={keep}": self.config.changed(keep=keep, **self.changes) for keep in self.keeps}


SINGLE = Variant("single", TNT(at=3, keep=0.5), keeps=KEEPS)
WHOLE = Variant("whole", EVERYWHERE)


def variants() -> Iterator[Variant]:
    """Return the default, and variants with one option changed each."""
    single, whole = TNT(at=3, keep=0.5), EVERYWHERE

    def changed(name: str, **options: Any) -> Variant:
        return Variant(name, single.changed(**options))

    yield Variant("default", single)
    yield changed("dropping", recipe="relative")
    yield changed("noise added in units of the token", noise_scale="rms", beta=1.0)
    yield changed("the image's mean without noise", beta=0.0)
    yield changed("the image's mean with noise of its spread", beta=1.0)
    yield changed("prune_prob 0", prune_prob=0.0)
    yield changed("prune_prob 0.8", prune_prob=0.8)
    yield changed("noise after one of the blocks 1 to 5", noise_blocks=(1, 2, 3, 4, 5))
    yield changed("capacity of half", capacity=0.5)
    yield changed("MLP scorer", scorer="mlp", hidden=192)
    yield changed("labels", objective="ce")
    for name, changes in {
        "sizes do not count": {"proportional": False}, "score_weight 0": {"score_weight": 0.0},
        "score_weight 0.25": {"score_weight": 0.25}, "score_weight 1": {"score_weight": 1.0},
    }.items():  # fmt: skip
        yield Variant(name, single, changes=changes, like="default")
    yield Variant("dropping, with what merging learned", single, changes={"how": "drop"}, like="default")
    for name, learned in LEARNED.items():
        yield Variant(name, single, like="default", learned=learned)
    yield Variant("no augmentation", single, augmented=False)
    for rate in (0.003, 0.03):
        yield Variant(f"learning rate {rate}", single, {"lr": rate})
    for epochs in (2, 3, 6, 10):
        yield Variant(f"{31 * epochs} steps", single, {"epochs": epochs})
    short = {"epochs": 4}  # 124 steps, as after one block; the default of all blocks is "whole, 310 steps"
    yield Variant("whole", whole, short)
    for name, changes in {
        "whole, score_weight 0": {"score_weight": 0.0}, "whole, score_weight 1": {"score_weight": 1.0},
        "whole, size_weight 0": {"size_weight": 0.0}, "whole, size_weight 0.5": {"size_weight": 0.5},
        "whole, sizes do not count": {"proportional": False},
    }.items():  # fmt: skip
        yield Variant(name, whole, short, changes=changes, like="whole")
    for name, learned in LEARNED.items():
        yield Variant(f"whole, {name}", whole, short, like="whole", learned=learned)
    yield Variant("whole, tokens compared", whole.changed(metric="x"), short)
    for share in (0.0, 0.8):
        yield Variant(f"whole, prune_prob {share}", whole.changed(prune_prob=share), short)
    yield Variant("whole, 310 steps", whole, {"epochs": 10})
    yield Variant("whole, noise after all blocks at once", whole.changed(noise_at="all"), short)


def efforts() -> Iterator[tuple[Variant, int]]:
    """Other numbers of steps, and fewer photos with as many; the table has all photos and the default's steps."""
    for epochs in (1, 3, 5):
        yield replace(SINGLE, name=f"epochs {epochs}", training={"epochs": epochs}), 1000
    for photos in (50, 200, 500):
        yield replace(SINGLE, name="photos"), photos


def schedules(plans: Path | None) -> dict[str, Config]:
    """Read TNT's plans by their budgets, from files such as tnt-731.json."""
    if plans is None:
        return {}
    return {f"0.{path.stem[4:]}": read(path).config for path in sorted(plans.glob("tnt-*.json"))}
