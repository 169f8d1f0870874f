from __future__ import annotations

import copy

import pytest
import torch
from PIL import Image

from tntprune import ATS, TNT, AViT, Random, ToMe, reduce_
from tntprune.analysis.accuracy_curve import KEEPS, measure_curve
from tntprune.analysis.evaluate import evaluate
from tntprune.backbones.digits_vit import digits_vit
from tntprune.data.folders import labelled_photos
from tntprune.demo.digits import scans, scatter
from tntprune.errors import UsageError, UserError


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Thirty cluttered digits in ten class folders."""
    folder = tmp_path_factory.mktemp("curve") / "digits"
    images, labels = scans("test")
    chosen = torch.cat([(labels == digit).nonzero()[:3, 0] for digit in range(10)])
    canvas, labels = scatter(images[chosen], labels[chosen], torch.Generator().manual_seed(0))
    for number, (image, label) in enumerate(zip(canvas, labels.tolist())):
        (folder / f"digit{label}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].mul(255).round().byte().numpy()).save(folder / f"digit{label}" / f"{number}.png")
    return folder


def curve_of(config, photos, keeps=(0.5, 0.25), **options):
    return measure_curve(reduce_(digits_vit(), config), photos, keeps, workers=0, progress=False, **options)


@pytest.mark.parametrize("config", [Random(at=2), TNT(at=2), ATS(at=2), ToMe(at=(1, 2))], ids=lambda c: c.method)
def test_every_point_is_what_evaluate_gives_for_it(photos, config):
    found = curve_of(config, photos, batch_size=8)
    assert found.images == 30 and found.data == "digits" and found.stamp
    for keep, point in zip((0.5, 0.25), found.points[-2:], strict=True):
        model = reduce_(digits_vit(), config.changed(keep=keep))
        alone = evaluate(model, labelled_photos(photos, model), batch_size=8, workers=0, progress=False)
        assert point.setting == f"keep {keep}"
        assert (point.top1, point.top5, point.agreement) == (alone.top1, alone.top5, alone.agreement)
        assert point.macs == alone.macs < found.base.macs
    whole = evaluate(digits_vit(), labelled_photos(photos, digits_vit()), workers=0, progress=False)
    assert (found.base.top1, found.base.macs, found.base.agreement) == (whole.top1, whole.macs, 100)


@pytest.mark.parametrize(
    ("config", "settings", "own"),
    [
        (Random(at=2), ["keep 0.5", "keep 0.25"], "keep 0.5"),
        (Random(at=2, keep=0.25), ["keep 0.5", "keep 0.25"], "keep 0.25"),
        (Random(at=2, keep=0.3), ["as saved", "keep 0.5", "keep 0.25"], "as saved"),
        (Random(at=2, tokens=20), ["as saved", "keep 0.5", "keep 0.25"], "as saved"),
    ],
)
def test_the_own_setting_is_among_them_and_marked(photos, config, settings, own):
    points = curve_of(config, photos).points
    assert [point.setting for point in points] == settings
    assert [point.setting for point in points if point.own] == [own]


@pytest.mark.parametrize("configs", [[Random(at=1, keep=0.5), ToMe(at=3, r=2)], [AViT()]])
def test_what_has_no_rate_is_measured_as_it_is(photos, configs):
    model = reduce_(digits_vit(), *configs)
    points = measure_curve(model, photos, workers=0, progress=False).points
    assert [(point.setting, point.own) for point in points] == [("as saved", True)]


@torch.inference_mode()
def test_the_model_stays_as_it_is(photos):
    model = reduce_(digits_vit(), Random(at=2, keep=0.5))
    images, reduction = torch.rand(2, 1, *model.patch_embed.img_size), model.reduction
    before, state = model(images), copy.deepcopy(model.state_dict())
    measure_curve(model, photos, workers=0, progress=False)
    assert model.reduction is reduction and torch.equal(model(images), before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_another_unpruned_model_can_be_the_measure(photos):
    silent = digits_vit()
    torch.nn.init.zeros_(silent.head.weight)  # it always says the same
    found = curve_of(Random(at=2), photos, base=silent)
    assert found.base.top1 == 10 and all(point.agreement < 50 < point.top1 for point in found.points)


def test_what_cannot_be_measured_is_refused(photos, tmp_path):
    with pytest.raises(UserError, match="training mode"):
        measure_curve(reduce_(digits_vit(), Random(at=2)).train(), photos)
    with pytest.raises(UserError, match="is not reduced"):
        measure_curve(digits_vit(), photos)
    with pytest.raises(UsageError, match="keep=2"):
        curve_of(Random(at=2), photos, (2,))
    (tmp_path / "digit0").mkdir()
    (tmp_path / "digit0" / "bad.png").write_bytes(b"no image")
    for digit in range(1, 10):
        (tmp_path / f"digit{digit}").mkdir()
        Image.new("L", (32, 32)).save(tmp_path / f"digit{digit}" / "a.png")
    with pytest.raises(UserError, match=r"bad\.png"):
        curve_of(Random(at=2), tmp_path)
    assert KEEPS == tuple(sorted(KEEPS, reverse=True))
