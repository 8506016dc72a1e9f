"""A stream that the ranks of a node share: together they have every sample once an epoch, in equally many batches."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, get_worker_info

from lightning_stocache import CachedLoader, CachedStream
from lightning_stocache.cache.stream import StreamLedger
from lightning_stocache.sampling.residents import batches_of, permutation
from tests.processes import run_ranks
from tests.sources import CountedStream

LENGTH = 103


class Divided(CountedStream):
    """Every worker of every rank reads its share of the numbers."""

    def __init__(self) -> None:
        super().__init__(LENGTH)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def __iter__(self) -> Iterator[Any]:
        info: Any = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(self.rank * workers + worker, LENGTH, self.world * workers):
            yield np.full(1, number), number


@contextmanager
def shared() -> Iterator[CachedStream]:
    """A stream that all ranks share. When it is closed, all ranks have read it."""
    with closing(CachedStream(Divided(), "16MiB", defer=True)) as stream:
        stream.share()
        yield stream
        dist.barrier()


def whole(kind: Any, workers: int) -> Any:
    """The numbers of every batch of three epochs, and the counts of all ranks."""
    with shared() as stream:
        loader = kind(stream, batch_size=4, num_workers=workers)
        epochs = [[numbers.tolist() for _, numbers in loader] for _ in range(3)]
        dist.barrier()
        counts = stream.counters.totals()
        if kind is CachedLoader:
            loader.close()
    return epochs, counts


def killed(rank: int) -> Any:
    """The numbers of three epochs, and the hits, after a worker of rank zero was killed in an epoch before."""
    with shared() as stream:
        loader: Any = DataLoader(stream, batch_size=1, num_workers=1, prefetch_factor=2)
        if rank == 0:
            batches = iter(loader)
            next(batches)
            os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
            with pytest.raises((RuntimeError, OSError, EOFError)):  # it died before a batch or giving one
                list(batches)
            del batches
        else:
            list(loader)
        epochs = [sorted(int(numbers) for _, numbers in loader) for _ in range(3)]
        dist.barrier()
        return epochs, stream.counters.totals().hits


def lives(rank: int) -> Any:
    """Whole epochs of both kinds of loaders, a killed worker, and three epochs of rank zero beside one of rank one."""
    found = whole(DataLoader, 0), whole(CachedLoader, 2), killed(rank)
    StreamLedger.patience = 0.2
    with shared() as stream:
        return *found, [sorted(number for _, number in stream) for _ in range(3 if rank == 0 else 1)]


@pytest.mark.processes
def test_every_sample_comes_once_over_all_ranks() -> None:
    """Epoch one is each rank's own stream. Later epochs are dealt to both ranks, in equally many batches. A killed
    worker costs an epoch: the samples that it has stored do not come twice, and the next whole epoch is stored. If the
    ranks are out of step, the stream passes through after a wait."""
    first, second = run_ranks(lives, 2)
    # The batches of a plain DataLoader are not known: as by DistributedSampler, a sample comes twice.
    for twice, (epochs, counts), (of_second, _) in zip((1, 0), first[:2], second[:2], strict=True):
        for number, (ours, theirs) in enumerate(zip(epochs, of_second, strict=True)):
            seen = [index for batch in ours + theirs for index in batch]
            assert set(seen) == set(range(LENGTH))
            assert len(seen) == LENGTH + (twice if number else 0)
            assert number == 0 or len(ours) == len(theirs)
        assert {index for batch in epochs[1] for index in batch} != {index for batch in epochs[0] for index in batch}
        assert counts.misses == LENGTH
        assert counts.hits == 2 * (LENGTH + twice)

    (epochs, hits), (of_second, _) = first[2], second[2]
    for ours, theirs in zip(epochs, of_second, strict=True):
        assert set(ours + theirs) == set(range(LENGTH))
        assert len(ours + theirs) <= LENGTH + 1
    assert LENGTH * 2 <= hits <= LENGTH * 2 + 4

    assert first[3] == [list(range(0, LENGTH, 2))] * 3
    assert second[3] == [list(range(1, LENGTH, 2))]


@given(st.integers(0, 300), st.integers(1, 9), st.integers(1, 20), st.booleans())
def test_batches_are_dealt_evenly(samples: int, ranks: int, size: int, drop_last: bool) -> None:
    """All ranks get equally many batches, none too large, and every sample once, unless there are too few samples."""
    order = permutation(samples, 0)
    dealt = [batches_of(order, rank, ranks, size, drop_last=drop_last) for rank in range(ranks)]
    assert len({len(batches) for batches in dealt}) == 1
    sizes = [len(batch) for batches in dealt for batch in batches]
    assert all(0 < count <= size for count in sizes)
    seen = sorted(index for batches in dealt for batch in batches for index in batch.tolist())
    if drop_last:
        assert set(sizes) <= {size}
        assert len(set(seen)) == len(seen) == samples // (ranks * size) * ranks * size
    else:
        assert set(seen) == set(range(samples))
        few = samples // ranks < -(-samples // (ranks * size))
        assert len(seen) == samples or (few and len(seen) < samples + ranks)
