"""Methods of other people: registered by a program, and installed as a package with an entry point."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import tntprune
from conftest import make, photos_for
from tntprune.methods import METHODS, Config, from_dict, registry, to_dict
from tntprune.methods.base import ScoringMethod

EXAMPLE = Path(__file__).parents[2] / "examples" / "norm_pruning"
COMMANDS = """
info digits_vit
macs digits_vit --method norm --at 2 --keep 0.5 --p 1
train digits_vit --method gate --at 2 --data {photos} --out {out}/gate --epochs 1 --device cpu
eval digits_vit --reducer {out}/gate --data {photos}
eval digits_vit --method norm --at 2 --keep 0.5 --data {photos}
show digits_vit {photo} --method norm --at 2 --out {out}/show.png
bench digits_vit --method norm --at 2 --batch-sizes 1 --rounds 3
sweep digits_vit --methods norm "norm p=1" --at 2 --rates 0.5 --data {photos} --out {out}/rows.jsonl --batch-size 8
report {out}/rows.jsonl --out {out}/report.html
search digits_vit --method norm --drop 50 --data {photos} --photos 16 --minutes 0.2 --out {out}/plan.json
macs digits_vit --reducer {out}/plan.json
export digits_vit --reducer {out}/gate --to pt2 --out {out}/gate.pt2
"""


@pytest.fixture
def installed(tmp_path):
    """The example as an installed package: its module, and what pip writes beside it."""
    site = tmp_path / "site"
    about = site / "norm_pruning-0.1.0.dist-info"
    about.mkdir(parents=True)
    shutil.copy(EXAMPLE / "norm_pruning.py", site)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: norm-pruning\nVersion: 0.1.0\n")
    (about / "entry_points.txt").write_text("[tntprune.methods]\nnorm = norm_pruning\n")
    return site


def python(code, site=None):
    given = textwrap.dedent(code)
    paths = [str(site)] if site else []
    code = f"import sys; sys.path[:0] = {paths!r}\n{given}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.wide
def test_every_command_takes_an_installed_method(installed, tmp_path):
    from PIL import Image

    photos, out = tmp_path / "photos", tmp_path / "out"
    out.mkdir()
    generator = torch.Generator().manual_seed(0)
    for label in range(10):
        folder = photos / str(label)
        folder.mkdir(parents=True)
        for number in range(2):
            pixels = torch.randint(0, 255, (64, 64), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
    lines = COMMANDS.format(photos=photos, out=out, photo=photos / "0" / "0.png").strip().splitlines()
    done = python(
        f"""
        import shlex
        from tntprune.cli.main import main
        for line in {lines!r}:
            code = main(shlex.split(line))
            assert code == 0, (code, line)
        """,
        installed,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "norm       can be applied" in done.stdout
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    configs = [(row["setting"].get("config") or {}) for row in rows]
    assert {config["p"] for config in configs if config.get("method") == "norm"} == {1.0, 2.0}
    assert "norm" in (out / "report.html").read_text()
    missing = "comes from the package norm-pruning, which is not installed here; install it with: pip install"
    for path in (out / "gate", out / "plan.json"):  # on a machine where the package is missing
        call = f"main(['macs', 'digits_vit', '--reducer', {str(path)!r}])"
        done = python(f"import sys; from tntprune.cli.main import main; sys.exit({call})")
        assert done.returncode in (1, 2) and missing in done.stderr and "Traceback" not in done.stderr


def test_a_saved_config_names_its_package(installed):
    code = """
    from tntprune.methods import find_method, to_dict
    print(to_dict(find_method("norm")())["package"])
    """
    assert python(code, installed).stdout == "norm-pruning\n"  # also where pip wrote no list of files


def test_an_installed_method_that_cannot_be_imported_is_told_and_stops_nothing(installed):
    (installed / "norm_pruning.py").write_text("raise RuntimeError('of another time')\n")
    done = python("from tntprune.methods import all_methods; print(*all_methods())", installed)
    assert done.returncode == 0 and done.stdout.split() == list(METHODS)
    assert "the methods of the package norm-pruning cannot be used (of another time)" in done.stderr


@pytest.fixture
def forgotten(monkeypatch):
    """What is registered in a test is not known to the next one."""
    monkeypatch.setattr(registry, "METHODS", dict(METHODS))
    monkeypatch.setattr(registry, "_MODULES", dict(registry._MODULES))


@dataclass(frozen=True)
class Loud(Config):
    method = "loud"


class LoudPruning(ScoringMethod):
    def score(self, tokens, heads):
        return tokens.patches.float().abs().amax(2)


def test_a_program_registers_a_method(forgotten, tmp_path):
    with pytest.raises(tntprune.UsageError, match=r"Loud is not registered; call tntprune\.register_method first"):
        tntprune.reduce_(make("plain"), Loud(at=2))
    tntprune.register_method(Loud, LoudPruning)
    model = tntprune.reduce_(make("plain"), Loud(at=2, keep=0.5))
    with torch.inference_mode(), tntprune.record(model) as trace:
        model(photos_for(model))
    assert trace.kept[2].shape[1] == 32
    assert from_dict(to_dict(Loud(at=2))) == Loud(at=2) and Loud.title == "loud"
    tntprune.save(model, tmp_path)
    assert tntprune.load_(make("plain"), tmp_path).reduction.config == Loud(at=2, keep=0.5)


def test_two_of_one_name_are_refused_naming_both(forgotten):
    @dataclass(frozen=True)
    class Other(Config):
        method = "tnt"

    with pytest.raises(tntprune.UsageError, match=r"'tnt' is registered twice: as tntprune\.\S+TNT and as \S+Other"):
        tntprune.register_method(Other, LoudPruning)


@pytest.mark.parametrize("name", ["", "Loud", "two words", 3, None])
def test_names_are_small_letters(forgotten, name):
    kind = dataclass(frozen=True)(type("Named", (Config,), {"method": name}))
    with pytest.raises(tntprune.UsageError, match="expected a name of small letters"):
        tntprune.register_method(kind, LoudPruning)


def test_classes_of_the_wrong_kind_are_refused(forgotten):
    with pytest.raises(tntprune.UsageError, match=r"expected a subclass of tntprune\.Config"):
        tntprune.register_method(LoudPruning, LoudPruning)
    with pytest.raises(tntprune.UsageError, match=r"expected a subclass of tntprune\.Method"):
        tntprune.register_method(Loud, Loud)
