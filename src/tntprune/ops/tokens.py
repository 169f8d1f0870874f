"""The tokens that travel from block to block, and the pure functions that select and merge them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F

from tntprune.ops.attention import SizeLogs, size_logs

TABLE = 2**20  # entries for each image of a table of pairs of tokens; larger ones are made in blocks of rows
Average = Literal["mean", "mlerp", "none"]  # see `merge`
NOWHERE = -1  # the index of a token without a place of its own in the grid: a fused one, or padding


@dataclass(frozen=True)
class Tokens:
    """The state that one block hands to the next. Nothing of it lives on a module.

    Args:
        x: (B, prefix + n, D), the prefix tokens (CLS, distillation, registers) first.
        index: (B, n), each patch token's place in the original grid, row by row; NOWHERE if it has none.
        prefix: How many prefix tokens there are.
        size: (B, n), how many patches a token stands for, 0 where there is only padding; None as long as every one
            stands for one.
        carrier: (B, N), for every original patch the position in `index` of the token that carries it, or -1 where it
            was dropped. None unless somebody records.
        state: What a method keeps from one of its places for the next; the method that put it there also keeps it
            in step with the tokens.
        grid_size: N, how many places the original grid has; 0 where nobody said so.
        block: The number of the block that they were in last; 0 is the embedding.
        logs: What `sized` found for some sizes, which may no longer be these.
        grid: Rows and columns of the original grid; None where nobody said so.
    """

    x: torch.Tensor
    index: torch.Tensor
    prefix: int
    size: torch.Tensor | None = None
    carrier: torch.Tensor | None = None
    state: Any = None
    grid_size: int = 0
    block: int = 0
    logs: SizeLogs | None = None
    grid: tuple[int, int] | None = None

    @property
    def patches(self) -> torch.Tensor:
        """(B, n, D), without the prefix tokens."""
        return self.x[:, self.prefix :]

    @property
    def count(self) -> int:
        """n, the number of patch tokens."""
        return self.x.shape[1] - self.prefix


def start(x: torch.Tensor, prefix: int, follow: bool = False, grid: tuple[int, int] | None = None) -> Tokens:
    """Tokens as they leave the embedding.

    Args:
        x: (B, prefix + N, D).
        prefix: How many prefix tokens there are.
        follow: Also keep `carrier`.
        grid: Rows and columns, N places in all, for what has to know them.
    """
    index = torch.arange(x.shape[1] - prefix, device=x.device).expand(x.shape[0], -1)  # (B, N)
    return Tokens(x, index, prefix, carrier=index if follow else None, grid_size=index.shape[1], grid=grid)


def sized(tokens: Tokens) -> Tokens:
    """Return the tokens, which have sizes, with the logarithms of these in `logs`: new ones if the sizes are."""
    assert tokens.size is not None
    if tokens.logs is not None and tokens.logs.size is tokens.size:
        return tokens
    return replace(tokens, logs=size_logs(tokens.size, tokens.prefix))


def size_bias(tokens: Tokens, power: float | torch.Tensor) -> torch.Tensor:
    """Return what sizes add to the logits of keys, (B, 1, 1, prefix + n): s counts like s ** power equal tokens."""
    logs = sized(tokens).logs
    assert logs is not None
    return logs.bias(power)


def pick(values: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Return rows by position: (B, n, ...) and (B, k) give (B, k, ...).

    Whole rows of one long list are copied as they lie: on CPU twice as fast as an index for each dimension, and six
    times as fast as a gather with an expanded index.
    """
    first = torch.arange(values.shape[0], device=values.device)[:, None] * values.shape[1]  # (B, 1)
    rows = values.flatten(0, 1).index_select(0, (position + first).flatten())  # (B * k, ...)
    return rows.view(*position.shape, *values.shape[2:])


def row_blocks(rows: int, columns: int) -> list[slice]:
    """Return how a table of pairs is cut into blocks of rows: memory then grows with the tokens, not with their square.

    It depends on nothing but the shape: what comes out for an image does not depend on its batch.
    """
    step = max(1, TABLE // max(1, columns))
    return [slice(first, min(first + step, rows)) for first in range(0, max(1, rows), step)]


def ranking(values: torch.Tensor, descending: bool = False) -> torch.Tensor:
    """Return the positions (B, n) of values (B, n) in ascending or descending order; equal ones stay in their order."""
    if torch.compiler.is_exporting() and written_as_onnx():
        return values.topk(values.shape[1], dim=1, largest=descending).indices
    return values.argsort(dim=1, descending=descending, stable=True)


def in_order(positions: torch.Tensor) -> torch.Tensor:
    """Return positions (B, k) in ascending order."""
    if torch.compiler.is_exporting() and written_as_onnx():
        return positions.topk(positions.shape[1], dim=1, largest=False).values
    return positions.sort(1).values


def written_as_onnx() -> bool:
    """Return whether `torch.onnx.export` is at work, which has no stable sort and would compute the K of a TopK.

    ONNX's TopK is stable, and runtimes such as TensorRT take only a constant K.
    """
    return torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export()


def take(tokens: Tokens, positions: torch.Tensor) -> Tokens:
    """Keep some patch tokens and all prefix tokens, with one gather.

    Args:
        tokens: n patch tokens.
        positions: (B, k), positions among the patch tokens, in the order in which they are to stand.
    """
    place = positions + tokens.prefix
    if tokens.prefix:  # OpenVINO ends the process (SIGFPE) where nothing is broadcast
        prefix = torch.arange(tokens.prefix, device=positions.device).expand(positions.shape[0], -1)
        place = torch.cat([prefix, place], 1)
    return replace(
        tokens,
        x=pick(tokens.x, place),  # (B, prefix + k, D)
        index=tokens.index.gather(1, positions),  # (B, k)
        size=None if tokens.size is None else tokens.size.gather(1, positions),
        carrier=None if tokens.carrier is None else follow(tokens.carrier, positions, None, tokens.count),
    )


def append(tokens: Tokens, x: torch.Tensor) -> Tokens:
    """Add patch tokens at the end that have no place in the grid.

    Args:
        tokens: n patch tokens.
        x: (B, m, D).
    """
    extra = tokens.index.new_full((1, 1), NOWHERE).expand(*x.shape[:2])  # (B, m)
    return replace(
        tokens,
        x=torch.cat([tokens.x, x], 1),  # (B, prefix + n + m, D)
        index=torch.cat([tokens.index, extra], 1),  # (B, n + m)
        size=None if tokens.size is None else F.pad(tokens.size, (0, x.shape[1]), value=1.0),
    )


def merge(
    tokens: Tokens,
    stay: torch.Tensor,
    into: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    average: Average = "mean",
) -> Tokens:
    """Fold patch tokens into others, which stand for their patches from then on.

    A one-hot matmul does it: scatter_reduce does not export everywhere, and gives another sum each time on CUDA. Only
    the tokens into which others can go are touched, and those into which none goes come out bit for bit.

    Args:
        tokens: n patch tokens.
        stay: (B, a), positions of the tokens that stay as they are; they come first.
        into: (b,), or (B, b) where images differ: positions of the tokens into which others can be folded, next.
        source: (B, r), positions of the tokens to fold; no token is in two of the three, and one in none is dropped.
        target: (B, r), where in `into` each goes; several may go into one.
        average: What these become: "mean", weighted by how many patches each token stands for; "mlerp", that mean with
            the norm of the longest token in it (Kim et al., "Token Fusion", WACV 2024, section 3); "none", what they
            were, so that the tokens to fold are dropped.

    Returns:
        a + b patch tokens.
    """
    alone, left = stay.shape[1], torch.cat([stay, into.expand(stay.shape[0], -1)], 1)  # (B, a + b)
    size = torch.ones_like(tokens.index, dtype=torch.float32) if tokens.size is None else tokens.size
    kept = take(replace(tokens, size=size, carrier=None), left)
    size_of_kept = kept.size
    assert size_of_kept is not None
    gone = size.gather(1, source)[:, None]  # (B, 1, r)
    first, moved = tokens.prefix + alone, pick(tokens.x, source + tokens.prefix)  # (B, r, D)
    x, sizes = [kept.x[:, :first]], [size_of_kept[:, :alone]]
    for rows in row_blocks(into.shape[-1], source.shape[1]):
        lands = target[:, None] == torch.arange(rows.start, rows.stop, device=into.device)[:, None]  # (B, rows, r)
        extra = lands * gone
        own = size_of_kept[:, alone:][:, rows]
        total = own + extra.sum(2)
        sizes.append(total)
        if average == "none":
            continue
        own, extra = (own / total)[:, :, None].to(tokens.x.dtype), (extra / total[:, :, None]).to(tokens.x.dtype)
        part = kept.x[:, first:][:, rows]  # and own and extra sum to 1
        if average == "mlerp":
            x.append(_mlerp(part, moved, own, extra, lands))
        elif torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]  # OpenVINO has no way to write into a part of a tensor
            x.append(torch.baddbmm(part * own, extra, moved))
        else:  # in place: `take` has just copied x, and autocast stands aside
            part.mul_(own).baddbmm_(extra, moved)
    if len(x) > 1:
        kept = replace(kept, x=torch.cat(x, 1))
    carrier = tokens.carrier
    if carrier is not None:
        new = torch.arange(left.shape[1], device=left.device).expand_as(left)
        old, new = torch.cat([left, source], 1), torch.cat([new, target + alone], 1)  # (B, a + b + r)
        carrier = follow(carrier, old, new, tokens.count)
    return replace(kept, size=torch.cat(sizes, 1), carrier=carrier)


def _mlerp(
    x: torch.Tensor, moved: torch.Tensor, own: torch.Tensor, extra: torch.Tensor, lands: torch.Tensor
) -> torch.Tensor:
    """Return weighted means, each with the norm of the longest token in it.

    Args:
        x: (B, b, D), tokens that take others in; those that do not come out bit for bit.
        moved: (B, r, D), tokens that go.
        own: (B, b, 1), the weight of each of `x` in its mean.
        extra: (B, b, r), that of each that goes.
        lands: (B, b, r), where each goes.
    """
    with torch.autocast(x.device.type, enabled=False):
        mean = torch.baddbmm(x * own, extra, moved).float()
    norms = torch.linalg.vector_norm(moved.float(), dim=2)[:, None]  # (B, 1, r)
    longest = torch.maximum(torch.linalg.vector_norm(x.float(), dim=2), (lands * norms).amax(2))  # (B, b)
    times = longest / torch.linalg.vector_norm(mean, dim=2).clamp(min=1e-6)
    return (mean * torch.where(lands.any(2), times, 1.0)[:, :, None]).to(x.dtype)


def spread(tokens: Tokens, grid: tuple[int, int]) -> torch.Tensor:
    """Something for every place of the grid, (B, N, D), row by row.

    A merged patch gets the token that carries it, if `source` tells; a dropped one the nearest that was kept, by
    Euclidean distance and, where two are as near, the first in the grid. Tokens without a place, and those of size 0,
    fill nothing; an image that has no other gets zeros.

    Args:
        tokens: n patch tokens.
        grid: Rows and columns, N places in all.
    """
    there, own = _standing(tokens, grid[0] * grid[1])
    near = nearest_kept(own >= 0, grid)
    carrier = own.gather(1, near)
    if tokens.carrier is not None:
        told = tokens.carrier.clamp(min=0)
        carrier = torch.where((tokens.carrier >= 0) & there.gather(1, told), told, carrier)
    filled = pick(tokens.x, carrier.clamp(min=0) + tokens.prefix)  # (B, N, D)
    return filled if tokens.size is None else torch.where(there.any(1)[:, None, None], filled, 0)


def lay(tokens: Tokens, grid: tuple[int, int]) -> torch.Tensor:
    """Every token at its own place of the grid, and NaN at the places where there is none; (B, N, D), row by row.

    Args:
        tokens: n patch tokens.
        grid: Rows and columns, N places in all.
    """
    _, own = _standing(tokens, grid[0] * grid[1])
    return torch.where((own >= 0)[:, :, None], pick(tokens.x, own.clamp(min=0) + tokens.prefix), torch.nan)


def _standing(tokens: Tokens, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which patch tokens have a place, (B, n), and of each place of the grid the token there or -1, (B, N)."""
    batch, count = tokens.index.shape
    there = tokens.index >= 0 if tokens.size is None else (tokens.index >= 0) & (tokens.size > 0)
    position = torch.arange(count, device=tokens.index.device).expand(batch, -1)
    own = tokens.index.new_full((batch, total + 1), -1)  # one place more, for those that have none
    return there, own.scatter(1, torch.where(there, tokens.index, total), position)[:, :total]


def nearest_kept(kept: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """For every place the nearest one that was kept, (B, N) to (B, N); of several the first. Any if none was.

    The squared distance and the place share one whole number, so that the smallest one tells both: first the nearest
    in each column, row against row, then the nearest of those, column against column.
    """
    rows, columns = (torch.arange(side, device=kept.device) for side in grid)
    total = grid[0] * grid[1]
    place = torch.arange(total, device=kept.device).view(grid)
    far = (grid[0] ** 2 + grid[1] ** 2) * total  # more than any distance comes to
    down = (rows[:, None] - rows).square() * total  # (H, H)
    key = torch.where(kept.view(-1, *grid), place, far)  # (B, H, W)
    key = (key[:, None] + down[:, :, None]).amin(2)  # of (B, H, H, W)
    across = (columns[:, None] - columns).square() * total  # (W, W)
    key = (key[:, :, None] + across).amin(3)  # of (B, H, W, W)
    return key.flatten(1) % total


def fill(tokens: Tokens, grid: tuple[int, int]) -> torch.Tensor:
    """`spread` as a picture, (B, D, H, W)."""
    filled = spread(tokens, grid)
    return filled.view(-1, *grid, filled.shape[2]).permute(0, 3, 1, 2).contiguous()


def shuffled(index: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a key for each place, to sort places by in an order that depends on nothing but the seed.

    ``x -> x^5 mod 2^31 - 1`` gives different places different keys (5 shares no factor with 2^31 - 2), so no random
    generator is touched, no tie is left to the device, and every device gets the same order.
    """
    prime = 2**31 - 1
    key = index + 1
    for salt in (48271, 69621):
        key = (key * salt + (seed + 1) * 7919 % prime) % prime
        square = key * key % prime
        key = square * square % prime * key % prime
    return key


def order(n: int, seed: int, device: torch.device | None = None) -> torch.Tensor:
    """Return a seeded permutation of n places, (n,) int64."""
    return shuffled(torch.arange(n, device=device), seed).argsort()


def follow(source: torch.Tensor, old: torch.Tensor, new: torch.Tensor | None, count: int) -> torch.Tensor:
    """`source` (B, N) after tokens at the `old` positions, of `count`, went to the `new` ones, and the rest went away.

    Without `new` they stand in the order of `old`.
    """
    if new is None:
        new = torch.arange(old.shape[1], device=old.device).expand_as(old)
    where = torch.full((old.shape[0], count), -1, device=old.device).scatter(1, old, new)
    return torch.where(source >= 0, where.gather(1, source.clamp(min=0)), -1)
