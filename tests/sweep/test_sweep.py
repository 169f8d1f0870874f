from __future__ import annotations

import gc
import json
import os
import pkgutil
import random
import shlex
import shutil
import signal
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data import ImageNetInfo

from several import processes, together
from tntprune.analysis.evaluate import evaluate
from tntprune.analysis.macs import macs
from tntprune.backbones.models import load_model, shape_of
from tntprune.cli.main import main
from tntprune.data.folders import labelled_photos
from tntprune.errors import UsageError, UserError
from tntprune.methods import ATS, TNT, AViT, Combination, DynamicViT, EViT, EvoViT, Random, ToMe, TopK, to_dict
from tntprune.methods.text import config_from_text
from tntprune.reduce import reduce_
from tntprune.serialization.checkpoint import save
from tntprune.sweep import SweepRequest, carry_out, plan_sweep
from tntprune.sweep.grid import of_methods, of_reducer
from tntprune.sweep.request import TrainedReducer, built, name_of, scheme_of
from tntprune.sweep.results import ResultRow
from tntprune.sweep.results_file import ResultsFile
from tntprune.system.distributed import ProcessGroup
from tntprune.system.precision import autocast, exact_head_

MODEL, SIZE = "test_vit", (64, 64)
WORDNET = ImageNetInfo("imagenet-1k").label_names()

# Processes that get killed, or that work together, are forked from one that has imported everything and run nothing.
processes.set_forkserver_preload(["tntprune.sweep", "tntprune.cli.main", "timm", "accelerate", "pytest"])


def sweep(requests, data, out, **options):
    names = ("weights", "batch_size", "precision", "limit", "img_size", "random_weights")
    planning = {name: options.pop(name) for name in names if name in options}
    return carry_out(plan_sweep(requests, data, **planning), out, **options)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Weights, photos of which about half are in the class that the model sees in them, and two trained reducers."""
    home = tmp_path_factory.mktemp("sweep")
    for name in (MODEL, "test_vit2"):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            state = timm.create_model(name, img_size=SIZE).state_dict()
            noisy = {key: value + 0.1 * torch.randn_like(value) for key, value in state.items()}
        save_file(noisy, home / f"{name}.safetensors")
    model = load_model(MODEL, home / f"{MODEL}.safetensors", img_size=SIZE)
    pixels = np.random.default_rng(0).integers(0, 256, (21, 8, 8, 3), dtype=np.uint8)
    scratch = home / "scratch.png"
    for number, picture in enumerate(pixels):
        image = Image.fromarray(picture).resize((73, 73), Image.Resampling.NEAREST)
        image.save(scratch)
        with torch.inference_mode():
            guess = int(model(shown(model, scratch)).argmax())
        folder = home / "photos" / WORDNET[guess if number % 2 else number]
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{number:02}.png")
    save(
        reduce_(load_model(MODEL, home / f"{MODEL}.safetensors", img_size=SIZE), TNT(at=2, noise_blocks=(1, 2, 3))),
        home / "tnt",
    )
    tuned = load_model(MODEL, home / f"{MODEL}.safetensors", img_size=SIZE)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.mul_(1.02)
        tuned.head.bias.add_(torch.linspace(0, 0.3, 1000))
    save(reduce_(tuned, EViT(at=2, keep=0.5)), home / "evit", weights=True)
    return home


def shown(model, path):
    from tntprune.data.transforms import transform_for

    return transform_for(model)(Image.open(path).convert("RGB"))[None]


@pytest.fixture
def run(home, tmp_path):
    """`sweep` of the tiny model on the tiny photos, into one file."""

    def call(asked, **options):
        files = {name: home / f"{name}.safetensors" for name in (MODEL, "test_vit2")}
        given = {"weights": files, "img_size": SIZE, "batch_size": 8, "workers": 0, "progress": False, "speed": False}
        out = options.pop("out", tmp_path / "results.jsonl")
        return sweep(asked, options.pop("data", home / "photos"), out, **given | options)

    return call


def requests_of(home):
    several = [
        Random(at=2, keep=0.5), TopK(at=2, keep=0.6), EViT(at=3, keep=0.4), ToMe(r=2), ATS(at=2, keep=0.5),
        AViT(at=(2, 4), keep=0.7), EvoViT(at=2, keep=0.5), Combination(parts=(Random(at=1, keep=0.8), ToMe(at=4, r=3))),
    ]  # fmt: skip
    return [
        *(SweepRequest(MODEL, config) for config in several),
        SweepRequest(MODEL, None, home / "tnt"),
        SweepRequest(MODEL, TNT(at=3, keep=0.3, similar=2), home / "tnt"),
        SweepRequest(MODEL, EViT(at=2, keep=0.8), home / "evit"),
        SweepRequest(MODEL, None, home / "evit", name="tuned", scheme="multi"),
    ]


def same(rows, others):
    """The same but for the times."""
    return [timeless(row) for row in rows] == [timeless(row) for row in others]


def timeless(row):
    return replace(row, images_per_s=None, speedup=None, peak_mib=None, busy=None, about={})


def lines(path):
    return [ResultRow.from_json(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def straight(home, tmp_path_factory):
    """All rows, of a sweep that nothing disturbed."""
    out = tmp_path_factory.mktemp("straight") / "results.jsonl"
    files = {MODEL: home / f"{MODEL}.safetensors"}
    return sweep(
        requests_of(home), home / "photos", out, weights=files, img_size=SIZE, batch_size=8, workers=0, speed=False,
        progress=False,
    )  # fmt: skip


# What is measured


def test_rows_are_those_of_evaluate_one_by_one(home, straight):
    def fresh():
        return load_model(MODEL, home / f"{MODEL}.safetensors", img_size=SIZE)

    photos = labelled_photos(home / "photos", fresh())
    assert len(straight) == 13 and straight[0].name == "unpruned"
    for row, one in zip(straight, [SweepRequest(MODEL, None), *requests_of(home)], strict=True):
        base, own = fresh(), fresh()
        model = built(own, own, one.config, None if one.reducer is None else TrainedReducer(one.reducer))
        found = evaluate(model, photos, batch_size=8, workers=0, base=base, progress=False)
        assert (row.top1, row.top5, row.agreement) == (found.top1, found.top5, found.agreement)
        assert (row.macs, row.tokens, row.images) == (found.macs, found.tokens, found.images)
        assert row.base_macs == macs(base).macs and row.skipped == 0
    assert straight[0].right > 5 and len({row.agreeing for row in straight}) > 4  # there is something to tell apart
    assert straight[-1].agreeing < 21 and straight[-1].name == "tuned" and straight[-1].scheme == "multi"


@pytest.mark.parametrize("options", [{"together": 3}, {"together": 50, "workers": 2}])
def test_how_they_are_grouped_and_read_does_not_matter(home, run, straight, options):
    assert same(run(requests_of(home), **options), straight)


def test_a_model_has_the_classes_of_its_weights(home, run, tmp_path):
    """Folders of any names, as many as the weights have classes: a model that was trained on one's own photos."""
    weights = tmp_path / "own.safetensors"
    save_file(timm.create_model(MODEL, img_size=SIZE, num_classes=3).state_dict(), weights)
    for number, photo in enumerate(sorted((home / "photos").glob("*/*.png"))[:6]):
        (tmp_path / "own" / f"class{number % 3}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "own" / f"class{number % 3}" / photo.name).write_bytes(photo.read_bytes())
    row = run([SweepRequest(MODEL, None)], data=tmp_path / "own", weights={MODEL: weights})[0]
    model = load_model(MODEL, weights, img_size=SIZE)
    expected = evaluate(model, labelled_photos(tmp_path / "own", model), batch_size=8, workers=0, progress=False)
    assert (row.top1, row.top5, row.macs) == (expected.top1, 100, expected.macs)


def test_a_setting_named_twice_is_measured_once_and_given_twice(run, tmp_path):
    once, twice = (
        SweepRequest(MODEL, Random(at=2, keep=0.5)),
        SweepRequest(MODEL, Random(at=2, keep=(0.5,)), name="again", scheme="multi"),
    )
    rows = run([once, SweepRequest(MODEL, None, name="whole"), twice])
    assert [(row.name, row.scheme) for row in rows] == [
        ("random drop", "single"), ("whole", "unpruned"), ("again", "multi")
    ]  # fmt: skip
    assert rows[0].setting == rows[2].setting and len(lines(tmp_path / "results.jsonl")) == 2


def test_the_photos_of_a_limit_are_always_the_same_and_nested(home):
    def photos(limit):
        made = plan_sweep([SweepRequest(MODEL, None)], home / "photos", limit=limit, random_weights=True)
        return made.models[0].photos

    assert photos(5) == photos(5) and len(photos(5)) == 5
    assert set(photos(5)) < set(photos(9)) < set(photos(None))
    assert photos(21) == photos(500) == photos(None) and photos(9) != photos(None)[:9]


def test_what_decides_the_result_decides_the_key(home, tmp_path):
    def key(one=None, data=home / "photos", **options):
        given = {"img_size": SIZE, "weights": {MODEL: home / f"{MODEL}.safetensors"}} | options
        return plan_sweep([one or SweepRequest(MODEL, Random(at=2))], data, **given).settings[-1].key

    other = tmp_path / "other.safetensors"
    save_file({"one": torch.zeros(1)}, other)
    moved = tmp_path / "moved"
    moved.symlink_to(home / "photos")
    keys = [
        key(), key(weights={}), key(weights={MODEL: other}), key(random_weights=True), key(batch_size=3), key(limit=5),
        key(precision="bf16"), key(img_size=(96, 96)),
        key(SweepRequest(MODEL, Random(at=3))), key(SweepRequest(MODEL, None)),
        key(SweepRequest(MODEL, None, home / "tnt")), key(SweepRequest(MODEL, TNT(at=2, keep=0.4), home / "tnt")),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert key(SweepRequest(MODEL, Random(at=2), name="x", scheme="multi")) == key() == key(data=moved)


def test_bad_photos_stop_it_or_are_counted(home, run, tmp_path, capsys):
    import shutil

    shutil.copytree(home / "photos", tmp_path / "photos")
    bad = sorted((tmp_path / "photos").glob("*/*.png"))[4]
    bad.write_bytes(b"not an image")
    asked = [SweepRequest(MODEL, Random(at=2, keep=0.5)), SweepRequest(MODEL, ATS(at=2, keep=0.5))]
    with pytest.raises(UserError, match=r"(?s)not an image.*--on-bad-image skip"):
        run(asked, data=tmp_path / "photos")
    rows = run(asked, data=tmp_path / "photos", on_bad_image="skip", together=1)
    assert [(row.images, row.skipped) for row in rows] == [(20, 1)] * 3
    assert capsys.readouterr().err.count(bad.name) == 1
    again = [str(tmp_path / "again.jsonl") if word == "again.jsonl" else word for word in shlex.split(rows[1].command)]
    assert main([*again[1:], "--no-speed"]) == 3  # the command of a row skips them too
    assert ResultsFile(tmp_path / "again.jsonl").rows()[rows[1].setting.key].right == rows[1].right


def test_half_precision_leaves_the_head_in_fp32(home, run):
    one = SweepRequest(MODEL, Random(at=2, keep=0.5))
    low, full = run([one], precision="bf16")[1], run([one])[1]
    assert low.setting.precision == "bf16" and low.setting.key != full.setting.key and low.macs == full.macs
    model = exact_head_(load_model(MODEL, home / f"{MODEL}.safetensors", img_size=SIZE))
    images = torch.randn(3, 3, *SIZE)
    with torch.inference_mode(), autocast(images.device, "bf16"):
        logits = model(images)
        assert model.blocks[0].mlp.fc1(torch.randn(1, 64)).dtype == torch.bfloat16
    assert logits.dtype == torch.float32 and (logits != logits.bfloat16().float()).any()
    with torch.inference_mode(), autocast(images.device, "fp32"):
        assert torch.equal(model(images), load_model(MODEL, home / f"{MODEL}.safetensors", img_size=SIZE)(images))


# Going on


def test_it_goes_on_with_what_is_missing(home, run, straight, tmp_path, monkeypatch):
    asked = requests_of(home)
    run(asked[:5])
    before = (tmp_path / "results.jsonl").read_text()
    measured = counting(monkeypatch, "tntprune.sweep.run_sweep.accuracy", lambda base, models, *rest: len(models))
    assert same(run(asked), straight)
    assert sum(measured) == len(asked) - 5 and (tmp_path / "results.jsonl").read_text().startswith(before)
    loads = counting(monkeypatch, "tntprune.sweep.host.load_model")
    assert same(run(asked), straight) and not loads  # there is nothing to do


def test_speed_is_added_later_without_redoing_the_accuracy(run, straight, tmp_path, monkeypatch):
    asked = [SweepRequest(MODEL, Random(at=2, keep=0.5)), SweepRequest(MODEL, TopK(at=2, keep=0.6))]
    rows = run(asked)
    assert all((row.images_per_s, row.speedup, row.peak_mib, row.busy) == (None,) * 4 for row in rows)
    measured = counting(monkeypatch, "tntprune.sweep.run_sweep.accuracy")
    timed = run(asked, speed=True, rounds=3)
    assert not measured and same(timed, rows) and same(rows, straight[:3])
    assert all(row.images_per_s > 0 and row.speedup > 0 and row.peak_mib > 0 for row in timed)
    assert timed[0].speedup == 1 and timed[1].about["speed"]["rounds"] == 3
    assert lines(tmp_path / "results.jsonl") == [*rows, *timed]
    assert run(asked, speed=True) == timed and len(lines(tmp_path / "results.jsonl")) == 6
    asked.append(SweepRequest(MODEL, EViT(at=3, keep=0.4)))
    monkeypatch.undo()
    assert same(run(asked, speed=True, rounds=3), straight[:4])
    assert len(lines(tmp_path / "results.jsonl")) == 8  # the new one, and then its speed


def test_a_full_disk_stops_it_and_what_was_done_is_kept(home, run, straight, tmp_path, monkeypatch):
    add, seen = ResultsFile.add, []

    def full(self, row):
        seen.append(row)
        if len(seen) == 4:
            raise UserError("no room")
        add(self, row)

    monkeypatch.setattr(ResultsFile, "add", full)
    with pytest.raises(UserError, match="no room"):
        run(requests_of(home), together=2)
    assert len(lines(tmp_path / "results.jsonl")) == 3
    monkeypatch.undo()
    assert same(run(requests_of(home)), straight)


def counting(monkeypatch, where, what=lambda *args, **options: 1):
    """What of each call of a function, from now on."""
    module, _, name = where.rpartition(".")
    function = getattr(pkgutil.resolve_name(module), name)
    seen = []

    def counted(*args, **options):
        seen.append(what(*args, **options))
        return function(*args, **options)

    monkeypatch.setattr(where, counted)
    return seen


# What it costs


def many(count, name=MODEL):
    return [SweepRequest(name, Random(at=1 + number % 5, keep=(20 + number) / 100)) for number in range(count)]


def test_fifty_settings_load_each_model_once_and_list_the_photos_once(home, run, monkeypatch):
    alive = []

    def check(*args):
        gc.collect()
        assert all(model() is None for model in alive)  # one model at a time

    loads = counting(monkeypatch, "tntprune.sweep.host.load_model", check)
    lists = counting(monkeypatch, "tntprune.data.folders.find_images")
    reads = counting(monkeypatch, "tntprune.data.photo.Photo.read")
    reads_files = counting(monkeypatch, "tntprune.sweep.request.read")
    make = load_model

    def remembered(*args):
        model = make(*args)
        alive.append(weakref.ref(model))
        return model

    monkeypatch.setattr("tntprune.sweep.host.load_model", lambda *args: (loads.append(check()), remembered(*args))[1])
    saved = [SweepRequest(MODEL, TNT(at=2, keep=(30 + number) / 100), home / "tnt") for number in range(5)]
    rows = run([*many(20), *saved, *many(25, "test_vit2")], limit=3)
    assert len(rows) == 52 and len(loads) == 2 and len(lists) == 1 and len(reads_files) == 1
    assert len(reads) == 3 * (4 + 4)  # 26 settings of each model in groups of eight: each photo once a group


@pytest.mark.parametrize(("photos", "settings"), [(4, 4), (20, 4), (4, 20)])
def test_memory_grows_neither_with_photos_nor_with_settings(run, monkeypatch, photos, settings):
    import tntprune.data.loading
    from tntprune.sweep import host

    batches, models, most = [], [], {"batches": 0, "models": 0}

    def watch(kind, alive, value):
        alive.append(weakref.ref(value))
        most[kind] = max(most[kind], sum(one() is not None for one in alive))

    def collate(items, function=tntprune.data.loading.collate):
        batch = function(items)
        watch("batches", batches, batch.images)
        return batch

    def build(*args, function=host.built):
        model = function(*args)
        watch("models", models, model)
        return model

    monkeypatch.setattr("tntprune.data.loading.collate", collate)
    monkeypatch.setattr("tntprune.sweep.host.built", build)
    run(many(settings), limit=photos, batch_size=2, together=2)
    assert len(batches) == photos // 2 * -(-(settings + 1) // 2) and len(models) == settings + 1
    assert most["batches"] <= 3 and most["models"] <= 4  # the last group may still be there while the next is made


def test_settings_share_their_weights_unless_they_were_trained(home):
    from tntprune.sweep.host import Host

    asked = [SweepRequest(MODEL, Random(at=2)), SweepRequest(MODEL, None, home / "tnt"), *[
        SweepRequest(MODEL, EViT(at=2, keep=keep), home / "evit") for keep in (0.3, 0.6)
    ]]  # fmt: skip
    made = plan_sweep(asked, home / "photos", weights={MODEL: home / f"{MODEL}.safetensors"}, img_size=SIZE)
    host = Host(made, made.models[0], "cpu", 0)
    before = {name: value.clone() for name, value in host.model.state_dict().items()}
    with host.models(made.models[0].settings) as models:
        weights = [model.blocks[0].mlp.fc1.weight for model in models]
        assert models[0] is host.model
        assert weights[0] is weights[1] is weights[2] and weights[3] is weights[4] is not weights[0]
        assert torch.allclose(weights[3], 1.02 * weights[0])
    assert all(torch.equal(value, before[name]) for name, value in host.model.state_dict().items())


# Killed, and several


def options_of(home):
    return {
        "weights": {MODEL: home / f"{MODEL}.safetensors"}, "img_size": SIZE, "batch_size": 8, "workers": 0,
        "rounds": 3, "progress": False,
    }  # fmt: skip


def sweep_and_die(home, out, moment):
    """Sweep, and be killed at a moment: in reading, in counting, before, in and after a write, or in taking times."""
    from tntprune.analysis.evaluate import Tally
    from tntprune.data.photo import Photo
    from tntprune.sweep import measure

    torch.set_num_threads(1)
    seen, write, fsync, count, read = 0, os.write, os.fsync, Tally.count, Photo.read

    def tick():
        nonlocal seen
        seen += 1
        if seen == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def ticking(function):
        def call(*args, **options):
            tick()
            return function(*args, **options)

        return call

    def halves(file, line):
        if not line.startswith(b'{"key"'):
            return write(file, line)
        tick()
        first = write(file, line[: len(line) // 2])
        tick()
        return first + write(file, line[first:])

    Photo.read, Tally.count, os.write, os.fsync = ticking(read), ticking(count), halves, ticking(fsync)
    measure.peak_memory = ticking(lambda call, device: None)
    sweep(requests_of(home), home / "photos", out, together=2, **options_of(home))


@pytest.mark.parametrize("times", [3, pytest.param(10, marks=pytest.mark.wide)])
def test_killed_again_and_again_it_ends_as_if_left_alone(home, straight, tmp_path, times):
    out = tmp_path / "results.jsonl"
    drawn = random.Random(5)
    before: list[ResultRow] = []
    for _ in range(times):
        process = processes.Process(target=sweep_and_die, args=(home, out, drawn.randint(1, 60)))
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        now = list(ResultsFile(out).rows().values())
        assert [one.setting for one in now][: len(before)] == [one.setting for one in before]
        before = now
    rows = sweep(requests_of(home), home / "photos", out, **options_of(home))
    assert same(rows, straight) and all(row.images_per_s for row in rows)
    assert len(lines(out)) == 2 * len(rows)  # each once, and once more with its speed


def one_of_two(group, home, out):
    added, add = [], ResultsFile.add

    def adding(self, row):
        added.append(row.images_per_s is not None)
        add(self, row)

    ResultsFile.add = adding
    rows = sweep(requests_of(home), home / "photos", out, together=2, group=group, **options_of(home))
    told = {"rows": [row.to_json() for row in rows], "counted": added.count(False), "timed": added.count(True)}
    out.with_name(f"{group.rank}.json").write_text(json.dumps(told))


def test_two_processes_give_what_one_gives(home, straight, tmp_path):
    out = tmp_path / "results.jsonl"
    together(2, one_of_two, home, out)
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for one in told:
        assert same([ResultRow.from_json(line) for line in one["rows"]], straight)
    assert [one["counted"] for one in told] == [7, 6]  # 13 settings
    assert [one["timed"] for one in told] == [13, 0]  # by one of them, when the other has ended
    assert len(lines(out)) == 26
    assert same(sweep(requests_of(home), home / "photos", out, **options_of(home)), straight) and len(lines(out)) == 26


class Beside(ProcessGroup):
    """The main process of two, beside a stranger who fills the same file; what happens at each wait is a list."""

    def __init__(self, *happens):
        super().__init__(0, 2)
        self.happens = [*happens]

    def gather(self, value):
        return [value, value]

    def wait(self):
        if self.happens:
            self.happens.pop(0)()


def test_what_a_stranger_adds_meanwhile_does_not_change_who_does_what(run, tmp_path):
    """Both processes share out what was missing at the start; else a setting would be nobody's."""
    asked = [
        SweepRequest(name, config)
        for name in (MODEL, "test_vit2")
        for config in (None, Random(at=2, keep=0.5), ToMe(r=2))
    ]
    there = run(asked, out=tmp_path / "there.jsonl")
    file = ResultsFile(tmp_path / "results.jsonl")

    def add(*rows):
        return lambda: [file.add(row) for row in rows]

    group = Beside(add(there[1], there[3]), add(), add(there[4]))  # the other's share, and one of the stranger's
    assert same(run(asked, speed=True, rounds=3, group=group), there)
    assert [row.setting.key for row in lines(file.path)].count(there[5].setting.key) == 2  # counted, and timed


# What cannot be measured


def test_what_a_model_cannot_take_is_told_at_the_start_and_left_out(home, run, capsys, tmp_path):
    asked = [
        *(SweepRequest("test_vit2", one) for one in (EViT(at=2), Random(at=2, keep=0.5), TNT(at=2), Random(at=9))),
        SweepRequest("test_vit2", None, home / "tnt", name="mine"), SweepRequest(MODEL, TNT(at=5), home / "tnt"),
        SweepRequest(MODEL, TopK(at=2), home / "evit"), SweepRequest(MODEL, Random(tokens=99)),
        SweepRequest(MODEL, AViT(), tmp_path / "nowhere"),
    ]  # fmt: skip
    rows = run(asked)
    told = capsys.readouterr().err.splitlines()
    assert [row.setting.model for row in rows] == ["test_vit2", "test_vit2", MODEL]
    assert len(told) == 8 and all(line.startswith("left out: test_vit") for line in told)
    words = ["evit cannot be applied", "tnt has to be trained", "at=9: the model has", "mine of", "no scorer there",
             "holds evit", "only 16 patch tokens", "no such folder"]  # fmt: skip
    assert [word for word, line in zip(words, told, strict=True) if word not in line] == []
    with pytest.raises(UserError, match="no setting can be measured: test_vit2, evit at=2"):
        run([SweepRequest("test_vit2", EViT(at=2))], out=tmp_path / "other.jsonl")
    assert not (tmp_path / "other.jsonl").exists()


def test_what_cannot_be_at_all_is_refused_before_anything_is_measured(home, run, tmp_path):
    one = SweepRequest(MODEL, Random(at=2))
    with pytest.raises(UserError, match="no setting was given"):
        run([])
    with pytest.raises(UsageError, match="unknown model"):
        run([one, SweepRequest("test_vat", None)])
    with pytest.raises(UserError, match="no such folder"):
        run([one], data=tmp_path / "photos")
    with pytest.raises(UserError, match="cannot be opened"):
        run([one], out=tmp_path / "nowhere" / "results.jsonl")
    with pytest.raises(UsageError, match="together=0"):
        run([one], together=0)
    with pytest.raises(UsageError, match="rounds=2"):
        run([one], rounds=2)


# Names


@pytest.mark.parametrize(
    ("config", "tuned", "name"),
    [
        (None, False, "unpruned"),
        (TNT(), False, "TNT"),
        (TNT(recipe="paper"), False, "TNT, paper's recipe"),
        (TNT(scorer="mlp"), False, "TNT, MLP"),
        (EViT(), False, "EViT"),
        (EViT(), True, "EViT, fine-tuned"),
        (Combination(parts=(Random(at=1), ToMe(at=3, r=2))), False, "random drop then ToMe"),
    ],
)
def test_names(config, tuned, name):
    assert name_of(config, tuned) == name


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        (None, "unpruned"),
        (Random(at=3), "single"),
        (TNT(at=3, similar=25), "single"),
        (TNT(at=(3, 4), similar=40), "multi"),
        (ToMe(r=4), "multi"),
        (ToMe(at=3, r=4), "single"),
        (AViT(), "multi"),
        (EvoViT(at=4), "single"),
        (DynamicViT(keep=(0.5, 0.5, 0.5)), "multi"),
        (Combination(parts=(Random(at=1), ToMe(at=3, r=2))), "multi"),
    ],
)
def test_schemes(config, scheme):
    assert scheme_of(config, 12) == scheme


# The command line


def test_methods_locations_and_rates_multiply():
    assert of_methods("random", ["3", "3,4"], ["0.5", "0.9,0.8"]) == [
        Random(at=3, keep=0.5), Random(at=(3, 4), keep=0.5), Random(at=(3, 4), keep=(0.9, 0.8))
    ]  # fmt: skip
    assert of_methods("evit", [], ["0.6"]) == [EViT(keep=0.6)]
    assert of_methods("evit at=2", ["3", "4"], ["0.6"]) == [EViT(at=2, keep=0.6)]
    assert of_methods("tome r=13", ["3"], ["0.6", "0.7"]) == [ToMe(at=3, r=13)]
    assert of_methods("tome", ["3"], ["0.6"]) == [ToMe(at=3, keep=0.6)]
    assert of_methods("random tokens=9", [], ["0.6"]) == [Random(tokens=9)]
    assert of_methods("random at=1 then tome at=3 r=2", ["4"], ["0.6"]) == [
        Combination(parts=(Random(at=1), ToMe(at=3, r=2)))
    ]
    for text, at, rates, word in (
        ("nothing", [], [], "unknown method"), ("random", ["3"], ["1.5"], "keep=1.5"),
        ("random keep", [], [], "option"),
        ("random", ["x"], [], "at=x"), ("random", ["3"], ["0.9,0.8"], "no rates for so many"), ("", [], [], "unknown"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=word):
            of_methods(text, at, rates)


def test_a_saved_reduction_is_varied_likewise(home):
    folder = home / "tnt"
    own = TNT(at=2, noise_blocks=(1, 2, 3))
    assert of_reducer(str(folder), [], []) == (folder, [None])
    assert of_reducer(f"{folder} similar=2", ["3"], ["0.5", "0.6"]) == (
        folder, [own.changed(at=3, keep=0.5, similar=2), own.changed(at=3, keep=0.6, similar=2)]
    )  # fmt: skip
    with pytest.raises(UsageError, match="no option 'r'"):
        of_reducer(f"{folder} r=2", [], [])
    with pytest.raises(UserError, match="no such folder"):
        of_reducer(f"{folder}s", [], [])


def test_overwritten_photos_are_measured_again(home, run, tmp_path):
    """Same names, same folders, other pixels: the rows of the old photos say nothing about the new ones."""
    photos = tmp_path / "photos"
    shutil.copytree(home / "photos", photos)
    (before,) = run([SweepRequest(MODEL, None)], data=photos)
    assert same(run([SweepRequest(MODEL, None)], data=photos), [before])
    paths = sorted(photos.rglob("*.png"))
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, [*contents[1:], contents[0]], strict=True):
        path.write_bytes(content)
    (after,) = run([SweepRequest(MODEL, None)], data=photos)
    assert after.setting.data != before.setting.data and after.right != before.right
    assert len(lines(tmp_path / "results.jsonl")) == 2
    shutil.copytree(home / "photos", tmp_path / "copy")  # another place and another time: the same photos
    assert run([SweepRequest(MODEL, None)], data=tmp_path / "copy")[0].setting == before.setting


def test_shipped_scorers_have_the_name_they_have_everywhere(tmp_path, capsys):
    photo = tmp_path / "photos" / WORDNET[0] / "a.png"
    photo.parent.mkdir(parents=True)
    Image.effect_noise((64, 64), 90).convert("RGB").save(photo)
    given = ["sweep", "vit_tiny_patch16_224", "--data", photo.parents[1], "--out", tmp_path / "out.jsonl", "--dry-run"]
    given += ["--json", "--reducers", "pretrained keep=0.4", "pretrained", "--at", "2", "--rates", "0.5"]
    assert main([str(one) for one in given]) == 0
    found = [one for one in json.loads(capsys.readouterr().out)["settings"] if one["config"]]
    assert [(one["config"]["at"], one["config"]["keep"]) for one in found] == [([2], [0.4]), ([2], [0.5])]
    assert all("--reducers 'pretrained " in one["command"] for one in found)
    assert main([str(one) for one in [*given[:1], "vit_small_patch16_224", *given[2:]]]) == 1
    assert "nothing is shipped for vit_small_patch16_224" in capsys.readouterr().err
    (tmp_path / "random.safetensors").touch()
    save_file(timm.create_model("vit_tiny_patch16_224").state_dict(), tmp_path / "random.safetensors")
    one = SweepRequest("vit_tiny_patch16_224", TNT(at=2, keep=0.5), "pretrained")
    files = {one.model: tmp_path / "random.safetensors"}
    with pytest.raises(UserError, match=r"made for the pretrained weights of vit_tiny.*and these are others"):
        sweep([one], photo.parents[1], tmp_path / "out.jsonl", weights=files, workers=0, progress=False, speed=False)


@pytest.fixture
def call(home, tmp_path, capsys):
    def run(*arguments, code=0):
        capsys.readouterr()
        given = ["sweep", MODEL, "--data", home / "photos", "--out", tmp_path / "cli.jsonl", "--img-size", 64, 64]
        given += ["--weights", home / f"{MODEL}.safetensors", "--batch-size", 8, "--workers", 0, *arguments]
        assert main([str(one) for one in given]) == code
        return capsys.readouterr()

    return run


def test_the_command(call, straight, home, tmp_path):
    given = (
        "--methods",
        "random",
        "topk at=2 keep=0.6",
        "--at",
        2,
        "--rates",
        0.5,
        "--reducers",
        home / "tnt at=2 keep=0.5",
    )
    planned = json.loads(call(*given, "--dry-run", "--json").out)
    assert [one["done"] for one in planned["settings"]] == [False] * 4 and not (tmp_path / "cli.jsonl").exists()
    assert planned["settings"][1]["macs"] == straight[1].macs
    found = json.loads(call(*given, "--no-speed", "--json").out)
    rows = [ResultRow.from_json(json.dumps(row)) for row in found["rows"]]
    assert same(rows[:3], straight[:3]) and rows[3].setting.reducer == straight[9].setting.reducer
    planned = json.loads(call(*given, "--dry-run", "--json").out)
    assert [(one["done"], one["timed"]) for one in planned["settings"]] == [(True, False)] * 4
    assert [one["key"] for one in planned["settings"]] == [row.setting.key for row in rows]
    text = call(*given, "--no-speed").out
    assert "random drop: random at=2 keep=0.5" in text and "4 rows in" in text
    order = [line.split()[0] for line in text.splitlines()[2:6]]
    assert order == ["unpruned", "single", "single", "single"]
    assert "(done, not timed)" in call(*given, "--dry-run").out


def test_the_command_of_a_row_measures_it_again(straight, tmp_path):
    for row in straight[::4] + straight[8:12:2]:
        words = shlex.split(row.command)
        out = tmp_path / f"{row.setting.key}.jsonl"
        assert main([*[str(out) if word == "again.jsonl" else word for word in words[1:]], "--no-speed"]) == 0
        again = ResultsFile(out).rows()[row.setting.key]
        assert replace(timeless(again), name=row.name, scheme=row.scheme) == timeless(row)
    assert words[0] == "tntprune" and str(Path.cwd()) not in row.command


def test_a_command_with_nothing_but_a_model_measures_the_model(call, straight, tmp_path):
    call("--no-speed", "--limit", 4)
    (row,) = lines(tmp_path / "cli.jsonl")
    assert row.name == "unpruned" and row.images == 4


@pytest.mark.parametrize(
    ("given", "code", "word"),
    [
        (["--at", "3"], 2, "without --methods"),
        (["--methods", "nothing"], 2, "unknown method"),
        (["--reducers", "nowhere"], 1, "no such folder"),
        (["--limit", "0"], 2, "limit=0"),
        (["--batch-size", "0"], 2, "batch_size=0"),
        (["--device", "nowhere"], 2, "device"),
        (["--methods", "tnt"], 3, "left out: test_vit, tnt: tnt has to be trained"),
    ],
)
def test_mistakes(call, given, code, word):
    assert word in call(*given, "--no-speed", code=code).err


def test_several_models_need_names_of_their_weights(home, tmp_path, capsys):
    given = [
        "sweep",
        MODEL,
        "test_vit2",
        "--data",
        home / "photos",
        "--out",
        tmp_path / "x.jsonl",
        "--img-size",
        64,
        64,
    ]
    files = [home / f"{name}.safetensors" for name in (MODEL, "test_vit2")]
    assert main([*map(str, given), "--weights", str(files[0])]) == 2
    assert "expected MODEL=FILE" in capsys.readouterr().err
    named = [f"{MODEL}={files[0]}", f"test_vit2={files[1]}"]
    more = ["--methods", "random", "evit at=2", "--no-speed", "--limit", "4", "--reducers", f"{MODEL}={home / 'tnt'}"]
    assert main([*map(str, given), "--weights", *named, *more]) == 3  # test_vit2 has no CLS token
    assert [(row.setting.model, row.name) for row in lines(tmp_path / "x.jsonl")] == [
        (MODEL, "unpruned"), (MODEL, "random drop"), (MODEL, "EViT"), (MODEL, "TNT"), ("test_vit2", "unpruned"),
        ("test_vit2", "random drop"),
    ]  # fmt: skip


def test_configs_go_into_the_file_and_come_out_as_they_were(straight, home):
    for row, one in zip(straight[1:], requests_of(home), strict=True):
        if one.reducer is None:
            assert row.setting.config == json.loads(json.dumps(to_dict(one.config)))
    assert config_from_text("random at=2 keep=0.5") == Random(at=2, keep=0.5)
    assert shape_of(MODEL).num_classes == 1000
