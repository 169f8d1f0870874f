"""Naive references: loops over images and tokens, as one would write them on a blackboard."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from tntprune import record, reduce_
from tntprune.backbones.base import tower_of
from tntprune.backbones.blocks import Inside


def first_half(model, number: int, x: torch.Tensor, places=None, bias: torch.Tensor | None = None):
    """The tokens that leave one block's attention, with the residual, and its heads."""
    inside, tower = Inside(bias=bias), tower_of(model)
    out = tower.opened(number).attention_half(x, inside, **tower.context(number, places, True))
    return out, inside.heads


def in_halves(model, number: int, x: torch.Tensor, places=None, bias: torch.Tensor | None = None):
    """The tokens that leave one block, which is run half by half."""
    return tower_of(model).opened(number).mlp_half(first_half(model, number, x, places, bias)[0])


def act(method, tokens, place, plan, heads=None):
    """What a method does at one place of a plan, as the walk does it."""
    block = plan[place.block]
    tokens = replace(tokens, block=place.block)
    if not place.inside:
        for number in block.watchers:
            tokens = method.member(number).watch(tokens, heads)
    step = block.inside if place.inside else block.after
    return tokens if step is None else method(tokens, step, heads)


def steps_of(plan):
    """The steps of a plan, in order."""
    return tuple(step for block in plan for step in (block.inside, block.after) if step is not None)


def by_place(steps):
    """Steps by where they are."""
    return {step.place: step for step in steps}


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
    noise_scale="image": a token gives way to the mean of its image's, with noise as large as they vary.
    """
    out = torch.empty_like(x)
    for b in range(len(x)):
        tokens = [x[b, i] for i in range(x.shape[1])]
        scores = [score(scorer, t, score_norm) for t in tokens[prefix:]]
        highest = max(s.item() for s in scores)
        total = sum(torch.exp(s - highest) for s in scores)
        alpha = [torch.exp(s - highest) / total for s in scores]
        stream = [layer_norm(token) if stream_norm else token for token in tokens]
        mean = sum(stream[prefix:]) / (len(tokens) - prefix)
        for i, kept in enumerate(stream):
            if i >= prefix:
                free = min(1.0, (capacity * alpha[i - prefix]).item())
                size, goal = 1.0, kept
                if noise_scale == "rms":
                    size = math.sqrt(sum(float(v) ** 2 for v in kept) / len(kept))
                if noise_scale == "image":
                    goal = mean
                    size = (sum((t - mean) ** 2 for t in stream[prefix:]) / (len(tokens) - prefix)).sqrt()
                kept = free * kept + (1 - free) * (goal + beta * size * eps[b, i])
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


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of two tokens, (D,) each."""
    dot = sum(float(p) * float(q) for p, q in zip(a, b))
    return dot / math.sqrt(sum(float(p) ** 2 for p in a)) / math.sqrt(sum(float(q) ** 2 for q in b))


def chosen(score, compared, size, count: int, relevance: float, crowding: float):
    """Which tokens of one image stay, the highest score first, and where each of the others goes.

    Args:
        score: n numbers.
        compared: (n, d).
        size: n numbers.
        count: How many stay.
        relevance: Weight of the score.
        crowding: Weight of the size.

    Returns:
        Those that stay by position, and for each that goes the position of the token that takes it in.
    """
    n = len(score)
    ranked = sorted(range(n), key=lambda i: -float(score[i]))  # stable: of equal ones the first is the higher
    worth = {}
    for place, i in enumerate(ranked):
        likeness = max([0.0, *(cosine(compared[i], compared[better]) for better in ranked[:place])])
        far = max(1e-4, 1 - likeness)
        worth[i] = far * math.exp(relevance * float(score[i])) * float(size[i]) ** crowding
    best = sorted(ranked, key=lambda i: -worth[i])[:count]
    stay = [i for i in ranked if i in best]
    into = {i: max(stay, key=lambda j: cosine(compared[i], compared[j])) for i in range(n) if i not in best}
    return stay, into


def folded(
    x: torch.Tensor, size, weight, stay: list[int], into: dict[int, int], share: dict[int, float], lift: float = 0.0
):
    """Tokens (n, D) of one image with some merged into others, or a share of them: (k, D), and each one's patches."""
    tokens, sizes = [], []
    for keeper in stay:
        members = [keeper, *(i for i, target in into.items() if target == keeper)]
        patches = [float(size[i]) * share.get(i, 1.0) for i in members]
        weights = [float(weight[i]) * count for i, count in zip(members, patches)]
        mean = sum(w * x[i] for w, i in zip(weights, members)) / sum(weights)
        long = sum(w * math.dist(x[i], [0.0] * len(x[i])) for w, i in zip(weights, members)) / sum(weights)
        tokens.append(mean * min(4.0, (long / math.dist(mean, [0.0] * len(mean))) ** lift))
        sizes.append(sum(patches))
    return torch.stack(tokens), sizes


def check_whole(reduced, images: torch.Tensor, expected) -> None:
    """Compare the logits of a reduced model and where its merged tokens went with those of loops.

    Args:
        reduced: The model.
        images: (B, C, H, W).
        expected: For each image the logits, and by block the token that carries each patch.
    """
    with torch.inference_mode(), record(reduced) as trace:
        logits = reduced(images)
    torch.testing.assert_close(logits, torch.stack([e[0] for e in expected]), atol=1e-5, rtol=1e-5)
    assert trace.carrier.keys() == expected[0][1].keys()
    for block, carrier in trace.carrier.items():
        assert carrier.tolist() == [e[1][block] for e in expected]


def check_equal_tokens(model, config) -> None:
    """Check that a token of size s counts like s equal ones: equal patches give what they give unmerged."""
    images = torch.rand(2, 3, 1, 1).expand(2, 3, 32, 32)
    with torch.inference_mode():
        model.pos_embed.zero_()
        expected = model(images)
        torch.testing.assert_close(reduce_(model, config)(images), expected, atol=1e-5, rtol=1e-5)
