"""Methods x backbones x locations x rates: one row a setting, in a file that survives anything."""

from tntprune.sweep.planning import PlannedSetting, SweepPlan, plan_sweep
from tntprune.sweep.request import SweepRequest
from tntprune.sweep.run_sweep import carry_out

__all__ = ["PlannedSetting", "SweepPlan", "SweepRequest", "carry_out", "plan_sweep"]
