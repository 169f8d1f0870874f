from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "search.md"


def test_the_pages_example_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(code, PAGE, "exec"), {"folder": tmp_path})
    assert (tmp_path / "plan.json").stat().st_size > 1000
