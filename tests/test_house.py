"""The house: imports point one way, and each room knows only what it may."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_stocache"
ROOMS = ["node", "cache", "source", "setup", "sampling", "loading", "growing", "insight", "training"]
TREES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
PRIVATE_FILES = {"torch_internals", "lightning_internals"}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path) -> Iterator[str]:
    """The modules that a file imports, anywhere in it; `from x import y` is x."""
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield node.module or ""


def room_of(module: str) -> str | None:
    package, _, inside = module.partition(".")
    room = inside.partition(".")[0]
    return room if package == PACKAGE.name and room in ROOMS else None


def knowing(*libraries: str) -> list[str]:
    """The modules that import one of these libraries."""
    return [name_of(path) for path in TREES if any(name.partition(".")[0] in libraries for name in imports_of(path))]


def test_rooms_import_only_from_rooms_above():
    """A module imports from its own room and from those before it; setup and sampling do not know each other.

    What stands in no room is the public face, the command line, and torch_internals, which knows nobody.
    """
    wrong = []
    for path in TREES:
        room = room_of(name_of(path))
        above = ROOMS[: ROOMS.index(room) + 1] if room else [] if path.stem == "torch_internals" else ROOMS
        above = [name for name in above if {name, room} != {"setup", "sampling"}]
        wrong += [
            f"{name_of(path)} <- {module}" for module in imports_of(path) if room_of(module) not in (None, *above)
        ]
    assert wrong == []


def test_no_cycles():
    """The modules can be put in an order in which each imports only what comes before it."""
    known = set(map(name_of, TREES))
    graph = {name_of(path): known & set(imports_of(path)) for path in TREES if name_of(path) != PACKAGE.name}
    assert len(list(TopologicalSorter(graph).static_order())) >= len(graph)


def test_names_come_from_the_leaf_that_defines_them():
    """No module inside imports from the package's face, nor from a room's, and none offers in `__all__` what it has
    imported, but torch's private names, which one file names."""
    faces = {PACKAGE.name, *(f"{PACKAGE.name}.{room}" for room in ROOMS)}
    assert [name_of(path) for path in TREES if room_of(name_of(path)) and faces & set(imports_of(path))] == []
    again = {}
    for path, tree in TREES.items():
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        imported = {alias.asname or alias.name for node in imports for alias in node.names}
        if path.stem != "torch_internals":
            again[name_of(path)] = imported & exported(tree)
    assert not any(again.values()), again


def exported(tree: ast.Module) -> set[str]:
    """What stands in `__all__`, where that is a list of names."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "__all__" and isinstance(node.value, ast.List):
            return {name.value for name in node.value.elts if isinstance(name, ast.Constant)}
    return set()


def test_only_training_knows_lightning_and_the_command_line_hydra():
    """Lightning is imported in training/ and nowhere else in the package, Hydra and OmegaConf by __main__ alone."""
    assert set(map(room_of, knowing("lightning", "pytorch_lightning"))) == {"training"}
    assert knowing("hydra", "omegaconf") == [f"{PACKAGE.name}.__main__"]


def test_only_the_cache_knows_how_a_sample_lies():
    """Outside of cache/ nobody looks into a store: no slots, no ring of its own, no bytes of a row, no segment.

    A store's handle may be asked for its arc: the nodes of a job tell each other theirs.
    """
    inside = re.compile(
        r"(?<!stocache\.)(?:cache|store)\.(?:layout|segment)\b|\.row_bytes\b|\.states\b|(?<!\.handle)\.arc\b"
    )
    outside = [path for path in TREES if room_of(name_of(path)) not in ("cache", None)]
    assert [(name_of(path), found) for path in outside for found in inside.findall(path.read_text())] == []


def test_what_is_private_of_others_is_named_in_two_files():
    """Attributes of other people's objects that begin with an underscore, and modules that do."""
    found = []
    for path in TREES:
        if path.stem in PRIVATE_FILES:
            continue
        attributes = [node for node in ast.walk(TREES[path]) if isinstance(node, ast.Attribute)]
        ours = {node.attr for node in attributes if is_self(node.value)} | {"_fields"}  # documented by namedtuple
        found += [(path.stem, node.attr) for node in attributes if is_private(node.attr) and node.attr not in ours]
        found += [(path.stem, module) for module in imports_of(path) if "._" in module]
    assert found == []


def test_no_string_hides_a_private_name_of_lightnings():
    """In training/ no string is a private name that the package does not define itself."""
    ours, found = private_names(*TREES.values()), []
    for path in (PACKAGE / "training").glob("*.py"):
        nodes = list(ast.walk(TREES[path]))
        pieces = [piece for node in nodes if isinstance(node, ast.JoinedStr) for piece in node.values]
        strings = [node.value for node in nodes if isinstance(node, ast.Constant) and node not in pieces]
        names = [text for text in strings if isinstance(text, str) and text.isidentifier() and is_private(text)]
        found += [(path.stem, name) for name in names if name not in ours]
    assert {file for file, _ in found} <= {"lightning_internals"}


def test_tests_use_public_names():
    """What is private in the package is free to change: no test knows it."""
    ours, found = private_names(*TREES.values()), {}
    any_of_ours = re.compile("|".join(ours))
    for path in (ROOT / "tests").rglob("*.py"):
        if any_of_ours.search(text := path.read_text()):  # others need no parsing, which takes seconds
            tree = ast.parse(text)
            found[path.name] = private_uses(tree, ours - private_names(tree))
    assert not any(found.values()), found


def private_names(*trees: ast.Module) -> set[str]:
    """The names with one underscore that files define: of functions, classes, variables and attributes of self."""
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            names.add(node.attr)
    return {name for name in names if is_private(name)}


def private_uses(tree: ast.Module, ours: set[str]) -> set[str]:
    """Which of these names are attributes of something else than self, are imported, or are replaced by setattr."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not is_self(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and name_called(node) == "setattr":
            paths = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            found |= {path.rpartition(".")[2] for path in paths}
    return found & ours


def name_called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_the_design_names_the_files_that_there_are():
    """Each room of the house in docs/design.md lists its modules, and no other."""
    tree = (ROOT / "docs/design.md").read_text().partition("## 2. The house")[2].split("```")[1]
    rooms = re.findall(r"^  (\w+)/ (.*?)(?=^  \S|\Z)", tree, re.MULTILINE | re.DOTALL)
    for room, words in rooms:
        if named := set(re.findall(r"\w+\.py", words)):
            assert named == {path.name for path in (PACKAGE / room).glob("*.py")} - {"__init__.py"}, room
    assert [room for room, _ in rooms] == ROOMS
