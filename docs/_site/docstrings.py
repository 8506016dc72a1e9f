"""Docstrings as `help()` shows them.

The site reads signatures from the source, without running it. The doors put the descriptions of their options into
their docstrings as they are imported (`training/options.py`), so the docstrings of public names are asked of the
imported objects instead: every option is on the page of each door that has it.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

import lightning_stocache


class Imported(griffe.Extension):
    """Gives each public name the docstring that it has once it is imported, and examples the heading griffe knows."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """The docstring of a class."""
        self._take(cls)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """The docstring of a function or method."""
        self._take(func)

    @staticmethod
    def _take(found: griffe.Class | griffe.Function) -> None:
        if found.docstring is None:
            return
        if found.name in lightning_stocache.__all__:
            public = getattr(lightning_stocache, found.name)
            if found.path == f"{public.__module__}.{public.__qualname__}":
                found.docstring.value = inspect.getdoc(public) or ""
        found.docstring.value = re.sub("^Example:$", "Examples:", found.docstring.value, flags=re.MULTILINE)
