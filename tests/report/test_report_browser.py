"""A report in a browser, at the width of a phone and of a desktop, and printed."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess

import pytest
from test_report_build import png

from made_rows import sweep
from tntprune.report.build import build

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine: apt-get install chromium")

WATCH = "<script>var wrong = []; addEventListener('error', e => wrong.push(String(e.message)), true);</script>"
MEASURE = """<script>addEventListener('load', () => {
  const box = e => { const b = e.getBoundingClientRect(); return [b.left, b.right, b.width, b.height]; };
  document.querySelectorAll('details').forEach(d => d.open = true);
  const boxes = [...document.querySelectorAll('.scroll')].map(s => {
    s.scrollLeft = 1e6;
    const cells = [...s.querySelectorAll('td:first-child')];
    return {room: s.clientWidth, need: s.scrollWidth, left: box(s)[0], first: cells.map(c => box(c)[0])};
  });
  parent.postMessage(JSON.stringify({
    wrong, width: innerWidth, need: document.documentElement.scrollWidth, boxes,
    pictures: [...document.images].map(i => [i.naturalWidth, ...box(i)]), texts: document.body.innerText.length,
  }), '*');
});</script>"""
OUTER = """<!doctype html><body style="margin:0">
<iframe src="page.html" style="width:{}px;height:900px;border:0"></iframe>
<pre></pre><script>onmessage = e => document.querySelector('pre').textContent = e.data;</script>"""


def chromium(*arguments):
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("page")
    rows = [row for name in ("deit_base_distilled_patch16_224", "b", "vit16") for row in sweep(name, keeps=(0.8, 0.4))]
    page = build(rows, "Results", "A lead.", maps=[("blocks", png(1600, 500))])
    (made / "report.html").write_text(page)
    (made / "page.html").write_text(page.replace("<head>", f"<head>{WATCH}").replace("</body>", f"{MEASURE}</body>"))
    return made


@pytest.mark.parametrize("width", [360, 390, 1280])
def test_nothing_overflows_and_everything_is_seen(folder, width):
    (folder / "outer.html").write_text(OUTER.format(width))
    dom = chromium(
        f"--user-data-dir={folder / 'profile'}", f"--window-size={max(width, 500)},900", "--virtual-time-budget=5000",
        "--dump-dom", (folder / "outer.html").as_uri(),
    )  # fmt: skip
    found = json.loads(html.unescape(re.findall(r"<pre>(.*?)</pre>", dom, re.DOTALL)[0]))
    assert found["wrong"] == [] and found["width"] == width and found["need"] <= width
    assert len(found["pictures"]) == 3 and found["texts"] > 1000
    for natural, left, right, wide, high in found["pictures"]:
        assert natural > 0 and 0 <= left < right <= width and wide > 200 and high > 50
    *_, wide, high = found["pictures"][0]
    assert (high > 2 * wide) == (width < 500)  # on a phone the plots lie below each other
    scrolled = [box for box in found["boxes"] if box["need"] > box["room"]]
    assert len(found["boxes"]) == 14 and (width == 1280 or len(scrolled) > 6)
    for box in found["boxes"]:
        assert all(abs(left - box["left"]) < 1 for left in box["first"])  # the first column stays where it can be seen


def test_it_can_be_printed(folder):
    chromium(
        f"--user-data-dir={folder / 'profile'}", "--no-pdf-header-footer", f"--print-to-pdf={folder / 'report.pdf'}",
        (folder / "report.html").as_uri(),
    )  # fmt: skip
    printed = (folder / "report.pdf").read_bytes()
    assert printed.startswith(b"%PDF") and 3 <= len(re.findall(rb"/Type\s*/Page\b", printed)) < 40
