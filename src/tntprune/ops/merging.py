"""Fewer tokens by relevance and likeness: each token that goes is merged into the most similar token that stays.

Ours: neither the paper's dropping nor ToMe's pairs. A token is needed as far as it is relevant and no more relevant
token is like it. One number decides for both, and any share can go in one step.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import torch
import torch.nn.functional as F

from tntprune.ops.similarity import closest
from tntprune.ops.tokens import Tokens, follow, in_order, pick, ranking, row_blocks, take
from tntprune.ops.windows import Windows, cut, number_of_windows

LONGEST = 4.0  # times its length that a mean becomes at most: opposite tokens have a mean near 0
NEAREST = 1e-4  # distances below it are alike: fp32 tells them from rounding errors no more


def standardised(score: torch.Tensor) -> torch.Tensor:
    """Scores (B, n) with mean 0 and standard deviation 1 in each image."""
    centred = score - score.mean(1, keepdim=True)
    return centred / (centred.square().mean(1, keepdim=True).sqrt() + 1e-6)


def choose(
    score: torch.Tensor,
    compared: torch.Tensor,
    size: torch.Tensor | None,
    count: int,
    score_weight: float,
    size_weight: float,
    windows: Windows | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return which tokens stay, which go, and where to. No gradient goes through.

    A token's importance is its distance from the most similar token of a higher score, 1 - cosine and at most 1, times
    exp(score_weight * its score), times its size ** size_weight. Of equal scores the first counts as the higher.

    Args:
        score: (B, n), standardised.
        compared: (B, n, d), what likeness is told by.
        size: (B, n), how many patches each token stands for; None if each stands for one.
        count: How many stay, at least 1 and less than n.
        score_weight: Weight of the score beside the log of the distance.
        size_weight: Weight of the log of the size.
        windows: Tokens are compared in these alone, at most `count` of them, and the highest score of each stays; None
            compares all.

    Returns:
        Positions of those that stay, in each window the highest score first (B, count), and of those that go
        (B, n - count); and for each of these the most similar one among the first, 0 to count - 1, and its cosine
        (both B, n - count).
    """
    if windows is not None:
        return _choose_in_windows(score, compared, size, count, score_weight, size_weight, windows)
    score = score.detach().float()
    rank = ranking(score, descending=True)  # (B, n)
    x = F.normalize(pick(compared.detach().float(), rank), dim=-1)  # (B, n, d), the highest score first
    blocks = row_blocks(x.shape[1], x.shape[1])
    with torch.autocast(x.device.type, enabled=False):  # a block, or all there is: (B, n, n)
        if len(blocks) == 1:
            alike = x @ x.transpose(1, 2)
            before = alike.tril(-1).amax(2)
        else:
            before = torch.cat([_most_alike_before(x, rows) for rows in blocks], 1)
    far = (1 - before).clamp(min=NEAREST)  # (B, n)
    importance = far.log() + score_weight * score.gather(1, rank)
    if size is not None:
        importance = importance + size_weight * size.gather(1, rank).log()
    place = ranking(importance, descending=True)
    stay, go = in_order(place[:, :count]), place[:, count:]  # (B, count), (B, n - count)
    if len(blocks) == 1:
        among = pick(alike, go).gather(2, stay[:, None].expand(-1, go.shape[1], -1))  # (B, n - count, count)
        likeness, target = among.max(2)
    else:
        likeness, target = closest(pick(x, go), pick(x, stay))
    return rank.gather(1, stay), rank.gather(1, go), target, likeness


def _choose_in_windows(
    score: torch.Tensor,
    compared: torch.Tensor,
    size: torch.Tensor | None,
    count: int,
    score_weight: float,
    size_weight: float,
    windows: Windows,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what `choose` says, in windows of m tokens at most. Padding, of size 0, stands last in each."""
    (batch, n), number = score.shape, windows.number
    own = cut(n, number, score.device)
    longest = own.place.shape[1]
    at = windows.order[:, own.place.flatten()].view(-1, longest)  # (B * windows, m)
    sizes = None if size is None else size.gather(1, at.view(batch, -1)).view_as(at)
    real = own.real.expand(batch, -1, -1).reshape_as(at)
    real = real if sizes is None else real & (sizes > 0)
    scores = score.detach().float().gather(1, at.view(batch, -1)).view_as(at)
    rank = ranking(scores.masked_fill(~real, -torch.inf), descending=True)  # the highest score of each first
    at, scores, real = at.gather(1, rank), scores.gather(1, rank), real.gather(1, rank)
    at = at.view(batch, -1)  # (B, windows * m)
    x = pick(F.normalize(compared.detach().float(), dim=-1), at).unflatten(1, (number, longest))
    blocks = row_blocks(number, longest**2)

    def alike(some: slice) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return torch.matmul(x[:, some], x[:, some].transpose(2, 3))  # (B, some, m, m)

    tables = [alike(blocks[0])] if len(blocks) == 1 else None
    before = [(alike(some) if tables is None else tables[0]).tril(-1).amax(3) for some in blocks]
    far = (1 - torch.cat(before, 1)).clamp(min=NEAREST).view_as(scores)
    importance = far.log() + score_weight * scores
    if sizes is not None:
        importance = importance + size_weight * sizes.gather(1, rank).log()
    first = torch.arange(longest, device=at.device) == 0
    importance = importance.masked_fill(first & real, torch.inf).view_as(at)
    place = ranking(importance[:, own.slot], descending=True)
    stay, go = own.slot[in_order(place[:, :count])], own.slot[place[:, count:]]  # in windows, end to end
    stays = torch.zeros_like(at, dtype=torch.bool).scatter(1, stay, True)
    there = stays.view(-1, number, 1, longest)
    found = [
        (alike(some) if tables is None else tables[0]).masked_fill(~there[:, some], -2.0).max(3) for some in blocks
    ]
    best = torch.cat([one.indices for one in found], 1).flatten(1).gather(1, go)  # in its window
    likeness = torch.cat([one.values for one in found], 1).flatten(1).gather(1, go).clamp(min=-1)  # padding: none
    number_of = stays.cumsum(1) - 1  # where in `stay` each is
    target = number_of.gather(1, go // longest * longest + best).clamp(min=0)
    return at.gather(1, stay), at.gather(1, go), target, likeness


def _most_alike_before(x: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return the largest cosine, at least 0, of each of some tokens and one that comes before it, (B, rows)."""
    alike = x[:, rows] @ x[:, : rows.stop].transpose(1, 2)  # (B, rows, columns)
    return alike.tril(rows.start - 1).amax(2)


def comparisons(entering: int, leaving: int, window: int | None = None) -> int:
    """Return how many pairs of tokens `choose` compares."""
    number = number_of_windows(entering, window, most=leaving)
    if number > 1:
        pairs = ceil(entering / number) ** 2
        return number * pairs * (1 if len(row_blocks(number, pairs)) == 1 else 2)
    blocks = row_blocks(entering, entering)
    if len(blocks) == 1:
        return entering**2
    before: int = sum((rows.stop - rows.start) * rows.stop for rows in blocks)
    return before + (entering - leaving) * leaving


def length(x: torch.Tensor) -> torch.Tensor:
    """Of tokens (B, n, D), in fp32: (B, n, 1)."""
    found: torch.Tensor = torch.linalg.vector_norm(x.float(), dim=2, keepdim=True)
    return found + 1e-6  # not 0, to divide by


def fold(
    tokens: Tokens,
    stay: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    share: torch.Tensor | None = None,
    norm_correction: torch.Tensor | float | None = None,
) -> Tokens:
    """Merge tokens into others, by their weighted mean. Gradients reach the tokens and all weights.

    A one-hot matmul does it, as in `tokens.merge`, whose targets are the same in every image.

    The norm of a mean is smaller than that of its tokens, the more so the less alike they are. With `norm_correction`
    the mean is multiplied by (mean of the norms / norm of the mean) ** norm_correction, and at most by `LONGEST`. With
    1 it gets the mean of the norms; that norms should be kept is from ToFu's MLERP (Kim et al., "Token Fusion", WACV
    2024, abstract).

    Args:
        tokens: n patch tokens.
        stay: (B, k), positions of those that stay, in the order in which they are to stand.
        source: (B, r), positions of those that go.
        target: (B, r), where in `stay` each goes.
        weight: (B, n), above 0: what each counts for in the mean, beside the number of patches that it stands for.
        share: (B, r), above 0 and at most 1: how much of each that goes is merged, while the rest is dropped; None is
            all of it.
        norm_correction: A number, 0 or larger; None is 0, the mean itself.

    Returns:
        k patch tokens.
    """
    size = torch.ones_like(tokens.index, dtype=torch.float32) if tokens.size is None else tokens.size
    kept = take(replace(tokens, size=size, carrier=None), stay)
    assert kept.size is not None
    gone = size.gather(1, source) if share is None else size.gather(1, source) * share  # (B, r), in patches
    heavy = gone * weight.gather(1, source).float()  # (B, r)
    light = kept.size * weight.gather(1, stay).float()  # (B, k)
    with torch.autocast(tokens.x.device.type, enabled=False):  # what takes nothing in comes out bit for bit
        moved = pick(tokens.patches, source)  # (B, r, D)
        x, sizes = [kept.x[:, : tokens.prefix]], []
        for rows in row_blocks(stay.shape[1], source.shape[1]):
            lands = target[:, None] == torch.arange(rows.start, rows.stop, device=stay.device)[:, None]  # (B, rows, r)
            own, extra, old = light[:, rows], lands * heavy[:, None], kept.patches[:, rows]
            total = own + extra.sum(2)
            own, extra = (own / total).to(old.dtype)[:, :, None], (extra / total[:, :, None]).to(old.dtype)
            mean = torch.baddbmm(old * own, extra, moved)  # (B, rows, D)
            if norm_correction is not None:
                long = torch.baddbmm(length(old) * own.float(), extra.float(), length(moved))  # (B, rows, 1)
                mean = (mean * (long / length(mean)).pow(norm_correction).clamp(max=LONGEST)).to(mean.dtype)
            x.append(mean)
            sizes.append(kept.size[:, rows] + (lands * gone[:, None]).sum(2))
    carrier = tokens.carrier
    if carrier is not None:
        new = torch.arange(stay.shape[1], device=stay.device).expand_as(stay)
        carrier = follow(carrier, torch.cat([stay, source], 1), torch.cat([new, target], 1), tokens.count)
    return replace(
        kept,
        x=torch.cat(x, 1),  # (B, prefix + k, D)
        size=sizes[0] if len(sizes) == 1 else torch.cat(sizes, 1),
        carrier=carrier,
    )
