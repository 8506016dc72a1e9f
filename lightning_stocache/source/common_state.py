"""State that both the reads of a source and other code of the training reach: a sampler, a batch sampler, `collate_fn`.

A read may write there (`self.visits[index] += 1`, for a sampler that draws what was seldom seen). A hit reads nothing,
so it would write nothing, and the other code would do something else than without a cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from types import FunctionType
from typing import Any

import numpy as np
import torch

from lightning_stocache.source.generators import KINDS, names_in, reachable

__all__ = ["CommonState"]

_CONTAINERS = (list, dict, set, deque)
_MOST_BYTES = 16 << 20  # of an array that is compared
_MOST_ITEMS = 1 << 20


class CommonState:
    """The arrays, containers and objects that a source and other code both reach.

    Args:
        source: the dataset.
        others: the other objects: samplers and functions. A dataset that such an object holds is not entered. Of it,
            and of any other object, those attributes count that the code of these objects names.
        datasets: the wrappers around the dataset.

    Example:
        >>> class Counting:
        ...     def __init__(self, visits):
        ...         self.visits = visits
        >>> visits = [0, 0]
        >>> state = CommonState(Counting(visits), [Counting(visits)])
        >>> before = state.content()
        >>> visits[1] += 1
        >>> state.written(before)
        'Counting.visits'
        >>> visits
        [0, 0]
    """

    def __init__(self, source: Any, others: Sequence[Any], datasets: Sequence[Any] = ()) -> None:
        self._nodes: list[tuple[str, Any]] = []
        known, named = set[int](), set[str]()
        wrappers, holds_source = [source, *datasets], False
        for other in others:
            for _, node in reachable(other, skip=wrappers, arrays=True):
                if any(node is wrapper for wrapper in wrappers):
                    holds_source = True
                elif type(node) is FunctionType:
                    named.update(names_in(node.__code__))
                elif _can_be_written(node) and not type(node).__module__.startswith("torch.utils.data"):
                    known.add(id(node))
        self._named = named
        own = getattr(source, "__dict__", {})
        if holds_source:
            known.update(id(own[name]) for name in named & own.keys())
        if known:
            nodes = reachable(source, arrays=True)
            self._nodes = [(path, node) for path, node in nodes if id(node) in known and _can_be_written(node)]

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def content(self) -> list[Any]:
        """Copies of what is there now."""
        return [_content(node, self._named) for _, node in self._nodes]

    def written(self, before: list[Any]) -> str | None:
        """Where the content is another one than it was. It is put back."""
        place = None
        for (path, node), content in zip(self._nodes, before, strict=True):
            if content is not None and not _equal(content, _content(node, self._named)):
                place = place or path
                _put_back(node, content)
        return place


def _can_be_written(node: Any) -> bool:
    if isinstance(node, (type, FunctionType, *KINDS)):
        return False
    if isinstance(node, (np.ndarray, torch.Tensor, bytearray, *_CONTAINERS)):
        return True
    return type(node).__module__ != "builtins" and (type(getattr(node, "__dict__", None)) is dict or _is_buffer(node))


def _is_buffer(node: Any) -> bool:
    """Whether it is memory that can be written to: an `array`, what a `multiprocessing.Array` holds."""
    with suppress(TypeError, ValueError, BufferError), memoryview(node) as view:
        return not view.readonly and view.nbytes <= _MOST_BYTES
    return False


def _content(node: Any, named: set[str]) -> Any:
    """A copy of the content of a node, of an object its named attributes; None if it is too large."""
    if isinstance(node, torch.Tensor):
        is_small = node.device.type == "cpu" and node.layout is torch.strided and node.nbytes <= _MOST_BYTES
        return node.detach().clone() if is_small else None
    if isinstance(node, np.ndarray):
        return node.copy() if node.nbytes <= _MOST_BYTES else None
    if isinstance(node, _CONTAINERS):
        return node.copy() if len(node) <= _MOST_ITEMS else None
    if _is_buffer(node):
        return bytes(memoryview(node).cast("B"))
    return {name: value for name, value in vars(node).items() if name in named}


def _equal(before: Any, now: Any) -> bool:
    if now is None or type(before) is not type(now):
        return False
    if isinstance(before, torch.Tensor):
        before, now = before.numpy(), now.numpy()
    if isinstance(before, np.ndarray):
        return bool(before.shape == now.shape and before.tobytes() == now.tobytes())
    if isinstance(before, bytes | set):
        return bool(before == now)
    if isinstance(before, dict):
        return before.keys() == now.keys() and all(map(_is_same_item, before.values(), now.values()))
    return len(before) == len(now) and all(map(_is_same_item, before, now))


def _is_same_item(before: Any, now: Any) -> bool:
    """Whether an item is the same object, or an equal number or text."""
    if before is now:
        return True
    return type(before) is type(now) and isinstance(before, int | float | str | bytes) and before == now


def _put_back(node: Any, content: Any) -> None:
    with suppress(Exception):  # what cannot be put back stays as the read has left it
        if isinstance(node, torch.Tensor):
            node.detach().copy_(content)
        elif isinstance(node, np.ndarray):
            node[...] = content
        elif isinstance(node, list):
            node[:] = content
        elif isinstance(node, dict | set | deque):
            node.clear()
            node.extend(content) if isinstance(node, deque) else node.update(content)
        elif isinstance(content, bytes):
            memoryview(node).cast("B")[:] = content
        else:
            vars(node).update(content)
