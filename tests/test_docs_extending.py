"""docs/extending.md: its code runs, and the package that it names is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()


def test_its_code_runs_as_one_program():
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.S))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "GMACs instead of 1.26" in done.stdout


def test_the_example_is_a_package_of_at_most_25_lines_a_method():
    text = (ROOT / "examples" / "norm_pruning" / "norm_pruning.py").read_text()
    parts = re.split(r"(?=^@dataclass)", text, flags=re.M)[1:]
    assert len(parts) == 2 and all(len([line for line in part.splitlines() if line.strip()]) <= 25 for part in parts)
    assert (
        '[project.entry-points."tntprune.methods"]'
        in (ROOT / "examples" / "norm_pruning" / "pyproject.toml").read_text()
    )
