"""The request for a cache of one source, the loader that will read it, and the values that options may have.

Values from a YAML file or a command line arrive as the user typed them. An error names the option, the rule, and the
value.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from torch.utils.data import Dataset

from lightning_stocache.cache.codec import Codec, UnsupportedSampleError
from lightning_stocache.cache.placement import Domain
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.named import check_name
from lightning_stocache.source.draws import Draws

__all__ = [
    "ENDLESS",
    "BackendChoice",
    "CacheRequest",
    "Form",
    "Layout",
    "LoaderSettings",
    "check_budget",
    "check_choice",
    "check_count",
    "check_flag",
    "check_options",
]

log = logging.getLogger(__name__)

BackendChoice = Literal["auto", "tmpfile", "memfd", "file"]
Layout = Literal["auto", "rows", "records"]
Form = Literal["decoded", "encoded", "auto"]

ENDLESS = 1 << 48
"""Stands for the number of samples in a stream, which nobody knows."""

_AUTO = Budget.parse("auto")


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Refuse a value that is not among the values of a `Literal`.

    Example:
        >>> from typing import Literal
        >>> check_choice("gather", "both", Literal["auto", "main", "worker"])
        Traceback (most recent call last):
        ValueError: gather must be 'auto', 'main' or 'worker', got 'both'
    """
    *others, last = map(repr, get_args(choices))
    if value not in get_args(choices):
        raise ValueError(f"{name} must be {', '.join(others)} or {last}, got {value!r}")


def check_count(name: str, value: Any, least: int) -> None:
    """Refuse a value that is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def check_flag(name: str, value: Any) -> None:
    """Refuse a value that is not a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")


def check_options(options: Any) -> None:
    """Refuse values that options of a `CacheRequest`, or of `CacheOptions`, cannot have."""
    check_choice("store", options.store, Form)
    for name in ("freeze_random", "strict", "prefill"):
        check_flag(name, getattr(options, name))
    if not isinstance(options.fingerprint, str):
        raise TypeError(f"fingerprint must be a string, got {options.fingerprint!r}")
    if options.name is not None:
        check_name(options.name)
    if options.dir is not None and (not isinstance(options.dir, str) or not options.dir):
        raise TypeError(f"dir must be the path of a directory, as a string, got {options.dir!r}")


def check_budget(budget: Budget) -> None:
    """Refuse a share of a stream, whose size is not known."""
    if budget.unit == "% of dataset" and budget.amount < 100:
        raise ValueError(
            f"budget of a stream must be in bytes, '% of free', 'auto' (as much as is safely free) or 0, got "
            f"{budget.written!r}: nobody knows the size of a stream"
        )


@dataclass(frozen=True)
class LoaderSettings:
    """The loader that will read a source.

    Args:
        batch_size: samples per batch.
        num_workers: worker processes.
        prefetch_factor: finished batches that each worker keeps.
        start_method: the start method of workers, if the loader sets it.
        worker_init_fn: called in each worker.
        stage: stage of the Trainer, for messages.
        draws_lists: whether its sampler draws lists of indices, each as one key (`batch_size=None`).
        is_running: whether it has persistent workers from an earlier epoch, which read an open cache.
        passes: how often it reads the source at most.
        pins: whether its batches are copied to page-locked memory.
    """

    batch_size: int
    num_workers: int
    prefetch_factor: int | None = None
    start_method: str | None = None
    worker_init_fn: Callable[[int], None] | None = None
    stage: str = ""
    is_running: bool = False
    passes: float = math.inf
    draws_lists: bool = False
    pins: bool = False


@dataclass(frozen=True)
class CacheRequest:
    """The request to cache one source.

    Args:
        source: the map-style dataset, or a stream.
        pot: name of the budget that several requests share.
        budget: budget of a request that opens alone.
        spec: an example of a sample, or the codec of the samples, which an example is turned into. If it is given,
            set-up reads no sample and does not look for randomness.
        freeze_random, name, fingerprint, strict, store, prefill, dir: see `CacheOptions`.
        reader: the loader that will read the source; None: unknown.
        layout: rows or records; "auto": rows if the samples allow it.
        domain: the indices that are drawn; None: all.
        as_stream: whether the source is a stream, or a function that makes an iterator.
        writers: of a rolling cache, the number of processes that append at the same time; 0: it is no rolling cache.
        draws: of a rolling cache, the samples that its fillers draw.

    Raises:
        TypeError: the type of fingerprint or dir is wrong, or spec holds what cannot be stored.
        ValueError: the name, or the value of another option, is not valid.
    """

    source: Dataset[object]
    pot: str = "train"
    budget: Budget = _AUTO
    spec: Codec | Any = None
    freeze_random: bool = False
    reader: LoaderSettings | None = None
    name: str | None = None
    fingerprint: str = ""
    strict: bool = False
    layout: Layout = "auto"
    store: Form = "decoded"
    prefill: bool = False
    dir: str | None = None
    domain: Domain | None = None
    as_stream: bool = False
    writers: int = 0
    draws: Draws | None = None

    def __post_init__(self) -> None:
        if self.as_stream and not self.writers:
            check_budget(self.budget)
        if self.domain is not None and self.domain.is_whole:
            object.__setattr__(self, "domain", None)
        check_choice("layout", self.layout, Layout)
        check_options(self)
        if self.store == "encoded" and self.layout == "rows":
            raise ValueError("store='encoded' keeps records, so layout='rows' is not possible")
        if self.spec is not None and not isinstance(self.spec, SampleSpec | RecordCodec):
            object.__setattr__(self, "spec", _codec_of(self.spec, self.layout))

    @property
    def length(self) -> int:
        """Number of samples in the source; `ENDLESS` for a stream."""
        return ENDLESS if self.as_stream else len(cast(Sized, self.source))

    @property
    def by_index(self) -> bool:
        """Whether an index has a slot of its own: not in a stream, nor in a rolling cache."""
        return not self.as_stream and not self.writers

    @property
    def must_open(self) -> bool:
        """Whether it is an error if this cache cannot open."""
        return self.strict or self.writers > 0

    def pass_through(self, reason: str, error: type[Exception] = ValueError) -> None:
        """Warn that the source passes through uncached, or raise an error (`strict`; a stream always passes)."""
        if self.strict and self.by_index:
            raise error(f"{self.title} cannot be cached: {reason}")
        log.warning("%s passes through uncached: %s", self.title, reason)

    @property
    def samples(self) -> int:
        """Number of samples that are drawn; `ENDLESS` if that is not known."""
        if self.draws is not None and self.draws.length is None:
            return ENDLESS
        return self.length if self.domain is None else len(self.domain)

    @property
    def title(self) -> str:
        """The source, for messages."""
        if self.as_stream:
            return getattr(self.source, "__name__", type(self.source).__name__)
        whose = self.reader.stage if self.reader is not None and self.reader.stage else self.pot
        samples = f"{self.length:,}" if self.domain is None else f"{self.samples:,} of {self.length:,}"
        return f"{type(self.source).__name__} ({samples} samples{f', {whose}' if whose else ''})"


def _codec_of(sample: Any, layout: Layout) -> Codec:
    """The codec of samples like this one: of rows if the layout and the sample allow it, else of records."""
    if layout != "records":
        try:
            return SampleSpec.infer(sample)
        except UnsupportedSampleError:
            if layout == "rows":
                raise
    return RecordCodec.infer([sample])
