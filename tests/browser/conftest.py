"""A real browser: Chromium as the system has it, driven by Playwright. Nothing is downloaded."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from app.report.made import evaluated, geometry, renamed, trained

from largemargin.app.report.page import report

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    own = [item for item in items if here in Path(item.path).parents]
    reason = ""
    if chromium() is None:
        reason = f"no Chromium is installed: none of {', '.join(NAMES)} is on PATH"
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        reason = "needs playwright: pip install playwright"
    for item in own:
        item.add_marker(pytest.mark.slow)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report of two runs, one of hostile names, one of a sphere, one of a thousand classes."""
    place = tmp_path_factory.mktemp("reports")
    softmax = evaluated(trained(place / "softmax"))
    cosface = evaluated(trained(place / "cosface", "cosface"))
    hostile = renamed(softmax, place / "hostile")
    options: dict[str, Any] = {"features": "pca", "max_samples": 60}
    return {
        "runs": report([softmax, cosface], place / "runs.html", **options),
        "hostile": report({"<b>x</b>": hostile}, place / "hostile.html", **options),
        "sphere": report(geometry(0, 3), place / "sphere.html"),
        "many": report(
            {"a": geometry(0, 16, samples=4000, classes=1000), "b": geometry(1, 16, classes=1000)},
            place / "many.html",
        ),
        "softmax": softmax.folder,
        "cosface": cosface.folder,
    }


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    # Chromium's sandbox does not run as root, as in containers.
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium(), args=options)
        yield found
        found.close()


class Watched:
    """A page that remembers what it complained about and what it asked for."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.dialogs: list[str] = []
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("dialog", self._dialog)

    def _console(self, message: Any) -> None:
        if message.type == "error":
            self.complaints.append(message.text)

    def _dialog(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def unfold(self) -> None:
        """Open what is folded, but for the numbers of the figures."""
        each = "details => { details.open = true; }"
        self.page.locator("details.more").evaluate_all(f"all => all.forEach({each})")

    def draw_all(self) -> None:
        """Scroll through the page, so that every figure is drawn."""
        self.unfold()
        boxes = self.page.locator(".plot")
        for at in range(boxes.count()):
            boxes.nth(at).scroll_into_view_if_needed()
            boxes.nth(at).locator(".svg-container, .main-svg").first.wait_for()
        self.page.evaluate("window.scrollTo(0, 0)")


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Watched]]:
    contexts = []

    def open_page(path: Path, **options: Any) -> Watched:
        options.setdefault("viewport", {"width": 1280, "height": 900})
        context = browser.new_context(**options)
        contexts.append(context)
        watched = Watched(context.new_page())
        watched.page.goto(path.as_uri())
        return watched

    yield open_page
    for context in contexts:
        context.close()
