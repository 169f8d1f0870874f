"""Photos to begin with, written into the explorer's temporary folder."""

from __future__ import annotations

from pathlib import Path

from PIL import Image
from torch import nn

from tntprune.data.transforms import input_mode
from tntprune.errors import UserError

PHOTOS = ("chelsea", "astronaut", "coffee", "rocket")  # that scikit-image brings along


def example_photos(model: nn.Module, folder: Path) -> list[Path]:
    """Write example photos that suit a model, and return their paths.

    Grey models get cluttered digits, the others photos of scikit-image that need no download.

    Raises:
        UserError: a package is not installed.
    """
    return _digits(folder) if input_mode(model) == "L" else _photos(folder)


def _digits(folder: Path) -> list[Path]:
    from tntprune.demo.digits import cluttered_digits

    images, labels = cluttered_digits("test", seed=1)
    paths = []
    for digit in (3, 5, 7, 8):
        canvas = images[int((labels == digit).nonzero()[0]), 0]  # (64, 64), normalised to [-1, 1]
        paths.append(folder / f"digit-{digit}.png")
        Image.fromarray(((canvas + 1) * 127.5).clamp(0, 255).byte().numpy()).save(paths[-1])
    return paths


def _photos(folder: Path) -> list[Path]:
    try:
        from skimage import data
    except ImportError:
        raise UserError("example photos need scikit-image; install it with: pip install 'tntprune[app]'") from None
    kept = Path(data.__file__).parent
    found = [path for name in PHOTOS for path in sorted(kept.glob(f"{name}.*")) if path.suffix in (".png", ".jpg")]
    paths = []
    for path in found:
        paths.append(folder / f"{path.stem}.jpg")
        with Image.open(path) as image:
            image.convert("RGB").save(paths[-1], quality=92)
    return paths
