"""Files as they are, decoded after the cache: many more samples per byte, where decoding is cheap beside reading.

`EncodedSource` gives what is to be kept, `Decoder` finishes it; how the files of a source are read and decoded, its
`EncodedAccess` knows. A share of the samples may be kept decoded, up to their first random step, where memory allows:
then `Decoder` runs the rest of their transform.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch.utils.data import Dataset, Subset

from lightning_stocache.source.file_access import EncodedAccess, access_to
from lightning_stocache.source.transform_split import Cut, Tail

__all__ = ["Decoder", "EncodedSource", "taken_apart"]

_MIX = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: its multiples spread evenly
_WHOLE = 1 << 64


class _Encoded(NamedTuple):
    """A sample as its file."""

    number: int
    content: Any


class _Decoded(NamedTuple):
    """A sample up to its first random step."""

    number: int
    sample: Any


class EncodedSource(Dataset[Any]):
    """What is kept of a source: its files, and a share of its samples decoded.

    Args:
        source: the user's dataset.
        access: to its files.
        head: gives decoded samples.
        share: of the samples that are kept decoded, from 0 to 1; they are spread evenly over the indices.
    """

    def __init__(
        self, source: Dataset[Any], access: EncodedAccess, head: Dataset[Any] | None = None, share: float = 0.0
    ) -> None:
        self._source, self._access, self._head = source, access, head
        self._below = 0 if head is None else int(share * _WHOLE)

    @property
    def form(self) -> Literal["encoded", "mixed"]:
        """Whether all samples are kept as their files, or some of them decoded."""
        return "mixed" if self._below else "encoded"

    def __len__(self) -> int:
        return len(self._source)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        if self._head is not None and index * _MIX % _WHOLE < self._below:
            return _Decoded(index, self._head[index])
        return _Encoded(index, self._access.read(index))


class Decoder:
    """Finishes what an `EncodedSource` gave.

    Args:
        source: the user's dataset.
        access: to its files.
        tail: finishes samples that were kept decoded; None: nothing is left to do for them.
        has_places: whether the tail finds its places in such a sample; else that comes anew, from the whole source.
        partly: whether some samples are kept decoded.
    """

    def __init__(
        self,
        source: Dataset[Any],
        access: EncodedAccess,
        tail: Tail | None = None,
        has_places: Callable[[Any], bool] = bool,
        partly: bool = False,
    ) -> None:
        self._source, self._access, self._tail, self._has_places = source, access, tail, has_places
        self._partly = partly

    @property
    def steps(self) -> list[Any]:
        """What it runs of the source: transforms, whose changes take effect at once."""
        if self._partly:  # what is kept decoded has a part of them in it
            return [] if self._tail is None else list(self._tail.steps)
        inner: Any = self._source
        while type(inner) is Subset:
            inner = inner.dataset
        transforms = (getattr(inner, name, None) for name in ("transform", "target_transform", "transforms"))
        return [step for step in transforms if step is not None]

    def __call__(self, kept: Any) -> Any:
        """The sample that the source would have returned."""
        if type(kept) is _Encoded:
            try:
                return self._access.decode(kept.content, kept.number)
            except Exception as error:
                error.add_note(f"(sample {kept.number} of {type(self._source).__name__}, decoded after the cache)")
                raise
        if self._tail is None:
            return kept.sample
        return self._tail(kept.sample) if self._has_places(kept.sample) else self._source[kept.number]


def taken_apart(
    source: Dataset[Any], cut: Cut | None = None, share: float = 0.0, has_places: Callable[[Any], bool] = bool
) -> tuple[EncodedSource, Decoder]:
    """What is kept of a source, and what finishes it.

    Args:
        source: one of which the files are known.
        cut: where its transform is cut for samples that are kept decoded.
        share: of these.
        has_places: whether the rest of the transform finds its places in one of these.

    Raises:
        ValueError: its files are not known.
    """
    access = access_to(source)
    if access is None:
        raise ValueError(f"the files of a {type(source).__name__} are not known")
    if not share:
        return EncodedSource(source, access), Decoder(source, access)
    head, tail = (source, None) if cut is None else cut.apply(source)
    return EncodedSource(source, access, head, share), Decoder(source, access, tail, has_places, partly=True)
