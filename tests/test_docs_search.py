from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "search.md"


@pytest.mark.parametrize("size", ["photos=16, moves=1", pytest.param("photos=100, moves=10", marks=pytest.mark.wide)])
def test_the_pages_example_runs(size, tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert "photos=100, moves=10" in code
    exec(compile(code.replace("photos=100, moves=10", size), PAGE, "exec"), {"folder": tmp_path})
    assert (tmp_path / "plan.json").stat().st_size > 1000
