"""Files for other runtimes say what the model says, or are refused in one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from unittest.mock import patch

import pytest
import timm
import torch
from PIL import Image

import conftest
import hf_models
import tntprune
from conftest import make, photos_for
from tntprune import ATS, TNT, AViT, Random, ToMe, TopK, reduce_, save
from tntprune.backbones.classnames import name_classes
from tntprune.backbones.digits_vit import digits_vit
from tntprune.cli.main import main
from tntprune.errors import UsageError, UserError
from tntprune.exporters.check import Pace, check, judge
from tntprune.exporters.export import described, export, reopen
from tntprune.exporters.formats import FORMATS
from tntprune.exporters.graph import Answering
from tntprune.exporters.samples import as_tensor, choose_photos, class_list

SUFFIX = {"onnx": "onnx", "openvino": "xml", "pt2": "pt2"}


def small(kind, depth=3, **changes):
    """A model of few blocks, for an export takes a time that grows with them."""
    with patch.dict(conftest.SMALL, depth=depth, **changes):
        return make(kind)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A small pruned model as a package, and the model."""
    model = reduce_(small("distilled"), TNT(at=2, keep=0.5, similar=25))
    path = tmp_path_factory.mktemp("written") / "small.pt2"
    return model, export(model, path, "pt2", indices=True)


def constant_counts(path):
    """Whether the K of every TopK is a constant, as some runtimes want it."""
    graph = pytest.importorskip("onnx").load(path).graph
    constants = {tensor.name for tensor in graph.initializer}
    constants |= {name for node in graph.node if node.op_type == "Constant" for name in node.output}
    ranked = [node for node in graph.node if node.op_type == "TopK"]
    return bool(ranked) and all(node.input[1] in constants for node in ranked)


def wide(*values):
    return pytest.param(*values, marks=pytest.mark.wide)


@pytest.mark.parametrize(
    ("to", "kind", "configs", "dynamic"),
    [
        ("onnx", "distilled", [TNT(at=1, keep=0.5, similar=9), ToMe(at=2, r=4)], True),
        ("openvino", "no_cls", [TNT(at=2, keep=0.5)], False),
        ("pt2", "layer_scale", [TopK(at=1, keep=0.7), ToMe(at=3, r=5)], True),
        wide("onnx", "distilled", [TNT(at=(1, 2, 4), keep=0.7, inside=True, metric="mean")], True),
        wide("onnx", "registers", [AViT(at=3)], False),
        wide("onnx", "plain", [ToMe(r=5)], True),
        wide("onnx", "registers", [TNT(at=(1, 2), keep=0.6, window=3), ToMe(at=3, r=5, window=3)], True),
        wide("openvino", "no_cls", [TNT(at=1, keep=0.6, window=3), ToMe(at=2, r=5, window=3)], False),
        wide("openvino", "plain", [Random(at=3)], True),
        wide("openvino", "no_cls", [ToMe(at=2, r=4), Random(at=3)], False),
    ],
)
def test_a_file_says_what_the_model_says(to, kind, configs, dynamic, tmp_path):
    pytest.importorskip({"onnx": "onnxscript", "openvino": "openvino", "pt2": "torch"}[to])
    deepest = max((at for config in configs for at in config.locations), default=0)
    model = reduce_(small(kind, depth=max(3, deepest + 1)), *configs)
    path = tmp_path / f"model.{SUFFIX[to]}"
    found = export(model, path, to, dynamic_batch=dynamic, indices=True, batch_size=1 if dynamic else 2)
    run, about = reopen(path)
    for batch in (1, 3) if dynamic else (2,):
        images = photos_for(model, batch)
        with torch.inference_mode():
            logits, kept = Answering(model, indices=True)(images)
            expected = model(images)
        told = run(images)
        torch.testing.assert_close(told[0], expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(logits, expected)
        assert torch.equal(told[1].sort().values, kept.sort().values)
    assert about["batch"] == ("dynamic" if dynamic else 2)
    assert [entry["name"] for entry in about["outputs"]] == ["logits", "kept"]
    assert about["outputs"][1]["shape"] == ["batch" if dynamic else 2, kept.shape[1]]
    assert set(tmp_path.iterdir()) == set(found.files)
    assert check(model, path, photos_for(model, 4)).problem is None
    assert to != "onnx" or constant_counts(path)


@pytest.mark.parametrize("to", ["pt2", wide("onnx"), wide("openvino")])
def test_a_last_block_for_prefix_tokens_alone(to, tmp_path):
    pytest.importorskip({"onnx": "onnxscript", "openvino": "openvino", "pt2": "torch"}[to])
    model = reduce_(small("distilled"), TNT(at=1, keep=0.5), last_block="prefix")
    whole = reduce_(small("distilled"), TNT(at=1, keep=0.5))
    images, path = photos_for(model, 2), tmp_path / f"model.{SUFFIX[to]}"
    export(model, path, to, dynamic_batch=True)
    run, about = reopen(path)
    with torch.inference_mode():
        torch.testing.assert_close(run(images)[0], whole(images), atol=1e-5, rtol=1e-4)
    assert about["macs"] == tntprune.macs(model).macs < tntprune.macs(whole).macs
    assert check(model, path, photos_for(model, 4)).problem is None
    with pytest.raises(UsageError, match="leaves no patch tokens at the end; expected one of the two"):
        export(model, path, to, indices=True)


def test_the_model_stays_as_it_is(written):
    model, _ = written
    assert next(model.parameters()).dtype == torch.float32 and next(model.parameters()).requires_grad
    assert type(model).__name__ == "ReducedVisionTransformerDistilled"


def test_what_one_has_to_know_lies_beside_it(written):
    model, found = written
    about = json.loads(described(found.path).read_text())
    assert found.files == (found.path, described(found.path))
    assert about["tntprune"] == tntprune.__version__ and about["versions"]["torch"]
    assert about["reduction"]["method"] == "tnt" and about["reduction"]["similar"] == 25
    assert about["macs"] == tntprune.macs(model).macs
    assert about["inputs"] == [{"name": "images", "shape": [1, 3, 32, 32], "dtype": "float32"}]
    assert about["preprocessing"]["input_size"] == [3, 32, 32] and len(about["preprocessing"]["mean"]) == 3
    assert about["format"] == "pt2" and about["dtype"] == "fp32"


def test_the_check_finds_a_file_of_another_model(written):
    model, found = written
    with torch.no_grad():
        other = reduce_(small("distilled"), TNT(at=2, keep=0.5, similar=25))
        other.head.bias.add_(1)
    assert check(model, found.path).problem is None
    told = check(other, found.path)
    assert told.problem is not None and "logits differ" in told.problem and told.same_kept == 100


def test_the_check_finds_other_tokens(tmp_path):
    model = reduce_(small("plain"), Random(at=2, keep=0.9))
    with torch.no_grad():
        model.head.weight.zero_()  # so that the logits say nothing
        model.head.bias.copy_(torch.arange(7))
    path = export(model, tmp_path / "m.pt2", "pt2", indices=True).path
    assert check(model, path).problem is None
    told = check(reduce_(model, Random(at=2, keep=0.9, order=1)), path)
    assert told.problem is not None and "other tokens" in told.problem


def test_a_broken_file_is_one_line(written, tmp_path):
    model, found = written
    path = tmp_path / "broken.pt2"
    path.write_bytes(found.path.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"broken\.pt2\.json: cannot be read"):
        check(model, path)
    described(path).write_bytes(described(found.path).read_bytes())
    with pytest.raises(UserError, match="pt2 cannot load it"):
        check(model, path)
    path.unlink()
    with pytest.raises(UserError, match="no such file"):
        check(model, path)


def test_half_precision_is_near(tmp_path):
    model = reduce_(small("plain"), TopK(at=2))
    path = export(model, tmp_path / "m.pt2", "pt2", "bf16").path
    told = check(model, path)
    assert told.problem is None and 1e-4 < told.relative < 0.5 and told.same_kept is None


@pytest.mark.slow
@pytest.mark.parametrize(("to", "weights"), [("openvino", "small.bin"), wide("onnx", None)])
def test_int8_is_near_and_small_and_says_on_what_it_was_checked_and_how_fast_it_is(
    to, weights, tmp_path, capfd, monkeypatch
):
    pytest.importorskip({"onnx": "onnxscript", "openvino": "nncf"}[to])
    for number in range(9):
        Image.effect_noise((32, 32), 40 + number).save(tmp_path / f"{number}.png")
    monkeypatch.setattr("tntprune.backbones.models.load_model", lambda *given: small("plain", depth=2))
    model = reduce_(small("plain", depth=2), TNT(at=1, keep=0.5))
    given = ["--to", to, "--dtype", "int8", "--data", str(tmp_path), "--check", "--json"]
    given += ["--reducer", str(save(model, tmp_path / "run").parent), "--out", str(tmp_path / f"small.{SUFFIX[to]}")]
    assert main(["export", "digits_vit", *given]) == 0
    about = json.loads(capfd.readouterr().out)
    told = about["check"]
    assert told["images"] == 2 and told["calibration_photos"] == about["calibration_images"] == 7
    assert told["held_out"] is True and told["problem"] is None
    assert told["pace"]["ms"] > 0 and told["pace"]["fp32_ms"] > 0
    whole = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert weights is None or (tmp_path / weights).stat().st_size < 0.5 * whole


def refused(kind, message, **options):
    model = options.pop("model", None) or make("plain")
    with pytest.raises(kind, match=message):
        export(model, options.pop("path", "never.onnx"), options.pop("to", "onnx"), **options)


def test_what_makes_no_sense_is_refused_by_name(tmp_path):
    refused(UsageError, "unknown format 'trt'; expected onnx, openvino, pt2", to="trt")
    refused(UsageError, r"never\.onnx: expected a file that ends in \.pt2", to="pt2")
    refused(UsageError, "onnx with bf16: .* expected fp16, or openvino", dtype="bf16")
    refused(UsageError, "pt2 with int8: .* expected onnx or openvino", to="pt2", path="a.pt2", dtype="int8")
    refused(UsageError, "onnx with fp8: unknown dtype; expected fp32, fp16", dtype="fp8")
    refused(UsageError, "both given", dynamic_batch=True, batch_size=4)
    refused(UsageError, "batch_size", batch_size=0)
    refused(UserError, "training mode; call model.eval", model=make("plain").train())
    refused(UserError, "bfloat16; expected fp32", model=make("plain").bfloat16())
    refused(
        UserError,
        "ats keeps another number .* expected a method with fixed counts",
        model=reduce_(make("plain"), ATS()),
    )
    refused(UserError, "is not supported", model=torch.nn.Linear(2, 2))


def test_int8_wants_photos_of_the_right_kind():
    pytest.importorskip("nncf")
    int8 = {"to": "openvino", "path": "a.xml", "dtype": "int8"}
    refused(UsageError, "int8 needs photos", **int8)
    refused(
        UserError, r"shape \(2, 3, 16, 16\); expected \(n, 3, 32, 32\)", calibration=torch.zeros(2, 3, 16, 16), **int8
    )
    refused(
        UserError,
        "2 calibration images; expected at least 4",
        calibration=torch.zeros(2, 3, 32, 32),
        batch_size=4,
        **int8,
    )
    refused(UserError, "no such folder", calibration="nowhere", **int8)


@pytest.mark.parametrize(("to", "package"), [("onnx", "onnxscript"), ("openvino", "openvino")])
def test_a_missing_extra_is_named(to, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    refused(
        UserError,
        rf"{package}, which cannot be imported .*pip install 'tntprune\[{to}\]'",
        to=to,
        path=f"a.{SUFFIX[to]}",
    )


def test_nothing_is_left_of_a_failure_and_an_older_file_stays(tmp_path, monkeypatch):
    path = tmp_path / "m.pt2"
    path.write_text("older")

    def fail(graph, file, *more):
        file.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(FORMATS, "pt2", FORMATS["pt2"]._replace(write=fail))
    refused(UserError, "cannot be written .No space left", model=small("plain"), to="pt2", path=path)
    assert path.read_text() == "older" and list(tmp_path.iterdir()) == [path]


def test_the_command(tmp_path, capfd, monkeypatch):
    """With another image size, and no path of this machine in what goes with the file."""
    save(reduce_(digits_vit(), TNT(at=2)), tmp_path / "deep" / "run")
    out = tmp_path / "digits.pt2"
    arguments = ["export", "digits_vit", "--to", "pt2", "--reducer", str(tmp_path / "deep" / "run")]
    arguments += ["--img-size", "24", "40", "--out", str(out), "--check", "--check-size", "4", "--indices", "--json"]
    assert main(arguments) == 0
    told = json.loads(capfd.readouterr().out)  # one object and nothing else, whatever the exporters say
    assert told["files"] == [str(out), f"{out}.json"] and told["model"] == "digits_vit"
    assert told["check"]["problem"] is None and told["check"]["same_kept"] == 100 and not told["check"]["photos"]
    text = described(out).read_text()
    about = json.loads(text)
    assert about["inputs"][0]["shape"] == [1, 1, 24, 40] and about["preprocessing"]["input_size"] == [1, 24, 40]
    assert about["reducer"] == "run" and str(tmp_path) not in text
    assert main(["export", "digits_vit", "--to", "openvino", "--dtype", "int8", "--out", "a.xml"]) == 2
    assert "--data DIR" in capfd.readouterr().err


def test_a_failing_check_is_an_error(tmp_path, capfd, monkeypatch):
    from tntprune.exporters import check as module

    monkeypatch.setattr(module, "TOLERANCE", -1.0)
    out = tmp_path / "digits.pt2"
    assert main(["export", "digits_vit", "--to", "pt2", "--out", str(out), "--check", "--check-size", "4"]) == 1
    assert "not what the model says: logits differ" in capfd.readouterr().err


def test_logits_that_are_no_numbers_are_never_right():
    wrong, right = torch.full((4, 7), torch.nan), torch.randn(4, 7)
    for dtype in ("fp32", "fp16"):
        for found, expected in ((wrong, right), (right, wrong), (wrong, wrong)):
            assert "no numbers" in (judge(dtype, False, found, expected, [], 1).problem or "")


def test_what_int8_is_measured_on_is_whole_batches():
    model, images = make("plain"), photos_for(make("plain"), 7)
    assert torch.equal(as_tensor(model, images, 128, 3), images[:6])
    assert torch.equal(as_tensor(model, images.split(2), 5, 2), images[:4])
    assert torch.equal(as_tensor(model, images, 5, 1), images[:5])


@pytest.mark.parametrize("to", ["pt2", wide("onnx"), wide("openvino")])
def test_an_embedder_names_its_output_by_what_it_is(to, tmp_path):
    pytest.importorskip({"onnx": "onnxscript", "openvino": "openvino", "pt2": "torch"}[to])
    model = reduce_(small("plain", num_classes=0), ToMe(at=2, r=4))
    path = export(model, tmp_path / f"m.{SUFFIX[to]}", to).path
    run, about = reopen(path)
    assert (
        about["outputs"] == [{"name": "embedding", "shape": [1, 32], "dtype": "float32"}] and about["classes"] is None
    )
    images = photos_for(model, 1)
    torch.testing.assert_close(run(images)[0], model(images), atol=1e-5, rtol=1e-4)
    told = check(model, path, photos_for(model, 4))
    assert told.problem is None and told.agreement is None and "embeddings differ by at most" in str(told)
    if to == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        assert [output.name for output in session.get_outputs()] == ["embedding"]
    if to == "openvino":
        import openvino

        assert openvino.Core().read_model(str(path)).outputs[0].get_names() == {"embedding"}


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["clip_vision", "siglip_vision", "owlvit_vision"])
def test_an_inner_value_may_have_the_name_of_the_output(kind, tmp_path):
    pytest.importorskip("onnxscript")
    model = reduce_(hf_models.make(kind), ToMe(at=2, r=4))  # its positions are an nn.Embedding
    path, images = export(model, tmp_path / "m.onnx").path, hf_models.photos_for(kind)[:1]
    run, _ = reopen(path)
    torch.testing.assert_close(run(images)[0], hf_models.used(model(images)), atol=1e-5, rtol=1e-4)


def test_the_names_of_the_classes_lie_beside_the_file(written, tmp_path):
    assert written[1].about["classes"] is None  # seven classes that nobody named
    model = small("plain", depth=1)
    name_classes(model, list("abcdefg"))
    about = export(model, tmp_path / "m.pt2", "pt2").about
    assert about["classes"] == list("abcdefg")
    imagenet = class_list(timm.create_model("vit_tiny_patch16_224"))
    assert len(imagenet) == 1000 and imagenet[0].startswith("n01440764 tench")
    name_classes(model, ["a", "b"])  # of other weights
    assert class_list(model) is None


def judged(relative, reduced, correlation_kept=True):
    """The verdict on an fp32 file of 60 images, in which as many differ by so much of their spread."""
    right = torch.randn(60, 100, generator=torch.Generator().manual_seed(0))
    found = right.clone()
    for image, amount in enumerate(relative):
        found[image, 3] += amount * right[image].std(correction=0)
        if not correlation_kept:
            found[image] = found[image].flip(0)
    return judge("fp32", True, found, right, [], 2 if reduced else 0)


def test_the_rule_of_the_check_is_the_one_that_is_printed():
    exact = judged([5e-4], reduced=False)
    assert exact.problem is None and exact.exceptions == 0 and "rule: fp32: within 0.001 of the spread\n" in str(exact)
    assert "in 1 of 60 images" in judged([0.019], reduced=False).problem  # nothing can go the other way
    border = judged([0.019, 5e-4], reduced=True)
    assert border.problem is None and border.exceptions == 1 and border.relative == pytest.approx(0.019, rel=1e-3)
    assert border.usual == pytest.approx(5e-4, rel=0.01)
    assert "except in 2 of 60 images" in str(border) and "exceptions: 1 of 60 images; the others" in str(border)
    assert "in 3 of 60 images, 2 excepted" in judged([0.019] * 3, reduced=True).problem
    assert "expected at least 0.9 of an exception" in judged([0.0], reduced=True, correlation_kept=False).problem


def test_photos_for_calibration_and_check_are_never_the_same(tmp_path):
    for number in range(112):
        (tmp_path / f"{number}.png").touch()
    checked, used = choose_photos(tmp_path, 64, 128)
    assert (len(checked), len(used)) == (28, 84) and not set(checked) & set(used)
    for first, second, expected in ((8, 16, (8, 16)), (0, 500, (0, 112))):
        assert tuple(map(len, choose_photos(tmp_path, first, second))) == expected
    for photo in [*tmp_path.iterdir()][2:]:
        photo.unlink()
    checked, used = choose_photos(tmp_path, 64, 128)
    assert len(checked) == len(used) == 1 and checked != used


def test_a_slower_file_is_said_to_be_slower():
    slow, fast = Pace("int8", 12.0, 10.0, 0.83), Pace("int8", 5.0, 10.0, 2.0)
    assert slow.slower and str(slow).endswith("0.83 times as fast. int8 is slower than fp32 here: use --dtype fp32")
    assert not fast.slower and str(fast).endswith("2.00 times as fast")


def test_a_name_that_is_not_utf8_is_refused_before_the_work(tmp_path):
    refused(UserError, r"c\\xff\.pt2: not UTF-8", path=tmp_path / os.fsdecode(b"c\xff.pt2"), to="pt2")
    folder = tmp_path / os.fsdecode(b"\xff")
    refused(UserError, "not UTF-8, and the runtimes cannot open", path=folder / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_not_blamed_on_the_model(tmp_path, monkeypatch):
    room = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room)
    refused(
        UserError,
        "cannot be written .no space left: 0.1 MB needed, 0.0 MB free",
        model=small("plain", depth=1),
        to="pt2",
        path=tmp_path / "m.pt2",
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name != "posix", reason="there are no such limits")
def test_a_disk_that_fills_up_meanwhile_does_not_end_the_process(tmp_path):
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(UserError) as caught:
            export(small("plain", depth=1), tmp_path / "m.pt2", "pt2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "m.pt2: cannot be written (File too large)" in str(caught.value) and not list(tmp_path.iterdir())


def test_what_a_killed_export_left_is_removed_by_the_next_one(tmp_path):
    model, path = small("plain", depth=1), tmp_path / "m.pt2"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left, other = tmp_path / f".m.pt2.{gone.pid}.tmp", tmp_path / f".n.pt2.{gone.pid}.tmp"
    running = tmp_path / f".m.pt2.{os.getppid()}.tmp"
    for folder in (left, other, running):
        folder.mkdir()
        (folder / "m.pt2").touch()
    export(model, path, "pt2")
    assert {file.name for file in tmp_path.iterdir()} == {"m.pt2", "m.pt2.json", other.name, running.name}
