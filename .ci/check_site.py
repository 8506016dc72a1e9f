"""Check that the built documentation is complete: `python check_site.py SITE`.

It loads nothing from elsewhere (no script, style, font or picture), has every public name with all of its options, and
can be searched.
"""

from __future__ import annotations

import dataclasses
import html
import json
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

__all__ = ["loads_in_page", "loads_in_style"]

_LOADED = {"stylesheet", "preload", "modulepreload", "preconnect", "dns-prefetch", "prefetch", "icon", "manifest"}


class _Loads(HTMLParser):
    """The addresses elsewhere that a page makes a browser load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        addresses = [given.get(name, "") for name in ("src", "poster", "data")]
        addresses += [part.split()[0] for part in given.get("srcset", "").split(",") if part.strip()]
        if tag == "link" and _LOADED & set(given.get("rel", "").split()):
            addresses.append(given.get("href", ""))
        self.found += [address for address in addresses if _is_elsewhere(address)]
        self.found += loads_in_style(given.get("style", ""))


def _is_elsewhere(address: str) -> bool:
    return bool(re.match(r"(https?:)?//", address.strip()))


def loads_in_page(text: str) -> list[str]:
    """The addresses elsewhere that are loaded with an HTML page; links that a reader may follow do not count."""
    parser = _Loads()
    parser.feed(text)
    styles = re.findall(r"<style[^>]*>(.*?)</style>", text, re.DOTALL)
    return parser.found + [address for style in styles for address in loads_in_style(style)]


def loads_in_style(text: str) -> list[str]:
    """The addresses elsewhere that are loaded with a style sheet."""
    addresses = re.findall(r"""(?:url\(|@import)\s*['"]?([^'")\s;]+)""", text)
    return [address for address in addresses if _is_elsewhere(address)]


def _problems(site: Path) -> Iterator[str]:
    import lightning_stocache
    from lightning_stocache import CacheOptions

    pages = sorted(site.rglob("*.html"))
    for page in pages:
        yield from (f"{page}: loads {address}" for address in loads_in_page(page.read_text()))
    for style in sorted(site.rglob("*.css")):
        yield from (f"{style}: loads {address}" for address in loads_in_style(style.read_text()))

    described: dict[str, str] = {}
    for page in (site / "reference").glob("*.html"):
        parts = re.split(r'<h2 id="lightning_stocache\.(\w+)"', page.read_text())
        described.update(zip(parts[1::2], parts[2::2], strict=True))
    yield from (f"the reference lacks {name}" for name in sorted(set(lightning_stocache.__all__) - set(described)))
    parameters = described.get("CacheOptions", "").partition("Parameters:")[2]
    for option in dataclasses.fields(CacheOptions):
        if not re.search(rf"<(?:code|b|strong)>{option.name}</", parameters):
            yield f"the reference does not describe the option {option.name}"

    index = json.loads((site / "search/search_index.json").read_text())
    found = {html.unescape(entry["location"]).partition("#")[0] for entry in index["docs"]}
    for page in pages:
        where = page.relative_to(site).as_posix()
        if where != "404.html" and not where.startswith("examples/") and where not in found:
            yield f"{where} cannot be found by a search"


def main() -> None:
    site = Path(sys.argv[1])
    if problems := list(_problems(site)):
        sys.exit("\n".join(problems))
    print(f"{site}: {len(list(site.rglob('*.html')))} pages, nothing loaded from elsewhere")


if __name__ == "__main__":
    main()
