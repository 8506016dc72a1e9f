"""README and the pages of docs/: what they show compiles, exists, and is what the program says.

How the pages are put together is checked by `mkdocs build --strict` and .ci/check_site.py, in .ci/run.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path
from typing import Any, NamedTuple

import lightning.pytorch  # noqa: F401  sets an environment variable when it is first imported
import pytest
import yaml

import lightning_stocache
from lightning_stocache.__main__ import COMMANDS
from lightning_stocache.cache.counters import Counts
from lightning_stocache.insight.metrics import Tally, rates
from tests import features

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


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """The calls of names, and of methods of names, that are public."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.partition(".")[0] in lightning_stocache.__all__:
                yield called, node


@every_page
def test_python_is_right(page):
    """Each block compiles; what it imports of the package exists, and so do the arguments of what it calls."""
    for block in blocks(page):
        tree = compile(block.code, page, "exec", ast.PyCF_ONLY_AST)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "lightning_stocache":
                assert {alias.name for alias in node.names} <= set(lightning_stocache.__all__), (page, node.lineno)
        for called, node in calls(tree):
            function: Any = lightning_stocache
            for name in called.split("."):
                function = getattr(function, name)
            taken = dict(inspect.signature(function).parameters)
            if called == "CachedLoader":  # takes all of DataLoader's
                taken |= inspect.signature(lightning_stocache.CachedLoader.__mro__[1]).parameters
            elif any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
                continue
            unknown = {keyword.arg for keyword in node.keywords if keyword.arg} - set(taken)
            assert not unknown, (page, node.lineno, called, unknown)


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
def test_what_is_named_exists(page):
    """Files, commands, and knobs of the config groups that a page names."""
    text = TEXT[page]
    for name in re.findall(r"(?<![\w./])(?:examples|tests|\.ci)/[\w/.-]*\w", text):
        assert (ROOT / name).exists(), (page, name)
    commands = {command.__name__.rstrip("_") for command in COMMANDS}
    assert set(re.findall(r"python -m lightning_stocache ([a-z]+)", text)) <= commands
    knobs = yaml.safe_load((ROOT / "configs/cache/stocache.yaml").read_text())
    assert set(re.findall(r"(?<![\w.])\+?cache\.([a-z_]+)=", text)) <= set(knobs)


@every_page
def test_links_lead_to_files(page):
    """A relative link is one of a checkout: it leads to a file that is there. (Of the site, mkdocs says so.)"""
    text = re.sub(r"^ *```.*?^ *```$", "", TEXT[page], flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\((?!https?:|mailto:|#)([^)\s#]+)", text):
        assert ((ROOT / page).parent / target).exists(), (page, target)


def test_every_public_name_has_its_place():
    """The reference asks for the docstring of each, once."""
    asked = re.findall(r"^::: lightning_stocache\.(\w+)$", "\n".join(TEXT.values()), re.MULTILINE)
    assert sorted(asked) == lightning_stocache.__all__


def test_every_command_and_config_group_is_shown():
    """What `--help` says of each command, and the files of each group."""
    shown = re.findall(r"^<!-- help: (\w+) -->$", TEXT["docs/reference/commands.md"], re.MULTILINE)
    assert sorted(shown) == sorted(command.__name__.rstrip("_") for command in COMMANDS)
    groups = re.findall(r"^<!-- configs: (\S+) -->$", TEXT["docs/reference/configs.md"], re.MULTILINE)
    assert sorted(groups) == sorted({"/", *(path.parent.name for path in (ROOT / "configs").glob("*/*.yaml"))})


def test_every_metric_is_explained():
    """Each key that is made of counts has its place in the table of keys."""
    first_column = "".join(re.findall(r"^\| (.*?) \|", TEXT["docs/reference/metrics.md"], re.MULTILINE))
    explained = set(re.findall(r"`(?:stocache/)?([\w/]+)`", first_column))
    full = Tally(counts=Counts(hits=1, misses=1), slots=1, wait_seconds=1, compute_seconds=1, loop_seconds=1, ranks=1)
    assert set(rates(full)) <= explained


@pytest.mark.parametrize("page", features.PAGES)
def test_the_table_of_features_is_that_of_the_tests(page):
    """`python -m tests.features` has written it."""
    table = TEXT[page].partition(features.BEGIN)[2].partition(features.END)[0]
    assert table == features.table()


def test_a_test_stands_behind_each_cell():
    """Every feature says something of every door, and what a door has is tested."""
    functions: dict[str, set[str]] = {}
    for feature, cells in features.FEATURES.items():
        assert len(cells) == len(features.DOORS), feature
        for cell in cells:
            assert (cell.how == "-") == (not cell.test), feature
            if cell.test:
                path, _, name = cell.test.partition("::")
                if path not in functions:
                    tree = ast.parse((ROOT / "tests" / path).read_text())
                    functions[path] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
                assert name in functions[path], (feature, cell.test)


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
