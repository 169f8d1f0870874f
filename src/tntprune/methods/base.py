"""What every method is to the rest: a module that maps tokens to tokens at its places in a model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn

from tntprune.errors import UserNote
from tntprune.methods.config import Config
from tntprune.methods.schedule import schedule
from tntprune.methods.steps import BlockPlan, Place, Plan, Step
from tntprune.ops.attention import Heads
from tntprune.ops.tokens import Tokens, size_bias, take


class Layout(NamedTuple):
    """What a method may know of the backbone.

    Args:
        family: The adapter's name.
        embed_dim: D.
        depth: Blocks.
        prefix: Prefix tokens: CLS, distillation, registers.
        grid: Rows and columns of patches at the model's own image size.
        cls: Whether the first prefix token is a CLS token.
        distilled: Whether the second is a distillation token.
        heads: Of each block's attention.
        attn_dim: Width of all heads together.
        pool: What the head reads: "token" for the CLS token, else how the tokens are pooled.
        opens: Whether its blocks can be run in halves, with a view of their attention.
        weighs: Where they cannot: whether the sizes of merged tokens can count in their attention.
        costs: Multiply-accumulates of each block: of its attention for each token, of its attention for each pair of
            tokens, of its MLP for each token. Empty where nobody asked the model.
    """

    family: str
    embed_dim: int
    depth: int
    prefix: int
    grid: tuple[int, int]
    cls: bool
    distilled: bool = False
    heads: int = 1
    attn_dim: int = 0
    pool: str = "token"
    opens: bool = True
    weighs: bool = False
    costs: tuple[tuple[int, int, int], ...] = ()

    @property
    def patches(self) -> int:
        """N, the patch tokens of the unpruned model."""
        return self.grid[0] * self.grid[1]

    def of_cells(self, side: int) -> Layout:
        """Return what is left of it where a token is a cell of side x side patches: see `ops.cells`."""
        if side == 1:
            return self
        rows, columns = (size // side for size in self.grid)
        width = self.embed_dim * side**2
        return self._replace(embed_dim=width, prefix=0, grid=(rows, columns), opens=False, weighs=True)


class Method(nn.Module):
    """One reduction of one model. Subclasses read on one screen and keep no state between calls.

    Args:
        config: What to do.
        layout: The backbone it is done to.
    """

    looks: ClassVar[Literal["", "heads", "map"]] = ""  # what it must see of a block's attention where it acts
    needs_cls: ClassVar[bool] = False
    needs_costs: ClassVar[bool] = False  # whether it wants `Layout.costs`
    trains = False  # whether it has parameters to learn
    learns_alone: ClassVar[bool] = False  # whether it learns only where there is no other reduction
    proportional = False  # whether merged tokens count in attention by their size
    ce: float = 1.0  # weights of the losses in training: cross-entropy to the labels,
    kl: float = 0.0  # divergence from the unpruned model
    needs_grid: bool = False  # whether it must know the grid of images that are not of the model's own size
    needs_teacher = False  # whether `penalty` looks at the unpruned model's tokens
    learners = 1  # blocks at which something is learned, each from a part of the steps
    trained: float = 1.0  # share of a training that is over; set by the trainer
    calibrated: bool = True  # whether its parameters were trained or loaded
    unsaved: bool = False  # whether they were trained and not saved since
    warned: bool = False  # whether `warn_uncalibrated` has been called in a forward pass
    corrected: int = 0  # photos that a correction of the model's weights was made from; 0: there is none
    cell: int = 1  # patches along a side of what is kept or dropped as a whole: one token, to the method
    last_block: str = "all"  # what the model's forward computes there: "all" tokens, or the "prefix" tokens alone
    output: str = ""  # what the tower of a larger model gives to what follows; see `Backbone.outputs`

    def __init__(self, config: Config, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.layout = layout
        self.calibrated = not config.must_train
        self._steps = self.scheduled(layout.patches)
        self._plan: Plan | None = None  # of the model's own size; `settle` makes it
        self.replaced: dict[
            str, nn.Parameter
        ] = {}  # the model's own weights, by name, that a correction took the place of

    def set_calibrated(self, value: bool = True) -> None:
        """Record whether the parameters were trained or loaded."""
        self.calibrated = value or not self.config.must_train

    def warn_uncalibrated(self) -> None:
        """Warn that the parameters still have their initial values, if they have.

        Warns:
            UserNote: they were neither trained nor loaded.
        """
        if not self.calibrated:
            warnings.warn(
                f"{self.config.method} was never calibrated: its parameters have their initial values; call "
                "tntprune.calibrate_(model, photos), or load trained ones with tntprune.load_",
                UserNote,
                stacklevel=3,
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if all(prefix + name in state_dict for name, _ in self.named_parameters()):
            self.set_calibrated()

    def steps(self, patches: int) -> tuple[Step, ...]:
        """Return the steps at which tokens go at test time, from an image of so many patches."""
        return self._steps if patches == self.layout.patches else self.scheduled(patches)

    def scheduled(self, patches: int) -> tuple[Step, ...]:
        """Work out `steps`."""
        return schedule([self.config], patches, self.layout.depth)

    def plan(self, patches: int) -> Plan:
        """Return what one pass does at each block. It is asked for once per pass.

        Methods that train in another way than they work return another plan in training mode.
        """
        if patches != self.layout.patches:
            return self.planned(self.scheduled(patches))
        return self._plan or self.settle()

    @property
    def untouched(self) -> int:
        """The last block up to which no pass in training does anything; 0 is the embedding."""
        return 0

    def settle(self) -> Plan:
        """Make the plan of the model's own size, which each pass then reads."""
        self._plan = self.planned(self._steps)
        return self._plan

    def planned(self, steps: Sequence[Step]) -> Plan:
        """Return the plan that takes these steps."""
        by_place = {step.place: step for step in steps}
        sized = self.proportional or self.config.variable
        plan, acted = [], False
        for block in range(self.layout.depth + 1):
            inside, after = by_place.get(Place(block, inside=True)), by_place.get(Place(block))
            sees = {self.sees(step) for step in (inside, after) if step is not None and block}
            seen: Literal["", "heads", "map"] = "map" if "map" in sees else "heads" if "heads" in sees else ""
            plan.append(BlockPlan(seen, inside, after, biased=acted and sized))
            acted = acted or inside is not None or after is not None
        return tuple(plan)

    def sees(self, step: Step) -> Literal["", "heads", "map"]:
        """Return what a step must see of its block's attention."""
        return self.looks

    def resize(self, grid: tuple[int, int]) -> None:
        """Take note that the model's own image size is another one now."""
        self.layout = self.layout._replace(grid=grid)
        self._steps = self.scheduled(self.layout.patches)
        self.settle()

    def unfold(self, tokens: Tokens) -> Tokens:
        """Return the tokens with those back among them that the method carries along elsewhere."""
        return tokens

    @property
    def spares_prefix(self) -> bool:
        """Whether nothing that it does in the last block, or behind it, changes prefix tokens."""
        return True

    def bias(self, tokens: Tokens, block: int) -> torch.Tensor | None:
        """Return what is added to the logits of each key in a block's attention, (B, 1, 1, prefix + n), or None."""
        if tokens.size is None or not (self.proportional or self.config.variable):
            return None
        return size_bias(tokens, power=int(self.proportional))

    def attend(self, heads: Heads, tokens: Tokens) -> torch.Tensor:
        """Return what the attention of a block that is opened gives, (B, heads, n, head_dim)."""
        return heads.output()

    def watch(self, tokens: Tokens, heads: Heads | None) -> Tokens:
        """Take note of tokens that leave a block, before those that go there are gone. See `BlockPlan.watchers`."""
        return tokens

    def member(self, number: int) -> Method:
        """Return one of several combined reductions."""
        return self

    def forward(self, tokens: Tokens, step: Step, heads: Heads | None = None) -> Tokens:
        """Go from `step.entering` to `step.leaving` patch tokens.

        Args:
            tokens: Those that arrive.
            step: What to do.
            heads: The block's attention, of the tokens that entered it, if the method looks at it.
        """
        raise NotImplementedError

    def penalty(self, tokens: Tokens, teacher: Tokens | None) -> torch.Tensor | None:
        """Return what the method adds to the loss in training, a scalar, or None.

        Args:
            tokens: As they leave the model's last norm, with what the method has put into `state`.
            teacher: The unpruned model's, where `needs_teacher` or `kl` asks for them.
        """
        return None

    @property
    def penalises(self) -> bool:
        """Whether it has a `penalty`, which may look at every token."""
        return type(self).penalty is not Method.penalty

    def macs(self, step: Step) -> int:
        """Return the multiply-accumulates of one step per image."""
        return 0

    @classmethod
    def obstacle(cls, layout: Layout, config: Config | None = None) -> str | None:
        """Return why the method, or one config of it, cannot be applied to a backbone; None where it can."""
        if cls.needs_cls and not layout.cls:
            return "it ranks tokens by the CLS token's attention, and the model has none"
        if cls.looks and not layout.opens:
            return "it reads the attention of blocks that do not show it"
        return None


class ScoringMethod(Method):
    """A method that keeps the patch tokens of the largest score. Its one function is `score`."""

    def score(self, tokens: Tokens, heads: Heads | None) -> torch.Tensor:
        """Return a score for each patch token, (B, n).

        Args:
            tokens: Those that arrive; `tokens.block` is the number of the block that they were in last.
            heads: The block's attention, if `looks` asks for it.
        """
        raise NotImplementedError

    def forward(self, tokens: Tokens, step: Step, heads: Heads | None = None) -> Tokens:
        """Keep the `step.leaving` patch tokens of the largest score, the best first."""
        return take(tokens, top(self.score(tokens, heads), step.leaving))


def top(score: torch.Tensor, count: int) -> torch.Tensor:
    """Return the positions (B, count) of the largest scores of (B, n), the best first; compared in fp32."""
    return (score.float() if score.is_floating_point() else score).topk(count, dim=1).indices
