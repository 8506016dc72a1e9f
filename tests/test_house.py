"""The house: imports point one way, each room knows only what it may, and the package's face and build list all."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import lightning.pytorch  # noqa: F401  sets an environment variable when it is first imported
import pytest

import lightning_stocache

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_stocache"
ROOMS = ["node", "cache", "source", "setup", "sampling", "loading", "growing", "insight", "training"]
FACES = {PACKAGE.name, *(f"{PACKAGE.name}.{room}" for room in ROOMS)}
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
    for path in sorted(PACKAGE.rglob("*.py"))
}
TREES = {module: ast.parse(text) for module, text in SOURCES.items()}


def imports_of(tree: ast.Module) -> Iterator[str]:
    """The modules that a file imports, anywhere in it; `from x import y` is x."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import of {node.module}"
            yield node.module or ""


IMPORTS = {module: set(imports_of(tree)) for module, tree in TREES.items()}


def room_of(module: str) -> str | None:
    package, _, inside = module.partition(".")
    room = inside.partition(".")[0]
    return room if package == PACKAGE.name and room in ROOMS else None


def test_rooms_import_only_from_rooms_above():
    """A module imports from its own room and from those before it; setup and sampling do not know each other.
    torch_internals knows nobody, and imports have no cycle. Only training knows Lightning, only __main__ Hydra."""
    wrong = []
    for module, imported in IMPORTS.items():
        room = room_of(module)
        above = ROOMS[: ROOMS.index(room) + 1] if room else [] if module.endswith("torch_internals") else ROOMS
        above = [name for name in above if {name, room} != {"setup", "sampling"}]
        wrong += [f"{module} <- {other}" for other in imported if room_of(other) not in (None, *above)]
    assert wrong == []
    graph = {module: imported & TREES.keys() for module, imported in IMPORTS.items() if module != PACKAGE.name}
    assert len(list(TopologicalSorter(graph).static_order())) >= len(graph)
    knowing: dict[str, set[str]] = {}
    for module, imported in IMPORTS.items():
        for library in {name.partition(".")[0] for name in imported}:
            knowing.setdefault(library, set()).add(module)
    assert {room_of(name) for name in knowing["lightning"] | knowing.get("pytorch_lightning", set())} == {"training"}
    assert knowing["hydra"] | knowing["omegaconf"] == {f"{PACKAGE.name}.__main__"}


def test_names_come_from_the_leaf_that_defines_them():
    """No module imports from a face, nor offers what it has imported, but for the file of torch's private names."""
    assert [module for module, imported in IMPORTS.items() if room_of(module) and FACES & imported] == []
    for module, tree in TREES.items():
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        imported = {alias.asname or alias.name for node in imports for alias in node.names}
        lists = re.findall(r"^__all__ = (\[.*?\])$", SOURCES[module], re.MULTILINE | re.DOTALL)
        offered = {name for names in lists for name in ast.literal_eval(names)}
        assert module.endswith("torch_internals") or not imported & offered, module


def test_only_the_cache_knows_how_a_sample_lies():
    """Nobody else looks into a store. A handle may be asked for its arc: the nodes of a job tell each other theirs."""
    inside = re.compile(
        r"(?<!stocache\.)(?:cache|store)\.(?:layout|segment)\b|\.row_bytes\b|\.states\b|(?<!\.handle)\.arc\b"
    )
    outside = [module for module in SOURCES if room_of(module) not in ("cache", None)]
    assert [(module, found) for module in outside for found in inside.findall(SOURCES[module])] == []


def test_what_is_private_of_others_is_named_in_two_files():
    """Attributes and modules that begin with an underscore; in training/ also strings that are no name of ours."""
    found = []
    for module, tree in TREES.items():
        if module.endswith(("torch_internals", "lightning_internals")):
            continue
        nodes = list(ast.walk(tree))
        attributes = [node for node in nodes if isinstance(node, ast.Attribute) and is_private(node.attr)]
        ours = {node.attr for node in attributes if is_self(node.value)} | {"_fields"}  # documented by namedtuple
        found += [(module, node.attr) for node in attributes if node.attr not in ours]
        found += [(module, name) for name in IMPORTS[module] if "._" in name]
        if room_of(module) == "training":
            pieces = {id(piece) for node in nodes if isinstance(node, ast.JoinedStr) for piece in node.values}
            texts = {node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in pieces}
            names = {text for text in texts if isinstance(text, str) and text.isidentifier() and is_private(text)}
            found += [(module, name) for name in names - private_in_package()]
    assert found == []


def test_tests_use_public_names():
    """What is private in the package is free to change: no test reads, imports or replaces it."""
    ours, found = private_in_package(), {}
    uses = re.compile(r"""(?:(?<!self)(?<!cls)\.|import |setattr\([\w.]+, ")(_\w+)""")
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text()
        if named := ours.intersection(uses.findall(text)):  # others need no parsing, which takes seconds
            found[path.name] = named - private_names(ast.parse(text))
    assert not any(found.values()), found


@cache
def private_in_package() -> set[str]:
    return set().union(*map(private_names, TREES.values()))


def private_names(tree: ast.Module) -> set[str]:
    """The names with one underscore that a file defines: of functions, classes, variables and attributes of self."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            names.add(node.attr)
    return {name for name in names if is_private(name)}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_public_names_resolve_are_sorted_and_listed():
    """Each leads to an object of that name, for editors and dir() too. Another name is an AttributeError."""
    for_editors = next(node for node in TREES[PACKAGE.name].body if isinstance(node, ast.If))
    imported = [alias.name for node in for_editors.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert lightning_stocache.__all__ == sorted(imported)
    assert set(lightning_stocache.__all__) < set(dir(lightning_stocache))
    for name in lightning_stocache.__all__:
        value = getattr(lightning_stocache, name)
        assert value.__name__ == name
        assert getattr(lightning_stocache, name) is value
    with pytest.raises(AttributeError, match="'lightning_stocache' has no attribute 'no_such_name'"):
        lightning_stocache.no_such_name  # noqa: B018


def test_every_room_is_built_and_in_the_design():
    """Config groups, too; no directory in lightning_stocache/ shadows configs/. docs/design.md lists the modules."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    groups = {Path(PACKAGE.name) / path.parent.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml")}
    assert sorted(setuptools["packages"]) == sorted(FACES | {".".join(path.parts) for path in groups})
    assert setuptools["package-dir"] == {"lightning_stocache.configs": "configs"}
    assert (ROOT / "configs" / "__init__.py").is_file()
    assert not (PACKAGE / "configs").exists()
    house = (ROOT / "docs/design.md").read_text().partition("## 2. The house")[2].split("```")[1]
    rooms = re.findall(r"^  (\w+)/ (.*?)(?=^  \S|\Z)", house, re.MULTILINE | re.DOTALL)
    for room, words in rooms:
        if named := set(re.findall(r"\w+\.py", words)):
            assert named == {path.name for path in (PACKAGE / room).glob("*.py")} - {"__init__.py"}, room
    assert [room for room, _ in rooms] == ROOMS
