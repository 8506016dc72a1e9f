"""Samples kept as their files and decoded after the cache: many more samples per byte, where decoding is cheap.

A source whose files are known can be taken apart into `read(index)`, which gives what is kept, and
`decode(content, index)`, which makes of it what the source would have returned, with its whole transform. `access_to`
finds such an `EncodedAccess` for:

- a source of the user's with methods `read(index)` and `decode(content, index)`;
- torchvision's `DatasetFolder` and its kin, with torchvision's loaders;
- `datasets.Dataset` of Hugging Face with columns of images or audio, as it is or with a transform;
- timm's `ImageDataset`, with any reader that gives files;
- a Subset of one of these.

Decoding is the source's own `__getitem__` on a shallow copy that finds the bytes in place of the file. Whoever looks at
a source compares the samples.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

from torch.utils.data import Dataset, Subset

from lightning_stocache.source.access import unwrap
from lightning_stocache.source.blob import EncodedFile, image_of

__all__ = ["EncodedAccess", "EncodedSource", "access_to", "packed_reader"]


class EncodedAccess(Protocol):
    """A source in two parts."""

    def read(self, index: int) -> Any:
        """What is kept of a sample: bytes, or a tuple or dict that holds them."""

    def decode(self, content: Any, index: int) -> Any:
        """The sample that the source would have returned for this index."""


class _Encoded(NamedTuple):
    """A sample as its file."""

    number: int
    content: Any


class EncodedSource(Dataset[Any]):
    """The files of a source. Called with one of them, it gives the sample that the source would have returned.

    Raises:
        ValueError: the files are not known.
    """

    def __init__(self, source: Dataset[Any]) -> None:
        access = access_to(source)
        if access is None:
            raise ValueError(f"the files of a {type(source).__name__} are not known")
        self._source, self._access = source, access

    def __len__(self) -> int:
        return len(self._source)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> _Encoded:
        return _Encoded(index, self._access.read(index))

    def __call__(self, encoded: _Encoded) -> Any:
        """The sample of a file."""
        try:
            return self._access.decode(encoded.content, encoded.number)
        except Exception as error:
            error.add_note(f"(sample {encoded.number} of {type(self._source).__name__}, decoded after the cache)")
            raise

    @property
    def steps(self) -> list[Any]:
        """The transforms of the source, whose changes take effect at once."""
        inner = unwrap(self._source)
        transforms = (getattr(inner, name, None) for name in ("transform", "target_transform", "transforms"))
        return [step for step in transforms if step is not None]


def packed_reader(source: Any) -> Callable[[int], Any]:
    """The function that reads samples with files in place of images, for `pack`: of a folder (file, label).

    Raises:
        ValueError: the files are not known.
    """
    access: Any = access_to(source)
    if access is not None and hasattr(access_to(unwrap(source)), "packed"):
        return cast(Callable[[int], Any], access.packed)
    raise ValueError(
        f"the files of {type(unwrap(source)).__name__} are not known; known are those of torchvision's ImageFolder and "
        "its kin with torchvision's loaders, and of a source with methods `read(index)` and `decode(content, index)`. "
        "Pack its samples as they are"
    )


def access_to(source: Any) -> EncodedAccess | None:
    """How the files of a source are read and decoded; None if that is not known."""
    if callable(getattr(source, "read", None)) and callable(getattr(source, "decode", None)):
        return _OfUser(source)
    if type(source) is Subset:
        inner = access_to(source.dataset)
        return None if inner is None else _OfSubset(source, inner)
    for module, name, access in _KNOWN:
        kind = getattr(sys.modules.get(module), name, None)  # not imported: then nobody made one
        if kind is not None and isinstance(source, kind):
            return access(source) if type(source).__getitem__ is kind.__getitem__ else None
    return None


class _OfUser:
    """The source's own methods."""

    def __init__(self, source: Any) -> None:
        self._source, self.decode = source, source.decode

    def read(self, index: int) -> Any:
        content = self._source.read(index)
        return bytes(content) if isinstance(content, bytearray | memoryview) else content

    packed = read


class _OfSubset:
    """Some indices of another source."""

    def __init__(self, subset: Subset[Any], inner: Any) -> None:
        self._indices, self._inner = subset.indices, inner

    def read(self, index: int) -> Any:
        return self._inner.read(self._indices[index])

    def packed(self, index: int) -> Any:
        return self._inner.packed(self._indices[index])

    def decode(self, content: Any, index: int) -> Any:
        return self._inner.decode(content, self._indices[index])


class _OfFolder:
    """torchvision's DatasetFolder: a file per sample, opened by its `loader`, which makes what `image_of` does."""

    def __init__(self, source: Any, form: str) -> None:
        self._source, self._form = source, form

    def read(self, index: int) -> bytes:
        with open(self._source.samples[index][0], "rb") as file:
            return file.read()

    def packed(self, index: int) -> tuple[EncodedFile, int]:
        return EncodedFile(self.read(index), self._form), self._source.samples[index][1]

    def decode(self, content: bytes, index: int) -> Any:
        return _twin(self._source, loader=lambda path: image_of(content, self._form))[index]


def _of_folder(source: Any) -> _OfFolder | None:
    folder, images = sys.modules["torchvision.datasets.folder"], sys.modules.get("torchvision.io")
    by_pil = sys.modules["torchvision"].get_image_backend() == "PIL"
    if source.loader is folder.pil_loader or (source.loader is folder.default_loader and by_pil):
        return _OfFolder(source, "rgb")
    if source.loader in (getattr(images, "read_image", 0), getattr(images, "decode_image", 0)):
        return _OfFolder(source, "tensor")
    return None


class _OfTimm:
    """timm's ImageDataset: its reader gives open files."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def read(self, index: int) -> tuple[Any, ...]:
        file, *others = self._source.reader[index]
        with file:
            return file.read(), *others

    def decode(self, content: tuple[Any, ...], index: int) -> Any:
        return _twin(self._source, reader=_OneFile(self._source.reader, index, content))[index]


class _OneFile:
    """A reader of timm's of which one file is at hand; where it is broken, timm goes on to the next."""

    def __init__(self, reader: Any, index: int, content: tuple[Any, ...]) -> None:
        self._reader, self._index, self._content = reader, index, content

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, index: int) -> Any:
        if index != self._index:
            return self._reader[index]
        content, *others = self._content
        return io.BytesIO(content), *others


class _OfHuggingFace:
    """A dataset of Hugging Face with columns of images or audio, as it is or with a transform of the user's."""

    def __init__(self, source: Any, raw: Any, coded: dict[str, Any]) -> None:
        self._source, self._raw, self._coded = source, raw, coded

    def read(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = self._raw[index]
        for name in self._coded:
            if (cell := row[name]) is not None and cell["bytes"] is None and cell["path"] is not None:
                with open(cell["path"], "rb") as file:
                    row[name] = cell | {"bytes": file.read()}
        return row

    def decode(self, content: dict[str, Any], index: int) -> Any:
        row = {
            name: self._coded[name].decode_example(value) if name in self._coded and value is not None else value
            for name, value in content.items()
        }
        if self._source.format["type"] is None:
            return row
        columns = self._source.format["columns"]
        batch = {name: [value] for name, value in row.items() if name in columns}
        made = self._source.format["format_kwargs"]["transform"](batch)
        return {name: values[0] for name, values in made.items()}


def _of_hugging_face(source: Any) -> _OfHuggingFace | None:
    library = sys.modules["datasets"]
    kinds = (library.Image, library.Audio)
    coded = {name: kind for name, kind in source.features.items() if isinstance(kind, kinds) and kind.decode}
    if not coded or source.format["type"] not in (None, "custom"):
        return None
    raw = source.with_format(None)
    for name, kind in coded.items():
        raw = raw.cast_column(name, type(kind)(decode=False))
    return _OfHuggingFace(source, raw, coded)


_KNOWN: tuple[tuple[str, str, Any], ...] = (
    ("torchvision.datasets", "DatasetFolder", _of_folder),
    ("timm.data.dataset", "ImageDataset", _OfTimm),
    ("datasets", "Dataset", _of_hugging_face),
)


def _twin(source: Any, **attributes: Any) -> Any:
    """A shallow copy with other attributes; 1 us, where `copy.copy` takes 6."""
    twin = object.__new__(type(source))
    twin.__dict__.update(source.__dict__)
    twin.__dict__.update(attributes)
    return twin
