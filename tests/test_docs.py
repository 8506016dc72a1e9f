"""README and the pages of docs/: the Python in them compiles, what is marked runs, and files and links exist."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch  # noqa: F401  sets an environment variable when it is first imported
import pytest

from lightning_stocache import CachedDataset, CachedLoader
from lightning_stocache.node.group import NodeGroup
from tests.processes import run_ranks

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


def blocks(page: str) -> Iterator[tuple[str, bool, str | None]]:
    """The fenced blocks of Python of a page: the code, whether it runs, and what it prints."""
    text = TEXT[page]
    for found in re.finditer(r"^( *)```python[^\n]*\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL):
        before = text[: found.start()]
        code = re.sub(f"^{found[1]}", "", found[2], flags=re.MULTILINE)
        printed = PRINTS.match(text, found.end())
        in_place = "\n" * (before.count("\n") + 1) + code  # an error names the line of the page
        yield in_place, before.endswith(RUNS), printed and printed[1]


@pytest.mark.parametrize("page", [page for page in sorted(TEXT) if RUNS in TEXT[page]])
def test_what_is_marked_runs(page, tmp_path, monkeypatch, capfd):
    """The blocks after `<!-- runs -->` run, in one namespace, and print what stands after `<!-- prints -->`."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": page}
    marked = [(code, expected) for code, runs, expected in blocks(page) if runs]
    assert sum(expected is not None for _, expected in marked) == TEXT[page].count("<!-- prints -->")
    for code, expected in marked:
        exec(compile(code, page, "exec"), names)
        printed = capfd.readouterr().out
        assert expected is None or printed == expected


def run_own_loop(rank: int, page: str) -> None:
    """Run the last block of a page that shares a dataset, and compare what the ranks have drawn."""
    [*_, code] = [code for code, _, _ in blocks(page) if ".share()" in code]
    drawn: list[list[int]] = []
    code = code.replace("num_workers=8", "num_workers=0").replace("        ...", "        note(epoch, batch)")
    names = {"source": range(512), "augment": int, "CachedDataset": CachedDataset, "CachedLoader": CachedLoader}

    def note(epoch: int, batch: Any) -> None:
        if len(drawn) == epoch:
            drawn.append([])
        drawn[epoch] += batch.tolist()

    exec(compile(code, page, "exec"), names | {"note": note})
    ranks = NodeGroup.discover().exchange(drawn)
    assert len(drawn) == 10
    for epoch in range(10):
        assert sorted(ranks[0][epoch] + ranks[1][epoch]) == list(range(512))
        assert len(ranks[0][epoch]) == len(ranks[1][epoch]) == 256


@pytest.mark.processes
@pytest.mark.parametrize("page", ["docs/doors.md", "docs/guides/nodes.md"])
def test_the_ranks_of_a_loop_of_ones_own_share_the_samples(page):
    """Under torchrun the snippets for plain PyTorch train on each sample once per epoch, on one of the ranks."""
    run_ranks(run_own_loop, 2, page)


@pytest.mark.parametrize("page", sorted(TEXT))
def test_python_compiles_and_files_exist(page):
    """Files of a checkout that a page names, and those that its relative links lead to, are there."""
    for code, _, _ in blocks(page):
        compile(code, page, "exec")
    for name in re.findall(r"(?<![\w./])(?:examples|tests|\.ci)/[\w/.-]*\w", TEXT[page]):
        assert (ROOT / name).exists(), (page, name)
    text = re.sub(r"^ *```.*?^ *```$", "", TEXT[page], flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\((?!https?:|mailto:|#)([^)\s#]+)", text):
        assert ((ROOT / page).parent / target).exists(), (page, target)
