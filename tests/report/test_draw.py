from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import make, photos_for
from tntprune import TNT, Random, calibrate_, reduce_
from tntprune.backbones.attach import reduction_of
from tntprune.cli.main import main
from tntprune.report import draw
from tntprune.report.draw import ORIGINAL, STRIPES, VEIL, kept_maps, photo_maps, row_titles, sheet, to_pixels, veiled


def test_kept_tokens_stay_clear_dropped_ones_are_veiled_and_merged_ones_half():
    pixels = np.full((4, 6, 3), 100, dtype=np.uint8)
    carrier = np.array([0, -1, 0, 3, 4, -1])  # 2 x 3 grid: 0, 3 and 4 kept, 1 and 5 dropped, 2 merged into 0
    seen = veiled(pixels, carrier, (2, 3))
    assert seen.shape == pixels.shape and seen.dtype == np.uint8
    assert (seen[:2, :2] == 100).all() and (seen[2:, :4] == 100).all()
    dropped, merged = ((100 * (1 - v) + STRIPES * v).round() for v in (VEIL, VEIL / 2))
    for place, (light, dark) in ((seen[:2, 2:4], dropped), (seen[2:, 4:], dropped), (seen[:2, 4:], merged)):
        assert (place[[0, 1], [0, 1]] == light).all() and (place[[0, 1], [1, 0]] == dark).all()


@pytest.mark.parametrize("shade", range(0, 256, 15))
@pytest.mark.parametrize("carrier", [-1, 0])
def test_a_token_that_is_gone_looks_different_whatever_it_shows(shade, carrier):
    """On white, on black and on any grey, dropped or merged, some of the patch differs from the photo."""
    pixels = np.full((8, 16, 3), shade, dtype=np.uint8)
    seen = veiled(pixels, np.array([0, carrier]), (1, 2)).astype(int)
    assert (seen[:, :8] == shade).all()
    assert np.abs(seen[:, 8:] - shade).max() > 25
    assert np.ptp(seen[:, 8:, 0]) > 25  # and it has stripes, which a photo's plain wall has not


def test_titles_of_rows_stay_different():
    long = [Path(f"ILSVRC2012_val_000{number}_n01440764_of_a_long_name.JPEG") for number in (17, 23, 99)]
    titles = row_titles(long)
    assert len(set(titles)) == 3 and titles[0].startswith("…") and "17_n014" in titles[0] and max(map(len, titles)) < 27
    assert row_titles([Path("a.png"), Path("b.png")]) == ["a", "b"]
    assert row_titles([long[0]]) == ["ILSVRC2012_val_00017_n01…"]
    ends = [Path("x" + "a" * 40 + end) for end in ("1", "2")] + [Path("y" * 40)]
    assert len(set(row_titles(ends))) == 3


def test_a_normalised_image_becomes_the_picture_it_was():
    picture = torch.randint(0, 256, (3, 5, 7), generator=torch.Generator().manual_seed(0)).float() / 255
    mean, std = (0.1, 0.5, 0.3), (0.2, 0.4, 0.9)
    normalised = (picture - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    assert np.array_equal(to_pixels(normalised, mean, std), (picture * 255).round().byte().permute(1, 2, 0).numpy())
    grey = to_pixels(torch.zeros(1, 4, 4), [0.5], [0.5])
    assert grey.shape == (4, 4, 3) and (grey == 128).all()


@pytest.mark.parametrize("kind", ["plain", "registers", "no_cls", "non_square", "patch_8x4"])
def test_a_map_shows_exactly_the_kept_patches(kind):
    model = reduce_(make(kind), Random(at=(0, 2), keep=0.5))
    images = photos_for(model)
    (tall, wide), grid = model.patch_embed.patch_size, model.patch_embed.grid_size
    for picture in kept_maps(model, images, (0.5,) * 3, (0.5,) * 3):
        assert list(picture) == [ORIGINAL, "before block 1", "after block 2"]
        count = grid[0] * grid[1]
        for caption in ("before block 1", "after block 2"):
            count = count // 2
            same = (picture[caption] == picture[ORIGINAL]).all(2)
            clear = same.reshape(grid[0], tall, grid[1], wide).all((1, 3))
            assert clear.sum() == count


def test_each_lets_every_location_work_alone_and_leaves_the_model_as_it_was():
    model = reduce_(make("plain"), TNT(at=(1, 2, 3), keep=(0.5, 0.25, 0.75)))
    images = photos_for(model)
    before = reduction_of(model).config
    with torch.inference_mode():
        expected = model(images)
        (one, *_), (each, *_) = (kept_maps(model, images, (0.5,) * 3, (0.5,) * 3, each) for each in (False, True))
        assert reduction_of(model).config == before and torch.equal(model(images), expected)
    assert list(one) == list(each) == [ORIGINAL, "after block 1", "after block 2", "after block 3"]
    clear = {
        caption: (pixels == each[ORIGINAL]).all(2).reshape(8, 4, 8, 4).all((1, 3)).sum()
        for caption, pixels in each.items()
    }
    assert clear == {ORIGINAL: 64, "after block 1": 32, "after block 2": 16, "after block 3": 48}


def test_a_sheet_has_a_row_for_each_photo_and_a_column_for_each_block(tmp_path):
    model = reduce_(make("plain"), Random(at=(1, 3), keep=0.5))
    paths = []
    for name in ("one", "two"):
        paths.append(tmp_path / f"{name}.png")
        Image.effect_noise((48, 40), 90).convert("RGB").save(paths[-1])
    maps = photo_maps(model, paths)
    picture = Image.open(io.BytesIO(sheet(maps, ["one", "two"])))
    alone = Image.open(io.BytesIO(sheet(maps[:1], ["one"])))
    assert picture.format == "PNG" and picture.width == alone.width and picture.height > 1.7 * alone.height
    assert picture.width > 900


@pytest.mark.parametrize(
    ("config", "merged", "dropped"),
    [(TNT(at=1, keep=0.5), True, False), (Random(at=1, keep=0.5), False, True), (Random(at=1, keep=1.0), False, False)],
)
def test_the_legend_names_the_fates_that_the_pictures_show(config, merged, dropped, monkeypatch):
    told = []
    monkeypatch.setattr(draw, "_legend", lambda figure, fates: told.extend(fates))
    model = reduce_(make("plain"), config)
    maps = kept_maps(model, photos_for(model), (0.5,) * 3, (0.5,) * 3)
    sheet(maps)
    assert told == ["kept", *["merged into a kept token"] * merged, *["dropped"] * dropped]


def test_after_a_sheet_the_model_can_still_be_trained():
    model = reduce_(make("plain"), TNT(at=(1, 2), keep=0.5))
    method = reduction_of(model)
    images = photos_for(model)
    kept_maps(model, images, (0.5,) * 3, (0.5,) * 3, each=True)
    assert reduction_of(model) is method
    calibrate_(model, images, epochs=1, batch_size=3, progress=False)
    with pytest.raises(RuntimeError):
        kept_maps(model, images[:, :1], (0.5,), (0.5,), each=True)
    assert reduction_of(model) is method


def test_a_map_has_the_grid_of_the_picture_and_not_the_models_own():
    model = reduce_(make("dynamic"), Random(at=2, keep=0.5))
    images = torch.randn(2, 3, 24, 48, generator=torch.Generator().manual_seed(0))
    for picture in kept_maps(model, images, (0.5,) * 3, (0.5,) * 3):
        same = (picture["after block 2"] == picture[ORIGINAL]).all(2)
        clear = same.reshape(6, 4, 12, 4).all((1, 3))
        assert clear.sum() == 36 and same.sum() == 36 * 16


@pytest.mark.parametrize("name", ["$5", "a$b$c", "$\\frac$", os.fsdecode(b"\xffphoto"), "two\nlines"])
def test_a_photo_may_have_any_name(name, tmp_path):
    photo = tmp_path / f"{name}.png"
    Image.effect_noise((32, 32), 90).convert("RGB").save(photo)
    out = tmp_path / "sheet.png"
    assert main(["show", "digits_vit", str(photo), "--method", "random", "--at", "1", "--out", str(out)]) == 0
    assert Image.open(out).format == "PNG"
