"""Files as they are, decoded after the cache: many more samples per byte, where decoding is cheap beside reading.

`EncodedSource` gives what is to be kept, `Decoder` finishes it; how the files of a source are read and decoded, its
`EncodedAccess` knows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.utils.data import Dataset, Subset

from lightning_stocache.source.file_access import EncodedAccess, access_to

__all__ = ["Decoder", "EncodedSource", "taken_apart"]


class _Encoded(NamedTuple):
    """A sample as its file."""

    number: int
    content: Any


class EncodedSource(Dataset[Any]):
    """The files of a source.

    Args:
        source: the user's dataset.
        access: to its files.
    """

    def __init__(self, source: Dataset[Any], access: EncodedAccess) -> None:
        self._source, self._access = source, access

    def __len__(self) -> int:
        return len(self._source)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> _Encoded:
        return _Encoded(index, self._access.read(index))


class Decoder:
    """Decodes what an `EncodedSource` gave.

    Args:
        source: the user's dataset.
        access: to its files.
    """

    def __init__(self, source: Dataset[Any], access: EncodedAccess) -> None:
        self._source, self._access = source, access

    @property
    def steps(self) -> list[Any]:
        """What it runs of the source: transforms, whose changes take effect at once."""
        inner: Any = self._source
        while type(inner) is Subset:
            inner = inner.dataset
        transforms = (getattr(inner, name, None) for name in ("transform", "target_transform", "transforms"))
        return [step for step in transforms if step is not None]

    def __call__(self, kept: _Encoded) -> Any:
        """The sample that the source would have returned."""
        try:
            return self._access.decode(kept.content, kept.number)
        except Exception as error:
            error.add_note(f"(sample {kept.number} of {type(self._source).__name__}, decoded after the cache)")
            raise


def taken_apart(source: Dataset[Any]) -> tuple[EncodedSource, Decoder]:
    """What is kept of a source, and what finishes it.

    Raises:
        ValueError: its files are not known.
    """
    access = access_to(source)
    if access is None:
        raise ValueError(f"the files of a {type(source).__name__} are not known")
    return EncodedSource(source, access), Decoder(source, access)
