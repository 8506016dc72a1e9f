"""State that both the reads of a source and other code of the training reach: a sampler, a batch sampler, `collate_fn`.

A read may write there (`self.visits[index] += 1`, for a sampler that draws what was seldom seen). A hit reads nothing,
so it would write nothing, and the other code would do something else than without a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import Any

import numpy as np

from lightning_stocache.source.snapshot import Copies, live_content
from lightning_stocache.source.walk import (
    GENERATORS,
    Variables,
    module_of,
    node_dict,
    reachable,
    read_code,
    variables_of,
)

__all__ = ["CommonState"]

_MOST_ITEMS = 1 << 20  # of a container that is compared


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
        >>> before.put_back()
        'Counting.visits'
        >>> visits
        [0, 0]
    """

    def __init__(self, source: Any, others: Sequence[Any], datasets: Sequence[Any] = ()) -> None:
        self._nodes: list[tuple[str, Any]] = []
        known = set[int]()
        named = set[str]()
        wrappers = [source, *datasets]
        holds_source = False
        for other in others:
            for _, node in reachable(other, skip=wrappers, arrays=True):
                if any(node is wrapper for wrapper in wrappers):
                    holds_source = True
                elif type(node) is FunctionType:
                    named.update(read_code(node.__code__).names)
                elif _can_be_written(node) and not module_of(type(node)).startswith("torch.utils.data"):
                    known.add(id(node))
        self._named = named
        own = node_dict(source) or {}
        if holds_source:
            known.update(id(own[name]) for name in named & own.keys())
        if known:
            nodes = reachable(source, arrays=True)
            self._nodes = [(path, node) for path, node in nodes if id(node) in known and _can_be_written(node)]

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def content(self) -> Copies:
        """Copies of what is there now."""
        nodes = list[tuple[str, Any]]()
        variables = list[Variables]()
        for path, node in self._nodes:
            live = live_content(node)
            if isinstance(live, np.ndarray) or (live is not None and len(live) <= _MOST_ITEMS):
                nodes.append((path, node))
            variables += (found.only(self._named) for found in variables_of(path, node))
        return Copies(nodes, variables)


def _can_be_written(node: Any) -> bool:
    kind = type(node)
    if issubclass(kind, (type, FunctionType, *GENERATORS)):
        return False
    return live_content(node) is not None or (module_of(kind) != "builtins" and node_dict(node) is not None)
