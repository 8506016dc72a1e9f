"""The package's face: its public names, what importing it costs, and what its build configuration lists."""

import ast
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import lightning.pytorch  # noqa: F401  sets an environment variable when it is first imported
import pytest

import lightning_stocache

ROOT = Path(__file__).parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


@pytest.mark.processes
def test_import_is_free(tmp_path):
    """Neither the package nor its configs, which Hydra imports, import torch, Lightning, Hydra or NumPy."""
    heavy = {"torch", "lightning", "hydra", "numpy"}
    code = f"import sys, lightning_stocache.configs; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_public_names_resolve():
    """Every public name leads to an object of that name, and a second look gives the same object."""
    for name in lightning_stocache.__all__:
        value = getattr(lightning_stocache, name)
        assert value.__name__ == name
        assert getattr(lightning_stocache, name) is value


def test_public_names_are_sorted_and_listed():
    """__all__ is sorted, names what can be resolved, and dir() shows it."""
    imported = next(node for node in ast.parse(inspect.getsource(lightning_stocache)).body if isinstance(node, ast.If))
    for_editors = [alias.name for node in imported.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert lightning_stocache.__all__ == sorted(for_editors)
    assert set(lightning_stocache.__all__) < set(dir(lightning_stocache))


def test_unknown_name_is_an_attribute_error():
    """A name that the package lacks is an AttributeError with both names in it."""
    with pytest.raises(AttributeError, match="'lightning_stocache' has no attribute 'no_such_name'"):
        lightning_stocache.no_such_name  # noqa: B018


def test_every_package_folder_is_built():
    """Each room and each config group that exists is listed for the build, and nothing else."""
    rooms = {path.parent for path in (ROOT / "lightning_stocache").rglob("__init__.py")}
    groups = {path.parent for path in (ROOT / "configs").rglob("*.yaml")}
    expected = {".".join(path.relative_to(ROOT).parts) for path in rooms}
    expected |= {".".join(("lightning_stocache", *path.relative_to(ROOT).parts)) for path in groups}
    assert sorted(SETUPTOOLS["packages"]) == sorted(expected)


def test_nothing_shadows_the_configs():
    """configs/ is a package of its own and no directory of that name lies in lightning_stocache/."""
    assert (ROOT / "configs" / "__init__.py").is_file()
    assert not (ROOT / "lightning_stocache" / "configs").exists()
    assert SETUPTOOLS["package-dir"] == {"lightning_stocache.configs": "configs"}
