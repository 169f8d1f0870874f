from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from PIL import Image

from conftest import make, photos_for
from hub_stand_in import Hub, served
from tntprune import TNT, Random, load_, push, reduce_, save
from tntprune.analysis.accuracy_curve import AccuracyCurve, AccuracyPoint
from tntprune.backbones.attach import reduction_of
from tntprune.backbones.digits_vit import build
from tntprune.cli.main import main
from tntprune.errors import UsageError, UserError
from tntprune.serialization.checkpoint import FILE, WEIGHTS
from tntprune.system.storage import read_metadata

MADE = json.dumps(
    {"training": {"epochs": 5, "lr": 0.01}, "model": "m", "weights": "/home/me/w.safetensors", "data": "/home/me/pets"}
)
POINT = AccuracyPoint("unpruned", 91.25, 99.5, 100.0, 2_000_000)
CURVE = AccuracyCurve(
    400, "pets", POINT, [AccuracyPoint("keep 0.5", 88.75, 99.0, 95.5, 1_000_000, True)], "a processor; today"
)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with served(monkeypatch, tmp_path / "cache") as hub:
        yield hub


def reduced(config, seed=2):
    model = reduce_(make("plain"), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in reduction_of(model).parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def refused(call, *words, kind=UserError):
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert all(word in message for word in words) and "\n" not in message, message


@torch.inference_mode()
def test_what_is_pushed_and_loaded_gives_the_same_logits_bit_for_bit(hub):
    model, fresh = reduced(TNT(at=3, keep=0.4, similar=3)), make("plain")
    address = push(model, "someone/small")
    assert address.startswith(f"{hub.address}/someone/small/commit/")
    images = photos_for(fresh)
    unpruned = fresh(images)
    for load in (load_, reduce_):
        load(fresh, "someone/small")
        assert reduction_of(fresh).config == TNT(at=3, keep=0.4, similar=3)
        assert torch.equal(fresh(images), model(images)) and not torch.equal(fresh(images), unpruned)
    reduce_(fresh, "someone/small", keep=0.25)
    assert reduction_of(fresh).config == TNT(at=3, keep=0.25, similar=3)


@torch.inference_mode()
def test_every_revision_stays_loadable(hub):
    first, second = reduced(TNT(at=3), seed=1), reduced(TNT(at=3), seed=2)
    push(first, "someone/small", message="one")
    commit = hub.repos["someone/small"].branches["main"]
    push(second, "someone/small@trial", message="two")
    images, fresh = photos_for(first), make("plain")
    assert not torch.equal(first(images), second(images))
    for source, revision, model in (
        ("someone/small", None, first),
        ("someone/small", commit, first),
        (f"someone/small@{commit}", None, first),
        ("someone/small", "trial", second),
        ("someone/small@trial", None, second),
    ):
        assert torch.equal(load_(fresh, source, revision=revision)(images), model(images))
    assert hub.repos["someone/small"].messages == ["initial commit", "one", "two"]
    assert (
        'load_(model, "someone/small@trial")'
        in hub.repos["someone/small"].commits[hub.repos["someone/small"].branches["trial"]]["README.md"].decode()
    )


@torch.inference_mode()
def test_weights_that_were_trained_come_along_from_the_same_commit(hub, tmp_path):
    model = reduced(TNT(at=3))
    save(model, tmp_path / "run", MADE, weights=True)
    push(model, "someone/tuned", run=tmp_path / "run")
    repo = hub.repos["someone/tuned"]
    commit = repo.branches["main"]
    assert set(repo.commits[commit]) == {".gitattributes", "README.md", FILE, WEIGHTS}
    images, fresh = photos_for(model), make("plain")
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.mul_(0.5)
    assert torch.equal(load_(fresh, "someone/tuned")(images), model(images))
    assert f"HEAD /someone/tuned/resolve/{commit}/{WEIGHTS}" in hub.asked
    push(model, "someone/tuned-not", run=tmp_path / "run", weights=False)
    assert WEIGHTS not in hub.repos["someone/tuned-not"].commits[hub.repos["someone/tuned-not"].branches["main"]]


def test_no_path_of_this_machine_is_shared(hub, tmp_path):
    model = reduced(TNT(at=3))
    save(model, tmp_path / "run", MADE)
    push(model, "someone/small", run=tmp_path / "run")
    files = hub.repos["someone/small"].commits[hub.repos["someone/small"].branches["main"]]
    assert all(b"/home/me" not in data and str(tmp_path).encode() not in data for data in files.values())
    (tmp_path / FILE).write_bytes(files[FILE])
    note = json.loads(read_metadata(tmp_path / FILE)["made_by"])
    assert note["data"] == "pets" and note["training"] == {"epochs": 5, "lr": 0.01}
    assert "- data: pets" in files["README.md"].decode() and "epochs 5, lr 0.01" in files["README.md"].decode()


def test_a_curve_that_was_measured_is_on_the_card(hub):
    push(reduced(TNT(at=3)), "someone/small", curve=CURVE, license="mit")
    card = hub.repos["someone/small"].commits[hub.repos["someone/small"].branches["main"]]["README.md"].decode()
    assert "| keep 0.5 (as saved) | 88.8 | 99.0 | 95.5 | 1.000 | 0.50 |" in card and "license: mit" in card
    assert "| agreement % | MMACs |" in card  # millions, of a small model


def test_what_cannot_be_pushed_is_refused_before_anything_is_sent(hub, tmp_path):
    model = reduced(TNT(at=3))
    save(reduced(TNT(at=3), seed=5), tmp_path / "other")
    save(reduce_(make("plain"), Random(at=3)), tmp_path / "random")
    refused(lambda: push(make("plain"), "someone/small"), "is not reduced")
    refused(lambda: push(model, "small"), "expected user/repo")
    refused(lambda: push(model, "a/b", data="x", curve=CURVE), "data and curve", kind=UsageError)
    refused(lambda: push(model, "a/b", run=tmp_path / "other"), "holds another powers")
    refused(lambda: push(model, "a/b", run=tmp_path / "random"), "holds another powers")
    refused(lambda: push(model, "a/b", data=tmp_path / "none"), str(tmp_path / "none"))
    assert hub.asked == []


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A saved reduction of the demo's model, and twenty small photos in its ten classes."""
    folder = tmp_path_factory.mktemp("push")
    save(reduce_(build(), TNT(at=2, tokens=16)), folder / "run", MADE)
    generator = torch.Generator().manual_seed(0)
    for number in range(20):
        place = folder / "photos" / f"digit{number % 10}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(0, 256, (32, 32), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(place / f"{number}.png")
    return folder


def test_the_command_writes_a_card_without_pushing(run, capsys):
    arguments = ["push", "digits_vit", "--reducer", str(run / "run"), "--card-only", "--json"]
    assert main(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"card": str(run / "run" / "README.md"), "curve": None}
    assert "Nothing was measured." in (run / "run" / "README.md").read_text()
    assert main([*arguments, "--data", str(run / "photos"), "--to", "me/digits"]) == 0
    curve, card = json.loads(capsys.readouterr().out)["curve"], (run / "run" / "README.md").read_text()
    assert curve["images"] == 20 and curve["points"][0]["setting"] == "as saved" and curve["points"][0]["own"]
    assert len(curve["points"]) == 7 and 'load_(model, "me/digits")' in card and "On 20 labelled photos" in card


def test_the_command_takes_another_image_size(run, capsys):
    arguments = ["push", "digits_vit", "--reducer", str(run / "run"), "--card-only", "--data", str(run / "photos")]
    assert main([*arguments, "--json"]) == 0
    usual = json.loads(capsys.readouterr().out)["curve"]
    assert main([*arguments, "--img-size", "32", "40", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["curve"]["base"]["macs"] < 0.8 * usual["base"]["macs"]


def pushes_and_loads(run, hub, call):
    """The command pushes what another command then loads by its id; `call` runs both and gives what they printed."""
    to = ["push", "digits_vit", "--reducer", str(run / "run"), "--to", "someone/digits@quarter"]
    use = ["eval", "digits_vit", "--data", str(run / "photos"), "--workers", "0", "--json"]
    out = call([*to, "--keep", "0.25", "--private", "--json"], [*use, "--reducer", "someone/digits@quarter"])
    pushed, found = map(json.loads, out.splitlines())
    repo = hub.repos["someone/digits"]
    assert pushed["repository"] == "someone/digits@quarter" and pushed["curve"] is None
    assert pushed["commit"].endswith(repo.branches["quarter"]) and repo.private
    assert repo.branches["quarter"] != repo.branches["main"]
    assert found["tokens"][2] == found["tokens"][0] // 4


def test_the_command_pushes_what_another_command_loads(run, hub, capsys):
    def call(*calls):
        assert [main(arguments) for arguments in calls] == [0, 0]
        return capsys.readouterr().out

    pushes_and_loads(run, hub, call)


@pytest.mark.wide
def test_the_command_pushes_to_where_the_environment_says(run, tmp_path):
    with Hub() as hub:
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": "writer", "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1",
        }  # fmt: skip

        def call(*calls):
            code = f"from tntprune.cli.main import main\nfor call in {calls!r}:\n    assert main(call) == 0"
            done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            return done.stdout

        pushes_and_loads(run, hub, call)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "expected --to user/repo, or --card-only"),
        (["--to", "digits"], "expected user/repo"),
        (["--to", "a/b", "--keep", "2"], "keep=2"),
        (["--to", "a/b"], "nobody is logged in"),
    ],
)
def test_what_the_command_refuses(run, hub, monkeypatch, capsys, arguments, words):
    monkeypatch.delenv("HF_TOKEN")
    assert main(["push", "digits_vit", "--reducer", str(run / "run"), *arguments]) in (1, 2)
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.startswith("tntprune: ") and words in told
    assert hub.asked == []


def test_a_revision_of_what_is_here_is_refused(tmp_path):
    save(reduced(TNT(at=3)), tmp_path / "run@x")
    load_(make("plain"), tmp_path / "run@x")
    for source in (tmp_path / "run@x", tmp_path / "run@x" / FILE, "pretrained"):
        refused(
            lambda source=source: load_(make("plain"), source, revision="v1"), "is on this machine", kind=UsageError
        )


def test_a_card_goes_into_a_folder_only(hub, capsys):
    assert main(["push", "digits_vit", "--reducer", "someone/small", "--card-only"]) == 2
    assert "is no folder here" in capsys.readouterr().err
