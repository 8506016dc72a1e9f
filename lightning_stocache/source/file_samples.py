"""A source whose samples hold their images as files: what `pack` keeps where it is to keep files.

The transforms of the source are left out, and come after the LMDB. Known are torchvision's DatasetFolder and what
derives from it, with a loader of which the decoder is known, and sources with a method `read` of their own, in Subsets
or not.
"""

from __future__ import annotations

import sys
from typing import Any

from torch.utils.data import Dataset, Subset

from lightning_stocache.source.blob import EncodedFile
from lightning_stocache.source.file_access import access_to

__all__ = ["FileSamples"]


class FileSamples(Dataset[Any]):
    """The samples of a source, with files in place of images.

    Args:
        source: of a folder: samples are (file, label); with a `read(index)`: what that returns.

    Raises:
        ValueError: its files are not known.

    Example:
        >>> FileSamples([1, 2])
        Traceback (most recent call last):
            ...
        ValueError: the files of list are not known; known are those of torchvision's ImageFolder and its kin with ...
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        inner, access = _inner(source), access_to(source)
        self._form = _form_of(inner)
        if access is None or (self._form is None and not callable(getattr(inner, "read", None))):
            loader = getattr(inner, "loader", None)
            which = "" if loader is None else f", with the loader {getattr(loader, '__name__', loader)!s:.60}"
            raise ValueError(
                f"the files of {type(inner).__name__}{which} are not known; known are those of torchvision's "
                "ImageFolder and its kin with torchvision's loaders, and of a source with methods `read(index)` and "
                "`decode(content, index)`. Pack its samples as they are"
            )
        self._access = access

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        content = self._access.read(index)
        if self._form is None:
            return content
        inner: Any = self.source
        while type(inner) is Subset:
            inner, index = inner.dataset, inner.indices[index]
        return EncodedFile(content, self._form), inner.samples[index][1]


def _inner(source: Any) -> Any:
    inner = source
    while type(inner) is Subset:
        inner = inner.dataset
    return inner


def _form_of(source: Any) -> str | None:
    """What the loader of a DatasetFolder makes of a file; None if it is none, or that is not known."""
    datasets, images = sys.modules.get("torchvision.datasets"), sys.modules.get("torchvision.io")
    if datasets is None or not isinstance(source, datasets.DatasetFolder):  # never imported: then nobody made one
        return None
    if source.loader in (datasets.folder.default_loader, datasets.folder.pil_loader):
        return "rgb"
    return "tensor" if source.loader in (getattr(images, "read_image", 0), getattr(images, "decode_image", 0)) else None
