"""Sharing a reduction: the saved file and its card in a repository on the Hub."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

from tntprune.analysis.accuracy_curve import AccuracyCurve, measure_curve
from tntprune.backbones.attach import reduction_of
from tntprune.errors import UsageError, UserError
from tntprune.serialization.card import CARD, model_card, shareable
from tntprune.serialization.checkpoint import read, save
from tntprune.serialization.hub import split, upload
from tntprune.system.storage import write


def push(
    model: nn.Module,
    target: str,
    *,
    run: str | Path | None = None,
    data: str | Path | None = None,
    curve: AccuracyCurve | None = None,
    revision: str | None = None,
    private: bool | None = None,
    message: str | None = None,
    token: str | None = None,
    license: str | None = None,
    weights: bool | None = None,
) -> str:
    """Put a model's reduction and a card that describes it on the Hugging Face Hub.

    Args:
        model: A reduced model, in eval mode where something is to be measured.
        target: user/repo, or user/repo@branch; made if it is not there.
        run: The folder that it was loaded from, for the card to tell how it was trained.
        data: Labelled photos to measure on, for the card; see `tntprune.analysis.accuracy_curve.measure_curve`.
        curve: What was measured already, instead of `data`.
        revision: A branch, instead of the main one.
        private: Whether a new repository is hidden from others; None is what the Hub does for this user.
        message: Of the commit.
        token: Instead of the one that this machine is logged in with.
        license: As the Hub writes it, such as apache-2.0; None is that of the base model, if timm knows it.
        weights: Also push the model's own weights; None is whether those in `run` were trained.

    Returns:
        The address of the commit.

    Raises:
        UserError: the model is not reduced or not the one in `run`, nobody is logged in, there is no right to write,
            or no connection.
        UsageError: both data and curve were given.
    """
    repo, branch = split(target, revision)
    method = reduction_of(model).config.method
    if data is not None and curve is not None:
        raise UsageError("data and curve were both given; expected photos to measure on, or what was measured")
    note, tuned = history(model, run) if run is not None else ("", False)
    weights = tuned if weights is None else weights
    if data is not None:
        curve = measure_curve(model, data)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        save(model, folder, shareable(note), weights)
        source = repo if branch in (None, "main") else f"{repo}@{branch}"
        text = model_card(model, source, made_by=note, curve=curve, license=license, weights=weights)
        write(folder / CARD, text.encode())
        message = message or f"A {method} reduction, by tntprune"
        return upload(folder, target, message, revision=revision, private=private, token=token)


def history(model: nn.Module, run: str | Path) -> tuple[str, bool]:
    """Return how the reduction of a model was trained, as its saved file says, and whether the model was trained too.

    Raises:
        UserError: what the file holds is not what the model has.
    """
    saved, own = read(run, model), reduction_of(model).state_dict()
    known = saved.learned
    other = next((n for n, v in own.items() if n not in known or not torch.equal(v.cpu(), known[n])), None)
    if other is not None:
        raise UserError(f"{saved.path}: holds another {other} than the model; expected the folder it was loaded from")
    return saved.made_by, saved.weights is not None
