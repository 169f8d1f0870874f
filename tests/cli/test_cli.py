from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from conftest import make
from tntprune import __version__
from tntprune.backbones.digits_vit import WEIGHTS
from tntprune.cli import main as cli
from tntprune.cli.commands import COMMANDS
from tntprune.cli.main import main
from tntprune.demo.digits import scans, scatter
from tntprune.errors import UserNote
from tntprune.methods import METHODS, TNT, options
from tntprune.reduce import reduce_
from tntprune.serialization.checkpoint import save
from tntprune.system.storage import read_metadata, read_weights

COUNT = 40
TRAIN = ["--at", "2", "--tokens", "16", "--batch-size", "8", "--workers", "0"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Forty cluttered digits as PNGs, in ten class folders."""
    folder = tmp_path_factory.mktemp("digits")
    images, labels = scans("test")
    chosen = torch.cat([(labels == digit).nonzero()[: COUNT // 10, 0] for digit in range(10)])
    canvas, labels = scatter(images[chosen], labels[chosen], torch.Generator().manual_seed(0))
    for number, (image, label) in enumerate(zip(canvas, labels.tolist())):
        (folder / f"digit{label}").mkdir(exist_ok=True)
        Image.fromarray(image[0].mul(255).round().byte().numpy()).save(folder / f"digit{label}" / f"{number:02}.png")
    return folder


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory):
    """The folder of a short training."""
    out = tmp_path_factory.mktemp("trained") / "run"
    assert main(["train", "digits_vit", "--data", str(digits), "--out", str(out), "--epochs", "2", *TRAIN]) == 0
    return out


@pytest.fixture
def call(capsys):
    """Run a command in this process: its exit code, standard output and standard error."""

    def run(*arguments):
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()

    return run


def start(*arguments, stdout=subprocess.PIPE, **environment):
    """A process of its own and its children, which get signals together as in a terminal."""
    command = [sys.executable, "-m", "tntprune", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.Popen(
        command, env=environment, text=True, stdout=stdout, stderr=subprocess.PIPE, start_new_session=True
    )


def finish(process):
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


def is_one_line(err):
    return err.startswith("tntprune: ") and err.count("\n") == 1 and err.endswith("\n")


# Help


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(call, command):
    code, out, err = call(command, "--help")
    assert (code, err) == (0, "")
    assert f"usage: tntprune {command}" in out and ("--json" in out or command == "app")  # which only serves


def test_help_shows_the_options_of_the_method_that_is_named_and_else_those_of_all_methods(call):
    def shown(*arguments):
        return set(re.findall(r"--[a-z][a-z-]*", call("macs", *arguments, "--help")[1]))

    assert {"--keep", "--then"} <= shown() and not {"--decreasing", "--how"} & shown()
    assert shown("--method", "unknown") == shown()
    for tome in (("--method", "tome"), ("--method=tome",)):
        assert {"--keep", "--decreasing"} <= shown(*tome) and "--how" not in shown(*tome)
    assert call("macs", "digits_vit", "--how", "drop", "--method", "tnt")[0] == 0  # hidden flags are flags


def test_help_lists_the_commands_and_exit_codes(call):
    for arguments in ([], ["--help"], ["-h"]):
        code, out, err = call(*arguments)
        assert (code, err) == (0, "")
        assert all(command in out for command in COMMANDS)
        assert "Exit codes: 0 done" in " ".join(out.split())


@pytest.mark.parametrize("method", METHODS)
def test_every_option_of_every_method_is_a_flag(call, method):
    words = " ".join(call("eval", "--method", method, "--help")[1].replace("│", " ").split())
    assert "--keep FLOAT..." in words and "share of the patch tokens kept at each location (0.5 for" in words
    for option in options(METHODS[method]):
        assert f"--{option.replace('_', '-')} " in words


def test_an_option_of_several_methods_takes_the_words_of_all_and_names_them(call):
    words = " ".join(call("eval", "--method", "tnt", "--help")[1].replace("│", " ").split())
    assert "--similar INT" in words and "for being similar to a kept one [tnt, zerotprune]" in words
    assert "--objective ce|kl|both" in words


def test_version(call):
    assert call("--version") == (0, f"tntprune {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--version"], {"torch", "timm", "transformers"}),
        (["--help"], {"timm", "torchvision", "transformers"}),  # the methods, which have the flags, are torch's modules
        (["train", "--help"], {"timm", "torchvision", "transformers"}),
        (["macs", "--help"], {"timm", "torchvision", "transformers"}),
    ],
)
def test_help_and_version_load_little(arguments, heavy):
    code = (
        "import sys, tntprune.cli.main as c\n"
        f"try: c.main({arguments})\n"
        "except SystemExit: pass\n"
        f"print({heavy} & {{*sys.modules}}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "set()\n"


# MACs and info


def test_macs_of_the_paper(call):
    code, out, _ = call(
        "macs", "deit_small_distilled_patch16_224", "--method", "tnt", "--at", 3, "--keep", 0.5, "--similar", 25
    )
    assert code == 0 and out.startswith("2.87 GMACs instead of 4.63\n")
    assert "block  3:  196 patch tokens" in out and "block  4:   98 patch tokens" in out


def test_what_a_small_model_costs_is_told_in_millions(call, digits):
    for arguments in (("macs", "digits_vit"), ("info", "digits_vit"), ("eval", "digits_vit", "--data", digits)):
        out = call(*arguments)[1]
        assert "MMACs" in out and "GMACs" not in out
        assert "16.56" in out  # 1e6 multiply-accumulates


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        (["--method", "random"], [64, 64, 64, 32, 32, 32]),
        (["--method", "random", "--at", 0, "--tokens", 9], [9] * 6),
        (["--method", "tnt", "--at", 2, 4, "--keep", 0.5, 0.25], [64, 64, 32, 32, 8, 8]),
        (["--method", "tnt", "--at", "2", "4", "--keep", ".5"], [64, 64, 32, 32, 16, 16]),
        ([], [64] * 6),
    ],
)
def test_macs_takes_one_value_or_several(call, arguments, tokens):
    code, out, _ = call("macs", "digits_vit", *arguments, "--json")
    assert code == 0 and json.loads(out)["tokens"] == tokens


def test_a_last_block_for_prefix_tokens_alone(call, tmp_path):
    given = ["macs", "digits_vit", "--method", "random", "--at", 2]
    whole, short = (json.loads(call(*given, "--last-block", which, "--json")[1]) for which in ("all", "prefix"))
    assert short["macs"] < whole["macs"] and short["per_block"][:-1] == whole["per_block"][:-1]
    assert (short["last_block"], whole["last_block"]) == ("prefix", "all")
    assert "block  6:   32 patch tokens" in (out := call(*given, "--last-block", "prefix")[1])
    assert out.count("as keys and values alone") == 1
    code, _, err = call("macs", "digits_vit", "--last-block", "prefix")
    assert code == 2 and "--last-block was given without --method" in err
    code, _, err = call("macs", "vit_base_patch16_clip_224", *given[2:], "--last-block", "cls")
    assert code == 2 and "'cls' for argument '--last-block'" in err
    code, _, err = call("macs", "vit_base_patch16_siglip_224", *given[2:], "--last-block", "prefix")
    assert code == 2 and "its head reads the patch tokens (global_pool='map'); expected 'all'" in err
    assert "last block for prefix tokens alone: can be asked for" in call("info", "digits_vit")[1]
    data = json.loads(call("info", "vit_base_patch16_siglip_224", "--json")[1])
    assert data["last_block"]["prefix"] == "its head reads the patch tokens (global_pool='map')"
    assert call("export", *given[1:], "--last-block", "prefix", "--to", "pt2", "--out", tmp_path / "a.pt2")[0] == 0
    assert json.loads((tmp_path / "a.pt2.json").read_text())["macs"] == short["macs"]


def test_every_kind_of_flag_is_understood(call):
    flags = {
        "recipe": "paper", "scorer": "mlp", "hidden": 5, "noise-blocks": 3, "capacity": 0.25, "noise-scale": "rms",
        "stream-norm": "False", "beta": 0.5, "score-norm": "True", "objective": "kl", "partition": "sequential",
        "similar": 3, "similar-at": "start", "similar-how": "merge", "order": 2,
    }  # fmt: skip
    given = [word for name, value in flags.items() for word in (f"--{name}", value)]
    assert call("macs", "digits_vit", "--method", "tnt", *given)[0] == 0
    assert call("macs", "digits_vit", "--method", "tnt", "--capacity", "drawn", "--recipe", "relative")[0] == 0


def test_true_and_false_are_written_either_way(call):
    whole = ["macs", "digits_vit", "--method", "topk", "--at", 3]
    found = {word: call(*whole, "--inside", word)[1] for word in ("True", "true", "False", "false")}
    assert found["True"] == found["true"] != found["False"] == found["false"]
    code, _, err = call(*whole, "--inside", "maybe")
    assert code == 2 and "'maybe' for argument '--inside'. Expected one of ('True', 'False'" in err


def test_info_tells_the_shape_and_what_can_be_applied(call):
    code, out, _ = call("info", "deit_small_distilled_patch16_224")
    assert code == 0
    assert "12 blocks of width 384" in out and "196 patch tokens (14 x 14) and 2 prefix tokens" in out
    data = json.loads(call("info", "digits_vit", "--json")[1])
    assert (data["blocks"], data["grid"], data["prefix_tokens"]) == (6, [8, 8], 1)
    assert data["methods"] == dict.fromkeys(METHODS)  # none has an obstacle
    code, out, _ = call("info", "vit16")
    assert code == 0 and "topk       cannot: it ranks tokens by the CLS token's attention" in out


def test_info_names_the_block_that_is_not_supported(call):
    code, out, err = call("info", "vit_small_patch16_18x2_224")
    assert (code, out) == (1, "") and is_one_line(err)
    assert "ParallelThingsBlock" in err


# Every method


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("tnt", "dynamicvit", "dtem")])
def test_every_method_that_needs_no_training_is_evaluated_and_shown(call, digits, tmp_path, name):
    method = ["--method", name, "--at", 2, "--keep", 0.5]
    code, out, err = call("eval", "digits_vit", "--data", digits, *method, "--json")
    found = json.loads(out)
    assert code == 0 and found["images"] == 40 and found["macs"] < 1.7e8, err
    assert all(isinstance(n, float if name == "ats" else int) for n in found["tokens"])
    photo = next(Path(digits).glob("*/*"))
    assert call("show", "digits_vit", photo, *method, "--out", tmp_path / "a.png")[0] == 0
    assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_counted(call, name):
    code, out, _ = call("macs", "deit_tiny_patch16_224", "--method", name, "--json")
    found = json.loads(out)
    saves = name not in ("ats", "avit")  # these say the most that is possible
    assert code == 0 and (found["macs"] < found["base_macs"]) == saves


def test_further_reductions_come_after_the_first(call, digits, tmp_path):
    code, out, _ = call(
        "macs", "digits_vit", "--method", "tnt", "--at", 1, "--then", "tome at=2,3 r=8", "topk at=5 keep=0.5", "--json"
    )
    found = json.loads(out)
    assert code == 0 and found["tokens"] == [64, 32, 24, 16, 16, 8]
    assert found["mlp_tokens"] == [64, 24, 16, 16, 8, 8]
    train = ["train", "digits_vit", "--data", digits, "--out", tmp_path / "run", "--epochs", 1, *TRAIN]
    assert call(*train)[0] == 0
    reducer = ["--reducer", tmp_path / "run", "--keep", 0.75]
    code, out, _ = call("eval", "digits_vit", "--data", digits, *reducer, "--then", "tome at=4 r=8", "--json")
    assert code == 0 and json.loads(out)["tokens"] == [64, 64, 48, 48, 40, 40]


def test_a_model_trained_with_its_reduction_is_compared_with_what_it_was(call, digits, tmp_path):
    train = ["train", "digits_vit", "--data", digits, "--out", tmp_path / "run", "--epochs", 2, *TRAIN]
    code, _, err = call(*train, "--method", "evit", "--at", 2, "--backbone-lr", 0.3)
    assert code == 0, err
    found = json.loads(call("eval", "digits_vit", "--data", digits, "--reducer", tmp_path / "run", "--json")[1])
    plain = json.loads(call("eval", "digits_vit", "--data", digits, "--json")[1])
    again = call("eval", "digits_vit", "--data", digits, "--reducer", tmp_path / "run", "--compare", "--json")[1]
    assert json.loads(again)["base"]["top1"] == plain["top1"]
    assert found["top1"] < plain["top1"] and found["agreement"] < 90  # such a rate has spoiled the model


# From photos to a picture


def test_a_training_leaves_what_it_says(call, digits, tmp_path):
    arguments = ["train", "digits_vit", "--data", digits, "--out", tmp_path / "run", "--epochs", 1, *TRAIN]
    code, out, err = call(*arguments)
    assert (
        code == 0 and out.startswith("trained 1 epoch of 40 photos, 5 steps of 8, in ") and str(tmp_path / "run") in out
    )
    assert "training: 100%" in err
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["log.jsonl", "reducer.safetensors"]
    code, out, _ = call(*arguments, "--resume")
    assert code == 0 and out.startswith("the training had ended already")
    code, out, err = call(*arguments)
    assert (code, out) == (2, "") and is_one_line(err) and "--resume" in err


@pytest.mark.parametrize("ended", [True, False])
def test_a_run_of_the_time_when_micro_batches_were_called_parts_goes_on(call, digits, tmp_path, monkeypatch, ended):
    arguments = ["train", "digits_vit", "--data", digits, "--out", tmp_path / "run", "--epochs", 2, *TRAIN]
    arguments += ["--micro-batches", 2, "--save-every", 1]
    with monkeypatch.context() as patch:
        if not ended:  # what is left is as after a kill between the last step and the end
            patch.setattr(
                "tntprune.training.runs.save", lambda *given, **more: (_ for _ in ()).throw(KeyboardInterrupt)
            )
        assert call(*arguments)[0] == (0 if ended else 130)
    path, note = tmp_path / "run" / ("reducer.safetensors" if ended else "checkpoint.safetensors"), {}
    for name, text in read_metadata(path).items():
        note[name] = text.replace('"micro_batches"', '"parts"')
    assert note != read_metadata(path)
    save_file(load_file(path), path, metadata=note)
    code, _, err = call(*arguments, "--micro-batches", 4, "--resume")
    assert code == 2 and "training.micro_batches=2, not 4" in err
    for more in ([], arguments[-4:-2]):
        code, _, err = call(*arguments[:-4], "--save-every", 1, *more, "--resume")
        assert code == 0, err
        assert (tmp_path / "run" / "reducer.safetensors").is_file()


def test_training_against_labels_takes_class_folders(call, digits, tmp_path):
    arguments = ["--epochs", 1, "--objective", "ce", "--recipe", "paper", "--json", *TRAIN]
    code, out, _ = call("train", "digits_vit", "--data", digits, "--out", tmp_path / "a", *arguments)
    assert code == 0 and json.loads(out)["steps"] == 5
    code, out, err = call("train", "digits_vit", "--data", digits / "digit3", "--out", tmp_path / "b", *arguments)
    assert (code, out) == (1, "") and "not in a class folder" in err and not (tmp_path / "b").exists()


def test_evaluation_of_what_was_trained(call, digits, trained):
    options = ["--data", digits, "--workers", 0]
    code, out, _ = call("eval", "digits_vit", *options, "--json")
    whole = json.loads(out)
    assert code == 0 and whole["top1"] > 85 and whole["agreement"] == 100 and whole["tokens"] == [64] * 6
    code, out, _ = call("eval", "digits_vit", *options, "--reducer", trained, "--compare", "--json")
    pruned = json.loads(out)
    assert code == 0 and pruned["tokens"] == [64, 64, 16, 16, 16, 16] and pruned["images"] == COUNT
    assert pruned["base"]["top1"] == whole["top1"] and pruned["base"]["macs"] == whole["macs"] > pruned["macs"]
    assert list(pruned) == [*whole, "base", "speedup"]
    fewer = json.loads(call("eval", "digits_vit", *options, "--reducer", trained, "--tokens", 2, "--json")[1])
    assert fewer["tokens"] == [64, 64, 2, 2, 2, 2] and fewer["agreement"] < pruned["agreement"]
    code, out, err = call("eval", "digits_vit", *options, "--reducer", trained, "--at", 1)
    assert code == 1 and not out and "has nothing for block 1; expected those that it was trained for: 2" in err


def test_evaluation_as_text(call, digits, trained):
    code, out, _ = call("eval", "digits_vit", "--data", digits, "--workers", 1, "--reducer", trained, "--compare")
    assert code == 0
    assert "40 images, 0 skipped" in out and "unpruned" in out and "times as fast" in out
    assert "patch tokens entering each block: 64 64 16 16 16 16" in out
    code, out, _ = call("eval", "digits_vit", "--data", digits, "--workers", 0, "--method", "random", "--tokens", 20)
    assert code == 0 and "64 64 64 20 20 20" in out


def test_one_seed_one_evaluation(call, digits):
    arguments = ["eval", "digits_vit", "--data", digits, "--workers", 0, "--method", "random", "--tokens", 12, "--json"]
    found = [json.loads(call(*arguments, "--seed", seed, "--order", 3)[1]) for seed in (0, 0, 1)]
    assert len({(f["top1"], f["agreement"]) for f in found}) == 1


def test_a_picture_of_what_is_kept(call, digits, trained, tmp_path):
    photos = sorted((digits / "digit3").iterdir())[:2]
    picture = tmp_path / "pictures" / "kept.png"
    code, out, _ = call("show", "digits_vit", *photos, "--reducer", trained, "--out", picture)
    assert code == 0 and str(picture) in out
    with Image.open(picture) as image:
        image.load()
        assert image.format == "PNG" and image.width > 200
    several = ["--method", "random", "--at", 1, 3, "--keep", 0.5, "--each"]
    code, out, _ = call("show", "digits_vit", *photos, "--out", tmp_path / "random.png", *several, "--json")
    assert code == 0
    told = json.loads(out)
    assert told["photos"] == 2 and told["columns"] == ["original", "after block 1", "after block 3"]


def test_an_image_that_cannot_be_read_stops_or_is_skipped(call, digits, tmp_path):
    for path in digits.rglob("*.png"):
        copy = tmp_path / path.relative_to(digits)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
    (tmp_path / "digit7" / "broken.png").write_bytes(b"no image")
    arguments = ["eval", "digits_vit", "--data", tmp_path, "--workers", 0, "--json"]
    code, out, err = call(*arguments)
    assert (code, out) == (1, "") and "broken.png" in err and "--on-bad-image skip" in err
    code, out, err = call(*arguments, "--on-bad-image", "skip")
    assert code == 3 and json.loads(out)["skipped"] == 1 and json.loads(out)["images"] == COUNT
    assert f"skipped {tmp_path / 'digit7' / 'broken.png'}" in err
    code, _, err = call("train", "digits_vit", "--data", tmp_path, "--out", tmp_path / "run", "--epochs", 1, *TRAIN)
    assert code == 1 and "broken.png" in err and "Traceback" not in err


# JSON


def test_json_is_one_object_on_standard_output(call, digits, trained, tmp_path):
    photo = next(digits.rglob("*.png"))
    for arguments in [
        ["macs", "digits_vit", "--method", "tnt"],
        ["info", "digits_vit"],
        ["train", "digits_vit", "--data", digits, "--out", tmp_path / "run", "--epochs", 1, *TRAIN],
        ["train", "digits_vit", "--data", digits, "--out", tmp_path / "run", "--epochs", 1, *TRAIN, "--resume"],
        ["eval", "digits_vit", "--data", digits, "--reducer", trained, "--workers", 1],
        ["show", "digits_vit", photo, "--reducer", trained, "--out", tmp_path / "a.png"],
    ]:
        code, out, err = call(*arguments, "--json")
        assert code == 0 and out.count("\n") == 1, arguments
        assert isinstance(json.loads(out), dict), arguments
        assert arguments[0] != "eval" or "evaluating: 100%" in err


@pytest.mark.parametrize("arguments", [["macs", "nonsense"], ["macs"], ["nonsense"], ["info", "resnet18"]])
def test_errors_are_json_too(call, arguments):
    code, out, err = call(*arguments, "--json")
    assert code in (1, 2) and out == "" and err.count("\n") == 1
    assert list(json.loads(err)) == ["error"]


# Mistakes


@pytest.fixture(scope="module")
def things(digits, trained, tmp_path_factory):
    """What the mistakes below are made with, by name."""
    root = tmp_path_factory.mktemp("things")
    (root / "empty").mkdir()
    for name in ("n01440764", "cats"):
        (root / "unknown" / name).mkdir(parents=True)
        Image.new("L", (64, 64)).save(root / "unknown" / name / "1.png")
    save(reduce_(make("plain"), TNT(at=2)), root / "narrow")
    (root / "broken").mkdir()
    (root / "broken" / "reducer.safetensors").write_bytes((trained / "reducer.safetensors").read_bytes()[:-7])
    torch.save({"head": torch.zeros(1)}, root / "other.pth")
    return {
        "DIGITS": digits, "TRAINED": trained, "PHOTO": next(digits.rglob("*.png")), "FILE": root / "other.pth",
        **{name.upper(): root / name for name in ("empty", "unknown", "narrow", "broken", "new", "missing")},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "code", "word"),
    [
        # no such thing
        ("macs nonsense", 2, "unknown model 'nonsense'"),
        ("macs vit_smal_patch16_224", 2, "vit_small_patch16_224"),
        ("macs vit_base_patch16_224.no_such_tag", 2, "no_such_tag"),
        ("macs digits_vit --method magic", 2, "unknown method 'magic'; expected one of atc, ats, avit, diffrate"),
        ("magic", 2, "magic"),
        ("macs digits_vit --method topk --at x", 2, "--at x: expected INT..."),
        ("macs digits_vit --method topk --keep a", 2, "--keep a: expected FLOAT..."),
        ("show digits_vit PHOTO --method random --out NEW.gif", 2, "NEW.gif: expected a file that ends in .png"),
        ("eval digits_vit --data DIGITS --method avit", 1, "avit has to be trained first"),
        ("macs digits_vit --then tome", 2, "--then was given without --method"),
        ("eval digits_vit --data DIGITS --then tome", 2, "--then was given without --method or --reducer"),
        ("macs digits_vit --method random --then magic", 2, "unknown method 'magic'"),
        ("macs digits_vit --method random --then 'tome r'", 2, "'r' after tome: expected option=value"),
        ("macs digits_vit --method random --then 'tome s=3'", 2, "tome has no option 's'"),
        ("macs digits_vit --method random --then 'random at=3'", 2, "both act after block 3"),
        ("train digits_vit --data DIGITS --out NEW --method topk", 1, "topk has nothing to train on a frozen model"),
        ("macs", 2, "MODEL"),
        ("macs digits_vit vit16", 2, "vit16"),
        ("macs digits_vit --magic 3", 2, "--magic"),
        ("train digits_vit --data DIGITS", 2, "--out"),
        ("eval digits_vit", 2, "--data"),
        ("info resnet18", 1, "ResNet is not supported"),
        ("train vit16 --data DIGITS --out NEW", 1, "--weights"),
        # options
        ("macs digits_vit --method tnt --keep 0", 2, "keep=0"),
        ("macs digits_vit --method tnt --keep -1", 2, "keep=-1"),
        ("macs digits_vit --method tnt --keep 2", 2, "keep=2"),
        ("macs digits_vit --method tnt --keep nan", 2, "keep=nan"),
        ("macs digits_vit --method tnt --keep half", 2, "--keep"),
        ("macs digits_vit --method tnt --keep", 2, "keep"),
        ("macs digits_vit --method tnt --keep 0.5 0.4", 2, "2 values for 1 location"),
        ("macs digits_vit --method tnt --at 2 3 4 --keep 0.5 0.4", 2, "2 values for 3 location"),
        ("macs digits_vit --method tnt --keep 0.5 --tokens 9", 2, "both given"),
        ("macs digits_vit --method tnt --tokens 65", 2, "only 64 patch tokens"),
        ("macs digits_vit --method random --at 6", 2, "the model has 6 blocks"),
        ("macs digits_vit --method random --at -1", 2, "at=-1"),
        ("macs digits_vit --method tnt --at 2.5", 2, "--at"),
        ("macs digits_vit --method tnt --at 3 --noise-blocks 2", 2, "no scorer there"),
        ("macs digits_vit --method random --similar 3", 2, "random has no option 'similar'"),
        ("macs digits_vit --method tnt --scorer conv", 2, "conv"),
        ("macs digits_vit --method tnt --stream-norm maybe", 2, "maybe"),
        ("macs digits_vit --method tnt --capacity two", 2, "two"),
        ("macs digits_vit --at 3", 2, "--at was given without --method"),
        ("macs digits_vit --noise-blocks 3", 2, "--noise-blocks was given without --method"),
        ("eval digits_vit --data DIGITS --at 3", 2, "--at was given without --method or --reducer"),
        ("eval digits_vit --data DIGITS --batch-size 0", 2, "batch_size=0"),
        ("eval digits_vit --data DIGITS --workers -1", 2, "workers=-1"),
        ("eval digits_vit --data DIGITS --seed -1", 2, "seed=-1"),
        ("eval digits_vit --data DIGITS --seed 99999999999999999999999", 2, "seed="),
        ("eval digits_vit --data DIGITS --on-bad-image maybe", 2, "maybe"),
        ("eval digits_vit --data DIGITS --device abacus", 2, "device 'abacus'"),
        ("train digits_vit --data DIGITS --out NEW --epochs 0", 2, "epochs=0"),
        ("train digits_vit --data DIGITS --out NEW --epochs many", 2, "--epochs"),
        ("train digits_vit --data DIGITS --out NEW --lr nan", 2, "lr=nan"),
        ("train digits_vit --data DIGITS --out NEW --warmup 1", 2, "warmup=1"),
        ("train digits_vit --data DIGITS --out NEW --seed 99999999999999999", 2, "seed="),
        ("train digits_vit --data DIGITS --out NEW --workers -1", 2, "workers=-1"),
        ("train digits_vit --data DIGITS --out NEW --save-every 0", 2, "save_every=0"),
        ("train digits_vit --data DIGITS --out NEW --amp fp8", 2, "fp8"),
        ("train digits_vit --data DIGITS --out NEW --method random", 1, "random has nothing to train"),
        ("demo --seed -1", 2, "seed=-1"),
        # files
        ("eval digits_vit --data MISSING", 1, "no such folder"),
        ("eval digits_vit --data EMPTY", 1, "no images in it"),
        ("eval digits_vit --data PHOTO", 1, "not a folder"),
        ("eval digits_vit --data UNKNOWN", 1, "but the model has 10 classes; expected one for each class"),
        ("train digits_vit --data MISSING --out NEW", 1, "no such folder"),
        ("train digits_vit --data EMPTY --out NEW", 1, "no images in it"),
        ("train digits_vit --data UNKNOWN --out NEW --objective ce", 1, "but the model has 10 classes"),
        ("train digits_vit --data DIGITS --out NEW --resume", 2, "no training to continue"),
        ("train digits_vit --data DIGITS --out PHOTO", 2, "expected a folder"),
        ("train digits_vit --data DIGITS --out PHOTO/run", 1, "cannot be written"),
        ("eval digits_vit --data DIGITS --weights MISSING", 1, "no such file"),
        ("eval digits_vit --data DIGITS --weights FILE", 1, "not weights of digits_vit"),
        ("eval digits_vit --data DIGITS --weights PHOTO", 1, "expected a .safetensors file"),
        # reducers
        ("eval digits_vit --data DIGITS --method tnt", 1, "tnt has to be trained first; expected --reducer"),
        ("eval digits_vit --data DIGITS --reducer NARROW", 1, "made for a model of embed_dim 32, given one of 64"),
        ("eval digits_vit --data DIGITS --reducer MISSING", 1, "no such folder"),
        ("eval digits_vit --data DIGITS --reducer EMPTY", 1, "no reduction in it"),
        ("eval digits_vit --data DIGITS --reducer BROKEN", 1, "cannot be read"),
        ("eval digits_vit --data DIGITS --reducer no/thing", 1, "no such folder here, and the Hub gave none"),
        ("eval digits_vit --data DIGITS --reducer TRAINED --method random", 2, "holds tnt"),
        ("eval digits_vit --data DIGITS --reducer TRAINED --keep 3", 2, "keep=3"),
        ("eval digits_vit --data DIGITS --reducer TRAINED --noise-blocks 2", 2, "was trained with None"),
        ("eval digits_vit --data DIGITS --reducer TRAINED --recipe paper", 2, "was trained with 'merge'"),
        ("eval digits_vit --data DIGITS --reducer " + "x" * 300, 1, "too long"),
        # pictures
        ("show digits_vit PHOTO --out NEW", 2, "nothing to show"),
        ("show digits_vit --out NEW --method random", 2, "no photo given"),
        ("show digits_vit MISSING --out NEW --method random", 1, "No such file"),
        ("show digits_vit FILE --out NEW --method random", 1, "not an image"),
        ("show digits_vit PHOTO --out EMPTY --method random", 1, "cannot be written"),
        ("show digits_vit PHOTO --out PHOTO/a.png --method random", 1, "cannot be written"),
    ],
)
def test_a_mistake_is_told_in_one_line(call, things, line, code, word):
    words = shlex.split(line)
    for name, path in things.items():
        words = [str(path) + w.removeprefix(name) if w in (name, f"{name}/run", f"{name}/a.png") else w for w in words]
    found, out, err = call(*words)
    assert (found, out) == (code, ""), err
    assert is_one_line(err), err
    assert word in err and "Traceback" not in err
    assert not things["NEW"].exists() or not any(things["NEW"].iterdir())


def test_weights_without_a_network_are_told_in_one_line(call, digits):
    code, out, err = call("eval", "deit_tiny_patch16_224", "--data", digits)
    last = err.splitlines(keepends=True)[-1]
    assert (code, out) == (1, "") and is_one_line(last) and "--weights FILE" in last and "Traceback" not in err


# In a process of its own


def wait_for(path: Path, process, lines: int = 0) -> None:
    """Until a file is there and has so many lines, or the process has ended."""
    while process.poll() is None and not (path.exists() and (not lines or path.read_text().count("\n") >= lines)):
        time.sleep(0.01)


@pytest.fixture(scope="module")
def straight(digits, tmp_path_factory):
    """A training that nothing interrupted, of 80 steps: long enough to be interrupted."""
    out = tmp_path_factory.mktemp("straight") / "run"
    assert main([*map(str, long_training(digits, out))]) == 0
    return read_weights(out / "reducer.safetensors")


def long_training(digits, out):
    options = ["--at", 1, "--noise-blocks", 1, "--tokens", 9, "--batch-size", 2, "--epochs", 4, "--workers", 1]
    return ["train", "digits_vit", "--data", digits, "--out", out, "--save-every", 7, *options]


@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(one, marks=pytest.mark.wide) for one in (signal.SIGTERM, signal.SIGKILL))]
)
def test_a_training_that_is_interrupted_goes_on_as_if_it_was_not(call, digits, straight, tmp_path, number):
    arguments = long_training(digits, tmp_path)
    process = start(*arguments)
    wait_for(tmp_path / "log.jsonl", process, lines=10)
    os.killpg(process.pid, number)
    code, out, err = finish(process)
    assert out == "" and "Traceback" not in err
    if number == signal.SIGKILL:
        assert code == -signal.SIGKILL
    else:
        assert code == 130
        assert "tntprune: stopped after step " in err and err.endswith("continue with --resume\n")
    step = int(read_metadata(tmp_path / "checkpoint.safetensors")["step"])
    assert 7 <= step < 80 and read_weights(tmp_path / "checkpoint.safetensors")
    code, _, err = call(*arguments, "--resume", "--weights", WEIGHTS)
    assert code == 2 and is_one_line(err) and "weights=None, not " in err
    code, _, err = call(*arguments, "--resume")
    assert code == 0, err
    resumed = read_weights(tmp_path / "reducer.safetensors")
    assert all(torch.equal(resumed[name], value) for name, value in straight.items())
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, 81)]
    assert all(math.isfinite(line["loss"]) for line in lines)


@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [(["--version"], ""), (["--version"], "1"), pytest.param(["train", "--help"], "", marks=pytest.mark.wide)],
)
def test_a_reader_that_has_gone_is_no_trouble(arguments, unbuffered):
    read, write = os.pipe()
    os.close(read)
    process = start(*arguments, stdout=write, PYTHONUNBUFFERED=unbuffered)
    os.close(write)
    assert finish(process) == (1, None, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_the_output_is_told_in_one_line():
    with Path("/dev/full").open("w") as full:
        code, _, err = finish(start("macs", "digits_vit", stdout=full, PYTHONUNBUFFERED=""))
    assert code == 1 and is_one_line(err) and "No space left on device" in err


def test_another_image_size_everywhere(call, digits, tmp_path):
    size = ("--img-size", "32", "64")
    data = json.loads(call("info", "digits_vit", *size, "--json")[1])
    assert data["grid"] == [4, 8] and data["patch_tokens"] == 32
    counted = json.loads(call("macs", "digits_vit", *size, "--method", "random", "--at", "2", "--json")[1])
    assert counted["base_macs"] == data["macs"] > counted["macs"] and counted["tokens"][:3] == [32, 32, 16]
    evaluated = ("eval", "digits_vit", "--data", digits, "--workers", "0", "--json")
    found = json.loads(call(*evaluated, "--img-size", "96", "96", "--method", "random", "--at", "2")[1])
    assert found["tokens"][:3] == [144, 144, 72] and found["top1"] > 15
    run = tmp_path / "run"
    code, _, err = call("train", "digits_vit", "--data", digits, "--out", run, *TRAIN, *size, "--epochs", "1")
    assert code == 0, err
    again = ("train", "digits_vit", "--data", digits, "--out", run, *TRAIN, "--epochs", "1", "--resume")
    assert call(*again)[0] == 2 and call(*again, *size)[0] == 0
    photo, picture = next(digits.glob("*/*.png")), tmp_path / "kept.png"
    assert call("show", "digits_vit", photo, "--reducer", run, *size, "--out", picture)[0] == 0
    with Image.open(picture) as image:
        assert image.width > 2 * image.height  # two pictures side by side, twice as wide as they are high


@pytest.mark.parametrize(
    ("model", "size", "message"),
    [
        ("digits_vit", ("60", "64"), "the patches of digits_vit are 8 8; expected multiples"),
        ("vit_tiny_patch16_224", ("100", "96"), "the patches of vit_tiny_patch16_224 are 16 16; expected multiples"),
        ("vit16", ("8", "16"), "expected multiples"),
        ("vit_tiny_patch16_224", ("0", "16"), "img_size=0: expected a whole number from 1 to 8192"),
        ("digits_vit", ("-64", "64"), "img_size=-64: expected a whole number from 1 to 8192"),
        ("resnet18", ("64", "64"), "resnet18 takes no such images"),
        ("digits_vit", ("64",), "--img-size 64: expected INT INT"),
    ],
)
def test_an_image_size_that_does_not_fit_is_one_line(call, model, size, message):
    for command in ("info", "macs"):
        code, out, err = call(command, model, "--img-size", *size)
        assert code == 2 and not out and message in err and err.count("\n") == 1


@pytest.mark.skipif(os.name != "posix", reason="written for a POSIX shell")
def test_streams_may_be_closed(digits, tmp_path):
    out, photo = tmp_path / "kept.png", next(digits.rglob("*.png"))
    words = ["-m", "tntprune", "show", "digits_vit", photo, "--method", "random", "--out", out]
    command = shlex.join([sys.executable, *map(str, words)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(f"{command} >&-", shell=True, env=environment, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    with Image.open(out) as image:
        image.load()  # nothing was printed into it
    command = shlex.join([sys.executable, "-m", "tntprune", "macs", "nonsense"])
    assert subprocess.run(f"{command} >&- 2>&-", shell=True, env=environment).returncode == 2


@pytest.mark.parametrize(("command", "told"), [("sweep", True), ("paper", True), ("embed", True), ("eval", False)])
def test_who_interrupts_what_can_go_on_is_told_so(command, told, monkeypatch, capsys):
    def interrupted(given):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    assert main([command, "model"]) == 130
    said = capsys.readouterr().err
    assert said.startswith("tntprune: interrupted") and ("the same command goes on" in said) == told


def test_notes_are_lines_and_other_warnings_stay_what_they_are(monkeypatch, capsys):
    def noted(given):
        warnings.warn("other weights", UserNote, stacklevel=1)
        warnings.warn("something else", RuntimeWarning, stacklevel=1)
        return 0

    monkeypatch.setattr(cli, "_run", noted)
    with pytest.warns(RuntimeWarning, match="something else") as others:
        assert main(["eval", "model"]) == 0
    assert capsys.readouterr().err == "tntprune: note: other weights\n"
    assert [one.category for one in others] == [RuntimeWarning]


@pytest.mark.parametrize("command", ["macs", pytest.param("info", marks=pytest.mark.wide)])
def test_counting_commands_start_without_what_they_do_not_need(command):
    """Half of their time went into torch's compiler, which timm and torchvision load to mark a few functions."""
    code = (
        "import sys; from tntprune.__main__ import run\n"
        f"sys.argv = ['tntprune', {command!r}, 'vit_tiny_patch16_224']\n"
        "try: run()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert "1.26 GMACs" in done.stdout and "timm" in loaded
    spared = ("torch._dynamo.convert_frame", "sympy", "transformers", "matplotlib", "sklearn")
    assert not loaded.intersection(spared)


def test_what_needs_the_compiler_still_gets_it_after_a_lean_start():
    code = (
        "from tntprune.cli.lean import start_lean; start_lean()\n"
        "import timm, torch\n"
        "assert torch._dynamo.config.recompile_limit > 0\n"
        "import torch._dynamo.utils as utils\n"
        "assert utils.is_compile_supported('cpu') in (True, False) and utils.counters is not None\n"
        "assert torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1)) == 2"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (["calibrate"], "unknown command 'calibrate' (did you mean train?)"),
        (["serch", "digits_vit"], "unknown command 'serch' (did you mean search?)"),
        (["macs", "digits_vit", "--method", "tomee"], "unknown method 'tomee' (did you mean tome?)"),
        (["macs", "digits_vit", "--method", "tome", "--at", "3,4"], "(write 3 4)"),
    ],
)
def test_what_was_meant_is_guessed(call, line, told):
    code, out, err = call(*line)
    assert code == 2 and told in err and not out, err


def test_the_list_of_commands_has_one_paragraph_for_each(call):
    out = call("--help")[1]
    assert "Train what a method learns" in out and "Several processes" not in out
    assert "Several processes" in call("train", "--help")[1]
