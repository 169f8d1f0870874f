"""Naive references: loops over images and tokens, as one would write them on a blackboard."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def layer_norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """One token, (D,)."""
    mean = sum(x) / len(x)
    variance = sum((v - mean) ** 2 for v in x) / len(x)
    return torch.stack([(v - mean) / torch.sqrt(variance + eps) for v in x])


def score(scorer, token: torch.Tensor, score_norm: bool) -> torch.Tensor:
    """One token, (D,), to one number, through a linear or an MLP scorer."""
    x = layer_norm(token) if score_norm else token
    for depth, layer in enumerate(scorer.layers):
        if depth:
            x = F.gelu(x)
        x = torch.stack([sum(w * v for w, v in zip(row, x)) + b for row, b in zip(layer.weight, layer.bias)])
    return x[0]


def noisy(x, eps, scorer, prefix, *, capacity, noise_scale, stream_norm, beta, score_norm):
    """TNT's training step after one block, image by image and token by token.

    x and eps: (B, prefix + n, D), eps without use for prefix tokens. capacity: a number of tokens.
    """
    out = torch.empty_like(x)
    for b in range(len(x)):
        tokens = [x[b, i] for i in range(x.shape[1])]
        scores = [score(scorer, t, score_norm) for t in tokens[prefix:]]
        highest = max(s.item() for s in scores)
        total = sum(torch.exp(s - highest) for s in scores)
        alpha = [torch.exp(s - highest) / total for s in scores]
        for i, token in enumerate(tokens):
            kept = layer_norm(token) if stream_norm else token
            if i >= prefix:
                free = min(1.0, (capacity * alpha[i - prefix]).item())
                size = 1.0
                if noise_scale == "rms":
                    size = math.sqrt(sum(float(v) ** 2 for v in kept) / len(kept))
                kept = kept + beta * size * (1 - free) * eps[b, i]
            out[b, i] = kept
    return out


def without_similar(x: torch.Tensor, remove: int, order: list[int], fold: bool):
    """The similarity step for one image without prefix tokens.

    Args:
        x: (n, D).
        remove: How many go.
        order: Its first half, rounded down, is the group that loses tokens.
        fold: Merge them into their matches.

    Returns:
        The tokens that are left by position, and how many patches each stands for.
    """
    n = len(x)
    first, second = order[: n // 2], order[n // 2 :]

    def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
        dot = sum(float(p) * float(q) for p, q in zip(a, b))
        return dot / math.sqrt(sum(float(p) ** 2 for p in a)) / math.sqrt(sum(float(q) ** 2 for q in b))

    matches = []
    for a in first:
        best = max(second, key=lambda b: cosine(x[a], x[b]))
        matches.append((cosine(x[a], x[best]), a, best))
    matches.sort(key=lambda m: m[0], reverse=True)
    gone = matches[:remove]
    groups = {i: [i] for i in range(n)}
    for _, a, best in gone:
        del groups[a]
        if fold:
            groups[best].append(a)
    return {i: torch.stack([x[m] for m in members]).mean(0) for i, members in groups.items()}, {
        i: len(members) for i, members in groups.items()
    }
