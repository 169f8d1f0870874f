from __future__ import annotations

import io
import os
import struct
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tntprune.data import images
from tntprune.data.images import FORMATS, SUFFIXES, BadImage, find_images, read_image
from tntprune.errors import UserError

rng = np.random.default_rng(0)
NOISE = rng.integers(0, 256, (24, 16, 3), dtype=np.uint8)
SMOOTH = np.stack([*np.meshgrid(np.arange(0, 240, 10), np.arange(0, 160, 10)), np.full((16, 24), 90)], 2).astype(
    np.uint8
)
SUFFIX_OF = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp", "BMP": "bmp", "TIFF": "tif", "GIF": "gif", "PPM": "ppm"}


def encoded(image: Image.Image, form: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def png(width: int, height: int, depth: int, colour: int, rows: bytes | None) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    pixels = b"" if rows is None else chunk(b"IDAT", zlib.compress(rows, 1))
    return b"\x89PNG\r\n\x1a\n" + header + pixels + chunk(b"IEND", b"")


def refused(path: Path, word: str, **options) -> None:
    with pytest.raises(BadImage) as caught:
        read_image(path, **options)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and word in message and "\n" not in message


@pytest.mark.parametrize(
    ("form", "options"), [("PNG", {}), ("WEBP", {"lossless": True}), ("BMP", {}), ("TIFF", {}), ("PPM", {})]
)
def test_lossless_formats_come_back_bit_for_bit(tmp_path, form, options):
    path = tmp_path / f"x.{SUFFIX_OF[form]}"
    path.write_bytes(encoded(Image.fromarray(NOISE), form, **options))
    assert np.array_equal(np.asarray(read_image(path)), NOISE)
    assert np.array_equal(np.asarray(read_image(path, "L")), np.asarray(Image.fromarray(NOISE).convert("L")))


@pytest.mark.parametrize("form", ["JPEG", "WEBP"])
def test_lossy_formats_come_back_nearly(tmp_path, form):
    path = tmp_path / f"x.{SUFFIX_OF[form]}"
    path.write_bytes(encoded(Image.fromarray(SMOOTH), form, quality=95))
    image = read_image(path)
    assert (image.mode, image.size) == ("RGB", (24, 16))
    assert np.abs(np.asarray(image).astype(int) - SMOOTH).mean() < 4


def test_the_content_counts_and_not_the_suffix(tmp_path):
    path = tmp_path / "really_a_png.jpg"
    path.write_bytes(encoded(Image.fromarray(NOISE), "PNG"))
    assert np.array_equal(np.asarray(read_image(path)), NOISE)


RED, CLEAR = (255, 0, 0), (255, 0, 0, 0)


@pytest.mark.parametrize(
    ("image", "form", "colour"),
    [
        (Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", (254, 0, 0)),
        (Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "TIFF", RED),
        (Image.new("L", (8, 8), 77), "PNG", (77, 77, 77)),
        (Image.new("L", (8, 8), 77), "JPEG", (77, 77, 77)),
        (Image.new("LA", (8, 8), (77, 0)), "PNG", (77, 77, 77)),
        (Image.new("1", (8, 8), 1), "PNG", (255, 255, 255)),
        (Image.new("RGB", (8, 8), RED).quantize(2), "PNG", RED),
        (Image.new("RGB", (8, 8), RED).quantize(2), "GIF", RED),
        (Image.new("RGBA", (8, 8), CLEAR), "PNG", RED),
        (Image.new("RGB", (1, 1), RED), "PNG", RED),
        (Image.new("L", (1, 1), 5), "BMP", (5, 5, 5)),
    ],
    ids=lambda value: f"{value.mode}-{value.width}" if isinstance(value, Image.Image) else str(value).replace(" ", ""),
)
def test_every_mode_is_converted(tmp_path, image, form, colour):
    path = tmp_path / "x.any"
    path.write_bytes(encoded(image, form))
    read = read_image(path)
    assert (read.mode, read.size) == ("RGB", image.size)
    assert np.abs(np.asarray(read).astype(int) - colour).max() <= (1 if form == "JPEG" else 0)
    assert read_image(path, "L").mode == "L"


def test_a_transparent_palette_colour_keeps_its_colour(tmp_path):
    palette = Image.new("P", (2, 2), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    (tmp_path / "x.png").write_bytes(encoded(palette, "PNG", transparency=1))
    assert read_image(tmp_path / "x.png").getpixel((0, 0)) == (10, 20, 30)


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PGM"])
def test_sixteen_bits_are_scaled_and_not_clipped(tmp_path, form):
    values = np.array([[0, 128, 129, 257, 300, 385, 386, 32767, 32896, 65406, 65407, 65535]], dtype=np.uint16)
    path = tmp_path / "x.any"
    if form == "PGM":
        path.write_bytes(b"P5 12 1 65535\n" + values.astype(">u2").tobytes())
    else:
        path.write_bytes(encoded(Image.fromarray(values), form))
    expected = [0, 0, 1, 1, 1, 1, 2, 127, 128, 254, 255, 255]
    for upright in (False, True):
        assert np.asarray(read_image(path, "L", upright)).ravel().tolist() == expected
    assert np.array_equal(np.asarray(read_image(path))[0], np.repeat(np.array(expected)[:, None], 3, 1))


@given(value=st.integers(0, 65535))
def test_sixteen_bits_are_rounded_to_the_nearest(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "sixteen.png"
    path.write_bytes(png(1, 1, 16, 0, b"\0" + struct.pack(">H", value)))
    assert read_image(path, "L").getpixel((0, 0)) == round(value * 255 / 65535)


def test_sixteen_bit_colour_is_scaled(tmp_path):
    (tmp_path / "x.png").write_bytes(png(1, 1, 16, 2, b"\0" + struct.pack(">3H", 65535, 32896, 257)))
    assert read_image(tmp_path / "x.png").getpixel((0, 0)) == (255, 128, 1)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_thirty_two_bits_are_refused(tmp_path, mode):
    Image.new(mode, (4, 4), 1).save(tmp_path / "deep.tif")
    refused(tmp_path / "deep.tif", "32 bits a channel")


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_truncated_files_are_refused(tmp_path, form, share):
    whole = encoded(Image.fromarray(NOISE), form)
    path = tmp_path / f"cut.{SUFFIX_OF[form]}"
    path.write_bytes(whole[: int(share * len(whole))])
    refused(path, "cut")


@pytest.mark.parametrize(
    "content",
    [
        b"hello",
        b"<html><body>404</body></html>",
        b"\xff\xd8\xff",
        b"\x89PNG\r\n\x1a\n",
        b"GIF89a",
        bytes(500),
        b"%PDF-1.7",
    ],
)
def test_what_is_no_image_is_refused(tmp_path, content):
    (tmp_path / "photo.jpg").write_bytes(content)
    refused(tmp_path / "photo.jpg", "photo.jpg")


def test_an_image_of_another_format_is_refused_and_the_formats_are_named(tmp_path):
    Image.fromarray(NOISE).save(tmp_path / "x.png", "ICO")
    refused(tmp_path / "x.png", "expected JPEG, PNG, WEBP")


def test_empty_missing_and_folders_are_refused(tmp_path):
    (tmp_path / "empty.jpg").touch()
    refused(tmp_path / "empty.jpg", "empty file")
    refused(tmp_path / "missing.jpg", "No such file")
    refused(tmp_path / "empty.jpg" / "below.jpg", "Not a directory")
    (tmp_path / "folder.jpg").mkdir()
    refused(tmp_path / "folder.jpg", "folder.jpg")


@pytest.mark.parametrize(
    ("width", "height"), [(20_000, 10_000), (12_000, 10_000), (10_001, 10_000), (2_000_000_000, 1)]
)
def test_too_many_pixels_are_refused_before_they_are_decoded(tmp_path, width, height):
    (tmp_path / "bomb.png").write_bytes(png(width, height, 1, 0, None))  # would fail otherwise: it has no pixels at all
    refused(tmp_path / "bomb.png", "at most 100 megapixels")


def test_a_whole_bomb_is_refused(tmp_path):
    (tmp_path / "bomb.png").write_bytes(png(20_000, 10_000, 1, 0, bytes(10_000 * 2_501)))
    assert (tmp_path / "bomb.png").stat().st_size < 200_000
    refused(tmp_path / "bomb.png", "at most 100 megapixels")


def test_the_limit_itself_is_allowed(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "MAX_PIXELS", 24 * 16)
    Image.new("L", (24, 16)).save(tmp_path / "x.png")
    Image.new("L", (24, 17)).save(tmp_path / "y.png")
    assert read_image(tmp_path / "x.png").size == (24, 16)
    refused(tmp_path / "y.png", "24 x 17 pixels")


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_followed_only_when_asked(tmp_path, form):
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show it rotated clockwise
    left_red = Image.new("RGB", (24, 16), (0, 0, 255))
    left_red.paste(RED, (0, 0, 12, 16))
    path = tmp_path / "x.any"
    path.write_bytes(encoded(left_red, form, exif=exif))
    plain, upright = read_image(path), read_image(path, upright=True)
    assert (plain.size, upright.size) == ((24, 16), (16, 24))
    assert plain.getpixel((2, 8))[0] > 200 > 50 > plain.getpixel((20, 8))[0]
    assert upright.getpixel((8, 2))[0] > 200 > 50 > upright.getpixel((8, 20))[0]


def test_a_tiff_is_turned_once_whatever_is_asked(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(NOISE).save(tmp_path / "x.tif", exif=exif)
    for upright in (False, True):  # Pillow turns it while reading: in TIFF the orientation is part of the pixels' order
        assert np.array_equal(np.asarray(read_image(tmp_path / "x.tif", upright=upright)), np.rot90(NOISE, 3))


def test_upright_leaves_an_image_without_orientation(tmp_path):
    Image.fromarray(NOISE).save(tmp_path / "x.png")
    assert np.array_equal(np.asarray(read_image(tmp_path / "x.png", upright=True)), NOISE)


def test_broken_exif_only_matters_when_it_is_followed(tmp_path):
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "hello"
    whole = encoded(Image.fromarray(NOISE), "JPEG", exif=exif)
    path = tmp_path / "x.jpg"
    path.write_bytes(whole.replace(b"\x01\x0e\x00\x02", b"\x01\x00\x00\x02"))  # an image width of "hello"
    assert read_image(path).size == (16, 24)
    refused(path, "x.jpg", upright=True)


def test_a_tiff_with_text_for_a_number_is_refused(tmp_path):
    whole = encoded(Image.fromarray(NOISE), "TIFF")
    path = tmp_path / "x.tif"
    path.write_bytes(whole.replace(struct.pack("<HH", 0x0111, 4), struct.pack("<HH", 0x0111, 2)))
    assert path.read_bytes() != whole
    refused(path, "x.tif")


def test_of_several_frames_the_first_counts(tmp_path):
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, (0, 255, 0))]
    for form in ("GIF", "TIFF", "MPO"):  # MPO is what phones write into .jpg
        frames[0].save(tmp_path / "x.any", form, save_all=True, append_images=frames[1:])
        assert read_image(tmp_path / "x.any").getpixel((4, 4))[0] > 250


WHOLE = {
    "jpg": encoded(Image.fromarray(SMOOTH), "JPEG", exif=Image.Exif()),
    "tif": encoded(Image.fromarray(SMOOTH), "TIFF", compression="tiff_lzw"),
    "webp": encoded(Image.fromarray(SMOOTH), "WEBP"),
    "gif": encoded(Image.fromarray(SMOOTH).quantize(8), "GIF"),
    "bmp": encoded(Image.fromarray(SMOOTH), "BMP"),
    "ppm": encoded(Image.fromarray(SMOOTH), "PPM"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(sorted(WHOLE)),
    changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=5),
    end=st.integers(1, 3000),
    upright=st.booleans(),
)
def test_a_damaged_file_is_read_or_refused_by_name(tmp_path_factory, kind, changes, end, upright):
    damaged = bytearray(WHOLE[kind])
    for place, value in changes:
        damaged[place % len(damaged)] = value
    path = tmp_path_factory.getbasetemp() / f"damaged.{kind}"
    path.write_bytes(damaged[:end])
    try:
        assert read_image(path, upright=upright).mode == "RGB"
    except BadImage as bad:
        assert str(bad).startswith(f"{path}: ") and "\n" not in str(bad)


def test_images_are_found_in_a_fixed_order(tmp_path):
    names = ["b/2.png", "b/10.jpg", "a/z.JPEG", "a/y.Png", "c.webp", "a/deep/er/x.tiff", *(f"s/x{s}" for s in SUFFIXES)]
    for name in reversed(names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = find_images(tmp_path)
    assert found == sorted(tmp_path / name for name in names)


def test_other_files_and_hidden_ones_are_passed_over(tmp_path):
    for name in (
        "x.jpg",
        ".x.jpg",
        "._x.jpg",
        ".cache/y.jpg",
        "a/.thumbs/z.png",
        "notes.txt",
        "jpg",
        "x.jpg.part",
        "a/b.npy",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "folder.png").mkdir()
    assert find_images(tmp_path) == [tmp_path / "x.jpg"]


def test_the_folder_itself_may_be_hidden(tmp_path):
    (tmp_path / ".data").mkdir()
    (tmp_path / ".data" / "x.jpg").touch()
    assert len(find_images(tmp_path / ".data")) == 1


def test_a_link_to_nothing_is_found_and_refused_by_name(tmp_path):
    (tmp_path / "gone.jpg").symlink_to(tmp_path / "elsewhere.jpg")
    assert find_images(tmp_path) == [tmp_path / "gone.jpg"]
    refused(tmp_path / "gone.jpg", "No such file")


def test_a_folder_without_images_is_refused(tmp_path):
    (tmp_path / "notes.txt").touch()
    for path, word in (
        (tmp_path, "no images in it"),
        (tmp_path / "missing", "no such folder"),
        (tmp_path / "notes.txt", "not a folder"),
    ):
        with pytest.raises(UserError) as caught:
            find_images(path)
        assert str(caught.value).startswith(f"{path}: {word}") and "\n" not in str(caught.value)


def test_linked_class_folders_are_followed_and_loops_are_not(tmp_path):
    real = tmp_path / "elsewhere" / "cats"
    real.mkdir(parents=True)
    (real / "a.png").write_bytes(encoded(Image.fromarray(NOISE), "PNG"))
    (real / "back").symlink_to(tmp_path / "root")
    root = tmp_path / "root"
    root.mkdir()
    (root / "cats").symlink_to(real)
    assert find_images(root) == [root / "cats" / "a.png"]


def test_two_links_to_one_folder_are_two_folders(tmp_path):
    real = tmp_path / "real"
    real.mkdir()
    (real / "a.png").write_bytes(encoded(Image.fromarray(NOISE), "PNG"))
    root = tmp_path / "root"
    root.mkdir()
    for name in ("one", "two"):
        (root / name).symlink_to(real)
    assert find_images(root) == [root / "one" / "a.png", root / "two" / "a.png"]


def test_a_sliver_is_refused_before_it_is_blown_up(tmp_path):
    (tmp_path / "sliver.png").write_bytes(encoded(Image.new("L", (1, 60_000)), "PNG"))
    with pytest.raises(BadImage, match="1 x 60000 pixels; expected sides of at most 100 to 1"):
        read_image(tmp_path / "sliver.png")
    (tmp_path / "long.png").write_bytes(encoded(Image.new("L", (100, 1)), "PNG"))
    assert read_image(tmp_path / "long.png").size == (100, 1)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_bytes_and_images_are_read_as_files_are(tmp_path, mode):
    for number, image in enumerate((Image.fromarray(NOISE), Image.fromarray(NOISE).convert("CMYK"))):
        form = "PNG" if image.mode == "RGB" else "TIFF"
        path = tmp_path / f"{number}.{SUFFIX_OF[form]}"
        path.write_bytes(encoded(image, form))
        expected = np.asarray(read_image(path, mode))
        assert np.array_equal(np.asarray(read_image(path.read_bytes(), mode)), expected)
        assert np.array_equal(np.asarray(read_image(image, mode)), expected)
        assert image.getpixel((0, 0))  # and is as usable as before


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (b"", "empty file"),
        (b"no image", "not an image that can be read"),
        (encoded(Image.fromarray(NOISE), "PNG")[:-60], "cannot be read"),
        (Image.new("L", (1, 101)), "expected sides of at most 100 to 1"),
        (Image.new("I", (4, 4)), "32 bits a channel"),
    ],
)
def test_what_is_wrong_with_bytes_and_images_is_told_by_the_name_that_was_given(source, words):
    with pytest.raises(BadImage, match=f"^set photo 3: .*{words}"):
        read_image(source, name="set photo 3")
    with pytest.raises(BadImage, match=r"^an image: "):
        read_image(source)


# Folders that were made to hang a reader


def test_links_to_themselves_stop_nothing(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").write_bytes(b"x")
    for name in ("loop", "a/loop", "a/loop.png"):
        (tmp_path / name).symlink_to(Path(name).name)
    (tmp_path / "a" / "up").symlink_to("..")
    assert find_images(tmp_path) == [tmp_path / "a" / "1.png", tmp_path / "a" / "loop.png"]
    with pytest.raises(BadImage, match=r"loop.png: cannot be read \(Too many levels"):
        read_image(tmp_path / "a" / "loop.png")


def test_links_that_multiply_end_in_a_line(tmp_path):
    """Thirty levels of two links each are a thousand million paths."""
    for level in range(30):
        (tmp_path / str(level)).mkdir()
        for name in "xy":
            (tmp_path / str(level) / name).symlink_to(f"../{level + 1}")
    (tmp_path / "30").mkdir()
    with pytest.raises(UserError, match="links lead here in more than"):
        find_images(tmp_path / "0")


def test_folders_in_folders_in_folders_are_told_or_read(tmp_path):
    """Deeper than Python's own stack, and than a path may be long."""
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(2100):
        os.mkdir("a", dir_fd=here)
        below = os.open("a", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    with pytest.raises(UserError, match="cannot be read"):
        find_images(tmp_path)
    subprocess.run(["rm", "-rf", tmp_path / "a"], check=True)


def test_a_lack_of_memory_is_not_a_bad_image(tmp_path, monkeypatch):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    monkeypatch.setattr("tntprune.data.images._whole", lambda *given: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        read_image(tmp_path / "a.png")
