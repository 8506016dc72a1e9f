"""README and the pages of docs/: the Python in them compiles, what is marked runs, and files and links exist.

How the pages are put together is checked by `mkdocs build --strict` and .ci/check_site.py, in .ci/run.
"""

import re
from collections.abc import Iterator
from pathlib import Path
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


@pytest.mark.parametrize("page", sorted(TEXT))
def test_python_compiles_and_files_exist(page):
    """Each block of Python is Python. Files of the examples, the tests and the checks that a page names are there; a
    relative link is one of a checkout, and leads to a file. (Of the site, mkdocs says so.)"""
    for block in blocks(page):
        compile(block.code, page, "exec")
    for name in re.findall(r"(?<![\w./])(?:examples|tests|\.ci)/[\w/.-]*\w", TEXT[page]):
        assert (ROOT / name).exists(), (page, name)
    text = re.sub(r"^ *```.*?^ *```$", "", TEXT[page], flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\((?!https?:|mailto:|#)([^)\s#]+)", text):
        assert ((ROOT / page).parent / target).exists(), (page, target)
