"""The whole road on a model of twelve tiny blocks and a handful of made-up photos."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from paper_models import paper_tiny
from tntprune.cli.main import main
from tntprune.cli.paper import weights_of
from tntprune.errors import UsageError
from tntprune.sweep.results_file import ResultsFile


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Weights, and photos in seven classes."""
    root = tmp_path_factory.mktemp("paper")
    torch.manual_seed(0)
    save_file(paper_tiny().state_dict(), root / "w.safetensors")
    for number in range(14):
        folder = root / "photos" / f"c{number % 7}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = (torch.rand(40, 40, 3) * 255).byte().numpy()
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


def run(place, out, *more):
    return main([
        "paper", "--backbones", "paper_tiny", "--weights", str(place / "w.safetensors"),
        "--data", str(place / "photos"), "--train-data", str(place / "photos"),
        "--out", str(out), "--recipe", "short", "--workers", "0", "--limit", "5", *more,
    ])  # fmt: skip


CHOSEN = ("--only", "single", "maps", "ablation", "random", "tnt", "evit", "--no-speed")


@pytest.fixture(scope="module")
def done(place):
    out = place / "out"
    assert run(place, out, *CHOSEN) == 0
    return out


def test_it_leaves_rows_trainings_figures_and_pages(done):
    rows = list(ResultsFile(done / "results.jsonl").rows().values())
    assert len(rows) == 1 + 30 + 8 - 1  # TNT at K = .6 is a row of the ablation too
    assert {row.name for row in rows} >= {"unpruned", "random drop", "TNT", "EViT", "TNT, merging"}
    assert all(row.images == 5 and row.images_per_s is None for row in rows)
    assert {path.name for path in (done / "trainings").iterdir()} == {"paper_tiny-tnt", "paper_tiny-evit"}
    names = {"paper.md", "report.html", "maps-paper_tiny-tnt.png", "figure-single.png", "figure-single-paper.png"}
    assert names <= {path.name for path in done.iterdir()}
    page = (done / "paper.md").read_text()
    assert "38 settings of paper_tiny, each on 5 photos" in page and "](maps-paper_tiny-tnt.png)" in page


def test_what_was_trained_is_what_is_run(done):
    rows = ResultsFile(done / "results.jsonl").rows().values()
    reducers = {row.name: row.setting.reducer for row in rows}
    assert reducers["random drop"] is None and reducers["TNT"] == reducers["TNT, merging"] != reducers["EViT"]
    assert {row.setting.config["recipe"] for row in rows if row.name == "TNT"} == {"paper"}


def test_it_continues_without_doing_anything_twice(place, done, capsys, monkeypatch):
    results, log = done / "results.jsonl", done / "trainings" / "paper_tiny-tnt" / "log.jsonl"
    before, trained = results.read_bytes(), log.read_bytes()
    lines = before.splitlines(keepends=True)
    results.write_bytes(b"".join(lines[:20]) + lines[20][:50])  # killed in the middle of a line
    capsys.readouterr()
    assert run(place, done, *CHOSEN, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    again = ResultsFile(results).rows()
    assert results.read_bytes().startswith(b"".join(lines[:20])) and log.read_bytes() == trained
    wanted = {json.loads(line)["key"]: json.loads(line) for line in lines}
    assert {key: row.right for key, row in again.items()} == {key: line["right"] for key, line in wanted.items()}
    assert len(told["settings"]) == 1 + 30 + 8
    tnt = next(one for one in told["settings"] if (one["name"], one["keep"]) == ("TNT", "0.5"))
    assert tnt["difference"] == pytest.approx(tnt["ours"]["drop"] - tnt["authors"]["drop"])


def test_trainings_that_are_there_are_used(place, done, capsys):
    out = place / "other"
    assert main([
        "paper", "--backbones", "paper_tiny", "--weights", f"paper_tiny={place / 'w.safetensors'}",
        "--data", str(place / "photos"), "--out", str(out), "--trainings", str(done / "trainings"), "--limit", "3",
        "--only", "ablation", "--workers", "0", "--no-speed", "--recipe", "short",
    ]) == 0  # fmt: skip
    assert not (out / "trainings").exists() and (out / "paper.md").exists()


def test_maps_alone_leave_a_page_and_no_report(place, done, capsys):
    out = place / "maps"
    given = ("--only", "maps", "tnt", "--trainings", str(done / "trainings"))
    assert run(place, out, *given, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["files"]) == {"paper.md"} and {path.name for path in out.iterdir()} == {
        "paper.md", "maps-paper_tiny-tnt.png",
    }  # fmt: skip
    page = (out / "paper.md").read_text()
    assert "](maps-paper_tiny-tnt.png)" in page and "Hardware: ." not in page


def test_trainings_of_another_recipe_are_not_taken_for_it(place, done, capsys):
    assert run(place, done, *CHOSEN, "--recipe", "published") == 2
    told = capsys.readouterr().err
    assert "paper_tiny-evit: trained with the short recipe, given --recipe published; expected" in told


def test_what_is_missing_is_told_before_anything_is_done(place, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["paper", "--backbones", "paper_tiny"]) == 2
    assert "--data DIR" in capsys.readouterr().err
    both = ["paper", "--data", str(place / "photos"), "--out", str(out)]
    assert main([*both, "--backbones", "vit16"]) == 2
    assert "released no weights" in capsys.readouterr().err
    weights = ["--weights", str(place / "w.safetensors")]
    assert main([*both, "--backbones", "paper_tiny", *weights]) == 2
    assert "--train-data DIR" in capsys.readouterr().err
    assert main([*both, *weights]) == 2
    assert "expected deit_base_distilled_patch16_224=FILE" in capsys.readouterr().err
    assert main([*both, "--backbones", "paper_tiny", "--weights", str(out / "none")]) == 1
    assert "no such file" in capsys.readouterr().err
    assert main([*both, "--backbones", "paper_tiny", *weights, "--photos", "none.jpg"]) == 1
    assert "no such photo" in capsys.readouterr().err
    assert not (out / "results.jsonl").exists()


def test_weights_by_model(tmp_path):
    assert weights_of(("a=x", "b=y"), ["a", "b"])["b"].name == "y"
    assert weights_of(("x",), ["a"])["a"].name == "x"
    with pytest.raises(UsageError, match="c is not run"):
        weights_of(("c=x",), ["a"])
    with pytest.raises(UsageError, match="2 models are run"):
        weights_of(("x",), ["a", "b"])
