"""What the site takes from elsewhere in the repository: pages, pictures, listings, and what the program says itself.

MkDocs calls the functions `on_*`. Pages link as files do (`../examples/train.py`, `../CHANGELOG.md`), so that a link
works in a checkout, too; here it is turned to the page that the site has in its place. Marks in a page, each a comment
of a line of its own, are replaced:

<!-- file: examples/train.py -->   a file, all of it
<!-- help: plan -->                what `stocache plan --help` prints
<!-- configs: cache -->            the YAML files of a config group; "/" are those beside the groups
<!-- names -->                     the public names, each with the first sentence of its docstring
<!-- interop -->                   the table of what is tested with other libraries
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import os
import posixpath
import re
import runpy
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

import lightning_stocache

ROOT = Path(__file__).parents[2]

# A page of the site, and the file that it is.
ELSEWHERE = {
    "benchmarks.md": "examples/benchmarks/README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
}
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|data:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
_MARK = re.compile(r"^<!-- (file|help|configs|names|interop)(?:: (\S+))? -->$", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie elsewhere, one for each example, and the pictures."""
    for page, path in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    for path in _examples():
        files.append(File.generated(config, _page(path), content=_listing(path)))
    for path in sorted((ROOT / "examples").rglob("pictures/*.png")):
        files.append(File.generated(config, _picture(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Put in what the marks ask for, and turn links to files of the repository into links of the site."""
    uri: str = page.file.src_uri
    home = posixpath.dirname(ELSEWHERE.get(uri, f"docs/{uri}"))

    def link(match: re.Match[str]) -> str:
        target = _uri(posixpath.normpath(posixpath.join(home, match[1])))
        return match[0] if target is None else posixpath.relpath(target, posixpath.dirname(uri)) + (match[2] or "")

    markdown = _MARK.sub(lambda match: _MARKS[match[1]](match[2]), markdown)
    return "".join(part if code else _LINK.sub(link, part) for code, part in _parts(markdown))


def _uri(path: str) -> str | None:
    """Where the site has a file of the repository; None: nowhere, or where the link says."""
    for page, elsewhere in ELSEWHERE.items():
        if path == elsewhere:
            return page
    if path == "README.md":
        return "index.md"
    if path.startswith("examples/") and (ROOT / path).is_file():
        pages = {".png": _picture(Path(path)), ".py": _page(ROOT / path), ".ipynb": "recipes/notebook.md"}
        return pages.get(Path(path).suffix)
    if path in ("examples", "examples/benchmarks"):
        return {"examples": "recipes/index.md", "examples/benchmarks": "benchmarks.md"}[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def _parts(markdown: str) -> Iterator[tuple[bool, str]]:
    """The text, cut where fenced blocks begin and end: whether it is code, and a part of it."""
    code, part = False, ""
    for line in markdown.splitlines(keepends=True):
        fence = line.lstrip().startswith("```")
        if fence and not code and part:
            yield False, part
            part = ""
        part += line
        if fence:
            if code:
                yield True, part
                part = ""
            code = not code
    if part:
        yield code, part


def _examples() -> list[Path]:
    return [*sorted((ROOT / "examples").glob("*.py")), *sorted((ROOT / "examples/benchmarks").glob("*.py"))]


def _page(path: Path) -> str:
    return str(path.relative_to(ROOT).with_suffix(".md"))


def _picture(path: Path) -> str:
    return f"pictures/{path.parts[1]}-{path.name}" if len(path.parts) > 3 else f"pictures/{path.name}"


def _listing(path: Path) -> str:
    """The page of an example: what its docstring says, and all of it."""
    name, text = path.relative_to(ROOT), path.read_text()
    said = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return f"---\nsearch: {{exclude: true}}\n---\n# {name}\n\n{said}\n\n```python\n{text}```\n"


def _file(path: str) -> str:
    """A file, with its path above it; a notebook as it was run."""
    if path.endswith(".ipynb"):
        return "\n\n".join(_cells(json.loads((ROOT / path).read_text())))
    language = {".py": "python", ".yaml": "yaml"}[Path(path).suffix]
    return f'```{language} title="{path}"\n{(ROOT / path).read_text().rstrip()}\n```'


def _cells(notebook: dict[str, Any]) -> Iterator[str]:
    """The cells of a notebook, with what they have printed and drawn."""
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        yield f"```python\n{text}\n```" if cell["cell_type"] == "code" else re.sub("^#", "##", text, flags=re.MULTILINE)
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                yield f"![What the cell has drawn](data:image/png;base64,{''.join(data['image/png']).strip()})"
            elif said := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
                yield f"```text\n{said}\n```"


def _help(command: str) -> str:
    """What a command prints for --help."""
    from lightning_stocache.__main__ import main

    said, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "92"
    try:
        with redirect_stdout(said), suppress(SystemExit):
            main([command, "--help"])
    finally:
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns
    if not said.getvalue().startswith("usage:"):
        raise PluginError(f"there is no command {command!r}: docs/reference/commands.md names it")
    return f"```text\n{said.getvalue()}```"


def _configs(group: str) -> str:
    """The files of a config group, each with its path."""
    paths = sorted((ROOT / "configs").glob("*.yaml" if group == "/" else f"{group}/*.yaml"))
    if not paths:
        raise PluginError(f"there is no config group {group!r}: docs/reference/configs.md names it")
    return "\n\n".join(_file(str(path.relative_to(ROOT))) for path in paths)


def _names(_: None) -> str:
    """A table of the public names."""
    said = {name: inspect.getdoc(getattr(lightning_stocache, name)) or "" for name in lightning_stocache.__all__}
    first = {name: re.split(r"(?<=\.)\s", text, maxsplit=1)[0].replace("\n", " ") for name, text in said.items()}
    rows = (f"| [`{name}`][lightning_stocache.{name}] | {text} |" for name, text in first.items())
    return "\n".join(["| name | |", "|---|---|", *rows])


def _interop(_: None) -> str:
    """The table of tests/interop, by library and by what becomes of a way to hold data."""
    table = runpy.run_path(str(ROOT / "tests/interop/table.py"))["TABLE"]
    rows = ["| | cached | passes |", "|---|---|---|"]
    for library, ways in table.items():
        cells: tuple[list[str], list[str]] = [], []
        for way, cached in ways.items():
            cells[not cached].append(way.strip("_").replace("_", " "))
        rows.append(f"| {library} | {' | '.join(map(', '.join, cells))} |")
    return "\n".join(rows)


_MARKS = {"file": _file, "help": _help, "configs": _configs, "names": _names, "interop": _interop}
