"""The form of a transform's result that the code behind the transform takes apart.

`first, second = transform(image)` and `[view["image"] for view in transform(sample)]` put parts of a result into the
sample, never the result itself. A cut stores the arguments of such a transform. Without its random steps the transform
has no result, so its head returns one of the same form: the containers of a real result, the arguments in place of one
leaf, and None in place of the others. The tail runs the steps, and puts the parts of the result where those of this
form lay.

Nothing is lost as long as the code behind does not look at the leaves (`opaque`), and each result has this form.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_stocache.source.samples import Path, is_namedtuple, node_at

__all__ = ["LEVELS", "ResultForm", "form_of"]

LEVELS = 4
"""Levels of containers in a form. What lies deeper is a leaf."""


@dataclass(frozen=True)
class ResultForm:
    """The containers of a result, the outermost first, each with its path, its class and its keys.

    Args:
        containers: the containers. Whatever else lies in them is a leaf.
        carrier: the leaf that stands for the arguments, which is a part of every sample.

    Example:
        >>> form = form_of([{"image": 1, "box": (2, 3)}])
        >>> form.leaves
        ((0, 'image'), (0, 'box', 0), (0, 'box', 1))
        >>> form = form.upper(levels=2)
        >>> form.leaves
        ((0, 'image'), (0, 'box'))
        >>> form.filled({(0, "image"): "a", (0, "box"): "b"})
        [{'image': 'a', 'box': 'b'}]
        >>> form.fits([{"image": 1, "box": None}]), form.fits([{"image": 1}])
        (True, False)
    """

    containers: tuple[tuple[Path, Any, tuple[Any, ...]], ...]
    carrier: Path = ()

    @property
    def leaves(self) -> tuple[Path, ...]:
        """The paths of the leaves."""
        inner = {path for path, _, _ in self.containers}
        paths = ((), *((*path, key) for path, _, keys in self.containers for key in keys))
        return tuple(path for path in paths if path not in inner)

    def upper(self, levels: int) -> ResultForm:
        """The containers of the upper levels alone."""
        return ResultForm(tuple(container for container in self.containers if len(container[0]) < levels))

    def filled(self, leaves: Mapping[Path, Any]) -> Any:
        """A result of this form with these leaves."""
        nodes = dict(leaves)
        for path, kind, keys in reversed(self.containers):  # the innermost first
            items = [nodes[*path, key] for key in keys]
            if issubclass(kind, dict):
                nodes[path] = kind(zip(keys, items, strict=True))
            else:
                nodes[path] = kind(items) if kind in (list, tuple) else tuple.__new__(kind, items)
        return nodes[()]

    def fits(self, result: Any) -> bool:
        """Whether a result has this form."""
        for path, kind, keys in self.containers:
            node = node_at(result, path)
            if type(node) is not kind or _keys_of(node) != keys:
                return False
        return True


def form_of(result: Any) -> ResultForm:
    """The form of a result."""
    return ResultForm(tuple(_containers(result, ())))


def _containers(node: Any, path: Path) -> Iterator[tuple[Path, Any, tuple[Any, ...]]]:
    kind: Any = type(node)
    if len(path) < LEVELS and (kind in (dict, OrderedDict, list, tuple) or is_namedtuple(kind)):
        keys = _keys_of(node)
        yield path, kind, keys
        for key in keys:
            yield from _containers(node[key], (*path, key))


def _keys_of(node: Any) -> tuple[Any, ...]:
    return tuple(node) if isinstance(node, dict) else tuple(range(len(node)))
