"""The explorer, driven in a browser: on a desktop and on a phone, with photos and with what is none."""

from __future__ import annotations

import shutil
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from PIL import Image

gradio = pytest.importorskip("gradio")
sync_api = pytest.importorskip("playwright.sync_api")

from tntprune.app.choices import ExploredModel  # noqa: E402
from tntprune.app.serve import served  # noqa: E402

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine: apt-get install chromium"),
    pytest.mark.xdist_group("explorer"),
]
SECONDS = 30_000  # milliseconds in which a busy machine answers
KEPT, FACTS, MESSAGE = "#kept-0 img", "#facts-0", "#message"


@pytest.fixture(scope="module")
def address():
    with served(ExploredModel("digits_vit")) as found:
        yield found


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield found
        found.close()


@pytest.fixture
def page(browser, address, request):
    width = getattr(request, "param", 1280)
    opened = browser.new_page(viewport={"width": width, "height": 900})
    opened.set_default_timeout(SECONDS)
    opened.asked = []
    opened.on("request", lambda one: opened.asked.append(one.url))
    opened.goto(address)
    opened.wait_for_selector(KEPT)
    opened.wait_for_function("document.querySelector('#facts-0')?.innerText?.includes('x less')")
    yield opened
    opened.close()


def text(page, place):
    return page.locator(place).inner_text()


def source(page, place=KEPT):
    return page.locator(place).get_attribute("src")


def until_changed(page, before, place=KEPT):
    page.wait_for_function(f"document.querySelector({place!r}).src != {before!r}")


def upload(page, path):
    before = source(page)
    clear = page.locator("#photo button[aria-label='Clear'], #photo button[aria-label='Remove Image']")
    if clear.count():
        clear.first.click()
    page.locator("#photo input[type=file]").set_input_files(str(path))
    return before


BOTH = pytest.mark.parametrize("page", [1280, 390], ids=["desktop", "phone"], indirect=True)


@BOTH
def test_it_begins_with_an_example_and_shows_two_methods(page):
    for side in (0, 1):
        page.wait_for_function(f"document.querySelector('#facts-{side}')?.innerText?.includes('x speed')")
        assert "MMACs" in text(page, f"#facts-{side}") and "cosine" in text(page, f"#facts-{side}")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")  # nothing is cut off
    outside = [url for url in page.asked if not url.startswith(("http://127.0.0.1", "data:", "blob:"))]
    assert not outside, outside


def test_moving_the_budget_changes_the_figures(page):
    page.locator("#budget-0 input[type=number]").fill("0.9")
    page.locator("#budget-0 input[type=number]").press("Enter")
    share = f"parseFloat(document.querySelector('{FACTS}')?.innerText?.match(/([0-9.]+) x less/)?.[1])"
    page.wait_for_function(f"{share} > 1.05 && {share} < 1.2")


def test_moving_through_the_blocks_shows_other_pictures(page):
    before = source(page)
    page.locator("#block input[type=number]").fill("0")
    page.locator("#block input[type=number]").press("Enter")
    until_changed(page, before)


def test_another_method(page):
    before = text(page, FACTS)
    page.locator("#method-0 input").click()
    page.get_by_role("option", name="random drop").click()
    page.wait_for_function(f"(document.querySelector('{FACTS}')?.innerText ?? {before!r}) != {before!r}")
    page.get_by_text("Python and command").first.click()
    page.wait_for_function("document.querySelector('#python-0')?.innerText?.includes('Random(')")


@BOTH
def test_an_uploaded_photo(page, tmp_path):
    Image.effect_noise((300, 200), 90).convert("CMYK").save(tmp_path / "own.jpg")
    before = upload(page, tmp_path / "own.jpg")
    until_changed(page, before)
    assert text(page, MESSAGE) == ""


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\nbroken", b""], ids=["broken", "empty"])
def test_a_broken_photo_is_told_in_a_sentence_and_the_page_goes_on(page, tmp_path, content):
    (tmp_path / "broken.png").write_bytes(content)
    upload(page, tmp_path / "broken.png")
    page.wait_for_function("document.querySelector('#message')?.innerText?.includes('broken.png')")
    assert len(text(page, MESSAGE).splitlines()) == 1
    Image.effect_noise((64, 64), 90).save(tmp_path / "good.png")
    upload(page, tmp_path / "good.png")
    page.wait_for_function("document.querySelector('#message')?.innerText == ''")


def test_an_unknown_model_is_told_in_a_sentence(page):
    page.locator("#model input").fill("resnet50")
    page.locator("#model input").press("Enter")
    page.wait_for_function("document.querySelector('#message')?.innerText?.includes('resnet50') || "
                           "document.querySelector('#message')?.innerText?.includes('ResNet')")  # fmt: skip


@pytest.mark.parametrize("path", ["/etc/passwd", str(Path(__file__).resolve())])
def test_files_of_the_machine_are_not_served(address, path):
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{address}gradio_api/file={path}")
    assert caught.value.code in (403, 404)


def test_nothing_stays_behind(browser, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with served(ExploredModel("digits_vit")) as address:
        page = browser.new_page()
        page.goto(address)
        page.wait_for_selector(KEPT, timeout=SECONDS)
        assert list(tmp_path.iterdir())
        page.close()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("tntprune-app-")]
