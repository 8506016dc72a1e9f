"""The recipes of docs/guides/frameworks.md, run as a reader would run them, with and without the cache."""

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

GUIDE = Path(__file__).parents[3] / "docs/guides/frameworks.md"


def recipe(framework: str) -> str:
    """The code under the heading of a framework."""
    section = GUIDE.read_text().partition(f"\n## {framework}\n")[2].partition("\n## ")[0]
    [code] = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return code


def run(framework: str, *, cached: bool, **names: Any) -> dict[str, Any]:
    """Run the recipe of a framework with some names, and return all names. `cached=False` runs it without the cache."""
    code = compile(recipe(framework), str(GUIDE), "exec")
    if cached:
        exec(code, names)
        return names
    package = importlib.import_module("lightning_stocache")
    sys.modules["lightning_stocache"] = WITHOUT
    try:
        exec(code, names)
    finally:
        sys.modules["lightning_stocache"] = package
    return names


def _plain_loader(loader: Any, **options: Any) -> Any:
    return loader


def _plain_dataset(source: Any, **options: Any) -> Any:
    source.share = lambda: None
    return source


WITHOUT: Any = SimpleNamespace(CachedDataset=_plain_dataset, cache_loader=_plain_loader)
"""Stands for the package, and caches nothing."""
