from __future__ import annotations

import json
import shlex

import pytest
import torch
from PIL import Image

from tntprune.cli.main import main
from tntprune.demo.digits import scans, scatter
from tntprune.search.claim import claimed
from tntprune.serialization.plan import read_plan

FEW = ["--method", "tome", "--at", 2, 3, "--macs", 0.8, "--moves", 0, "--workers", 0]  # a search that takes little


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Forty cluttered digits in ten class folders."""
    folder = tmp_path_factory.mktemp("digits")
    images, labels = scans("test")
    chosen = torch.cat([(labels == digit).nonzero()[:4, 0] for digit in range(10)])
    canvas, labels = scatter(images[chosen], labels[chosen], torch.Generator().manual_seed(0))
    for number, (image, label) in enumerate(zip(canvas, labels.tolist())):
        (folder / f"digit{label}").mkdir(exist_ok=True)
        Image.fromarray(image[0].mul(255).round().byte().numpy()).save(folder / f"digit{label}" / f"{number:02}.png")
    return folder


@pytest.fixture
def call(capsys):
    """Run a command; returns the exit code and what it wrote."""

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def plan(digits, tmp_path_factory):
    """A plan of TNT, which is trained on the way."""
    out = tmp_path_factory.mktemp("plans") / "new" / "plan.json"
    given = ["--data", str(digits), "--macs", "0.6", "--moves", "0", "--workers", "0", "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tntprune.training.config.STEPS", 2)
        assert main(["search", "digits_vit", *given]) == 0
    return out


def test_a_plan_and_its_picture_are_written(plan):
    found = read_plan(plan)
    assert found.config.method == "tnt" and found.learned and found.budget == {"macs": 0.6}
    assert found.predicted["held_out"]["agreement"] >= 50 and "top1_drop" in found.predicted["held_out"]
    assert json.loads(found.made_by)["command"] == "search" and len(found.front) > 1
    picture = Image.open(plan.with_suffix(".png"))
    assert picture.size[0] > 1000


def test_every_command_takes_a_plan_as_its_reducer(plan, digits, tmp_path, call):
    expected = read_plan(plan).predicted["macs"]
    reducer = ["digits_vit", "--reducer", plan]
    code, out, err = call("eval", *reducer, "--data", digits, "--workers", 0, "--json")
    assert code == 0 and json.loads(out)["macs"] == expected, err
    photo = next(digits.glob("*/*"))
    assert call("show", *reducer, photo, "--out", tmp_path / "a.png")[0] == 0
    assert call("export", *reducer, "--to", "pt2", "--out", tmp_path / "a.pt2")[0] == 0
    code, out, err = call("bench", *reducer, "--rounds", 3, "--batch-sizes", 1, "--json")
    assert code == 0 and "tnt" in {row["method"] for row in json.loads(out)["results"]}, err
    sweep = ["sweep", "digits_vit", "--reducers", plan, "--data", digits, "--out", tmp_path / "a.jsonl"]
    assert call(*sweep, "--workers", 0)[0] == 0
    assert call("eval", *reducer, "--data", digits, "--at", 2, "--keep", 0.5, "--workers", 0)[0] == 0
    code, out, err = call("macs", *reducer, "--json")
    assert code == 0 and json.loads(out)["macs"] == expected and "note" not in err, err


def test_a_plan_can_be_searched_again_from_what_it_has_learned(plan, digits, tmp_path, call):
    given = ["--data", digits, "--moves", 0, "--workers", 0, "--out", tmp_path / "b.json", "--json"]
    code, out, err = call("search", "digits_vit", "--reducer", plan, "--drop", 20, *given)
    assert code == 0, err
    found = json.loads(out)
    assert found["budget"] == {"drop": 20.0} and found["plan"] == str(tmp_path / "b.json")
    assert found["chosen"]["held_out"]["top1_drop"] <= 20 and found["front"] and found["proxy"]["schedules"] > 2
    own = read_plan(plan).learned
    assert all(torch.equal(own[name], value) for name, value in read_plan(tmp_path / "b.json").learned.items())


def test_where_tokens_may_go_can_be_said(digits, tmp_path, call):
    code, out, err = call("search", "digits_vit", "--data", digits, *FEW, "--metric", "x", "--out", tmp_path / "c.json")
    assert code == 0 and "tome, 80 % of the MACs" in out and "uniform rates" in out, err
    config = read_plan(tmp_path / "c.json").config
    assert set(config.at) <= {2, 3} and config.metric == "x"


def test_a_plan_is_not_overwritten(plan, digits, call):
    before = plan.read_bytes()
    code, out, err = call("search", "digits_vit", "--data", digits, "--macs", 0.7, "--out", plan)
    assert code == 2 and not out and "exists already; expected a new name" in err
    assert plan.read_bytes() == before


def test_why_there_are_no_labels_is_told(digits, tmp_path, call):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "digits").symlink_to(digits / "digit3")
    (tmp_path / "photos" / "others").symlink_to(digits / "digit4")
    given = ["--data", tmp_path / "photos", *FEW, "--out", tmp_path / "d.json"]
    code, out, err = call("search", "digits_vit", *given)
    assert code == 0 and "points of agreement on 8 photos" in out and "judged without labels (" in out, err


@pytest.mark.parametrize("out", ["a" * 300 + ".json", "digits.txt/a.json", "/proc/a.json"])
def test_an_output_that_cannot_be_written_is_refused_before_the_search(digits, tmp_path, monkeypatch, call, out):
    monkeypatch.setattr("tntprune.search.find_plan.find_plan", lambda *given, **more: pytest.fail("it searched"))
    (tmp_path / "digits.txt").touch()
    code, told, err = call("search", "digits_vit", "--data", digits, "--macs", 0.7, "--out", tmp_path / out)
    line = err.strip().splitlines()[-1]
    assert code == 1 and not told and line.startswith("tntprune: ") and "expected" in line and "Traceback" not in err


def test_two_searches_do_not_write_one_plan(digits, tmp_path, call):
    out = tmp_path / "new" / "plan.json"
    given = ["--data", digits, *FEW, "--out", out]
    with claimed(out):
        code, told, err = call("search", "digits_vit", *given)
    assert code == 1 and not told and "another search writes it" in err and not out.exists()
    assert call("search", "digits_vit", *given)[0] == 0
    assert sorted(path.name for path in out.parent.iterdir()) == ["plan.json", "plan.png"]


def test_a_picture_of_somebody_elses_is_not_overwritten(digits, tmp_path, call):
    (tmp_path / "cat.png").write_bytes(b"a photo")
    code, out, err = call("search", "digits_vit", "--data", digits, "--macs", 0.7, "--out", tmp_path / "cat.json")
    assert code == 2 and not out and "cat.png exists already" in err
    assert (tmp_path / "cat.png").read_bytes() == b"a photo" and len(list(tmp_path.iterdir())) == 1


def test_the_last_line_is_a_command_to_type(digits, tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    code, out, err = call("search", "digits_vit", "--data", digits, *FEW, "--out", "my plan.json")
    assert code == 0 and "Chosen: tome keeps" in out and "Cost: " in out and "Loss: " in out, err
    words = shlex.split(out.splitlines()[-1])
    assert words[:2] == ["tntprune", "eval"]
    words[words.index("OTHER_PHOTOS")] = str(digits)
    assert call(*words[1:], "--workers", 0)[0] == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--macs", 0.5, "--out", "a.txt"], "ends in .json"),
        (["--out", "a.json"], "expected one of macs, latency and speedup"),
        (["--macs", 0.5, "--speedup", 2, "--out", "a.json"], "macs and speedup given"),
        (["--macs", 0.5, "--method", "tome", "--r", 4, "--out", "a.json"], "--r: is what the search chooses"),
        (["--macs", 0.5, "--tokens", 4, "--out", "a.json"], "--tokens: is what the search chooses"),
        (["--macs", 0.5, "--similar", 4, "--out", "a.json"], "--similar: is what the search chooses"),
        (["--macs", 0.5, "--method", "ats", "--out", "a.json"], "ats leaves another number"),
        (["--macs", 0.5, "--curve", "c.json", "--out", "a.json"], "--curve is of time"),
        (["--latency", "12", "--out", "a.json"], "such as 12ms"),
        (["--macs", 0.5, "--reducer", "none.json", "--out", "a.json"], "no such file"),
    ],
)
def test_mistakes_get_one_line(digits, tmp_path, monkeypatch, call, more, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = call("search", "digits_vit", "--data", digits, "--workers", 0, *more)
    line = err.strip().splitlines()[-1]
    assert code in (1, 2) and not out and words in line and "Traceback" not in err, err
    assert not (tmp_path / "a.json").exists()
