from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tntprune
from conftest import make, photos_for
from tntprune import ATS, TNT, AViT, EViT, ToMe
from tntprune.backbones.attach import reduction_of
from tntprune.bench import backends
from tntprune.bench.benchmark import bench, merged
from tntprune.bench.candidates import candidates, described
from tntprune.bench.latency_curve import CurvePoint, curve_table, latency_curve
from tntprune.bench.pipeline import throughput, throughput_table
from tntprune.bench.rows import BenchRow, speedup, table, with_speedups
from tntprune.cli.main import main
from tntprune.data.folders import all_photos
from tntprune.methods import METHODS, Combination
from tntprune.methods.text import config_from_text
from tntprune.reduce import reduce_
from tntprune.report.bench_plot import plot
from tntprune.system import clock
from tntprune.system.clock import Watch, busy_line, in_turns, peak_memory, summary

CPU = torch.device("cpu")
ROW = BenchRow("tnt", "tnt", 0.5, 8, "fp32", "eager", "cpu", 5.0, 4.0, 6.0, 1600.0, 1.6, rounds_ms=(5.0, 4.0, 6.0))
BASE = replace(ROW, method="unpruned", median_ms=10.0, rounds_ms=(10.0, 8.0, 12.0))


def test_every_candidate_has_its_bound_and_shares_the_weights():
    model = reduce_(make("plain"), TNT(at=2, keep=0.25))
    trained = reduce_(make("plain"), TNT(at=3, keep=0.5))
    found = candidates(model, [TNT(at=2, keep=0.5), EViT(at=2, keep=0.5), ToMe(r=4)], [trained])
    names = [one.method for one in found]
    assert names == [
        "unpruned", "tnt", "bound", "random", "tnt", "bound", "random", "evit", "bound", "random",
        "tome", "bound", "random",
    ]  # fmt: skip
    for one in found:
        if one.bound is not None:
            assert found[one.bound].method == "bound" and found[one.bound].tokens == one.tokens
    assert [one.keep for one in found if one.method in METHODS and one.method != "random"] == [0.5, 0.5, 0.5, None]
    assert found[0].mac_ratio == 1 and found[1].model is trained
    weight = found[0].model.blocks[0].attn.qkv.weight
    others = [one for one in found[4:] if one.model is not trained]
    assert all(one.model.blocks[0].attn.qkv.weight is weight for one in others)
    assert isinstance(reduction_of(model).config, TNT)  # the model that was given is as it was


def test_methods_with_the_same_counts_share_a_bound():
    found = candidates(make("plain"), [TNT(at=2, keep=0.5), TNT(at=2, keep=0.5, scorer="mlp")])
    assert [one.method for one in found] == ["unpruned", "tnt", "bound", "random", "tnt"]
    assert found[1].bound == found[4].bound == found[3].bound == 2


def test_the_bound_of_a_short_last_block_is_as_short():
    whole = reduce_(make("plain"), TNT(at=2, keep=0.5))
    found = candidates(make("plain"), [TNT(at=2, keep=0.5)], [whole], last_block="prefix")
    assert [one.method for one in found] == ["unpruned", *["tnt", "bound", "random"] * 2]
    assert found[4].bound == 5 and found[4].options == "tnt at=2 keep=0.5 last_block=prefix"
    assert found[4].mac_ratio > found[1].mac_ratio and found[5].mac_ratio > found[4].mac_ratio > 1
    assert all(reduction_of(one.model).last_block == "prefix" for one in found[4:])


@pytest.mark.parametrize("name", list(METHODS))
def test_a_config_as_a_line_is_read_back_as_itself(name):
    for config in (METHODS[name](), METHODS[name](at=2, keep=0.3)):
        assert config_from_text(described(config)) == config
    assert described(Combination(parts=(TNT(at=2), ToMe(at=4, r=3)))) == "tnt at=2 then tome at=4 r=3"


def shallow() -> torch.nn.Module:
    """Three blocks."""
    model = make("plain")
    model.blocks = model.blocks[:3]
    return model


def test_a_run_has_every_setting_and_right_ratios():
    model = shallow()
    found = bench(
        model, [TNT(at=2, keep=0.5), ToMe(r=5)], batch_sizes=(1, 3), dtypes=("fp32", "bf16"), rounds=4, progress=False
    )
    assert len(found.results) == 2 * 2 * 7 and not found.failed
    for row in found.results:
        assert 0 < row.p10_ms <= row.median_ms <= row.p90_ms
        assert row.images_per_s == pytest.approx(1000 * row.batch / row.median_ms)
        same = [r for r in found.results if (r.batch, r.dtype) == (row.batch, row.dtype)]
        base = next(r for r in same if r.method == "unpruned")
        pairs = sorted(theirs / ours for theirs, ours in zip(base.rounds_ms, row.rounds_ms))
        assert len(row.rounds_ms) == 4 and row.speedup == pytest.approx((pairs[1] + pairs[2]) / 2)
        if row.method in ("tnt", "random") and row.options == "tnt at=2":
            bound = next(r for r in same if r.method == "bound" and r.options == "tnt at=2")
            pairs = sorted(theirs / ours for theirs, ours in zip(bound.rounds_ms, row.rounds_ms))
            assert row.bound_ratio == pytest.approx((pairs[1] + pairs[2]) / 2)
        assert row.peak_mib is not None and row.peak_mib > 0
    tnt = next(row for row in found.results if row.method == "tnt")
    cost = tntprune.macs(reduce_(shallow(), TNT(at=2, keep=0.5)))
    assert tnt.mac_ratio == pytest.approx(cost.base_macs / cost.macs) and tnt.keep == 0.5
    assert "batch 3, bf16, cpu" in str(found) and found.stamp in str(found)
    assert not any(hasattr(model, name) for name in ("reduction",))


def test_what_gives_something_else_is_not_timed(monkeypatch):
    def spoilt(model, backend):
        return (lambda images: model(images)) if backend == "eager" else (lambda images: model(images) + 1)

    monkeypatch.setattr("tntprune.bench.benchmark.prepared", spoilt)
    monkeypatch.setattr("tntprune.bench.benchmark.first_run", lambda run, images, backend: run(images))
    found = bench(make("plain"), [TNT(at=2)], batch_sizes=(2,), backends=("eager", "compile"), rounds=3, progress=False)
    assert {row.backend for row in found.results} == {"eager"} and len(found.failed) == 4
    assert "gives something else than the eager model" in found.failed[0].reason and "not timed" in str(found)


def test_what_does_not_compile_is_told_and_gets_no_speedup(monkeypatch):
    real = backends.first_run

    def first(run, images, backend):
        if backend == "compile":
            raise tntprune.UserError("does not compile: no compiler")
        return real(run, images, backend)

    monkeypatch.setattr("tntprune.bench.benchmark.first_run", first)
    found = bench(make("plain"), [TNT(at=2)], batch_sizes=(2,), backends=("eager", "compile"), rounds=3, progress=False)
    assert [one.reason for one in found.failed] == ["does not compile: no compiler"] * 4
    with pytest.raises(tntprune.UserError, match="nothing could be timed: does not compile"):
        bench(make("plain"), [], batch_sizes=(2,), backends=("compile",), rounds=3, progress=False)


class Narrow(torch.nn.Module):
    """Cuts off all but the first columns."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, images):
        return 2 * images[..., : self.count]


@pytest.mark.parametrize("kind", ["small", pytest.param("reduced", marks=pytest.mark.wide)])
def test_compiled_whole_with_one_graph_each(kind, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    images = photos_for(make("plain"))
    models = [Narrow(count) for count in range(1, 11)]  # more than Dynamo compiles for one code object
    if kind == "reduced":
        models += [one.model for one in candidates(shallow(), [TNT(at=1, tokens=20)])[1:2]]
    with torch.inference_mode():
        for one in models:
            run = backends.prepared(one, "compile")
            torch.testing.assert_close(backends.first_run(run, images, "compile"), one(images))
    torch.compiler.reset()


def test_a_silent_fallback_is_noticed(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda run, **options: run)
    run = backends.prepared(make("plain"), "compile")
    with pytest.raises(tntprune.UserError, match="was not compiled whole: 0 graphs"):
        backends.first_run(run, photos_for(make("plain")), "compile")


def test_a_graph_break_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))

    class Breaks(torch.nn.Module):
        def forward(self, x):
            torch._dynamo.graph_break()
            return x

    with pytest.raises(tntprune.UserError, match="does not compile"):
        backends.first_run(backends.prepared(Breaks(), "compile"), torch.ones(1), "compile")
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.wide
def test_inductor_gives_what_eager_gives():
    model = reduce_(shallow(), TNT(at=1, keep=0.5, similar=5))
    images = photos_for(model, 2)
    with torch.inference_mode():
        run = backends.prepared(model, "compile")
        found = backends.difference(backends.first_run(run, images, "compile"), model(images))
    assert found < 1e-4
    torch.compiler.reset()


def test_speedups_between_unlike_things_are_refused():
    base = BASE
    assert speedup(ROW, base) == 2
    slow = replace(ROW, rounds_ms=(5.0, 40.0, 6.0))  # one round in which the machine was slow for this one alone
    assert speedup(slow, base) == 2
    for name, value in {"dtype": "bf16", "device": "cuda", "batch": 1}.items():
        with pytest.raises(tntprune.UserError, match=f"a speed-up between {name}"):
            speedup(ROW, replace(base, **{name: value}))
    with pytest.raises(tntprune.UserError, match="a speed-up against random"):
        speedup(ROW, replace(base, method="random"))


def test_a_backend_that_the_unpruned_model_was_not_timed_in_gets_no_speedup():
    base = BASE
    rows, notes = with_speedups([base, ROW, replace(ROW, backend="compile"), replace(ROW, dtype="bf16")])
    assert [row.speedup for row in rows] == [1, 2, None, None]
    assert len(notes) == 2 and "the unpruned model was not timed there" in notes[0]
    faster = replace(base, backend="compile", median_ms=4.0, rounds_ms=(4.0, 3.2, 4.8))
    rows, notes = with_speedups([base, faster, ROW])
    assert [row.speedup for row in rows] == pytest.approx([0.4, 1, 0.8]) and rows[2].against == "compile" and not notes
    assert "1/1.60        -" in table(with_speedups([replace(ROW, backend="compile")])[0])


def test_a_row_is_read_back_also_from_when_the_bound_was_the_oracle():
    row = replace(ROW, bound_ratio=0.9, keep=(0.5, 0.7))
    told = json.loads(json.dumps(asdict(row)))
    assert BenchRow.read(told) == row
    told = {"oracle_ratio" if name == "bound_ratio" else name: value for name, value in told.items()}
    assert BenchRow.read({**told, "method": "oracle"}) == replace(row, method="bound")


def test_cuda_graphs_need_a_gpu():
    with pytest.raises(tntprune.UsageError, match="backend cudagraphs: the device is cpu"):
        bench(make("plain"), [TNT(at=2)], backends=("cudagraphs",))
    with pytest.raises(tntprune.UsageError, match="expected one of eager, compile, cudagraphs"):
        bench(make("plain"), [TNT(at=2)], backends=("jit",))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rounds": 1}, "rounds=1: expected a whole number, 3 or larger"),
        ({"batch_sizes": (0,)}, "batch_sizes=0: expected a whole number, 1 or larger"),
        ({"batch_sizes": ()}, "batch_sizes: none given; expected at least one"),
        ({"dtypes": ()}, "dtypes: none given"),
        ({"backends": ()}, "backends: none given"),
        ({"dtypes": ("int8",)}, "dtype 'int8': expected one of fp32, bf16, fp16"),
    ],
)
def test_what_cannot_be_timed_is_refused(given, told):
    for measure in (partial(bench, configs=[TNT(at=2)]), latency_curve):
        with pytest.raises(tntprune.UsageError, match=told):
            measure(make("plain"), **given)
    with pytest.raises(tntprune.UsageError, match="images: none given"):
        bench(make("plain"), [], images=torch.zeros(0, 3, 32, 32))


def test_cuda_graphs_that_inductor_leaves_out_are_noticed(monkeypatch):
    from torch._dynamo.utils import counters

    def compiled(run, **options):
        def called(images):
            counters["stats"]["unique_graphs"] += not calls
            counters["inductor"]["cudagraph_skips"] += skips and len(calls) == 1  # where the graph would be recorded
            calls.append(images)
            return run(images)

        return called

    monkeypatch.setattr(torch, "compile", compiled)
    images = photos_for(make("plain"))
    for skips in (False, True):
        calls = []
        run = backends.prepared(make("plain"), "cudagraphs")
        if skips:
            with pytest.raises(tntprune.UserError, match="compiled without CUDA graphs"):
                backends.first_run(run, images, "cudagraphs")
        else:
            assert torch.is_tensor(backends.first_run(run, images, "cudagraphs"))
        assert len(calls) == 3  # run, recorded, replayed


def test_no_peak_is_told_of_a_cuda_graph(monkeypatch):
    monkeypatch.setattr("tntprune.bench.benchmark.check_settings", lambda *settings: None)
    monkeypatch.setattr("tntprune.bench.benchmark.prepared", lambda model, backend: model)
    monkeypatch.setattr("tntprune.bench.benchmark.first_run", lambda run, images, backend: run(images))
    options = {"batch_sizes": (1,), "backends": ("eager", "cudagraphs"), "rounds": 3, "progress": False}
    found = bench(make("plain"), [], **options).results
    assert [row.peak_mib is None for row in found] == [False, True]


@given(st.lists(st.floats(0.1, 1e4), min_size=3, max_size=50))
@settings(max_examples=50, deadline=None)
def test_a_summary_is_ordered_and_within_what_was_measured(values):
    found = summary(values)
    ordered = (min(values), found.p10, found.median, found.p90, max(values))
    assert all(a <= b * (1 + 1e-12) for a, b in zip(ordered, ordered[1:]))


def test_calls_take_turns_and_each_begins_once():
    order = []
    calls = [partial(order.append, name) for name in "abc"]
    in_turns(calls, 3, CPU, warmup=3, progress=False)
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert len(rounds) == 6 and all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert {one[0] for one in rounds[3:]} == {"a", "b", "c"}


def test_times_are_in_milliseconds():
    fast, slow = in_turns([lambda: None, lambda: time.sleep(0.02)], 5, CPU, progress=False)
    assert fast.median < 15 < slow.median < 500


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc returns large blocks, and learns not to")
def test_memory_is_kept_from_call_to_call_once_something_is_timed():
    lines = """
        import resource, torch
        from tntprune.system.clock import in_turns
        in_turns([lambda: None], 3, torch.device("cpu"), progress=False)
        def faults(size):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            several = [torch.ones(size << 20, dtype=torch.uint8) for _ in range(5)]
            del several
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        print([[faults(size) for _ in range(10)][-1] for size in (5, 7, 9, 11)])
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_"))}
    program = [sys.executable, "-c", textwrap.dedent(lines)]
    found = json.loads(subprocess.run(program, env=kept, check=True, capture_output=True).stdout)
    assert max(found) < 100, found  # without, it is thousands in most runs


def test_peak_memory_counts_what_is_alive_at_a_time(capfd):
    def call():
        first = torch.ones(2**18)  # 1 MiB
        second = first + 1
        del first
        return second + 1

    assert peak_memory(call, CPU) == pytest.approx(2 * 2**20, rel=0.05)
    assert capfd.readouterr().err == ""


def test_a_busy_machine_is_told():
    watch = Watch()
    assert watch.others() is None  # it has not watched
    stop = threading.Event()
    worker = threading.Thread(target=lambda: [sum(range(1000)) for _ in iter(stop.is_set, True)])
    worker.start()
    with watch.on():
        time.sleep(0.5)
    stop.set()
    worker.join()
    if watch.others() is None:
        pytest.skip("this system does not tell")
    assert watch.others() < 50  # this process's own work is not others'
    assert busy_line(0.05) is None and busy_line(None) is None
    assert "other programs used 1.5 processors" in busy_line(1.5)


def test_others_are_what_is_used_beside_this_process(monkeypatch):
    marks = iter([(0.0, 9.0), (4.0, 13.0), (100.0, 12.0), (101.0, 18.0)])  # wall clock, and what others used
    monkeypatch.setattr(clock.Watch, "_now", staticmethod(lambda: next(marks)))
    watch = Watch()
    with watch.on():
        pass
    assert watch.others() == pytest.approx(1.0)
    with watch.on():  # what was meanwhile, such as compiling, is left out
        pass
    assert watch.others() == pytest.approx((4 + 6) / (4 + 1))
    monkeypatch.setattr(clock.Watch, "_now", staticmethod(lambda: None))
    with watch.on():
        pass
    assert watch.others() is None


def test_methods_whose_tokens_differ_are_marked():
    found = bench(make("plain"), [ATS(at=2, keep=0.5), AViT(at=2)], batch_sizes=(2,), rounds=3, progress=False)
    marked = {row.method: row.variable for row in found.results if row.method in ("ats", "avit")}
    assert marked == {"ats": True, "avit": False} and any("differs from image to image" in note for note in found.notes)


def test_a_latency_curve_goes_up_to_all_tokens():
    points = latency_curve(make("plain"), counts=(4, 16), batch_sizes=(2,), rounds=3, progress=False)
    assert [point.tokens for point in points] == [4, 16, 64] and points[-1].time_share == 1
    assert points[0].mac_share < points[1].mac_share < points[2].mac_share == 1
    assert len(latency_curve(make("plain"), batch_sizes=(1,), rounds=3, progress=False)) == 16
    assert curve_table(points).count("\n") == 3
    with pytest.raises(tntprune.UsageError, match="only 64 patch tokens"):
        latency_curve(make("plain"), counts=(65,), progress=False)


def photos(folder, count=3):
    from PIL import Image

    folder.mkdir()
    for number in range(count):
        Image.new("RGB", (40, 40), (number * 20, 0, 0)).save(folder / f"{number}.png")
    return all_photos(folder)


def test_loader_and_model_are_measured_apart(tmp_path):
    models = [one for one in candidates(make("test_vit"), [TNT(at=2)]) if one.method in ("unpruned", "tnt")]
    found = throughput(models, photos(tmp_path / "photos"), batch=2, workers=0, batches=2)
    assert [one.method for one in found] == ["unpruned", "tnt"]
    for one in found:
        slower = min(one.loader_images_per_s, one.model_images_per_s)
        assert 0 < one.end_to_end_images_per_s < 1.5 * slower
        assert one.bound_by == ("loader" if slower == one.loader_images_per_s else "model")
    assert "bound by" in throughput_table(found)
    (tmp_path / "photos" / "bad.png").write_bytes(b"no picture")
    with pytest.raises(tntprune.UserError, match=r"bad\.png"):
        throughput(models, all_photos(tmp_path / "photos"), batch=2, workers=0, batches=2)


class Slow(torch.utils.data.Dataset):
    """Photos of which a process reads twenty in a second."""

    def __init__(self, photos, transform, mode):
        self.photos = photos

    def __len__(self):
        return len(self.photos)

    def __getitem__(self, position):
        time.sleep(0.05)
        return torch.zeros(3, 32, 32), 0, position


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_what_was_read_ahead_is_not_the_loaders_rate(tmp_path, monkeypatch):
    monkeypatch.setattr("tntprune.bench.pipeline.Photos", Slow)
    models = candidates(make("plain"), [])
    (found,) = throughput(models, photos(tmp_path / "photos"), batch=1, workers=4, batches=4)
    assert 20 < found.loader_images_per_s < 1.4 * 80 and found.end_to_end_images_per_s < 1.4 * 80


def test_a_plot_is_a_picture_and_other_endings_are_refused(tmp_path):
    beside = [replace(ROW, method=name) for name in ("bound", "random")]
    rows, _ = with_speedups([BASE, ROW, *beside, *(replace(one, batch=2) for one in (BASE, ROW))])
    points = [CurvePoint(n, 1, "fp32", "eager", "cpu", 1.0, 0.9, 1.1, n / 64, n / 64) for n in (4, 64)]
    plot(tmp_path / "a.png", rows, points, "model", "a machine")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    plot(tmp_path / "a.svg", rows, [], "model", "a machine")
    assert "of bound" not in (tmp_path / "a.svg").read_text() and "<svg" in (tmp_path / "a.svg").read_text()
    with pytest.raises(tntprune.UserError, match=r"a picture of kind txt; expected .png"):
        plot(tmp_path / "a.txt", rows, [], "model", "a machine")


def test_the_command(tmp_path, capsys):
    photos(tmp_path / "photos")
    code = main([
        "bench", "digits_vit", "--method", "tnt", "--at", "2", "--rates", "0.5", "0.25", "--also", "tome at=2,3 r=4",
        "--batch-sizes", "1", "--rounds", "3", "--latency-curve", "--data", str(tmp_path / "photos"), "--workers", "0",
        "--plot", str(tmp_path / "bench.png"), "--json",
    ])  # fmt: skip
    told = json.loads(capsys.readouterr().out)
    assert code == 0 and (tmp_path / "bench.png").exists()
    wanted = {
        "method", "keep", "batch", "dtype", "backend", "device", "median_ms", "p10_ms", "p90_ms", "images_per_s",
        "mac_ratio", "speedup", "bound_ratio",
    }  # fmt: skip
    assert all(wanted <= set(row) for row in told["results"])
    rates = [(row["method"], row["keep"]) for row in told["results"] if row["method"] in ("tnt", "tome")]
    assert rates == [("tnt", 0.5), ("tnt", 0.25), ("tome", None)]  # which has a number of its own
    assert len(told["curve"]) == 16 and told["pipeline"][0]["method"] == "unpruned"
    assert told["threads"] == torch.get_num_threads() and "tntprune" in told["stamp"]


def test_the_command_with_a_trained_run(tmp_path, capsys):
    from tntprune.backbones.models import load_model

    model = reduce_(load_model("digits_vit"), TNT(at=2, keep=0.5))
    tntprune.save(model, tmp_path / "run")
    arguments = ["bench", "digits_vit", "--reducer", str(tmp_path / "run"), "--batch-sizes", "2", "--rounds", "3"]
    assert main([*arguments, "--rates", "0.5", "0.3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["keep"] for row in told["results"] if row["method"] == "tnt"] == [0.5, 0.3]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "of bound" in text and "unpruned" in text and "tnt at=2" in text


def test_several_devices_are_one_benchmark():
    first = bench(make("plain"), [TNT(at=2)], batch_sizes=(1,), rounds=3, progress=False)
    second = replace(
        first, results=[replace(row, device="cuda:0") for row in first.results], others=2.0, stamp="a GPU", notes=["n"]
    )
    both = merged([first, second])
    assert len(both.results) == 8 and both.stamp == f"{first.stamp} | a GPU" and both.others == 2.0
    assert "batch 1, fp32, cpu" in str(both) and "batch 1, fp32, cuda:0" in str(both)


def test_another_image_size(capsys):
    arguments = ["--img-size", "48", "96", "--batch-sizes", "1", "--rounds", "3", "--latency-curve", "--json"]
    assert main(["bench", "digits_vit", *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["curve"][-1]["tokens"] == 6 * 12


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--rounds", "2"], "rounds=2: expected a whole number from 3"),
        (["--rates", "50"], "rates=50: expected a number above 0 to 1"),
        (["--batch-sizes", "0"], "batch_sizes=0"),
        (["--backends", "cudagraphs"], "expected --device cuda"),
        (["--also", "tomme"], "unknown method 'tomme'"),
        (["--keep", "0.5"], "--keep was given without --method"),
        (["--threads", "0"], "threads"),
        (["--device", "cpu", "nothing"], "device 'nothing' cannot be used"),
        (["--data", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--dtypes", "int8"], "dtypes"),
    ],
)
def test_wrong_usage_is_one_line(arguments, told, capsys):
    assert main(["bench", "digits_vit", *arguments]) in (1, 2)
    error = capsys.readouterr().err.strip()
    assert told in error and error.count("\n") == 0
