"""Samples kept as their files and decoded after the cache: many more samples per byte, where decoding is cheap.

A source whose files are known can be taken apart into `read(index)`, which gives the file, and `decode(content,
index)`, which makes the sample that the source would have returned, with its whole transform. `access_to` gives an
`EncodedSource` for:

- a source of the user's with methods `read(index)` and `decode(content, index)`;
- torchvision's `DatasetFolder` and its kin, with torchvision's loaders;
- `datasets.Dataset` of Hugging Face with columns of images or audio, as it is or with a transform;
- timm's `ImageDataset`, with any reader that gives files;
- a Subset of one of these.

Decoding is the source's own `__getitem__` on a shallow copy that finds the bytes in place of the file. Nothing here
proves that both ways give the same sample: set-up compares some samples.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset, Subset

from lightning_stocache.source.access import unwrap
from lightning_stocache.source.blob import EncodedFile, image_of

__all__ = ["EncodedSource", "access_to", "packed_reader"]


class EncodedSource(Dataset[Any]):
    """The files of a source. Called with a file and its index, it gives the sample.

    Args:
        source: the source.
        read: gives the file of an index: bytes, or a tuple or dict that holds them.
        decode: makes the sample that the source would have returned, given a file and its index.
        packed: gives what `pack` writes for an index; None if such a source cannot be packed as files.
    """

    def __init__(
        self,
        source: Any,
        read: Callable[[int], Any],
        decode: Callable[[Any, int], Any],
        packed: Callable[[int], Any] | None = None,
    ) -> None:
        self._source = source
        self._read = read
        self._decode = decode
        self.packed = packed

    def __reduce__(self) -> Any:
        return access_to, (self._source,)  # the functions cannot be pickled

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        return self._read(index)

    def __call__(self, content: Any, index: int) -> Any:
        """The sample of a file."""
        return self._decode(content, index)

    @property
    def steps(self) -> list[Any]:
        """The transforms of the source, whose changes take effect at once."""
        inner = unwrap(self._source)
        transforms = (getattr(inner, name, None) for name in ("transform", "target_transform", "transforms"))
        return [step for step in transforms if step is not None]


def packed_reader(source: Any) -> Callable[[int], Any]:
    """The function that reads samples with files in place of images, for `pack`; for a folder (file, label).

    Raises:
        ValueError: the files are not known.
    """
    files = access_to(source)
    if files is not None and files.packed is not None:
        return files.packed
    raise ValueError(
        f"the files of {type(unwrap(source)).__name__} are not known; known are those of torchvision's ImageFolder and "
        "its kin with torchvision's loaders, and of a source with methods `read(index)` and `decode(content, index)`. "
        "Pack its samples as they are"
    )


def access_to(source: Any) -> EncodedSource | None:
    """The files of a source; None if it is not known how they are read and decoded."""
    if callable(getattr(source, "read", None)) and callable(getattr(source, "decode", None)):
        return EncodedSource(source, source.read, source.decode, source.read)
    if type(source) is Subset:
        inner = access_to(source.dataset)
        indices = source.indices
        if inner is None:
            return None
        packed = inner.packed
        return EncodedSource(
            source,
            lambda index: inner[indices[index]],
            lambda content, index: inner(content, indices[index]),
            None if packed is None else lambda index: packed(indices[index]),
        )
    for module, name, access in _KNOWN:
        kind = getattr(sys.modules.get(module), name, None)  # not imported: then nobody made one
        if kind is not None and isinstance(source, kind):
            return access(source) if type(source).__getitem__ is kind.__getitem__ else None
    return None


def _of_folder(source: Any) -> EncodedSource | None:
    """The files of torchvision's DatasetFolder, one per sample; `image_of` opens them as its `loader` does."""
    folder = sys.modules["torchvision.datasets.folder"]
    images = sys.modules.get("torchvision.io")
    by_pil = sys.modules["torchvision"].get_image_backend() == "PIL"
    if source.loader is folder.pil_loader or (source.loader is folder.default_loader and by_pil):
        form = "rgb"
    elif source.loader in (getattr(images, "read_image", 0), getattr(images, "decode_image", 0)):
        form = "tensor"
    else:
        return None

    def read(index: int) -> bytes:
        with open(source.samples[index][0], "rb") as file:
            return file.read()

    def decode(content: bytes, index: int) -> Any:
        return _twin(source, loader=lambda path: image_of(content, form))[index]

    return EncodedSource(source, read, decode, lambda index: (EncodedFile(read(index), form), source.samples[index][1]))


def _of_timm(source: Any) -> EncodedSource:
    """The files of timm's ImageDataset, whose reader gives open files."""

    def read(index: int) -> tuple[Any, ...]:
        file, *others = source.reader[index]
        with file:
            return file.read(), *others

    def decode(content: tuple[Any, ...], index: int) -> Any:
        return _twin(source, reader=_OneFile(source.reader, index, content))[index]

    return EncodedSource(source, read, decode)


class _OneFile:
    """A reader of timm's that has the content of one file. If that is broken, timm goes on to the next file."""

    def __init__(self, reader: Any, index: int, content: tuple[Any, ...]) -> None:
        self._reader = reader
        self._index = index
        self._content = content

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, index: int) -> Any:
        if index != self._index:
            return self._reader[index]
        content, *others = self._content
        return io.BytesIO(content), *others


def _of_hugging_face(source: Any) -> EncodedSource | None:
    """The files of a dataset of Hugging Face with columns of images or audio, with or without a transform."""
    library = sys.modules["datasets"]
    kinds = (library.Image, library.Audio)
    coded = {name: kind for name, kind in source.features.items() if isinstance(kind, kinds) and kind.decode}
    if not coded or source.format["type"] not in (None, "custom"):
        return None
    raw = source.with_format(None)
    for name, kind in coded.items():
        raw = raw.cast_column(name, type(kind)(decode=False))

    def read(index: int) -> dict[str, Any]:
        row: dict[str, Any] = raw[index]
        for name in coded:
            cell = row[name]
            if cell is not None and cell["bytes"] is None and cell["path"] is not None:
                with open(cell["path"], "rb") as file:
                    row[name] = cell | {"bytes": file.read()}
        return row

    def decode(content: dict[str, Any], index: int) -> Any:
        row = {
            name: coded[name].decode_example(value) if name in coded and value is not None else value
            for name, value in content.items()
        }
        if source.format["type"] is None:
            return row
        columns = source.format["columns"]
        batch = source.format["format_kwargs"]["transform"]({name: [row[name]] for name in row if name in columns})
        return {name: values[0] for name, values in batch.items()}

    return EncodedSource(source, read, decode)


_KNOWN: tuple[tuple[str, str, Any], ...] = (
    ("torchvision.datasets", "DatasetFolder", _of_folder),
    ("timm.data.dataset", "ImageDataset", _of_timm),
    ("datasets", "Dataset", _of_hugging_face),
)


def _twin(source: Any, **attributes: Any) -> Any:
    """A shallow copy with other attributes; 1 us, where `copy.copy` takes 6."""
    twin = object.__new__(type(source))
    twin.__dict__.update(source.__dict__)
    twin.__dict__.update(attributes)
    return twin
