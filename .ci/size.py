"""Measure the size of the tree, room by room: `python .ci/size.py [--against TAG_OR_FOLDER]`.

Code lines are neither blank nor comment nor docstring. Tokens per code line, branches per function (`if`, loops,
`except`, `case`, conditions in expressions) and the share of docstring lines show whether a room became shorter or only
denser. The figures are those of a formatted tree (`ruff format`).
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
import tempfile
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "lightning_stocache"
OTHERS = ("tests", "examples", "configs")
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Size:
    """Counts of one file, or the sums of many."""

    files: int = 0
    lines: int = 0
    code: int = 0
    tokens: int = 0
    docstrings: int = 0
    functions: int = 0
    branches: int = 0

    def add(self, other: Size) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def cells(self) -> list[str]:
        """One text per column of the table."""
        return [
            f"{self.files}",
            f"{self.lines}",
            f"{self.code}",
            ratio(self.tokens, self.code),
            ratio(self.branches, self.functions),
            ratio(100 * self.docstrings, self.lines),
        ]


COLUMNS = ("files", "lines", "code lines", "tokens/line", "branches/def", "docstring %")


def ratio(part: int, whole: int) -> str:
    return f"{part / whole:.2f}" if part and whole else "-"


def docstring_lines(tree: ast.Module) -> set[int]:
    """The numbers of all lines of docstrings."""
    numbers: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            numbers.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return numbers


def branches(node: ast.AST) -> int:
    """How often the code of one node forks."""
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    return isinstance(node, BRANCHES)


def size_of_python(text: str) -> Size:
    """Measure one Python file."""
    tree, lines = ast.parse(text), text.splitlines()
    docstrings = docstring_lines(tree)
    code: set[int] = set()
    tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in LAYOUT or token.start[0] in docstrings:
            continue
        tokens += 1
        code.update(number for number in range(token.start[0], token.end[0] + 1) if lines[number - 1].strip())
    nodes = list(ast.walk(tree))
    functions = sum(isinstance(node, FUNCTIONS) for node in nodes)
    return Size(1, len(lines), len(code), tokens, len(docstrings), functions, sum(map(branches, nodes)))


def size_of_yaml(text: str) -> Size:
    """Measure one YAML file: lines, and those that are neither blank nor comment."""
    lines = text.splitlines()
    return Size(1, len(lines), sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in lines))


def size(files: Iterator[Path]) -> Size:
    total = Size()
    for file in files:
        measure = {".py": size_of_python, ".yaml": size_of_yaml}.get(file.suffix)
        if measure is not None:
            total.add(measure(file.read_text()))
    return total


def rooms(root: Path) -> dict[str, Size]:
    """The size of each room of a tree, of the whole package, and of tests, examples and configs."""
    package = root / PACKAGE
    folders = sorted(path for path in package.iterdir() if path.is_dir() and any(path.glob("*.py")))
    sizes = {folder.name: size(folder.rglob("*")) for folder in folders}
    sizes["root files"] = size(package.glob("*"))
    whole = Size()
    for room in sizes.values():
        whole.add(room)
    return sizes | {"package": whole} | {name: size((root / name).rglob("*")) for name in OTHERS}


def rooms_of(tree: str, root: Path) -> dict[str, Size]:
    """The rooms of a folder, or of a commit of the repository at `root`."""
    if Path(tree).is_dir():
        return rooms(Path(tree))
    archive = subprocess.run(["git", "-C", str(root), "archive", tree], check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
        return rooms(Path(folder))


def main() -> None:
    root = Path(__file__).resolve().parents[1]
    parser = argparse.ArgumentParser(description="Measure the size of the tree, room by room.")
    parser.add_argument("--against", metavar="TREE", help="a tag, commit or folder: each cell is then 'before > now'")
    against = parser.parse_args().against
    now = rooms(root)
    before = rooms_of(against, root) if against else None
    width = 15 if before else 13
    print(f"{'room':<11}" + "".join(f"{column:>{width if column != 'files' else 9}}" for column in COLUMNS))
    for room in [*now, *(set(before or ()) - set(now))]:
        cells = now.get(room, Size()).cells()
        if before:
            earlier = before.get(room, Size()).cells()
            cells = [f"{old} > {new}" for old, new in zip(earlier, cells, strict=True)]
        print(f"{room:<11}" + "".join(f"{cell:>{width if i else 9}}" for i, cell in enumerate(cells)))


if __name__ == "__main__":
    main()
