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
        BadImage: it is missing, empty, truncated, no image, of more than 100 megapixels, one side is more than 100
            times the other, or it has 32 bits a channel.
    """
    name = name or (str(source) if isinstance(source, Path) else "an image")
    try:
        if isinstance(source, Image.Image):
            return _whole(name, source, mode, upright)
        with _open(name, source) as image:
            return _whole(name, image, mode, upright)
    except UnidentifiedImageError:
        raise BadImage(f"{name}: not an image that can be read; expected {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError:
        raise BadImage(f"{name}: too many pixels; expected at most {MAX_PIXELS // 10**6} megapixels") from None
    except MemoryError:
        raise  # says nothing about the image
    except Exception as error:  # Pillow's decoders raise a dozen kinds on broken files
        if isinstance(error, BadImage):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadImage(f"{name}: cannot be read ({reason or type(error).__name__}); replace or remove it") from None


def _open(name: str, source: Path | bytes) -> Image.Image:
    if isinstance(source, Path) and source.is_dir():
        raise BadImage(f"{name}: a folder; expected an image")
    if (source.stat().st_size if isinstance(source, Path) else len(source)) == 0:
        raise BadImage(f"{name}: empty file; expected an image")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is stricter
        return Image.open(source if isinstance(source, Path) else BytesIO(source), formats=FORMATS)


def _whole(name: str, image: Image.Image, mode: Literal["RGB", "L"], upright: bool) -> Image.Image:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise BadImage(f"{name}: {width} x {height} pixels; expected at most {MAX_PIXELS // 10**6} megapixels")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise BadImage(f"{name}: {width} x {height} pixels; expected sides of at most {MAX_RATIO} to 1")
    image.load()
    whole: Image.Image = ImageOps.exif_transpose(image) if upright else image
    sixteen = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM")
    return _convert(name, whole, mode, sixteen)


def _convert(name: str, image: Image.Image, mode: Literal["RGB", "L"], sixteen: bool) -> Image.Image:
    if sixteen:
        scaled = np.asarray(image, dtype=np.float32) / 257  # 65535 becomes 255
        image = Image.fromarray(scaled.round().astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise BadImage(f"{name}: 32 bits a channel; expected 8 or 16, so convert it first")
    return image.convert(mode)


def find_images(folder: Path) -> list[Path]:
    """The image files under a folder, by their suffixes, in a fixed order; hidden files and folders are passed over.

    Raises:
        UserError: the folder is missing or holds no image.
    """
    if not folder.is_dir():
        raise UserError(
            f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}; expected one with images"
        )
    found = sorted(_walk(folder))
    if not found:
        raise UserError(f"{folder}: no images in it; expected files ending in {', '.join(sorted(SUFFIXES))}")
    return found


def _walk(folder: Path) -> Iterator[Path]:
    """Links are followed, for class folders often are some, but not back to a folder that we are in."""
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
            if _is_folder(entry):
                waiting.append((entry.path, above | {own}))
            elif Path(entry.name).suffix.lower() in SUFFIXES:
                yield Path(entry.path)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder or leads to one.

    Raises:
        UserError: that cannot be told.
    """
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False  # a link to itself; with an image's ending it is told when it is read
        raise UserError(f"{entry.path}: cannot be read ({error.strerror}); expected a folder or a file") from None
