"""The plan of the paper: each of its rows once, with its multiply-accumulates; and the same for another model."""

from __future__ import annotations

import json
from collections import Counter

import pytest

import paper_models  # noqa: F401 - registers them
from tntprune import UserError
from tntprune.cli.main import main
from tntprune.methods import EViT, ToMe, options
from tntprune.paper import dry_run, published
from tntprune.paper.dry_run import count, estimate, seconds
from tntprune.paper.entries import BACKBONES, COLUMNS, LEARNERS, METHODS, ablation
from tntprune.paper.plan import make_plan, substitute
from tntprune.paper.settings import ranking
from tntprune.paper.trainings import PlannedTraining, recipe


@pytest.fixture
def instant(monkeypatch):
    """Nothing is timed."""
    monkeypatch.setattr(dry_run, "seconds", lambda name, device, precision: 0.01)


# The paper's own backbones


def test_every_published_row_is_in_the_plan_once_and_in_its_order():
    plan = make_plan()
    assert [entry.row for entry in plan.entries] == [{c: one.row[c] for c in COLUMNS} for one in published()]
    for entry, one in zip(plan.entries, published(), strict=True):
        assert (entry.model, entry.config) == (one.model, one.config)
        assert (entry.authors.top1, entry.authors.gmacs, entry.own) == (one.authors.top1, one.authors.gmacs, True)


def test_rates_are_ranked_from_the_most_tokens():
    ranks = ranking(("vit16_mlp768", "deit_small_distilled"))
    assert ranks["vit16_mlp768 single tnt 160"] == 1 and ranks["vit16_mlp768 single tnt 50"] == 12
    assert ranks["deit_small_distilled multi tome 8 at 3.45"] == 1
    assert ranks["deit_small_distilled multi tome 25 at 1.55"] == 10
    assert ranks["deit_small_distilled multi tnt 0.9 0.9 0.9 at 3.0"] == 2


def test_plain_models_come_with_their_unpruned_rows():
    plan = make_plan()
    assert {entry.model for entry in plan.bases} == {f"deit_{size}_patch16_224" for size in ("base", "small", "tiny")}
    unpruned = {entry.model for entry in plan.all if entry.config is None}
    assert unpruned == {entry.model for entry in plan.all}
    assert [entry.config is None for entry in plan.runs[:7]] == [True] * 7


def test_one_training_serves_all_rates_and_what_is_the_same_is_run_once():
    plan = make_plan()
    assert len(plan.trainings) == len(set(plan.trainings)) == 10
    assert ("deit_base_patch16_224", "evit") in plan.trainings and ("vit16", "tnt") in plan.trainings
    runs = Counter(entry.run for entry in plan.all)
    assert len(plan.runs) == len(runs) < len(plan.all)


def test_the_ablation_gives_the_printed_gflops_or_says_why_not():
    rows = ablation("deit_base_distilled_patch16_224")
    assert [entry.authors.top1 for entry in rows if entry.authors] == [81.33, 81.52, 81.54, 81.57, 80.55, 81.41, 81.50]
    for entry in rows:
        if entry.authors is not None:
            met = abs(count(entry.model, entry.config) / 1e9 - entry.authors.gmacs) <= 0.015
            assert met != bool(entry.authors.not_met), entry.name
    assert sum(bool(entry.authors and entry.authors.not_met) for entry in rows) == 1
    single = next(one for one in published() if one.name == "deit_base_distilled single tnt 0.6")
    assert rows[3].config == single.config and rows[3].authors.top1 == single.authors.top1
    assert ablation("deit_small_distilled_patch16_224") == ()


# Choosing


def test_only():
    plan = make_plan(only=["multi", "tnt", "tome"])
    assert {(e.table, e.method) for e in plan.entries} == {("unpruned", "none"), ("multi", "tnt"), ("multi", "tome")}
    assert not plan.ablation and not plan.maps and not plan.bases
    plan = make_plan(BACKBONES[:1], ["maps"])
    assert not plan.all and [one.backbone for one in plan.maps] == list(BACKBONES[:1])
    assert plan.trainings == [(BACKBONES[0], "tnt")] and plan.models == list(BACKBONES[:1])
    assert not make_plan(only=["random"]).trainings


def test_backbones_of_which_nothing_is_asked_are_not_run():
    plan = make_plan(only=["ablation"])
    assert plan.models == list(BACKBONES[:1]) and len(plan.entries) == 1
    assert "vit16" not in make_plan(only=["evit"]).models  # it has no CLS token, and no public weights


def test_each_training_is_of_what_its_rows_run():
    """Each recipe of TNT's learns its own way, whichever training the paper's authors gave it."""
    for kind in ("published", "short"):
        for name, config in LEARNERS.items():
            learned = [key for key, entry in options(type(config)).items() if entry.metadata["learned"]]
            trained = recipe(name, kind).config
            assert [getattr(trained, key) for key in learned] == [getattr(config, key) for key in learned]


@pytest.mark.parametrize(
    ("only", "words"),
    [
        (["tnt-mpl"], "did you mean tnt-mlp"),
        (["all"], "expected some of single, multi"),
        (["ablation", "evit"], "nothing"),
    ],
)
def test_what_there_is_not_is_refused(only, words):
    with pytest.raises(UserError, match=words):
        make_plan(BACKBONES[1:2], only)


# Another model


def test_another_model_gets_the_whole_plan():
    plan = substitute("vit_tiny_patch16_224")
    counts = Counter((entry.scheme, entry.method) for entry in plan.entries)
    expected = {(scheme, method): 10 for scheme in ("single", "multi") for method in METHODS}
    assert counts == expected | {("unpruned", "none"): 1, ("single", "tome"): 4, ("multi", "tome"): 8}
    assert len(plan.ablation) == 8 and len(plan.maps) == 2 and not plan.left_out
    assert {entry.model for entry in plan.all} == {"vit_tiny_patch16_224"}
    for entry in plan.entries:
        theirs = entry.authors
        assert (theirs is None) == (
            entry.method == "tnt-relative" or (entry.scheme, entry.method) == ("multi", "random")
        )
        if theirs is None:
            continue
        assert not entry.own and theirs.backbone in ("deit_tiny_distilled", "deit_small_distilled")
        ours = count(entry.model, entry.config) / count(entry.model, None)
        if not (entry.note or theirs.note):
            assert abs(ours - theirs.share) < 0.02, entry.name  # 0.01 GFLOPs are 0.008 of DeiT-T


def test_evit_runs_at_its_true_rates_where_its_labels_are_wrong():
    plan = make_plan(["vit_tiny_patch16_224"], ["evit"])
    rates = [entry.config.keep for entry in plan.entries if entry.scheme == "multi"]
    assert rates == [(k,) for k in (0.8, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2)]
    assert [entry.parameter for entry in plan.entries if entry.scheme == "multi"] == [f"{k}" for (k,) in rates]
    single = [entry.config for entry in plan.entries if entry.scheme == "single"]
    assert single[7] == EViT(at=3, keep=0.3)  # printed so, and not the 0.25 that its GFLOPs are of


def test_counts_follow_the_number_of_patches():
    plan = substitute("paper_tiny")  # 64 patches instead of 196
    tome = [entry.config for entry in plan.entries if (entry.scheme, entry.method) == ("single", "tome")]
    assert tome[-1] == ToMe(at=3, r=32)  # K = .5
    assert {entry.config.similar for entry in plan.entries if entry.method == "tnt"} == {8, 13}
    full = {e.name + e.scheme + e.parameter: count(e.model, e.config) for e in plan.entries}
    assert all(macs <= full["unprunedunpruned"] * 1.01 for macs in full.values())


def test_methods_that_need_a_cls_token_are_left_out_and_told():
    plan = substitute("paper_no_cls")
    assert {method for _, method, _ in plan.left_out} == {"topk", "evit"}
    assert not {"topk", "evit"} & {entry.method for entry in plan.entries}


def test_shallow_models_are_refused():
    with pytest.raises(UserError, match="expected at least 12"):
        substitute("test_vit")


# On paper


def test_dry_run_lists_every_published_row_with_its_macs(capsys, instant):
    assert main(["paper", "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["settings"]) == len(published()) == 443
    for setting, one in zip(told["settings"], published(), strict=True):
        assert {name: setting[name] for name in COLUMNS} == {name: one.row[name] for name in COLUMNS}
        assert one.authors.agrees(setting["macs"]) != bool(one.authors.not_met)
    assert len(told["ablation"]) == 8 and len(told["trainings"]) == 10
    assert told["estimate"]["total"] > told["estimate"]["evaluating"] > 0


def test_dry_run_prints_the_plan(capsys, instant):
    assert (
        main(["paper", "--dry-run", "--backbones", "paper_tiny", "--recipe", "short", "--only", "multi", "evit"]) == 0
    )
    text = capsys.readouterr().out
    assert "several locations" in text and "training evit" in text and "one location" not in text
    assert "3 epochs" in text and "11 settings to run on 50000 photos" in text and "authors" not in text.split()[0]


def test_the_estimate_adds_up():
    plan = make_plan(["paper_tiny"], ["single", "random"])
    trainings = [PlannedTraining("paper_tiny", "tnt", 2, False), PlannedTraining("paper_tiny", "evit", 1, True)]
    found = estimate(plan, trainings, "cpu", images=100, photos=10, speed=False, per_image={"paper_tiny": 2.0})
    base = count("paper_tiny", None)
    own = sum(count(entry.model, entry.config) / base for entry in plan.runs)
    assert found.evaluating == pytest.approx(200 * (own + len(plan.runs) / dry_run.TOGETHER))
    assert found.training == {"paper_tiny tnt": 2 * 10 * 3 * 2.0, "paper_tiny evit": 10 * 4 * 2.0}
    assert found.total == pytest.approx(found.evaluating + 200.0)
    assert 0 < seconds("paper_tiny", "cpu") < 60
