"""Checks a built site: ``python docs/check_site.py site``.

Nothing is loaded from another host, every internal link and anchor leads somewhere, every loss has
its page, and no equation is left as LaTeX.
"""

import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

LOADED = {
    "script": ("src",),
    "img": ("src", "srcset"),
    "source": ("src", "srcset"),
    "iframe": ("src",),
    "video": ("src", "poster"),
    "audio": ("src",),
    "embed": ("src",),
    "object": ("data",),
    "image": ("href", "xlink:href"),
    "use": ("href", "xlink:href"),
}
"""Attributes whose address a browser fetches by itself."""
FETCHED = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "manifest"}
ELSEWHERE = re.compile(r"^\s*(?:https?:)?//", re.IGNORECASE)


class Page(HTMLParser):
    """Addresses that a page loads, those it links to, and the anchors it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = {"", "__top"}
        self.equations = 0
        self.feed(text)

    def handle_starttag(self, tag: str, given: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in given}
        self.anchors |= {attributes.get("id", ""), attributes.get("name", "")}
        self.equations += tag == "math"
        self.loaded += [attributes[name] for name in LOADED.get(tag, ()) if attributes.get(name)]
        self.loaded += re.findall(r"url\(['\"]?([^'\")]+)", attributes.get("style", ""))
        if tag == "link" and FETCHED & set(attributes.get("rel", "").split()):
            self.loaded.append(attributes.get("href", ""))
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])


def check(site: Path) -> list[str]:
    """What is wrong with the site; nothing where all is well."""
    site = site.resolve()
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(site.rglob("*.html"))}
    pages = {path: Page(text) for path, text in texts.items()}
    exist = {path.resolve() for path in site.rglob("*") if path.is_file()}
    wrong = []
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        wrong += [f"{name} loads {each}" for each in page.loaded if ELSEWHERE.match(each)]
        if name != "404.html":  # made for any depth, so its links begin at the root
            local = dict.fromkeys([*page.loaded, *page.links])
            wrong += [
                f"{name}: {each} leads nowhere"
                for each in local
                if not _leads(each, path, pages, exist)
            ]
        wrong += [f"{name} shows LaTeX: {each}" for each in _left_over(texts[path])]
    for path in sorted(site.rglob("*.css")):
        for each in re.findall(
            r"(?:url\(['\"]?|@import\s+['\"])([^'\")]+)", path.read_text("utf-8")
        ):
            if ELSEWHERE.match(each):
                wrong.append(f"{path.relative_to(site).as_posix()} loads {each}")
    return wrong


def _leads(address: str, page: Path, pages: dict[Path, Page], exist: set[Path]) -> bool:
    if re.match(r"[a-z]+:", address) or ELSEWHERE.match(address):
        return True
    target, anchor = urldefrag(address)
    file = page
    if target:
        file = Path(os.path.normpath(page.parent / unquote(target.split("?")[0])))
    if file not in exist:
        file /= "index.html"
    if file not in exist:
        return False
    return file not in pages or unquote(anchor) in pages[file].anchors


def _left_over(text: str) -> list[str]:
    """Equations that were not drawn, outside of code."""
    shown = re.sub(r"<(code|pre|script|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    return re.findall(r'class="arithmatex"|:math:`[^`]*`|\.\. math::|\$\$|\\\([^<]{1,60}', shown)


def main(site: Path, losses: list[str]) -> int:
    wrong = check(site)
    wrong += [
        f"{name} has no page" for name in losses if not (site / f"losses/{name}.html").is_file()
    ]
    for each in wrong:
        sys.stderr.write(f"{each}\n")
    if not wrong:
        count = len(list(site.rglob("*.html")))
        sys.stdout.write(
            f"{count} pages: all links lead somewhere, nothing is loaded from outside\n"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    import largemargin as lm

    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "site"), list(lm.LOSSES)))
