"""The strict image reader: an image is read right, or refused by name. None is replaced by another."""

from __future__ import annotations

import errno
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from tntprune.errors import UserError
from tntprune.system.storage import SUFFIXES

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM")
MAX_PIXELS = 100_000_000
Node = tuple[int, int]  # a disk and a file's number on it
MAX_PATHS = 100  # to the same folder, over links
MAX_RATIO = 100  # of the sides; resizing the short one to a model's size would make the long one enormous


class BadImage(UserError):
    """An image that cannot be read; the message names the file."""


def read_image(
    source: Path | bytes | Image.Image,
    mode: Literal["RGB", "L"] = "RGB",
    upright: bool = False,
    name: str | None = None,
) -> Image.Image:
    """Read one image in full.

    CMYK, grey, palette and 16-bit images are converted (16-bit ones scaled to 8 bits, not clipped), transparency is
    dropped, and of several frames the first counts.

    Args:
        source: The file, what is in it, or an image of Pillow's, which is held to the same limits.
        mode: What to convert it to.
        upright: Turn it as its EXIF orientation says. Off for ImageNet figures, which are defined without it.
        name: For messages, where there is no file.

    Raises:
        BadImage: it is missing, empty, truncated, no image, of more than `MAX_PIXELS`, one side is more than
            `MAX_RATIO` times the other, or it has 32 bits a channel.
    """
    name = name or (str(source) if isinstance(source, Path) else "an image")
    try:
        if isinstance(source, Image.Image):
            return _whole(source, mode, upright)
        with _open(source) as image:
            return _whole(image, mode, upright)
    except MemoryError:
        raise  # says nothing about the image
    except BadImage as refusal:
        told = str(refusal)
    except UnidentifiedImageError:
        told = f"not an image that can be read; expected {', '.join(FORMATS)}"
    except Image.DecompressionBombError:
        told = f"too many pixels; expected at most {MAX_PIXELS // 10**6} megapixels"
    except Exception as error:  # Pillow's decoders raise a dozen kinds on broken files
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        told = f"cannot be read ({reason or type(error).__name__}); replace or remove it"
    raise BadImage(f"{name}: {told}")


def _open(source: Path | bytes) -> Image.Image:
    if isinstance(source, Path) and source.is_dir():
        raise BadImage("a folder; expected an image")
    if (source.stat().st_size if isinstance(source, Path) else len(source)) == 0:
        raise BadImage("empty file; expected an image")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is stricter
        return Image.open(source if isinstance(source, Path) else BytesIO(source), formats=FORMATS)


def _whole(image: Image.Image, mode: Literal["RGB", "L"], upright: bool) -> Image.Image:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise BadImage(f"{width} x {height} pixels; expected at most {MAX_PIXELS // 10**6} megapixels")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise BadImage(f"{width} x {height} pixels; expected sides of at most {MAX_RATIO} to 1")
    image.load()
    whole: Image.Image = ImageOps.exif_transpose(image) if upright else image
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):  # 16 bits: 65535 becomes 255
        whole = Image.fromarray((np.asarray(whole, dtype=np.float32) / 257).round().astype(np.uint8))
    elif whole.mode in ("I", "F"):
        raise BadImage("32 bits a channel; expected 8 or 16, so convert it first")
    return whole.convert(mode)


def find_images(folder: Path) -> list[Path]:
    """Find the image files under a folder, in order, but for hidden ones; a UserError says that there are none."""
    if not folder.is_dir():
        what = "not a folder" if folder.exists() else "no such folder"
        raise UserError(f"{folder}: {what}; expected one with images")
    found = sorted(_walk(folder))
    if not found:
        raise UserError(f"{folder}: no images in it; expected files ending in {', '.join(sorted(SUFFIXES))}")
    return found


def _walk(folder: Path) -> Iterator[Path]:
    """Follow links, for class folders often are some, but not back to a folder that we are in."""
    seen: Counter[Node] = Counter()
    waiting: list[tuple[str, frozenset[Node]]] = [(str(folder), frozenset())]
    while waiting:
        place, above = waiting.pop()
        try:
            about = Path(place).stat()
            entries = list(os.scandir(place))
        except OSError as error:
            raise UserError(f"{place}: cannot be read ({error.strerror}); expected a folder with images") from None
        own = (about.st_dev, about.st_ino)
        if own in above:
            continue
        seen[own] += 1
        if seen[own] > MAX_PATHS:
            raise UserError(f"{place}: links lead here in more than {MAX_PATHS} ways; expected fewer")
        for entry in entries:
            if entry.name.startswith("."):
                continue
            try:
                below = entry.is_dir()
            except OSError as error:
                if error.errno != errno.ELOOP:  # a link to itself; with an image's ending it is told when it is read
                    told = f"{entry.path}: cannot be read ({error.strerror}); expected a folder or a file"
                    raise UserError(told) from None
                below = False
            if below:
                waiting.append((entry.path, above | {own}))
            elif Path(entry.name).suffix.lower() in SUFFIXES:
                yield Path(entry.path)
