"""What every config has: where tokens go and how many stay, checked when it is made, and JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import Field, asdict, dataclass, field, fields, replace
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from tntprune.errors import UsageError
from tntprune.schedule import Place, Step, Turn, truncated

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
        at: Block or blocks at which tokens are removed, from 1; 0 is before the first block. Ascending. None, where a
            method allows it, is every block that the method's paper acts on.
        keep: Share of the current patch tokens that stays at each location, in (0, 1]; one value serves all
            locations. 0.5 unless `tokens` is given.
        tokens: Patch tokens that stay at each location, instead of `keep`.

    Raises:
        UsageError: a value is out of range, or there are more (or fewer) rates than locations.
    """

    method: ClassVar[str]
    everywhere: ClassVar[bool] = False  # whether at=None has a meaning
    listed: ClassVar[tuple[str, ...]] = ("keep", "tokens")  # options with one value, or one for each location
    rivals: ClassVar[tuple[str, ...]] = ("keep", "tokens")  # options of which one can be given

    at: int | Sequence[int] | None = option(3, "block or blocks at which tokens are removed (0: before the first)")
    keep: float | Sequence[float] | None = option(
        None, "share of the patch tokens kept at each location (0.5 for most methods)"
    )
    tokens: int | Sequence[int] | None = option(None, "patch tokens kept at each location, instead of a share")

    def __post_init__(self) -> None:
        for name in ("at", "keep", "tokens"):
            value = getattr(self, name)
            object.__setattr__(self, name, value if value is None else as_tuple(value))
        check(self.at is not None or self.everywhere, "at=None: expected at least one block")
        locations: tuple[Any, ...] = () if self.at is None else self.locations
        check(self.at is None or len(locations) > 0, "at: no location given; expected at least one block")
        for at in locations:
            check(is_int(at) and at >= 0, f"at={at}: expected a block number, 0 or larger")
        ascending = all(a < b for a, b in pairwise(locations))
        check(ascending, f"at={show(locations)}: expected ascending blocks, each once")
        check(self.keep is None or self.tokens is None, "keep and tokens were both given; expected one of them")
        if self.at is not None:
            self.check_length("keep" if self.tokens is None else "tokens", len(locations))
        for value in self.given:
            if self.tokens is None:
                check(is_number(value) and 0 < value <= 1, f"keep={value}: expected a share above 0 and at most 1")
            else:
                check(is_int(value) and value > 0, f"tokens={value}: expected a whole number, 1 or larger")

    def check_length(self, name: str, locations: int) -> None:
        """Refuse an option whose number of values is neither one nor that of the locations."""
        values: tuple[Any, ...] = self.given if name in ("keep", "tokens") else as_tuple(getattr(self, name))
        at = "" if self.at is None else f" at={show(self.locations)}"
        check(
            len(values) in (1, locations),
            f"{name}={show(values)}: {len(values)} values for {locations} location(s){at}; "
            "expected one value, or one for each location",
        )

    @property
    def locations(self) -> tuple[int, ...]:
        """The blocks at which tokens are removed, always as a tuple; none where `at` is None."""
        return self.at or ()  # type: ignore[return-value]

    @property
    def given(self) -> tuple[Any, ...]:
        """The counts or rates as they were given, always as a tuple."""
        return self.tokens if self.tokens is not None else self.keep or (0.5,)  # type: ignore[return-value]

    @property
    def amounts(self) -> tuple[float, ...] | tuple[int, ...]:
        """What stays at each location, one entry for each: counts if `tokens` was given, else rates."""
        return self.given if len(self.given) == len(self.locations) else self.given * len(self.locations)

    def amount(self, turn: int) -> Any:
        """What stays at one location, counted from 0: a count if `tokens` was given, else a rate."""
        return self.given[turn] if len(self.given) > 1 else self.given[0]

    def stay(self, turn: Turn, count: int) -> int:
        """Patch tokens that stay of `count`: shares are truncated, and at least one stays.

        Raises:
            UsageError: more are to stay than arrive.
        """
        if self.tokens is None:
            return truncated(count, self.amount(turn.number))
        stay = int(self.amount(turn.number))
        check(stay <= count, f"tokens={stay} {turn.place}: only {count} patch tokens arrive there")
        return stay

    @property
    def alone(self) -> bool:
        """Whether it cannot be combined with another reduction."""
        return False

    @property
    def variable(self) -> bool:
        """Whether the number of tokens differs from image to image."""
        return False

    @property
    def reads(self) -> bool:
        """Whether it reads the attention of the blocks at which it acts."""
        return False

    @property
    def is_inside(self) -> bool:
        """Whether tokens go between attention and MLP, instead of after the block."""
        return False

    def blocks(self, depth: int) -> tuple[int, ...]:
        """The blocks at which tokens are removed from a model of so many blocks.

        Raises:
            UsageError: a location is not one of its blocks.
        """
        for at in self.locations:
            if self.is_inside:
                check(0 < at <= depth, f"at={at}: the model has {depth} blocks; expected 1 to {depth}")
            else:
                check(
                    at < depth,
                    f"at={at}: the model has {depth} blocks, and removing tokens after the last one saves nothing; "
                    f"expected 0 to {depth - 1}",
                )
        return self.locations

    def places(self, depth: int) -> tuple[Place, ...]:
        """Where the method acts in a model of so many blocks, in order."""
        return tuple(Place(block, self.is_inside) for block in self.blocks(depth))

    def step(self, turn: Turn, count: int, patches: int) -> Step | None:
        """What happens at one of the places.

        Args:
            turn: Which one.
            count: Patch tokens that arrive.
            patches: Patch tokens of the unpruned model.

        Returns:
            The step, or None where everything stays.
        """
        stay = self.stay(turn, count)
        return Step(turn.place, count, stay, stay) if stay < count else None

    def singles(self, depth: int) -> list[Any]:
        """Each location on its own: copies with one location and what stays there."""
        found = []
        for number, at in enumerate(self.blocks(depth)):
            own = {}
            for name in self.listed:
                values = getattr(self, name)
                if values is not None:
                    own[name] = values[number] if len(values) > 1 else values[0]
            found.append(self.changed(at=at, **own))
        return found

    def changed(self, **changes: Any) -> Any:
        """A copy with some options changed; giving `keep` or `tokens` takes the place of the other.

        Raises:
            UsageError: the method has no such option, or a value is out of range.
        """
        check_options(type(self), changes)
        if any(changes.get(name) is not None for name in self.rivals):
            changes = {**dict.fromkeys(self.rivals), **changes}
        return replace(self, **changes)


def check_words(config: Config, *names: str) -> None:
    """Refuse words that an option does not allow.

    Raises:
        UsageError: naming the option and its words.
    """
    for name in names:
        allowed, value = choices(type(config), name), getattr(config, name)
        check(value in allowed, f"{name}={value!r}: expected {' or '.join(map(repr, allowed))}")


def check_flags(config: Config, *names: str) -> None:
    """Refuse what is neither True nor False, nor None where that is the default.

    Raises:
        UsageError: naming the option.
    """
    for name in names:
        value = getattr(config, name)
        allowed = isinstance(value, bool) or (value is None and options(type(config))[name].default is None)
        check(allowed, f"{name}={value!r}: expected True or False")


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
        check(name in options(config), f"{config.method} has no option {name!r}; it has {', '.join(options(config))}")


def find_method(name: str) -> type[Config]:
    """The config class of a method.

    Raises:
        UsageError: there is no such method.
    """
    check(name in METHODS, f"unknown method {name!r}; expected one of {', '.join(sorted(METHODS))}")
    return METHODS[name]


def to_dict(config: Config) -> dict[str, Any]:
    """A config as plain JSON values."""
    about = {"version": VERSION, "method": config.method}
    if parts := getattr(config, "parts", None):
        return {**about, "parts": [to_dict(part) for part in parts]}
    return {**about, **asdict(config)}


def from_dict(data: dict[str, Any]) -> Config:
    """A config from what `to_dict` made.

    Raises:
        UsageError: it comes from a newer version, or has an unknown method or option.
    """
    data = dict(data)
    version, name = data.pop("version", None), data.pop("method", None)
    known = is_int(version) and 0 < version <= VERSION
    check(known, f"config of version {version}; this tntprune reads up to {VERSION}: upgrade it")
    if name == "combination":
        parts = data.get("parts")
        if not isinstance(parts, list) or not all(isinstance(part, dict) and "parts" not in part for part in parts):
            raise UsageError("a combination without its parts; expected what tntprune.save writes")
        from tntprune.config.combination import Combination

        return Combination(parts=tuple(from_dict(part) for part in parts))
    config = find_method(str(name))
    check_options(config, data)
    return config(**{name: tuple(value) if isinstance(value, list) else value for name, value in data.items()})


def as_tuple(value: Any) -> tuple[Any, ...]:
    """One value or several as a tuple."""
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)


def show(values: Sequence[Any]) -> str:
    """Values as they stand on a command line."""
    return " ".join(map(str, values))


def is_int(value: Any) -> bool:
    """A whole number that is not True or False."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """A finite number that is not True or False."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check(holds: bool, message: str) -> None:
    """Refuse what does not hold.

    Raises:
        UsageError: with the message.
    """
    if not holds:
        raise UsageError(message)
