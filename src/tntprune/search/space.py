"""What can be chosen: at which blocks of a model tokens go, how many stay after each, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tntprune.analysis.macs import block_macs, head_macs
from tntprune.backbones.attach import base_of, reduction_of, twin_of
from tntprune.backbones.base import find_backbone
from tntprune.errors import UsageError, UserError
from tntprune.methods import Combination, Config, options
from tntprune.methods.learned import inherit
from tntprune.methods.schedule import schedule
from tntprune.methods.steps import Step, before_last, counts
from tntprune.reduce import reduce_

Left = tuple[int, ...]  # patch tokens that are left after each block of a space


class Space:
    """The schedules of one method on one model.

    Args:
        model: Its reduction, if there is one, is left out.
        template: The method, with all options but those that are searched.
        learned: What it has learned; None leaves its schedules untrained.
        blocks: Where tokens may go; None is everywhere the method can act.
        last_block: What the last block computes, see `tntprune.reduce_`.

    Raises:
        UserError: the method cannot be searched, or cannot be applied to the model, and why.
        UsageError: it cannot act at one of the blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        template: Config,
        learned: dict[str, torch.Tensor] | None = None,
        blocks: Sequence[int] | None = None,
        last_block: str = "all",
    ) -> None:
        backbone = find_backbone(model)
        self.base = base_of(model)
        self.layout, self.costs = backbone.layout(self.base), backbone.costs(self.base)
        self.patches, self.depth = self.layout.patches, self.layout.depth
        self.template, self.learned, self.last_block = template, learned, last_block
        self._own: dict[Step, int] = {}
        if isinstance(template, Combination) or not {"at", "tokens"} <= set(options(type(template))):
            raise UserError(f"{template.method} cannot be searched; expected one method, with at and tokens")
        if template.changed(at=max(1, self.depth // 2), tokens=1).variable:
            raise UserError(
                f"{template.method} leaves another number of tokens in each image, so that what it costs is not known "
                "beforehand; expected a method with a fixed number, such as tnt or tome"
            )
        self.blocks = self._where(blocks)
        self.asked = self._counts()
        none = {"similar": 0} if len(self.similars) > 1 else {}
        self._host = reduction_of(self.put(self.template.changed(at=self.blocks, tokens=1, **none)))

    def _where(self, blocks: Sequence[int] | None) -> tuple[int, ...]:
        """Return the blocks at which the method can act, with what it has learned."""
        found: list[int] = []
        why = UserError("the model has no blocks")
        last = self.depth - (self.last_block == "prefix")  # in which no patch token is left to go
        for block in range(last + 1) if blocks is None else sorted(set(blocks)):
            try:
                self.put(self.template.changed(at=block, tokens=max(1, self.patches // 2)))
                found.append(block)
            except UserError as error:
                why = error
                if blocks is not None:
                    raise
        if not found:
            raise why
        return tuple(found)

    def _counts(self) -> dict[int, int]:
        """Return the `tokens` to ask for so that a number is left: a fused token or similar ones change it."""
        found: dict[int, int] = {}
        last = self.blocks[-1]
        for tokens in range(1, self.patches + 1):
            try:
                steps = schedule([self.template.changed(at=last, tokens=tokens)], self.patches, self.depth)
            except UsageError:  # more than arrive, where similar ones go first
                break
            for step in steps:
                if step.place.block == last and step.leaving < self.patches:
                    found.setdefault(step.leaving, tokens)
        return found

    @property
    def free(self) -> bool:
        """Whether tokens may go inside the last block, behind whose attention nothing reads them: it costs nothing."""
        reads = self.layout.cls and self.layout.pool == "token"
        return reads and self.template.is_inside and self.blocks[-1] == self.depth

    @property
    def least(self) -> int:
        """The fewest patch tokens that can be left."""
        return min(self.asked)

    def _reachable(self, count: int) -> int:
        """Return the largest number of tokens that can be left and is not above another one."""
        return count if count in self.asked else max((one for one in self.asked if one <= count), default=self.least)

    @property
    def similars(self) -> tuple[int, ...]:
        """How many similar tokens can be tried to go at the start, where a method drops such; (0,) where not."""
        if getattr(self.template, "similar_how", None) != "drop" or getattr(self.template, "merges", False):
            return (0,)
        return tuple(sorted({0, *(round(self.patches * share) for share in (0.06, 0.13, 0.25))}))

    def config(self, left: Sequence[int], similar: int = 0) -> Config:
        """Return the config that leaves so many patch tokens after each block.

        Args:
            left: One count for each of `blocks`, none larger than the one before it.
            similar: Similar tokens that go at the start, where the method drops such.

        Raises:
            UsageError: nothing would be removed, or the method has no such schedule.
        """
        at, tokens, before = [], [], self.patches - similar
        for block, count in zip(self.blocks, left, strict=True):
            if count >= before:
                continue
            count = self._reachable(count)
            if count < before and self.asked[count] <= before:  # no more can be asked for than arrive
                at.append(block)
                tokens.append(self.asked[count])
                before = count
        if not at:
            raise UsageError("nothing is removed; expected fewer tokens after some block")
        more = {"similar": similar} if len(self.similars) > 1 else {}
        config: Config = self.template.changed(at=tuple(at), tokens=tuple(tokens), **more)
        return config

    def everywhere(self) -> Config:
        """Return a config with all of the blocks, to train: what is learned then is enough for every schedule."""
        count, last = len(self.blocks), max(self.asked)
        wanted = [last - round(0.7 * last * (n + 1) / (count + 1)) for n in range(count)]
        tokens = [self.asked[self._reachable(one)] for one in wanted]
        config: Config = self.template.changed(at=self.blocks, tokens=tuple(tokens))
        return config

    def put(self, config: Config) -> nn.Module:
        """Return a model with a config on it, which shares its weights with the others, in eval mode if they are."""
        model = reduce_(twin_of(self.base), config, last_block=self.last_block)
        if self.learned is not None:
            inherit(reduction_of(model), self.learned)
        return model

    def macs(self, config: Config) -> int:
        """Return the multiply-accumulates per image, in closed form: what `tntprune.macs` says of the reduced model."""
        steps, narrow = schedule([config], self.patches, self.depth), self.last_block == "prefix"
        steps = before_last(steps, self.depth) if narrow else steps
        for step in steps:
            if step not in self._own:
                self._own[step] = self._host.macs(step)
        return self._without_steps(steps, narrow) + sum(self._own[step] for step in steps)

    @property
    def base_macs(self) -> int:
        """Multiply-accumulates of the unpruned model."""
        return self._without_steps(())

    def _without_steps(self, steps: Sequence[Step], narrow: bool = False) -> int:
        left, costs, prefix = counts(steps, self.patches, self.depth), self.costs, self.layout.prefix
        left = left.narrowed() if narrow else left
        return sum(block_macs(costs, left, prefix)) + costs.embed + head_macs(costs, left.last, prefix)
