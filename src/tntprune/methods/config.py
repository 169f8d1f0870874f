"""What every config has: where tokens go and how many stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar

from tntprune.methods.checks import as_tuple, check, check_options, is_int, is_number, show
from tntprune.methods.steps import Place, Step, Turn, truncated

WINDOW = "compare tokens in windows of so many patches along a side, for large grids (all with all)"
MOST = 2**32 - 1  # the largest number in any option: seeds go as far


def option(default: Any, help: str, *, learned: bool = False) -> Any:
    """Declare an option, with the one-line help that the command line prints.

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

    method: ClassVar[str]  # its name, in small letters
    title: ClassVar[str] = ""  # its name in tables and figures; the same if not given
    untimed: ClassVar[str] = ""  # why its time cannot be predicted from its numbers of tokens, as a sentence's end
    usual: ClassVar[float] = 0.5  # the share that stays where nothing is said
    everywhere: ClassVar[bool] = False  # whether at=None has a meaning
    earliest: ClassVar[int | None] = None  # the first of the blocks that it means, if it means blocks up to the last
    listed: ClassVar[tuple[str, ...]] = ("keep", "tokens")  # options with one value, or one for each location
    renamed: ClassVar[dict[str, str]] = {}  # options that earlier versions saved under another name
    renamed_parameters: ClassVar[dict[str, str]] = {}  # and the same of what is learned
    without: ClassVar[tuple[str, ...]] = ()  # options of the method that it is derived from, which it has not
    rivals: ClassVar[tuple[str, ...]] = ("keep", "tokens")  # options of which one can be given

    at: int | Sequence[int] | None = option(3, "block or blocks at which tokens are removed (0: before the first)")
    keep: float | Sequence[float] | None = option(
        None, "share of the patch tokens kept at each location (0.5 for most methods)"
    )
    tokens: int | Sequence[int] | None = option(None, "patch tokens kept at each location, instead of a share")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            huge = [one for one in as_tuple(value) if isinstance(one, int | float) and abs(one) > MOST]
            check(not huge, f"{name}={show(huge)}: expected a number up to {MOST}")
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
                percent = f" (for {value:g} % write {value / 100:g})" if is_number(value) and 1 < value <= 100 else ""
                check(
                    is_number(value) and 0 < value <= 1,
                    f"keep={value!r}: expected a share above 0 and at most 1{percent}",
                )
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
        return self.tokens if self.tokens is not None else self.keep or (self.usual,)  # type: ignore[return-value]

    @property
    def amounts(self) -> tuple[float, ...] | tuple[int, ...]:
        """What stays at each location, one entry for each: counts if `tokens` was given, else rates."""
        return self.given if len(self.given) == len(self.locations) else self.given * len(self.locations)

    def amount(self, turn: int) -> Any:
        """Return what stays at one location, counted from 0: a count if `tokens` was given, else a rate."""
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
    def by_share(self) -> bool:
        """Whether nothing but a share says how many tokens stay."""
        return all(getattr(self, name) is None for name in self.rivals if name != "keep")

    @property
    def alone(self) -> bool:
        """Whether it cannot be combined with another reduction."""
        return False

    @property
    def variable(self) -> bool:
        """Whether the number of tokens differs from image to image."""
        return False

    @property
    def must_train(self) -> bool:
        """Whether it is of no use before it has been trained."""
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
        """Return the blocks at which tokens are removed from a model of so many blocks.

        Raises:
            UsageError: a location is not one of its blocks, or an option has not one value, nor one for each block.
        """
        if self.at is None and self.earliest is not None:
            last = depth if self.is_inside else depth - 1
            found = tuple(range(min(self.earliest, max(1, last)), last + 1))
            for name in self.listed:
                if getattr(self, name) is not None:
                    self.check_length(name, len(found))
            return found
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
        """Return where the method acts in a model of so many blocks, in order."""
        return tuple(Place(block, self.is_inside) for block in self.blocks(depth))

    def step(self, turn: Turn, count: int, patches: int) -> Step | None:
        """Return what happens at one of the places.

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
        """Return each location on its own: copies with one location and what stays there."""
        found = []
        for number, at in enumerate(self.blocks(depth)):
            own = {}
            for name in self.listed:
                values = getattr(self, name)
                if values is not None:
                    own[name] = values[number] if len(values) > 1 else values[0]
            found.append(self.changed(at=at, **own))
        return found

    @classmethod
    def updated(cls, data: dict[str, Any], depth: int | None) -> dict[str, Any]:
        """Return options that an earlier version saved, so that they mean now what they meant then.

        Args:
            data: Options by name, as JSON values.
            depth: Blocks of the model, if known.
        """
        return data

    def check_changes(self, changes: dict[str, Any], source: str) -> None:
        """Refuse changes that do not fit what was learned.

        Args:
            changes: Options by name.
            source: Where it was learned, for the message.

        Raises:
            UsageError: one of them does not fit.
        """

    def changed(self, **changes: Any) -> Any:
        """Return a copy with some options changed; giving `keep` or `tokens` takes the place of the other.

        Raises:
            UsageError: the method has no such option, or a value is out of range.
        """
        check_options(type(self), changes)
        if any(changes.get(name) is not None for name in self.rivals):
            changes = {**dict.fromkeys(self.rivals), **changes}
        return replace(self, **changes)
