"""`tntprune app`: refusals, and an explorer that is started and ended."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request

import pytest

pytest.importorskip("gradio")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model", "nonsense"], "unknown model 'nonsense'"),
        (["--weights", "missing.safetensors"], "missing.safetensors"),
        (["--reducer", "missing"], "missing"),
        (["--port", "0"], "port=0"),
    ],
)
def test_what_cannot_be_opened_is_told_in_one_line(arguments, told, capsys):
    from tntprune.cli.main import main

    assert main(["app", *arguments]) in (1, 2)
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and told in said[0]


@pytest.mark.slow
def test_it_starts_answers_and_ends_with_ctrl_c():
    running = subprocess.Popen(
        [sys.executable, "-m", "tntprune", "app"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        address = re.search(r"http://127\.0\.0\.1:\d+/?", running.stdout.readline())[0]
        assert b"tntprune" in urllib.request.urlopen(address).read()
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=30)
    finally:
        running.kill()
    assert running.returncode == 130 and "Traceback" not in errors
