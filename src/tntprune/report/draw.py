"""Pictures of what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tntprune.analysis.record import record
from tntprune.backbones.attach import device_of, reduction_of
from tntprune.backbones.base import find_backbone, tower_of
from tntprune.data.images import read_image
from tntprune.data.transforms import input_mode, normalization_of, transform_for
from tntprune.methods.learned import inherit
from tntprune.reduce import reduce_
from tntprune.report.plot_style import blank, drawable, finished
from tntprune.system.storage import make_folder, write

Pixels = Any  # (H, W, 3) uint8 array
VEIL = 0.85  # share of the veil over a dropped token; half of it over a merged one
STRIPES = np.array([[238, 241, 246], [118, 134, 168]])  # of the veil: one of them shows on white, on black, on any grey
ORIGINAL = "original"
LONGEST = 24  # characters of a row's title
FATES = {"kept": 0.0, "merged into a kept token": VEIL / 2, "dropped": VEIL}  # of a patch, and its veil


class PhotoMaps(dict[str, Pixels]):
    """Pictures of one photo by their captions, each (H, W, 3).

    Attributes:
        dropped: Whether any of them shows a dropped token.
        merged: Whether any of them shows a merged one.
    """

    dropped = False
    merged = False


def veiled(pixels: Pixels, carrier: np.ndarray[Any, Any], grid: tuple[int, int]) -> Pixels:
    """Draw a striped veil over dropped tokens, and half of one over tokens that were merged into others.

    Args:
        pixels: (H, W, 3), 0 to 255.
        carrier: (N,), for each patch the patch whose token carries it, or -1; see `Trace.carrier`.
        grid: Rows and columns of patches.
    """
    own = np.arange(len(carrier))
    veil = np.where(carrier == own, 0.0, np.where(carrier < 0, VEIL, VEIL / 2)).reshape(grid)
    height, width = pixels.shape[:2]
    tall, wide = -(-height // grid[0]), -(-width // grid[1])
    veil = veil.repeat(tall, 0).repeat(wide, 1)[:height, :width, None]
    stripe = max(1, min(tall, wide) // 4)  # pixels; the diagonals fit into a patch
    colour = STRIPES[(np.add.outer(np.arange(height), np.arange(width)) // stripe) % 2]  # (H, W, 3)
    return (pixels * (1 - veil) + colour * veil).round().astype(np.uint8)


def to_pixels(image: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> Pixels:
    """Turn a normalised image (C, H, W) back into (H, W, 3), 0 to 255."""
    x = image.cpu() * torch.tensor(std).view(-1, 1, 1) + torch.tensor(mean).view(-1, 1, 1)
    return x.clamp(0, 1).mul(255).round().byte().expand(3, -1, -1).permute(1, 2, 0).numpy()


@torch.inference_mode()
def kept_maps(
    model: nn.Module, images: torch.Tensor, mean: Sequence[float], std: Sequence[float], each: bool = False
) -> list[PhotoMaps]:
    """Draw for each image the picture itself, and one picture for each block after which tokens go.

    Args:
        model: A reduced model in eval mode.
        images: (B, C, H, W), normalised.
        mean: Of the normalisation.
        std: Of the normalisation.
        each: Let every location work on its own, as in the paper's figures, instead of one after the other.

    Returns:
        The pictures of each image.
    """
    grid = find_backbone(model).grid(model, images)
    pictures = [PhotoMaps({ORIGINAL: to_pixels(image, mean, std)}) for image in images]
    for carrier in _carriers(model, images, each):
        for block, places in carrier.items():
            if block and bool((places == torch.arange(places.shape[1], device=places.device)).all()):
                continue  # nothing is missing (yet), or all are together again
            caption = f"after block {block}" if block else "before block 1"
            for picture, place in zip(pictures, places.cpu().numpy(), strict=True):
                picture[caption] = veiled(picture[ORIGINAL], place, grid)
                picture.dropped |= bool((place < 0).any())
                picture.merged |= bool(((place >= 0) & (place != np.arange(len(place)))).any())
    return pictures


def _carriers(model: nn.Module, images: torch.Tensor, each: bool) -> list[dict[int, torch.Tensor]]:
    method = reduction_of(model)
    if not each:
        with record(model) as trace:
            find_backbone(model).output(model, images.to(device_of(model)))
        return [trace.carrier]
    depth, found = method.layout.depth, []
    try:
        for part in getattr(method, "parts", [method]):
            for config in part.config.singles(depth):
                reduce_(model, config)
                inherit(reduction_of(model), part.state_dict())
                (carriers,) = _carriers(model, images, each=False)
                own = config.blocks(depth) or carriers  # without Evo-ViT's last one, where all are together again
                found.append({block: places for block, places in carriers.items() if block in own})
    finally:
        tower_of(model).reduction = method  # the same module as before, not one like it
    return found


def photo_maps(model: nn.Module, photos: Sequence[Path], each: bool = False) -> list[PhotoMaps]:
    """Draw `kept_maps` of photos, each turned upright as its EXIF orientation says.

    Raises:
        BadImage: a photo cannot be read.
    """
    transform = transform_for(model)
    images = torch.stack([transform(read_image(path, input_mode(model), upright=True)) for path in photos])
    return kept_maps(model, images, *normalization_of(model), each)


def sheet(pictures: Sequence[PhotoMaps], titles: Sequence[str] | None = None) -> bytes:
    """Lay pictures in a grid, one row per image and one column per caption, with a legend of the veils, as a PNG."""
    captions = list(pictures[0])
    rows, columns = len(pictures), len(captions)
    tall = pictures[0][ORIGINAL].shape[0] / pictures[0][ORIGINAL].shape[1]
    figure = blank(2.2 * columns, (2.2 * tall + 0.06) * rows + 0.6)
    axes = figure.subplots(rows, columns, squeeze=False)
    for row, picture in enumerate(pictures):
        for column, caption in enumerate(captions):
            axis = axes[row][column]
            small = picture[caption].shape[0] < 128
            axis.imshow(picture[caption], interpolation="nearest" if small else "antialiased")
            axis.set_xticks([])
            axis.set_yticks([])
            for edge in axis.spines.values():
                edge.set_color("#cccccc")
            if row == 0:
                axis.set_title(drawable(caption), fontsize=10)
            if column == 0 and titles is not None:
                axis.set_ylabel(drawable(titles[row]), fontsize=9)
    shown = (True, any(picture.merged for picture in pictures), any(picture.dropped for picture in pictures))
    _legend(figure, [fate for fate, there in zip(FATES, shown, strict=True) if there])
    return finished(figure, "png")


def _legend(figure: Any, fates: Sequence[str]) -> None:
    """Name the veils that occur below the pictures, each as it looks on white."""
    from matplotlib.patches import Patch

    patches = []
    for name in fates:
        veil = FATES[name]
        light, dark = (tuple((255 - veil * (255 - stripe)) / 255) for stripe in STRIPES)
        patches.append(
            Patch(facecolor=light, edgecolor=dark if veil else "#999999", hatch="////" * bool(veil), label=name)
        )
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9)


def row_titles(paths: Sequence[Path]) -> list[str]:
    """Cut the names of photos to short titles that stay different.

    Names that are too long lose the beginning that all of them share.
    """
    names = [path.stem for path in paths]
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    shared = len(list(same)) if len(names) > 1 else 0
    titles = [_cut(name, shared) for name in names]
    if len(set(titles)) < len(set(names)):  # they differ further on
        titles = [f"{number}: {title[: LONGEST - 4]}" for number, title in enumerate(titles, start=1)]
    return titles


def _cut(name: str, shared: int) -> str:
    if len(name) <= LONGEST:
        return name
    begin = min(max(0, shared - 4), len(name) - LONGEST)  # a few letters of what is shared, for the eye
    part = name[begin : begin + LONGEST]
    return ("…" if begin else "") + part + ("…" if begin + LONGEST < len(name) else "")


def write_picture(path: Path, data: bytes) -> None:
    """Write a picture whole or not at all.

    Raises:
        UserError: the folder cannot be written.
    """
    make_folder(path.parent)
    write(path, data)
