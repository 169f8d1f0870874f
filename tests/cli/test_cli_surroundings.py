"""The command line in odd surroundings: values at the edge, locales, terminals, signals, environments, full memory."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TypeVar

import pytest
from PIL import Image

from command_lines import flags_of, run
from tntprune.cli import main as cli
from tntprune.cli.commands import COMMANDS
from tntprune.cli.main import main
from tntprune.cli.options import MethodOptions
from tntprune.errors import UsageError
from tntprune.system.flags import Within, Written, check_flags, hints_of

Mark = TypeVar("Mark")
MODULE = ["-m", "tntprune"]
SCRIPT = ["-c", "import sys; sys.argv[0] = 'tntprune'; from tntprune.__main__ import run; run()"]
WHOLE = ("1e38", "-1", "0", "1" + "0" * 400, "-" + "9" * 40)
BROKEN = ("nan", "inf", "-1e38", "-1", "0", "1e38")


@pytest.fixture
def call(capsys):
    """Run a command in this process: its exit code, standard output and standard error."""

    def run(*arguments):
        capsys.readouterr()
        return main([str(argument) for argument in arguments]), *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Ten photos in ten class folders."""
    folder = tmp_path_factory.mktemp("photos")
    for digit in range(10):
        (folder / f"digit{digit}").mkdir()
        Image.new("L", (64, 64), 20 * digit).save(folder / f"digit{digit}" / "1.png")
    return folder


def required(command: str, photos: Path, without: str = "") -> list[str]:
    """The arguments that a command cannot be parsed without, but one."""
    words = [command]
    for flag in flags_of(command):
        if flag.required and flag.name != without:
            values = {"MODEL": "digits_vit", "DIR": str(photos), "RUN": "new" if flag.dest == "out" else "pretrained"}
            ends = {"JSON": ".json", "PNG": ".png", "JSONL": ".jsonl"}
            words += [flag.name] * bool(flag.name) + [values.get(flag.metavar, f"new{ends.get(flag.metavar, '')}")]
    return words


def marks(kind: type[Mark]) -> list[tuple[str, str, Mark]]:
    """Every command with each of its flags that has such a mark."""
    found = []
    for command, function in COMMANDS.items():
        for name, (_, several) in hints_of(function).items():
            found += [(command, name, mark) for mark in several if isinstance(mark, kind)]
    return found


# Values


def test_every_number_has_a_range():
    ranged = {(command, name) for command, name, _ in marks(Within)}
    for command in COMMANDS:
        for flag in flags_of(command):
            name = flag.dest.replace("-", "_")
            of_method = command != "sweep" and name in vars(MethodOptions())  # the configs check these
            if not of_method and any(kind in flag.metavar for kind in ("INT", "FLOAT", "STEPS", "H W")):
                assert (command, name) in ranged, f"{command} {flag.name}"


FIRST = {(name, mark): command for command, name, mark in reversed(marks(Within))}  # of commands that share a flag


@pytest.mark.parametrize(("command", "name", "mark"), marks(Within), ids=str)
def test_a_number_out_of_its_range_is_refused_before_anything_is_read(call, command, name, mark):
    flag = next(flag for flag in flags_of(command) if flag.dest.replace("-", "_") == name)
    words = required(command, Path("missing"), flag.name)
    values = BROKEN if flag.metavar.startswith("FLOAT") else WHOLE
    for value in values if command == FIRST[name, mark] else values[1:2]:
        number = float(value) if len(value) < 300 else float("inf")
        if mark.least <= number <= mark.most:
            continue
        pair = (value, value) if flag.metavar == "H W" else (value,)
        code, out, err = call(*words, flag.name, *pair)
        assert (code, out) == (2, ""), (value, err)
        assert err.startswith("tntprune: ") and err.count("\n") == 1 and "missing" not in err, err


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ("--keep " + "1" + "0" * 400, "keep="),
        ("--beta 1e38", "beta=1e+38"),
        ("--hidden 1000000000000 --scorer mlp", "hidden=1000000000000"),
        ("--order " + str(2**64), "order="),
        ("--score-weight inf", "score_weight=inf"),
        ("--similar " + "9" * 400, "similar="),
    ],
)
def test_options_of_methods_are_bounded(call, options, word):
    code, out, err = call("macs", "digits_vit", "--method", "tnt", *options.split())
    assert (code, out, err.count("\n")) == (2, "", 1) and word in err, err


def test_a_range_says_what_it_expects(call):
    assert call("bench", "digits_vit", "--rounds", "1" + "0" * 20)[2] == (
        "tntprune: rounds=100000000000000000000: expected a whole number from 3 to 100000\n"
    )
    code, _, err = call("train", "digits_vit", "--data", "x", "--out", "y", "--lr", "1e38")
    assert (code, err) == (2, "tntprune: lr=1e+38: expected a number above 0 to 1000\n")


@pytest.mark.parametrize(("command", "name"), [found[:2] for found in marks(Written)])
def test_what_is_written_is_valid_text_before_the_work_begins(call, photos, tmp_path, monkeypatch, command, name):
    monkeypatch.chdir(tmp_path)
    flag = next(flag for flag in flags_of(command) if flag.dest.replace("-", "_") == name)
    words = required(command, photos, flag.name)
    begin = time.perf_counter()
    code, out, err = call(*words, flag.name, f"a\udcff{'.json' if flag.metavar == 'JSON' else ''}")
    assert (code, out) == (2, "") and err.startswith(f"tntprune: {name}='a\\udcff") and err.count("\n") == 1, err
    assert time.perf_counter() - begin < 10 and not any(tmp_path.iterdir())


def test_marks_on_flags_inside_a_group_are_checked():
    kind, _ = hints_of(COMMANDS["train"])["training"]
    with pytest.raises(UsageError, match="epochs=0: expected a whole number from 1"):
        check_flags(COMMANDS["train"], {"training": kind(epochs=0)})


@pytest.mark.parametrize(
    ("arguments", "before"),
    [
        (["train", "digits_vit", "--data", "x", "--out", ""], "--out"),
        (["train", "digits_vit", "--data", "x", "--out="], "--out"),
        (["macs", ""], "macs"),
        ([""], "tntprune"),
        (["report", "a", "", "b"], "a"),
    ],
)
def test_an_empty_value_is_refused(call, arguments, before):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "") and err.startswith(f"tntprune: an empty value after {before}; ") and "\n" in err


def test_an_error_shows_no_escape_codes(call):
    code, _, err = call("eval", "digits_vit", "--data", "a\nb\x1b[31m", "--json")
    assert code == 1 and json.loads(err)["error"].startswith("a b\\x1b[31m: no such folder")
    code, _, err = call("eval", "digits_vit", "--data", "a\nb\x1b[31m")
    assert code == 1 and err.startswith("tntprune: a b\\x1b[31m: no such folder") and err.count("\n") == 1


# Every error is JSON with --json


@pytest.mark.parametrize(
    ("error", "code", "word"),
    [
        (MemoryError(), 1, "out of memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes."),
            1,
            "out of memory",
        ),
        (RecursionError("maximum recursion depth exceeded"), 1, "nested too deeply"),
        (OSError(28, "No space left on device", "file"), 1, "file: No space left on device"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_every_error_is_one_line_or_one_object(call, monkeypatch, error, code, word):
    def fails(given):
        raise error

    monkeypatch.setattr(cli, "_parse", fails)
    found, out, err = call("eval", "digits_vit")
    assert (found, out) == (code, "") and err.startswith(f"tntprune: {word}") and err.count("\n") == 1
    found, out, err = call("eval", "digits_vit", "--json")
    assert (found, out) == (code, "") and json.loads(err)["error"].startswith(word)


@pytest.mark.parametrize("explicit", [True, False])
def test_an_interrupt_that_other_code_wraps_is_an_interrupt(call, monkeypatch, explicit):
    """Python 3.11 turns an interrupt into a RuntimeError where a module that is being imported makes a class."""

    def fails(given):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            if explicit:
                raise RuntimeError("Error calling __set_name__ on 'cached_property'") from error
            raise ImportError("cannot import name 'nested'")  # noqa: B904

    monkeypatch.setattr(cli, "_parse", fails)
    code, out, err = call("eval", "digits_vit")
    assert (code, out, err) == (130, "", "tntprune: interrupted\n")


def test_other_errors_of_ours_stay_tracebacks(monkeypatch):
    def fails(given):
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli, "_parse", fails)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["eval", "digits_vit"])


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_usage_is_json_too(call, command):
    for wrong in (["--no-such-flag", "3"], ["too", "many", "words", "--seed", "x"]):
        code, out, err = call(command, *wrong, "--json")
        assert (code, out, err.count("\n")) == (2, "", 1) and list(json.loads(err)) == ["error"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["macs", "digits_vit", "--kep", "0.5"], "unknown flag --kep (did you mean --keep?); see tntprune macs --help"),
        (["eval", "digits_vit", "--dta=x"], "unknown flag --dta (did you mean --data?); see tntprune eval --help"),
        (["bench", "digits_vit", "--zzzz"], "unknown flag --zzzz; see tntprune bench --help"),
    ],
)
def test_a_misspelt_flag_is_named_with_its_likely_meaning(call, words, line):
    assert call(*words) == (2, "", f"tntprune: {line}\n")


# Locales and terminals


def python(*arguments, timeout=100, **environment):
    """Run Python in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, timeout=timeout, errors="surrogateescape"
    )


ASCII = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_an_ascii_locale(tmp_path):
    done = python(*MODULE, "macs", "é", **ASCII)
    assert (
        (done.returncode, done.stdout) == (2, "")
        and done.stderr.startswith("tntprune: ")
        and done.stderr.count("\n") == 1
    )
    for arguments in ("--help", "eval --help", "info digits_vit"):
        ended = run(shlex.split(arguments), tmp_path, "ascii")
        assert (ended.code, ended.err) == (0, "") and len(ended.out) > 100
    ended = run(["report", "rows", "--title", "\udcc3\udca9"], tmp_path, "ascii")
    assert ended.code == 2 and ended.err.startswith("tntprune: title='\\udcc3") and ended.err.count("\n") == 1


def test_text_that_the_terminal_cannot_show_is_escaped(tmp_path, photos):
    folder = tmp_path / "caf\udce9 \u00e9"
    shutil.copytree(photos, folder)
    (folder / "digit3" / "bad\udcff.png").write_bytes(b"no image")
    arguments = ["eval", "digits_vit", "--data", str(folder), "--workers", "0", "--on-bad-image", "skip"]
    done = python(*MODULE, *arguments, **ASCII)
    assert done.returncode == 3 and "bad\\udcff.png: not an image" in done.stderr, done.stderr
    assert "10 images, 1 skipped" in done.stdout
    ended = run(arguments, tmp_path)
    assert ended.code == 3 and "bad\\udcff.png: not an image" in ended.err and "10 images, 1 skipped" in ended.out


def test_a_name_that_is_not_utf_8_gets_into_a_card(call, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(photos, "caf\udce9")
    train = ["train", "digits_vit", "--data", "caf\udce9", "--out", "run", "--at", "2", "--epochs", "1"]
    assert call(*train, "--workers", "0")[0] == 0
    assert call("push", "digits_vit", "--reducer", "run", "--card-only")[0] == 0
    assert "caf\\udce9" in Path("run/README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("columns", ["1", "5", "1000000000", "nonsense", "-1", "0", "", "9" * 40])
def test_help_ends_whatever_the_width(call, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as end:
        main(["eval", "--help"])
    assert end.value.code in (0, None) and os.environ["COLUMNS"] == columns


def test_help_is_40_to_400_wide(capsys, monkeypatch):
    for columns, width in (("1", 40), ("60", 60), ("1000000000", 400)):
        monkeypatch.setenv("COLUMNS", columns)
        with pytest.raises(SystemExit):
            main(["macs", "--help"])
        drawn = [line for line in capsys.readouterr().out.splitlines() if line.startswith((" ", "│"))]
        assert 40 <= max(map(len, drawn)) <= width


# The environment of several processes


@pytest.mark.parametrize(
    ("environment", "word"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE=abc: expected a whole number from 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0: expected a whole number from 1"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE=: expected a whole number from 1"),
        ({"WORLD_SIZE": "9" * 5000}, "expected a whole number from 1"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2, but RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE=2, but MASTER_ADDR is not set"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost"}, "WORLD_SIZE=2, but MASTER_PORT is not set"),
        (
            {"WORLD_SIZE": "2", "RANK": "x", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "RANK=x: expected a whole number from 0",
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "RANK=2: expected a whole number from 0 to 1",
        ),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0: expected a whole number from 1"),
        ({"LOCAL_WORLD_SIZE": "1.5"}, "LOCAL_WORLD_SIZE=1.5: expected a whole number from 1"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_environment_that_makes_no_sense_is_one_line(call, photos, tmp_path, monkeypatch, environment, word):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    code, said, err = call("train", "digits_vit", "--data", photos, "--out", tmp_path / "run")
    assert (code, said, err.count("\n")) == (1, "", 1) and word in err, err
    assert not (tmp_path / "run").exists()


# Ctrl-C


def interrupted(entry, arguments, delay, times=1):
    """A process that gets Ctrl-C after a while, together with its children, as in a terminal."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [sys.executable, *entry, *map(str, arguments)],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    time.sleep(delay)
    for _ in range(times):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.02)
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


@pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")
@pytest.mark.parametrize(
    ("entry", "times", "delay"), [(MODULE, 1, 0.3), (SCRIPT, 2, 0.7), (MODULE, 2, 1.5), (SCRIPT, 1, 1.5)]
)
def test_an_interrupt_in_the_first_seconds_is_one_line(photos, entry, times, delay):
    arguments = ["eval", "digits_vit", "--data", photos, "--workers", 1, "--json"]
    code, out, err = interrupted(entry, arguments, delay, times)
    assert "Traceback" not in err
    if code != 0:  # else it was done
        lines = [line for line in err.replace("\r", "\n").splitlines() if not line.startswith("evaluating")]
        assert (code, out) == (130, "") and [json.loads(line) for line in lines if line] == [{"error": "interrupted"}]


@pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")
def test_a_second_interrupt_ends_a_training_at_once(photos, tmp_path):
    arguments = ["train", "digits_vit", "--data", photos, "--out", tmp_path / "run", "--at", 2, "--epochs", 100_000]
    process = subprocess.Popen(
        [sys.executable, *MODULE, *map(str, arguments), "--batch-size", "2"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    log = tmp_path / "run" / "log.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") > 3):
        time.sleep(0.01)
    for _ in range(3):
        os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode in (1, 130) and "Traceback" not in err
    assert "tntprune: interrupted\n" in err or "tntprune: stopped after step" in err
