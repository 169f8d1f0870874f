"""What every method is to the rest: a module that maps tokens to tokens at its places in a model."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn

from tntprune.errors import UserNote
from tntprune.methods.config import Config
from tntprune.methods.schedule import Place, Step, schedule
from tntprune.ops.attention import Heads, log_size
from tntprune.ops.tokens import Tokens

Plan = dict[Place, Step]


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

    @property
    def patches(self) -> int:
        """N, the patch tokens of the unpruned model."""
        return self.grid[0] * self.grid[1]


class Method(nn.Module):
    """One reduction of one model. Subclasses read on one screen and keep no state between calls.

    Args:
        config: What to do.
        layout: The backbone it is done to.
    """

    looks: ClassVar[Literal["", "heads", "map"]] = ""  # what it must see of a block's attention where it acts
    needs_cls: ClassVar[bool] = False
    trains = False  # whether it has parameters to learn
    proportional = False  # whether merged tokens count in attention by their size
    ce: float = 1.0  # weights of the losses in training: cross-entropy to the labels,
    kl: float = 0.0  # divergence from the unpruned model
    needs_teacher = False  # whether `penalty` looks at the unpruned model's tokens
    learners = 1  # blocks at which something is learned, each from a part of the steps
    trained: float = 1.0  # share of a training that is over; set by the trainer
    calibrated: bool = True  # whether its parameters were trained or loaded
    warned: bool = False  # whether `warn_uncalibrated` has been called in a forward pass

    def __init__(self, config: Config, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.layout = layout
        self.calibrated = not config.must_train
        self._own = self._schedule(layout.patches)

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

    def steps(self, patches: int) -> Plan:
        """Where tokens go from an image of so many patches; made beforehand for the model's own size."""
        return self._own if patches == self.layout.patches else self._schedule(patches)

    def resize(self, grid: tuple[int, int]) -> None:
        """Take note that the model's own image size is another one now."""
        self.layout = self.layout._replace(grid=grid)
        self._own = self._schedule(self.layout.patches)

    def unfold(self, tokens: Tokens) -> Tokens:
        """Tokens on their way, with those back among them that the method carries along elsewhere."""
        return tokens

    def plan(self, patches: int) -> Plan:
        """Where this pass acts, asked once at its start: where tokens go, unless a method trains otherwise."""
        return self.steps(patches)

    def _schedule(self, patches: int) -> Plan:
        return {step.place: step for step in schedule([self.config], patches, self.layout.depth)}

    def sees(self, block: int, plan: Plan) -> Literal["", "heads", "map"]:
        """What it must see of a block's attention in this pass."""
        acts = Place(block) in plan or Place(block, inside=True) in plan
        return self.looks if acts else ""

    def rests(self, plan: Plan, block: int) -> bool:
        """Whether this pass does nothing and looks at nothing in a block and after it."""
        return Place(block) not in plan and Place(block, inside=True) not in plan and not self.sees(block, plan)

    def begins(self, plan: Plan) -> int:
        """The last block up to which, and in which, this pass does nothing; what is done after it may be something."""
        busy = [block for block in range(1, self.layout.depth + 1) if not self.rests(plan, block)]
        if Place(0) in plan or not busy:
            return 0 if Place(0) in plan else self.layout.depth
        first = busy[0]
        after = Place(first, inside=True) not in plan and not self.sees(first, plan)
        return first if after else first - 1

    def bias(self, tokens: Tokens, block: int) -> torch.Tensor | None:
        """What is added to the logits of each key in one block's attention, (B, 1, 1, prefix + n), or None."""
        if tokens.size is None or not (self.proportional or self.config.variable):
            return None
        return log_size(tokens.size, tokens.prefix, power=int(self.proportional))

    def attend(self, heads: Heads, tokens: Tokens) -> torch.Tensor:
        """What a block's heads give where the block has been opened, (B, heads, n, head_dim)."""
        return heads.output()

    def forward(self, tokens: Tokens, place: Place, plan: Plan, heads: Heads | None = None) -> Tokens:
        """Act on the tokens at a place. Nothing happens where the plan has no step."""
        step = plan.get(place)
        return tokens if step is None else self.reduce(tokens, step, heads)

    def reduce(self, tokens: Tokens, step: Step, heads: Heads | None) -> Tokens:
        """Go from `step.entering` to `step.leaving` patch tokens.

        Args:
            tokens: Those that arrive.
            step: What to do.
            heads: The block's attention, of the tokens that entered it, if the method looks at it.
        """
        raise NotImplementedError

    def penalty(self, tokens: Tokens, teacher: Tokens | None) -> torch.Tensor | None:
        """What the method adds to the loss in training, a scalar, or None.

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
        """Multiply-accumulates that one step costs for one image."""
        return 0

    @classmethod
    def obstacle(cls, layout: Layout, config: Config | None = None) -> str | None:
        """Why the method, or one config of it, cannot be applied to such a backbone, and what would do; else None."""
        if cls.needs_cls and not layout.cls:
            return f"it ranks tokens by the CLS token's attention, and the model has none; {WITHOUT_CLS} would do"
        if cls.looks and not layout.opens:
            return f"it reads the attention of blocks that do not show it; {WITHOUT_ATTENTION} would do"
        return None


WITHOUT_CLS = "tnt, random, dynamicvit, tome, zerotprune or avit"
WITHOUT_ATTENTION = "tnt, random, or avit with at"


def top(score: torch.Tensor, count: int) -> torch.Tensor:
    """Positions (B, count) of the largest scores of (B, n), the best first; compared in fp32."""
    return score.float().topk(count, dim=1).indices
