"""README and the pages of docs/: the Python in them compiles, what is marked runs, and files and links exist.

How the pages are put together is checked by `mkdocs build --strict` and .ci/check_site.py, in .ci/run.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path
from typing import Any, NamedTuple

import lightning.pytorch  # noqa: F401  sets an environment variable when it is first imported
import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples/benchmarks/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
TEXT = {path.relative_to(ROOT).as_posix(): path.read_text() for path in PAGES}
every_page = pytest.mark.parametrize("page", sorted(TEXT))
RUNS = "<!-- runs -->\n"
PRINTS = re.compile(r"\s*(?:prints\s*)?<!-- prints -->\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block of Python."""

    code: str
    runs: bool
    prints: str | None


def blocks(page: str) -> Iterator[Block]:
    """The blocks of a page."""
    text = TEXT[page]
    for found in re.finditer(r"^( *)```python[^\n]*\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL):
        before = text[: found.start()]
        code = re.sub(f"^{found[1]}", "", found[2], flags=re.MULTILINE)
        printed = PRINTS.match(text, found.end())
        in_place = "\n" * (before.count("\n") + 1) + code  # an error names the line of the page
        yield Block(in_place, before.endswith(RUNS), printed and printed[1])


@every_page
def test_python_compiles(page):
    """Each block of Python is Python."""
    for block in blocks(page):
        compile(block.code, page, "exec")


@pytest.mark.processes
@pytest.mark.parametrize("page", [page for page in sorted(TEXT) if RUNS in TEXT[page]])
def test_what_is_marked_runs(page, tmp_path, monkeypatch, capfd):
    """The blocks after `<!-- runs -->` run, in one namespace, and print what stands after `<!-- prints -->`."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": page}
    assert sum(block.runs and block.prints is not None for block in blocks(page)) == TEXT[page].count("<!-- prints -->")
    for block in blocks(page):
        if block.runs:
            exec(compile(block.code, page, "exec"), names)
            printed = capfd.readouterr().out
            assert block.prints is None or printed == block.prints


@every_page
def test_files_exist(page):
    """Files of the examples, the tests and the checks that a page names."""
    for name in re.findall(r"(?<![\w./])(?:examples|tests|\.ci)/[\w/.-]*\w", TEXT[page]):
        assert (ROOT / name).exists(), (page, name)


@every_page
def test_links_lead_to_files(page):
    """A relative link is one of a checkout: it leads to a file that is there. (Of the site, mkdocs says so.)"""
    text = re.sub(r"^ *```.*?^ *```$", "", TEXT[page], flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\((?!https?:|mailto:|#)([^)\s#]+)", text):
        assert ((ROOT / page).parent / target).exists(), (page, target)


SITE = run_path(str(ROOT / ".ci/check_site.py"))


def test_what_a_page_loads_from_elsewhere_is_found():
    """Scripts, styles, fonts and pictures, however they are asked for; links are none, nor is what lies beside it."""
    page = (
        '<link rel="stylesheet" href="https://a/x.css"><link rel="canonical" href="https://b"><a href="https://c">c</a>'
        '<script src="//d/x.js"></script><img srcset="https://e/x.png 2x, y.png"><div style="background:url(http://f/x)">'
        "<style>@import 'https://g/x.css';</style><img src='assets/y.png'>"
    )
    assert sorted(SITE["loads_in_page"](page)) == [
        "//d/x.js", "http://f/x", "https://a/x.css", "https://e/x.png", "https://g/x.css",
    ]  # fmt: skip
    style = 'a{background:url(data:x)} @font-face{src:url("https://h/x.woff2")}'
    assert SITE["loads_in_style"](style) == ["https://h/x.woff2"]
