"""Methods x backbones x locations x rates: one row a setting, in a file that survives anything."""

from tntprune.sweep.jobs import Job
from tntprune.sweep.planning import Plan, Task, plan
from tntprune.sweep.run_sweep import carry_out, sweep

__all__ = ["Job", "Plan", "Task", "carry_out", "plan", "sweep"]
