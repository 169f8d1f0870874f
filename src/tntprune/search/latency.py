"""How long a reduced model takes on this machine, from the numbers of its tokens: a curve, measured once.

What is timed is what `tntprune bench` times eagerly; see `measure.py` for how.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tntprune.config import Config

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class LatencyCurve:
    """Time against the number of tokens, of one model, batch size and precision on one machine."""

    @property
    def unpruned(self) -> float:
        """Seconds for one batch of the unpruned model."""
        raise NotImplementedError

    def predict(self, config: Config) -> float:
        """Seconds for one batch of the model with a reduction on it. Nothing is run; a few microseconds a step.

        Args:
            config: Of the method whose steps were measured, with any places and counts (and any `similar`).

        Raises:
            UsageError: the config does not fit the model, or is of a method that was not measured.
        """
        raise NotImplementedError

    def slower(self) -> dict[int, int]:
        """Patch tokens for which a block takes longer than with some larger number, to the fastest such number."""
        raise NotImplementedError

    def check(self, model: nn.Module, config: Config, *, batch_size: int = 1, dtype: str = "fp32") -> None:
        """Refuse to be used for anything else than what was measured.

        Raises:
            UserError: another model, batch size, precision, device, number of threads, machine or method, in one line.
        """
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        raise NotImplementedError

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LatencyCurve:
        """From what `to_dict` made.

        Raises:
            UserError: it is none, or of a newer version.
        """
        raise NotImplementedError

    def save(self, path: Path) -> None:
        """Write it as JSON, whole or not at all.

        Raises:
            UserError: it cannot be written.
        """
        raise NotImplementedError

    @classmethod
    def load(cls, path: Path) -> LatencyCurve:
        """Read what `save` wrote; `check` tells whether it can be used.

        Raises:
            UserError: it cannot be read.
        """
        raise NotImplementedError


def measure_latency(
    model: nn.Module,
    config: Config,
    *,
    batch_size: int = 1,
    dtype: str = "fp32",
    seconds: float = 60.0,
    progress: bool = True,
) -> LatencyCurve:
    """Time the blocks of a model at many numbers of tokens, and the steps of a method between them.

    Args:
        model: In eval mode, on the device to measure. A reduction that is on it is left out.
        config: The method whose steps are to be known; where it acts and how many stay does not matter.
        batch_size: Images at a time.
        dtype: Of weights and images.
        seconds: About how long it may take.
        progress: Show bars.

    Raises:
        UsageError: there is no such precision, or a number is out of range.
        UserError: the method cannot be applied, or the number of tokens that it leaves differs from image to image.
    """
    raise NotImplementedError
