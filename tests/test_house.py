"""The house: public names resolve, and every room is built and described. import-linter and ruff hold its laws."""

import ast
import re
import tomllib
from pathlib import Path

import lightning.pytorch  # noqa: F401  sets an environment variable when it is first imported
import pytest

import lightning_stocache

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_stocache"


def test_public_names_resolve_are_sorted_and_listed():
    """Each leads to an object of that name, for editors and dir() too. Another name is an AttributeError."""
    for_editors = next(
        node for node in ast.parse((PACKAGE / "__init__.py").read_text()).body if isinstance(node, ast.If)
    )
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
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    layers = reversed(tool["importlinter"]["contracts"][0]["layers"])  # the linter wants every room among them
    rooms = [room for layer in layers for room in layer.split(" | ") if (PACKAGE / room).is_dir()]
    groups = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.yaml")}
    packages = [PACKAGE.name, *(f"{PACKAGE.name}.{part.replace('/', '.')}" for part in (*rooms, *groups))]
    assert sorted(tool["setuptools"]["packages"]) == sorted(packages)
    assert tool["setuptools"]["package-dir"] == {"lightning_stocache.configs": "configs"}
    assert (ROOT / "configs" / "__init__.py").is_file()
    assert not (PACKAGE / "configs").exists()
    house = (ROOT / "docs/design.md").read_text().partition("## 2. The house")[2].split("```")[1]
    described = re.findall(r"^  (\w+)/ (.*?)(?=^  \S|\Z)", house, re.MULTILINE | re.DOTALL)
    for room, words in described:
        if named := set(re.findall(r"\w+\.py", words)):
            assert named == {path.name for path in (PACKAGE / room).glob("*.py")} - {"__init__.py"}, room
    assert [room for room, _ in described] == rooms
