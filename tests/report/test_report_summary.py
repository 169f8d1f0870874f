from __future__ import annotations

from math import sqrt

import pytest

from made_rows import made, sweep
from tntprune.methods import TNT, Random, TopK
from tntprune.report.groups import grouped
from tntprune.report.summary import error_of_difference, standard_error, summary, tie


def row(right, agreeing, name="TNT", macs=0.6, images=1000):
    kind = {"TNT": TNT, "Top-K": TopK, "random": Random}[name]
    return made(kind(at=3, keep=macs), name, right, macs, agreeing=agreeing, images=images)


@pytest.mark.parametrize("right", [100, 500, 900])
def test_the_standard_error_is_the_binomial_one(right):
    share = right / 1000
    assert standard_error(row(right, right)) == pytest.approx(100 * sqrt(share * (1 - share) / 1000), rel=0.02)
    assert standard_error(row(3, 3, images=3)) > 10  # three right of three prove little


def test_a_difference_is_as_sure_as_independent_images_make_it_or_surer():
    one, other = row(800, 500), row(700, 500)  # so many guesses differ that nothing more is known
    apart = sqrt(standard_error(one) ** 2 + standard_error(other) ** 2)
    assert error_of_difference(one, other) == pytest.approx(apart)
    close, closer = row(800, 990), row(790, 990)  # the two can differ on 20 images at most
    assert error_of_difference(close, closer) == pytest.approx(100 * sqrt(20) / 1000)
    assert error_of_difference(close, closer) < apart / 3


def test_the_bound_holds_for_any_two_rows_that_could_be():
    import torch

    generator = torch.Generator().manual_seed(0)
    for changed in (0.02, 0.1, 0.5):
        labels, base = torch.randint(0, 3, (2, 400), generator=generator)
        guesses = []
        for _ in range(2):
            other = torch.rand(400, generator=generator) < changed
            guesses.append(torch.where(other, torch.randint(0, 3, (400,), generator=generator), base))
        made_ = [row(int((g == labels).sum()), int((g == base).sum()), images=400) for g in guesses]
        differences = (guesses[0] == labels).float() - (guesses[1] == labels).float()
        paired = 100 * float(differences.pow(2).sum()) ** 0.5 / 400  # the standard error where there is no difference
        assert paired <= error_of_difference(*made_) * 1.05


def test_within_two_standard_errors_is_a_tie():
    assert tie(row(800, 500), row(770, 500)) and not tie(row(800, 500), row(750, 500))
    assert not tie(row(800, 995), row(780, 995)) and tie(row(800, 1000), row(800, 1000))


def said(*rows):
    ((topic, sentences),) = summary(grouped([made(), *rows]))
    assert topic == "vit_tiny, one location: unpruned 80.0 % of 1,000 images (standard error 1.3)"
    return sentences


def test_a_lead_within_noise_is_called_a_tie():
    (high,) = said(row(780, 500, "TNT"), row(770, 500, "Top-K"), row(600, 500, "random"))
    assert "No method is first beyond noise: TNT leads at the one cost compared, by 1.0 points (a tie)" in high
    assert "Within noise of the first there: Top-K." in high and "random" not in high


def test_a_lead_beyond_noise_is_said_to_be_one():
    high, low = said(
        row(780, 700, "TNT", 0.6), row(700, 700, "Top-K", 0.6), row(770, 700, "TNT", 0.5), row(600, 700, "Top-K", 0.5),
        row(500, 500, "Top-K", 0.3),
    )  # fmt: skip
    assert high.startswith("At 45 % of the MACs or more: TNT is first at 2 of 2 costs, by 8.0 to 17.0 points")
    assert "(beyond noise)" in high and "Within noise of the first" not in high
    assert "costs, 50 %, leaves 77.0 % with TNT, " in high and "unpruned model: within noise on 1,000 images." in high
    assert low.startswith("Below 45 % of the MACs: no two methods have the same cost")
    assert "leaves 50.0 % with Top-K, 30.0 ± " in low and "below the unpruned model" in low


def test_each_backbone_and_scheme_has_its_own():
    topics = [topic for topic, _ in summary(grouped(sweep("a") + sweep("b")))]
    assert [topic.split(":")[0] for topic in topics] == [
        "a, one location", "a, several locations", "b, one location", "b, several locations",
    ]  # fmt: skip
    mixed = [topic for topic, _ in summary(grouped(sweep() + sweep(precision="bf16")))]
    assert len(set(mixed)) == 4 and "bf16" in mixed[-1]
