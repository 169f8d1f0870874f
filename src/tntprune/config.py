"""What a reduction is: one frozen dataclass per method, checked when it is made, and its round trip through JSON.

This module needs neither torch nor timm, so that the command line can list methods and options at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import Field, asdict, dataclass, field, fields, replace
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from tntprune.errors import UsageError

VERSION = 1  # of the JSON; raised when a field changes its meaning

METHODS: dict[str, type[Config]] = {}
C = TypeVar("C", bound="type[Config]")


def method(name: str) -> Callable[[C], C]:
    """Register a config under its method's name."""

    def enter(config: C) -> C:
        config.method = name
        METHODS[name] = config
        return config

    return enter


def option(default: Any, help: str, *, learned: bool = False) -> Any:
    """A field with the one-line help that the command line prints.

    Args:
        default: Its default.
        help: The line.
        learned: What was learned only fits this value, so that it cannot be changed in a saved reduction.
    """
    return field(default=default, metadata={"help": help, "learned": learned})


@dataclass(frozen=True)
class Config:
    """Where tokens are removed and how many stay. Every method's config has these three.

    Args:
        at: Block or blocks after which tokens are removed, from 1; 0 is before the first block. Ascending.
        keep: Share of the current patch tokens that stays at each location, in (0, 1]; one value serves all
            locations. 0.5 unless `tokens` is given.
        tokens: Patch tokens that stay after each location, instead of `keep`.

    Raises:
        UsageError: a value is out of range, or there are more (or fewer) rates than locations.
    """

    method: ClassVar[str]

    at: int | Sequence[int] = option(3, "block or blocks after which tokens are removed (0: before the first)")
    keep: float | Sequence[float] | None = option(None, "share of the patch tokens kept at each location (0.5)")
    tokens: int | Sequence[int] | None = option(None, "patch tokens kept at each location, instead of a share")

    def __post_init__(self) -> None:
        for name in ("at", "keep", "tokens"):
            value = getattr(self, name)
            object.__setattr__(self, name, value if value is None else _tuple(value))
        _check(self.at is not None, "at=None: expected at least one block")
        locations: tuple[Any, ...] = self.locations
        _check(len(locations) > 0, "at: no location given; expected at least one block")
        for at in locations:
            _check(_is_int(at) and at >= 0, f"at={at}: expected a block number, 0 or larger")
        ascending = all(a < b for a, b in pairwise(locations))
        _check(ascending, f"at={_show(locations)}: expected ascending blocks, each once")
        _check(self.keep is None or self.tokens is None, "keep and tokens were both given; expected one of them")
        given: tuple[Any, ...] = self.tokens if self.tokens is not None else self.keep or (0.5,)  # type: ignore[assignment]
        name = "keep" if self.tokens is None else "tokens"
        _check(
            len(given) in (1, len(locations)),
            f"{name}={_show(given)}: {len(given)} values for {len(locations)} location(s) at={_show(locations)}; "
            "expected one value, or one for each location",
        )
        for value in given:
            if name == "keep":
                _check(_is_number(value) and 0 < value <= 1, f"keep={value}: expected a share above 0 and at most 1")
            else:
                _check(_is_int(value) and value > 0, f"tokens={value}: expected a whole number, 1 or larger")

    @property
    def locations(self) -> tuple[int, ...]:
        """The blocks after which tokens are removed, always as a tuple."""
        return self.at  # type: ignore[return-value]

    @property
    def amounts(self) -> tuple[float, ...] | tuple[int, ...]:
        """What stays at each location, one entry for each: counts if `tokens` was given, else rates."""
        given: tuple[Any, ...] = self.tokens if self.tokens is not None else self.keep or (0.5,)  # type: ignore[assignment]
        return given if len(given) == len(self.locations) else given * len(self.locations)

    def changed(self, **changes: Any) -> Any:
        """A copy with some options changed; giving one of `keep` and `tokens` takes the place of the other.

        Raises:
            UsageError: the method has no such option, or a value is out of range.
        """
        check_options(type(self), changes)
        if changes.get("tokens") is not None:
            changes.setdefault("keep", None)
        if changes.get("keep") is not None:
            changes.setdefault("tokens", None)
        return replace(self, **changes)


@method("random")
@dataclass(frozen=True)
class Random(Config):
    """Random drop, the baseline: the same tokens go in every image, as the seed says.

    Args:
        order: Seed of the order in which tokens are dropped.
    """

    order: int = option(0, "seed of the order in which tokens are dropped")

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(_is_int(self.order) and self.order >= 0, f"order={self.order}: expected a whole number, 0 or larger")


# The rows of the design's table: what each recipe fills in where an option is None.
RECIPES: dict[str, dict[str, Any]] = {
    "paper": {
        "noise_at": "all", "capacity": "one", "noise_scale": "one", "stream_norm": True, "beta": 0.02,
        "score_norm": False, "objective": "ce",
    },
    "relative": {
        "noise_at": "one", "capacity": "drawn", "noise_scale": "rms", "stream_norm": False, "beta": 1.0,
        "score_norm": True, "objective": "kl",
    },
}  # fmt: skip


@method("tnt")
@dataclass(frozen=True)
class TNT(Config):
    """Training Noise Token pruning (the paper's section 3; the design's section on TNT).

    In training the patch tokens x_i that leave a noisy block become
    ``x_i + beta * s_i * (1 - min(1, c * alpha_i)) * eps_i`` with alpha the softmax of the scores over patch tokens;
    at test time the tokens with the largest scores stay. An option left at None takes the recipe's value.

    Args:
        similar: Tokens removed for being similar to a kept one; 0 turns the step off. Where fewer can go (at most
            as many as stay), fewer go: the number that stays is always what `keep` or `tokens` says.
        similar_at: "score" removes them after each ranking (top n + similar, then similar are removed), "start"
            once before block 1. None: "score" with one location, "start" with several, as in the paper.
        partition: How tokens are split in two groups: "random" (a seeded permutation, the same for every image) or
            "sequential" (by rank: the better half is compared with the worse one; in the grid's order at "start").
        similar_how: "drop" the similar tokens or "merge" each into its match.
        order: Seed of the random partition.
        recipe: "relative" (ours, better on a short training) or "paper" (the authors' released code).
        scorer: "linear" or "mlp" (D, hidden, GELU, 1).
        hidden: Width of the MLP scorer; None is twice the embedding width, derived from the paper's DeiT-Tiny figures.
        noise_blocks: Blocks whose output gets noise in training, each with a scorer; None is 1 to 5, or fewer in a
            model with fewer blocks. 0 is the patch embedding.
        noise_at: In training, noise after "all" of these blocks at once, or after "one" of them, drawn for each batch,
            so that every scorer learns from the features that it will see.
        capacity: Number of tokens that can pass free of noise: "one", a share of the tokens in (0, 1], or "drawn",
            a share drawn uniformly from [0.1, 0.9] for each batch and block.
        noise_scale: Noise in units of "one" or of each token's root mean square, "rms".
        stream_norm: In training a non-affine LayerNorm replaces the residual stream, prefix tokens included, before
            noise is added, as in the authors' code.
        beta: Standard deviation of the noise, above 0.
        score_norm: Scores are computed from a non-affine LayerNorm of the tokens.
        objective: "ce", cross-entropy to the labels (of the CLS head alone on distilled models), or "kl", divergence
            from the unpruned model, which needs no labels.
    """

    similar: int = option(0, "tokens removed for being similar to a kept one")
    similar_at: Literal["score", "start"] | None = option(None, "remove similar tokens after the score or at the start")
    partition: Literal["random", "sequential"] = option("random", "how the similarity step splits the tokens")
    similar_how: Literal["drop", "merge"] = option("drop", "drop similar tokens, or merge each into its match")
    order: int = option(0, "seed of the random partition")
    recipe: Literal["relative", "paper"] = option("relative", "the default of each option below", learned=True)
    scorer: Literal["linear", "mlp"] = option("linear", "the scorer", learned=True)
    hidden: int | None = option(None, "width of the mlp scorer (twice the embedding's)", learned=True)
    noise_blocks: int | Sequence[int] | None = option(
        None, "blocks whose output gets noise in training (1 to 5)", learned=True
    )
    noise_at: Literal["all", "one"] | None = option(None, "noise after all of these at once, or one for each batch")
    capacity: float | Literal["one", "drawn"] | None = option(None, "tokens free of noise: one, drawn, or a share")
    noise_scale: Literal["one", "rms"] | None = option(None, "unit of the noise")
    stream_norm: bool | None = option(None, "normalise the residual stream in training, as the authors' code does")
    beta: float | None = option(None, "standard deviation of the noise")
    score_norm: bool | None = option(None, "score a LayerNorm of the tokens", learned=True)
    objective: Literal["ce", "kl"] | None = option(None, "train against labels, or against the unpruned model")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_blocks is not None:
            blocks = _tuple(self.noise_blocks)
            for block in blocks:
                _check(_is_int(block) and block >= 0, f"noise_blocks: {block} given; expected numbers, 0 or larger")
            object.__setattr__(self, "noise_blocks", tuple(sorted(set(blocks))))
        _check(_is_int(self.similar) and self.similar >= 0, f"similar={self.similar}: expected 0 or more tokens")
        _check(_is_int(self.order) and self.order >= 0, f"order={self.order}: expected a whole number, 0 or larger")
        for name in (
            "similar_at",
            "partition",
            "similar_how",
            "recipe",
            "scorer",
            "noise_at",
            "noise_scale",
            "objective",
        ):
            allowed, value = choices(TNT, name), getattr(self, name)
            _check(value in allowed, f"{name}={value!r}: expected {' or '.join(map(repr, allowed))}")
        _check(self.noise_blocks != (), "noise_blocks: none given; expected at least one block")
        width = self.hidden is None or (_is_int(self.hidden) and self.hidden > 0)
        _check(width, f"hidden={self.hidden}: expected a width above 0")
        _check(
            self.hidden is None or self.scorer == "mlp", f"hidden={self.hidden}: the linear scorer has no hidden layer"
        )
        for name in ("stream_norm", "score_norm"):
            value = getattr(self, name)
            _check(value in (None, True, False), f"{name}={value!r}: expected True or False")
        _check(self.beta is None or (_is_number(self.beta) and self.beta > 0), f"beta={self.beta}: expected above 0")
        share = _is_number(self.capacity) and 0 < self.capacity <= 1  # type: ignore[operator]
        _check(
            share or self.capacity in (None, "one", "drawn"),
            f"capacity={self.capacity!r}: expected 'one', 'drawn' or a share above 0 and at most 1",
        )

    @property
    def resolved(self) -> TNT:
        """The same config with every None that the recipe fills in filled in."""
        gaps = {name: value for name, value in RECIPES[self.recipe].items() if getattr(self, name) is None}
        gaps["similar_at"] = self.similar_at or ("score" if len(self.locations) == 1 else "start")
        return replace(self, **gaps)


def choices(config: type[Config], name: str) -> tuple[Any, ...]:
    """The words an option allows, None among them where it does; () where the option takes no words."""
    hint = get_type_hints(config)[name]
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    words = tuple(word for part in parts if get_origin(part) is Literal for word in get_args(part))
    return words + ((None,) if words and NoneType in parts else ())


def options(config: type[Config]) -> dict[str, Field[Any]]:
    """The options of a method by name."""
    return {f.name: f for f in fields(config)}


def check_options(config: type[Config], given: Sequence[str] | dict[str, Any]) -> None:
    """Refuse options that the method does not have.

    Raises:
        UsageError: naming the first such option and those that exist.
    """
    for name in given:
        _check(name in options(config), f"{config.method} has no option {name!r}; it has {', '.join(options(config))}")


def find_method(name: str) -> type[Config]:
    """The config class of a method.

    Raises:
        UsageError: there is no such method.
    """
    _check(name in METHODS, f"unknown method {name!r}; expected one of {', '.join(sorted(METHODS))}")
    return METHODS[name]


def to_dict(config: Config) -> dict[str, Any]:
    """A config as plain JSON values."""
    return {"version": VERSION, "method": config.method, **asdict(config)}


def from_dict(data: dict[str, Any]) -> Config:
    """A config from what `to_dict` made.

    Raises:
        UsageError: it comes from a newer version, or has an unknown method or option.
    """
    data = dict(data)
    version, name = data.pop("version", None), data.pop("method", None)
    known = _is_int(version) and 0 < version <= VERSION
    _check(known, f"config of version {version}; this tntprune reads up to {VERSION}: upgrade it")
    config = find_method(str(name))
    check_options(config, data)
    return config(**{name: tuple(value) if isinstance(value, list) else value for name, value in data.items()})


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)


def _show(values: Sequence[Any]) -> str:
    return " ".join(map(str, values))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise UsageError(message)
