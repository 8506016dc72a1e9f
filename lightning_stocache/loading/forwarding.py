"""A dataset around the user's own one that leaves it its names.

A name is read, written and deleted in the source, unless the class of the wrapper has it. Private names are the
source's too; what a wrapper keeps for itself begins with two underscores, which Python turns into a name of its class.
Dunder names are never forwarded: a `__getitems__` of the source would be found by the loader, and go past the cache.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

__all__ = ["Forwarding"]


class Forwarding(Dataset[Any]):
    """The base of what stands in front of a source.

    Args:
        source: the user's dataset.
    """

    def __init__(self, source: Dataset[Any]) -> None:
        self.__source = source

    def __getattr__(self, name: str) -> Any:
        # Pickle and copy ask before there is a source.
        if self.__keeps(name) or "_Forwarding__source" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__source, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__keeps(name):
            super().__setattr__(name, value)
        else:
            setattr(self.__source, name, value)

    def __delattr__(self, name: str) -> None:
        if self.__keeps(name):
            super().__delattr__(name)
        else:
            delattr(self.__source, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *dir(self.__source)})

    def __keeps(self, name: str) -> bool:
        """Whether a name is the wrapper's own: one of its class, or with two underscores."""
        return hasattr(type(self), name) or (name.startswith("_") and "__" in name)
