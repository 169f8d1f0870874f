"""Methods: one file each, with its config and its module; their base classes, schedule and registry."""

from tntprune.methods import registry
from tntprune.methods.atc import ATC, AgglomerativeClustering
from tntprune.methods.ats import ATS, AdaptiveTokenSampling
from tntprune.methods.avit import AdaptiveTokens, AViT
from tntprune.methods.checks import check_options, choices, options
from tntprune.methods.combination import Combination, Combined
from tntprune.methods.config import Config
from tntprune.methods.dynamicvit import DynamicSparsification, DynamicViT
from tntprune.methods.evit import EViT, ExpediteViT
from tntprune.methods.evovit import EvoViT, SlowFast
from tntprune.methods.mctf import MCTF, MultiCriteriaFusion
from tntprune.methods.pitome import EnergyMerging, PiToMe
from tntprune.methods.random import Random, RandomDrop
from tntprune.methods.registry import METHODS, all_methods, find_method, implementation, obstacle_to, register_method
from tntprune.methods.saved import from_dict, to_dict
from tntprune.methods.tnt.config import RECIPES, TNT
from tntprune.methods.tnt.method import TrainingNoise
from tntprune.methods.tofu import ToFu, TokenFusion
from tntprune.methods.tome import TokenMerging, ToMe
from tntprune.methods.topk import TopK, TopKPruning
from tntprune.methods.zerotprune import ZeroTokenPruning, ZeroTPrune

__all__ = [
    "ATC", "ATS", "MCTF", "METHODS", "RECIPES", "TNT", "AViT", "Combination", "Config", "DynamicViT", "EViT", "EvoViT",
    "PiToMe", "Random", "ToFu", "ToMe", "TopK", "ZeroTPrune", "all_methods", "check_options", "choices", "find_method",
    "from_dict", "implementation", "obstacle_to", "options", "register_method", "to_dict",
]  # fmt: skip

register_method(TNT, TrainingNoise)  # in the order in which methods are listed
register_method(Random, RandomDrop)
register_method(TopK, TopKPruning)
register_method(EViT, ExpediteViT)
register_method(DynamicViT, DynamicSparsification)
register_method(ToMe, TokenMerging)
register_method(PiToMe, EnergyMerging)
register_method(ToFu, TokenFusion)
register_method(ZeroTPrune, ZeroTokenPruning)
register_method(ATS, AdaptiveTokenSampling)
register_method(AViT, AdaptiveTokens)
register_method(EvoViT, SlowFast)
register_method(MCTF, MultiCriteriaFusion)
register_method(ATC, AgglomerativeClustering)
registry.implement(Combination, Combined)
