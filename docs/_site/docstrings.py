"""Gives examples in docstrings the heading that griffe knows."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Turns `Example:` into `Examples:`."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of a class, a function or a method."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub("^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
