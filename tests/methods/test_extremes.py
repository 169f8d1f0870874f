"""Options of a training that no computation can follow are refused by their name, before anything is read."""

from __future__ import annotations

import pytest

from tntprune.cli.main import main
from tntprune.data.augment import Augmentation
from tntprune.errors import UsageError
from tntprune.methods import TNT
from tntprune.training.config import Training

BAD = [
    *(f"--{name} {value}" for name in ("lr", "backbone-lr", "warmup-lr", "min-lr", "weight-decay")
      for value in ("1e38", "1e300", "1e-300", "1e-320")),
    "--color-jitter 1e300", "--color-jitter 101",
    "--auto-augment rand-m9-n1000000000", "--auto-augment augmix-w1000000000", "--auto-augment augmix-m5-d101",
    "--auto-augment rand-m1.2.3", "--auto-augment rand-m.", "--auto-augment rand-mstd99999999999999999999999",
    "--hidden 1000000000000 --scorer mlp", "--beta 1e38", "--beta 1e300",
    "--mixup 1e-320", "--mixup 1e300", "--cutmix 1e-320", "--cutmix 1e300",
]  # fmt: skip


@pytest.mark.parametrize("flags", BAD)
def test_an_extreme_option_is_wrong_usage_in_one_line(flags, tmp_path, capsys):
    given = ["train", "digits_vit", "--data", str(tmp_path), "--out", str(tmp_path / "run"), *flags.split()]
    assert main(given) == 2
    err = capsys.readouterr().err
    name = flags.split()[0].removeprefix("--").replace("-", "_")
    assert err.startswith(f"tntprune: {name}=") and err.count("\n") == 1 and "expected" in err
    assert not (tmp_path / "run").exists()


def test_values_at_the_limits_are_taken():
    for rate in (1e-12, 1000.0):
        Training(lr=rate, backbone_lr=rate, warmup_lr=rate, min_lr=rate, weight_decay=rate)
    Training(backbone_lr=0, warmup_lr=0.0, min_lr=0, weight_decay=0)
    for mixing in (0, 0.001, 1000):
        Augmentation(mixup=mixing, cutmix=mixing, color_jitter=100)
    for text in (
        "rand-m9-mstd0.5-inc1",
        "rand-m9-mstd101-n100",
        "augmix-m5-w4-d2",
        "original-mstd0.5",
        "3a",
        "rand-m.5",
    ):
        Augmentation(auto_augment=text)
    TNT(hidden=65536, scorer="mlp", beta=1e6)


def test_python_says_the_same():
    with pytest.raises(UsageError, match="lr=1e"):
        Training(lr=1e38)
    with pytest.raises(UsageError, match="hidden="):
        TNT(hidden=10**12, scorer="mlp")
