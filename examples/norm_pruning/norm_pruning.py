"""A method that keeps the tokens of the largest L2 norm, and one that learns which tokens to keep."""

from dataclasses import dataclass, replace

import torch

from tntprune import Config, ScoringMethod, option, register_method


@dataclass(frozen=True)
class Norm(Config):
    """Keep the patch tokens of the largest norm."""

    method = "norm"
    p: float = option(2.0, "order of the norm")


class NormPruning(ScoringMethod):
    def score(self, tokens, heads):
        return tokens.patches.float().norm(self.config.p, dim=2)


@dataclass(frozen=True)
class Gate(Config):
    """Keep the patch tokens that a linear layer scores highest."""

    method = "gate"
    must_train = True


class GatePruning(ScoringMethod):
    trains = True  # `calibrate_` and `tntprune train` train its parameters
    ce, kl = 0.0, 1.0  # against the unpruned model, without labels

    def __init__(self, config, layout):
        super().__init__(config, layout)
        self.scorers = torch.nn.ModuleDict({str(at): torch.nn.Linear(layout.embed_dim, 1) for at in config.locations})

    def score(self, tokens, heads):
        return self.scorers[str(tokens.block)](tokens.patches.float()).squeeze(2)

    def forward(self, tokens, step, heads=None):
        if not self.training:
            return super().forward(tokens, step, heads)
        gate = self.score(tokens, heads).sigmoid()[:, :, None].to(tokens.x.dtype)  # no token goes, but some fade
        gated = tokens.patches * gate * step.leaving / step.entering / gate.mean(1, keepdim=True)
        return replace(tokens, x=torch.cat([tokens.x[:, : tokens.prefix], gated], 1))


register_method(Norm, NormPruning)
register_method(Gate, GatePruning)
