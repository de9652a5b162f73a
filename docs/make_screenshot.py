"""Makes docs/figures/report.png: the report at the end of ``largemargin demo``, in a browser.

Run ``python docs/make_screenshot.py`` (two minutes, needs Chromium and playwright), or with the
path of a report that is there already. Header and verdict, then the mistakes of the models.
"""

import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

PICTURE = Path(__file__).parent / "figures" / "report.png"
WIDTH = 1360
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LARGEST = 400_000


def demo_report(folder: Path) -> Path:
    """The report of a demo that runs now."""
    command = [sys.executable, "-m", "largemargin", "demo", "--folder", str(folder / "demo")]
    subprocess.run(command, check=True)
    return folder / "demo" / "report.html"


def parts(report: Path) -> list[Image.Image]:
    """What is seen of the report, from top to bottom."""
    from playwright.sync_api import sync_playwright

    browser_path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser_path is None:
        sys.exit(f"no browser: none of {', '.join(BROWSERS)} is on PATH")
    # Chromium's sandbox does not run as root, as in containers.
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=options)
        page = browser.new_page(viewport={"width": WIDTH, "height": 1000}, color_scheme="light")
        page.goto(report.resolve().as_uri())
        images = [taken(page, 0, lowest(page, "#table-glance") + 8), mistakes(page)]
        browser.close()
    return images


def mistakes(page: Any) -> Image.Image:
    """The maps of confusions, and the hardest samples of the first model."""
    for plot in page.locator("#mistakes .plot").all():
        plot.scroll_into_view_if_needed()
        plot.locator(".main-svg").first.wait_for()
    page.wait_for_timeout(500)
    start = page.locator("#mistakes").evaluate("e => e.getBoundingClientRect().top + scrollY") + 8
    return taken(page, start, lowest(page, "#mistakes .worst", 1) - start + 8)


def lowest(page: Any, what: str, count: int = 100) -> float:
    """Where the last of the first so many elements ends."""
    ends: list[float] = page.locator(what).evaluate_all(
        "all => all.map(e => e.getBoundingClientRect().bottom + scrollY)"
    )
    return max(ends[:count])


def taken(page: Any, top: float, height: float) -> Image.Image:
    page.locator("nav").evaluate("e => { e.style.position = 'static'; }")
    clip = {"x": 0, "y": top, "width": WIDTH, "height": height}
    raw = page.screenshot(full_page=True, clip=clip)
    return Image.open(io.BytesIO(raw)).convert("RGB")


def main(given: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        images = parts(Path(given[0]) if given else demo_report(Path(folder)))
    whole = Image.new("RGB", (WIDTH, sum(image.height for image in images)), "white")
    at = 0
    for image in images:
        whole.paste(image, (0, at))
        at += image.height
    whole.save(PICTURE, optimize=True)
    size = PICTURE.stat().st_size
    print(f"{PICTURE}: {whole.width} x {whole.height} pixels, {size:,} bytes")
    if size > LARGEST:
        sys.exit(f"larger than {LARGEST:,} bytes: show less of it.")


if __name__ == "__main__":
    main(sys.argv[1:])
