"""The built site: strict, whole, and without a word to the network."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("griffe", reason="mkdocstrings is not installed")

import check_site

import largemargin as lm

ROOT = Path(__file__).resolve().parents[2]


def write(folder: Path, **pages: str) -> Path:
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('<script src="https://cdn.x/y.js"></script>', "loads https://cdn.x/y.js"),
        ('<link rel="stylesheet" href="//fonts.x/css">', "loads //fonts.x/css"),
        ('<img src="http://x/y.png">', "loads http://x/y.png"),
        ('<p style="background: url(https://x/y)">', "loads https://x/y"),
        ('<a href="missing.html">', "missing.html leads nowhere"),
        ('<a href="other.html#no">', "other.html#no leads nowhere"),
        ('<a href="#no">', "#no leads nowhere"),
        (r'<span class="arithmatex">\(x\)</span>', "shows LaTeX"),
        ("<p>$$x$$</p>", "shows LaTeX"),
    ],
)
def test_what_is_wrong_is_found(text: str, said: str, tmp_path: Path) -> None:
    site = write(tmp_path, page=text, other='<h2 id="yes">x</h2>')
    assert any(said in each for each in check_site.check(site))


def test_what_is_right_passes(tmp_path: Path) -> None:
    text = (
        '<a href="https://example.org">out</a><a href="other.html#yes"></a><a href="#a" id="a"></a>'
        '<code>$$x$$</code><img src="data:image/png;base64,x"><link rel="canonical" href="https://x">'
    )
    assert check_site.check(write(tmp_path, page=text, other='<h2 id="yes">x</h2>')) == []


def test_a_style_sheet_may_not_fetch_either(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text("@import 'https://x/y.css'; b {background: url(c.png)}")
    assert check_site.check(tmp_path) == ["a.css loads https://x/y.css"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_site_is_built_and_whole(site: Path) -> None:
    assert check_site.main(site, list(lm.LOSSES)) == 0
    for name in lm.LOSSES:
        text = (site / "losses" / f"{name}.html").read_text(encoding="utf-8")
        assert "<math" in text
        assert text.count("<svg xmlns") >= 2, "no curve"


@pytest.mark.slow
def test_search_needs_no_server(site: Path) -> None:
    """Browsers neither fetch a file nor start a worker for a page from disk."""
    assert (site / "search" / "search_index.js").read_text("utf-8").startswith("var __index = {")
    assert 'src="../assets/iframe-worker.js"' in (site / "losses" / "cosface.html").read_text()
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    browser_path = Path("/usr/bin/chromium")
    if not browser_path.exists():
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(browser_path), args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": 1440, "height": 900})
        view.goto((site / "losses" / "cosface.html").as_uri())
        view.click("input.md-search__input")
        view.keyboard.type("centroid", delay=20)
        view.wait_for_selector(".md-search-result__item", timeout=20_000)
        found = view.inner_text(".md-search-result__meta")
        browser.close()
    assert "matching documents" in found


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        *("index", "choosing", "benchmarks", "losses/cosface", "api/geometry", "errata"),
        "notebooks/look_at_a_trained_model",
    ],
)
def test_a_browser_asks_nobody_but_the_disk(site: Path, page: str) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    browser_path = Path("/usr/bin/chromium")
    if not browser_path.exists():
        pytest.skip("Chromium is not installed")
    asked, wide = [], {}
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(browser_path), args=["--no-sandbox"])
        for width in (390, 1440):
            view = browser.new_page(viewport={"width": width, "height": 900})
            view.on("request", lambda request: asked.append(request.url))
            view.goto((site / f"{page}.html").as_uri())
            view.wait_for_timeout(500)
            wide[width] = view.evaluate("document.documentElement.scrollWidth - innerWidth")
        browser.close()
    assert asked
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert all(excess <= 0 for excess in wide.values()), "the page is wider than the screen"
