"""Cluttered digits: the data of the demo, made at run time from scikit-learn's handwritten scans.

A scan of 8 x 8 pixels, enlarged to 24 x 24, lies at random on a 64 x 64 canvas among six fragments of other digits.
With patches of 8 the canvas has 64 tokens and the digit covers about nine of them, so that it matters which tokens
are dropped. Training and test scans are kept apart, and everything follows from the seed.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from tntprune.errors import UserError

CANVAS, DIGIT, FRAGMENT = 64, 24, 10  # pixels
FRAGMENTS = 6
HELD_OUT = 500  # scans that no training ever sees


def scans(split: Literal["train", "test"]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the handwritten scans of one split, 1,297 for training and 500 held out.

    Returns:
        Images (n, 1, 8, 8) in [0, 1] and labels (n,) from 0 to 9.

    Raises:
        UserError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("the digits need scikit-learn; install it with: pip install 'tntprune[demo]'") from None

    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().div(16).unsqueeze(1)
    labels = torch.from_numpy(bunch.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    chosen = order[:HELD_OUT] if split == "test" else order[HELD_OUT:]
    return images[chosen], labels[chosen]


def paste(images: torch.Tensor, top_left: torch.Tensor, size: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Enlarge each image, turn it and lay it on an empty canvas.

    Args:
        images: (n, 1, h, w).
        top_left: (n, 2), x and y of the corner in pixels of the canvas.
        size: (n,), the side after enlarging, in pixels.
        angle: (n,), in radians.

    Returns:
        Canvases (n, 1, 64, 64), zero outside the pasted image.
    """
    centre = (top_left + size[:, None] / 2) / CANVAS * 2 - 1  # (n, 2), in the [-1, 1] of grid_sample
    zoom = CANVAS / size
    cos, sin = angle.cos() * zoom, angle.sin() * zoom
    rotation = torch.stack([torch.stack([cos, -sin], 1), torch.stack([sin, cos], 1)], 1)  # (n, 2, 2)
    shift = -(rotation @ centre[:, :, None])  # (n, 2, 1)
    grid = F.affine_grid(torch.cat([rotation, shift], 2), [len(images), 1, CANVAS, CANVAS], align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)  # (n, 1, 64, 64)


def scatter(
    images: torch.Tensor, labels: torch.Tensor, generator: torch.Generator, jitter: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lay each scan among fragments of other scans of the same batch.

    Args:
        images: Scans (n, 1, 8, 8) in [0, 1], at least two.
        labels: (n,).
        generator: Where all randomness comes from.
        jitter: 0 for the demo's data; in training the size varies by this share and the angle by this many radians.

    Returns:
        Canvases (n, 1, 64, 64) in [0, 1], and the labels.
    """
    n = len(images)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    def wobble() -> torch.Tensor:
        return (uniform(n) * 2 - 1) * jitter

    size = DIGIT * (1 + wobble())
    corner = (uniform(n, 2) * (CANVAS - size[:, None] + (jitter == 0))).floor()
    canvas = paste(images, corner, size, wobble())
    for _ in range(FRAGMENTS):
        other = (torch.arange(n) + torch.randint(1, n, (n,), generator=generator)) % n
        big = F.interpolate(images[other], size=(DIGIT, DIGIT), mode="bilinear", align_corners=False)
        cut = (uniform(n, 2) * (DIGIT - FRAGMENT + 1)).long()
        window = torch.arange(FRAGMENT)
        rows, columns = cut[:, :1] + window, cut[:, 1:] + window  # (n, 10) each
        piece = big[torch.arange(n)[:, None, None], 0, rows[:, :, None], columns[:, None, :]].unsqueeze(1)
        where = (uniform(n, 2) * (CANVAS - FRAGMENT + 1)).floor()
        canvas = torch.maximum(canvas, paste(piece, where, torch.full((n,), float(FRAGMENT)), torch.zeros(n)))
    return canvas, labels


def normalise(images: torch.Tensor) -> torch.Tensor:
    """Map [0, 1] to [-1, 1], as the digits ViT expects."""
    return (images - 0.5) / 0.5


def cluttered_digits(
    split: Literal["train", "test"], copies: int = 1, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lay every scan of a split on `copies` canvases.

    Returns:
        Normalised images (copies * n, 1, 64, 64) and labels (copies * n,).
    """
    images, labels = scans(split)
    generator = torch.Generator().manual_seed(seed)
    made = [scatter(images, labels, generator) for _ in range(copies)]
    return normalise(torch.cat([m[0] for m in made])), torch.cat([m[1] for m in made])
