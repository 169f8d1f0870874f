"""benchmarks/gpu.py runs from end to end without a GPU, and its page says that there was none."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).parents[2] / "benchmarks" / "gpu.py")


@pytest.fixture(scope="module")
def script():
    before = sys.modules.get("gpu")
    yield runpy.run_path(SCRIPT, run_name="gpu")
    assert sys.modules.get("gpu") is before


def test_a_small_run_on_the_cpu_finds_what_the_page_has(script, tmp_path):
    script["main"](out=tmp_path, device="cpu")
    found, page = json.loads((tmp_path / "gpu.json").read_text()), (tmp_path / "gpu.md").read_text()
    assert not found["failed"]
    methods = set(script["METHODS"])
    checked = {(row["method"], row["dtype"], row["same"]) for row in found["checks"]}
    assert checked == {(name, dtype, True) for name in methods for dtype in ("fp32", "bf16", "fp16")}
    assert set(found["kernels"]) == {"unpruned", *methods}
    assert all(ran == ["flash_attention_for_cpu"] for ran in found["kernels"].values())
    variants = {"unpruned", "TNT", "a plan", "ToMe", "random drop", "bound of TNT"}
    assert {(row["batch"], row["variant"]) for row in found["times"]} == {(b, v) for b in (1, 2) for v in variants}
    assert all(row["speedup"] == 1 for row in found["times"] if row["variant"] == "unpruned")
    assert all((row["macs"] > 1) == (row["variant"] != "unpruned") for row in found["times"])
    assert found["training"][0]["ms"] > 0
    assert found["left_out"] == ["waiting for the device: there is no GPU"]
    assert "It has never been run on a GPU" in page
    assert page.count("\n| TNT | ") == 4  # three precisions and a kernel


def test_a_part_that_fails_is_told_and_the_others_are_run(script, tmp_path):
    def breaks(*_):
        raise RuntimeError("no memory\nat all")

    whole = script["main"].__globals__
    kept = {name: whole[name] for name in ("kernels", "check", "times")}
    whole.update(dict.fromkeys(kept, breaks))
    try:
        with pytest.raises(SystemExit, match="failed: kernels, checks, times"):
            script["main"](out=tmp_path, device="cpu")
    finally:
        whole.update(kept)
    assert "- times: RuntimeError: no memory\n" in (tmp_path / "gpu.md").read_text()
    assert json.loads((tmp_path / "gpu.json").read_text())["training"]
