"""What a reduction is: one frozen dataclass per method, one file each, and the registry of them.

Nothing here needs torch or timm, so that the command line can list methods and options at once.
"""

from tntprune.config.base import METHODS, Config, find_method
from tntprune.config.checks import check_options, choices, options
from tntprune.config.combination import Combination

from tntprune.config.tnt import RECIPES, TNT  # isort: skip - methods are listed in this order
from tntprune.config.random import Random  # isort: skip
from tntprune.config.topk import TopK  # isort: skip
from tntprune.config.evit import EViT  # isort: skip
from tntprune.config.dynamicvit import DynamicViT  # isort: skip
from tntprune.config.tome import ToMe  # isort: skip
from tntprune.config.zerotprune import ZeroTPrune  # isort: skip
from tntprune.config.ats import ATS  # isort: skip
from tntprune.config.avit import AViT  # isort: skip
from tntprune.config.evovit import EvoViT  # isort: skip
from tntprune.config.saved import from_dict, to_dict  # isort: skip

__all__ = [
    "ATS", "METHODS", "RECIPES", "TNT", "AViT", "Combination", "Config", "DynamicViT", "EViT", "EvoViT", "Random",
    "ToMe", "TopK", "ZeroTPrune", "check_options", "choices", "find_method", "from_dict", "options", "to_dict",
]  # fmt: skip
