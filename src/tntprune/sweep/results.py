"""What was measured of one setting: a row of a results file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True)
class Setting:
    """Everything that decides what is measured. Two rows of the same setting are the same row.

    Args:
        model: The name that our commands take.
        weights: SHA-256 of the file of weights, "hub" for timm's own, or "random".
        config: `to_dict` of the reduction's config; None for the unpruned model.
        reducer: SHA-256 of the saved reduction (and of the weights beside it), or None where nothing was learned.
        data: SHA-256 of the photos' paths below their folder, in order, with their labels and contents.
        images: How many photos that are.
        precision: "fp32", "bf16" or "fp16": of the forward pass; the last two under autocast, with the head in fp32.
        batch_size: Images at a time.
        img_size: Rows and columns of pixels, None for the model's own.
    """

    model: str
    weights: str
    config: dict[str, Any] | None
    reducer: str | None
    data: str
    images: int
    precision: str = "fp32"
    batch_size: int = 32
    img_size: tuple[int, int] | None = None

    @property
    def key(self) -> str:
        """What tells it from all others, in 16 digits."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class ResultRow:
    """One measured setting.

    Args:
        setting: What was measured.
        name: Of the line that the row belongs to in tables and figures: "TNT", "EViT, fine-tuned".
        scheme: "unpruned", "single" (one location) or "multi".
        images: Images counted; those that could not be read are not among them.
        skipped: Images that could not be read.
        right: Images whose label is the first guess.
        right5: Images whose label is among the first five.
        agreeing: Images on which the first guess is that of the unpruned model.
        macs: Multiply-accumulates of one image; the mean over the images where it differs.
        base_macs: Of the unpruned model.
        tokens: Patch tokens that enter each block; the mean where it differs.
        images_per_s: Of the forward pass alone, the median batch; None until speed was measured.
        speedup: Times as fast as the unpruned model in the same turns, the median over the batches; None likewise.
        peak_mib: Memory that a pass needs beside weights and images; None likewise, or where it cannot be told.
        busy: Processors that other programs used meanwhile; None likewise.
        command: A command that measures the row again.
        about: hardware, versions, date, seconds, and whatever else is worth knowing.
    """

    setting: Setting
    name: str
    scheme: str
    images: int
    skipped: int
    right: int
    right5: int
    agreeing: int
    macs: int
    base_macs: int
    tokens: list[float]
    images_per_s: float | None = None
    speedup: float | None = None
    peak_mib: float | None = None
    busy: float | None = None
    command: str = ""
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def top1(self) -> float:
        """Percent."""
        return 100 * self.right / self.images

    @property
    def top5(self) -> float:
        """Percent."""
        return 100 * self.right5 / self.images

    @property
    def agreement(self) -> float:
        """Percent."""
        return 100 * self.agreeing / self.images

    @property
    def timed_on(self) -> str | None:
        """The hardware that speed was measured on, which may be another than that of the rest; None if it was not."""
        if self.images_per_s is None:
            return None
        found: str | None = self.about.get("speed", self.about).get("hardware")
        return found

    def to_json(self) -> str:
        """Return one line, with the setting's key first and the percentages for those who read it as it is."""
        shown = {"top1": round(self.top1, 3), "top5": round(self.top5, 3), "agreement": round(self.agreement, 3)}
        return json.dumps({"key": self.setting.key, **shown, **asdict(self)})

    @classmethod
    def from_json(cls, line: str) -> ResultRow:
        """Read the row of a line.

        Raises:
            ValueError: the line is not of a row.
        """
        try:
            data = json.loads(line)
            known = {name: data[name] for name in cls.__dataclass_fields__}
            found = cls(setting=Setting(**known.pop("setting")), **known)
            _check(found)
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a row of results: {error}") from None
        size = found.setting.img_size
        return replace(found, setting=replace(found.setting, img_size=size and (size[0], size[1])))


def _check(row: ResultRow) -> None:
    """Refuse a row with values that no measurement has.

    Raises:
        ValueError: naming the field, what it holds and what was expected.
    """
    for part in (row.setting, row):
        for entry in fields(part):
            value = getattr(part, entry.name)
            right, words = EXPECTED.get(entry.name) or EXPECTED[str(entry.type)]
            if not right(value):
                text = json.dumps(value)
                raise ValueError(f"{entry.name} is {text if len(text) <= 40 else f'{text[:40]}...'}; expected {words}")
    for name in ("right", "right5", "agreeing"):
        if getattr(row, name) > row.images:
            raise ValueError(f"{name} is {getattr(row, name)} of {row.images} images; expected at most that many")


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**63


def _count(value: Any) -> bool:
    return isinstance(value, int) and _amount(value)


def _positive(value: Any) -> bool:
    return _count(value) and value > 0


def _list_of(value: Any, right: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(right, value))


def _config(value: Any) -> bool:
    """Return whether a report can read it; the options of methods that it does not know are none of its business."""
    if not isinstance(value, dict) or not isinstance(value.get("method", ""), str):
        return False
    at, parts = value.get("at"), value.get("parts", [])
    return (at is None or _count(at) or _list_of(at, _count)) and _list_of(parts, _config)


def _about(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(_text(value.get(name, "")) for name in ("hardware", "date"))
        and isinstance(value.get("versions", ""), str | dict)
        and _amount(value.get("seconds", 0))
        and ("speed" not in value or _about(value["speed"]))
    )


# what a field can hold, and words for it, by its name or its type
EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("images", "macs", "base_macs", "batch_size"), (_positive, "a whole number above 0")),
    "setting": (lambda value: True, "an object"),
    "str": (_text, "text"),
    "str | None": (lambda value: value is None or _text(value), "text or null"),
    "int": (_count, "a whole number"),
    "float | None": (lambda value: value is None or _amount(value), "a number or null"),
    "list[float]": (lambda value: _list_of(value, _amount), "a list of numbers"),
    "tuple[int, int] | None": (
        lambda value: value is None or (_list_of(value, _positive) and len(value) == 2),
        "two whole numbers or null",
    ),
    "dict[str, Any] | None": (lambda value: value is None or _config(value), "a method's options or null"),
    "dict[str, Any]": (_about, "an object with text for hardware, versions and date"),
}
