"""A dataset that is cached whole: small batches are gathered together, and nobody can tell."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_stocache.loading import epoch, index_stream
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.sampling.locality_sampler import LocalitySampler
from tests.loading.twins import Numbers, copied, pairwise, same, totals

LENGTH = 700
SAMPLE_BYTES = 3 * 5 * 7 + 8

pytestmark = [pytest.mark.usefixtures("seeded"), pytest.mark.processes]


@pytest.fixture(scope="module")
def dataset() -> Iterator[CachedDataset]:
    with closing(CachedDataset(Numbers(LENGTH))) as dataset:
        dataset.__getitems__(list(range(LENGTH)))
        yield dataset


def locality(dataset: CachedDataset, size: int) -> LocalitySampler:
    return LocalitySampler(dataset, 1, 0, batch_size=size, ring=dataset.ring, nodes=((0,),))


CASES = pairwise(
    size=(1, 2, 7, 100, 699, 700, 1000),
    order=("sequential", "shuffled", "locality"),
    block=(1, 5, 100),
    drop_last=(False, True),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_batches_are_those_of_a_dataloader(dataset: CachedDataset, monkeypatch: pytest.MonkeyPatch, case: Any) -> None:
    """In order and bit for bit over two epochs, wherever blocks (of so many samples) and drawn stretches end."""
    order, block, size, drop_last = (case[name] for name in ("order", "block", "size", "drop_last"))
    monkeypatch.setattr(epoch, "BLOCK_BYTES", block * SAMPLE_BYTES)
    monkeypatch.setattr(epoch, "DRAWN", 60)
    monkeypatch.setattr(index_stream, "GROUP", 50)
    made: list[list[Any]] = []
    for kind, source in ((DataLoader, dataset.source), (CachedLoader, dataset)):
        torch.manual_seed(1)
        sampler = locality(dataset, size) if order == "locality" else None
        loader = kind(source, size, order == "shuffled", sampler, drop_last=drop_last)
        if isinstance(loader, CachedLoader):  # by blocks, not batch by batch
            monkeypatch.setattr(index_stream.IndexStream, "draw", None)
        made.append([copied(batch) for _ in range(2) for batch in loader] + [torch.rand(1)])
    assert len(made[0]) > 1 or drop_last
    assert same(*made)


def test_hits_are_counted_when_a_batch_is_handed_out(dataset: CachedDataset) -> None:
    """Not when it is gathered: an epoch broken off has served what it gave."""
    before = totals(dataset)
    iterator = iter(CachedLoader(dataset, 4))
    for number in range(1, 4):
        next(iterator)
        moved = totals(dataset) - before
        assert (moved.hits, moved.bytes_from_cache, moved.served) == (4 * number, 4 * number * SAMPLE_BYTES, 4 * number)
        assert moved.gather_ns > 0


def test_large_batches_are_gathered_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of more than 1 MiB shares its memory with no other; small ones share blocks of at most 2 MiB."""
    with closing(CachedDataset(Numbers(12, (3, 300, 300)))) as dataset:
        dataset.__getitems__(list(range(12)))
        for size, expected in ((4, 3), (1, 2)):
            kept = [image.untyped_storage() for image, _ in CachedLoader(dataset, size)]
            assert {storage.nbytes() for storage in kept} == {size * 270_000}
            addresses = {storage.data_ptr() for storage in kept}
            blocks = [address for address in addresses if address - size * 270_000 not in addresses]
            assert len(blocks) == expected


@pytest.mark.parametrize("warm", [True, False])
def test_a_source_that_has_grown_is_loaded_beyond_its_cache(warm: bool) -> None:
    """Samples that the cache does not know come from the source, and take nobody's slot, also in the first epoch."""
    source = Numbers(10)
    with closing(CachedDataset(source)) as dataset:
        loader = CachedLoader(dataset, 4)
        if warm:
            list(loader)
        source.length = 13
        last: Any = [12, 11, 10]
        assert same(list(CachedLoader(dataset, 3, sampler=last)), list(DataLoader(Numbers(13), 3, sampler=last)))
        dataset.__getitems__([10, 11, -1])
        assert same(list(loader), list(DataLoader(Numbers(13), 4)))
        assert same([dataset[index] for index in range(13)], [source[index] for index in range(13)])
        assert dataset.cache.filled == 10


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stop_iteration_of_a_transform_shortens_no_batch(num_workers: int) -> None:
    """It is an error, whoever makes the batch."""

    with closing(CachedDataset(Numbers(8), transform=stops_at_five)) as dataset, pytest.raises(RuntimeError):
        list(CachedLoader(dataset, 4, num_workers=num_workers))


def stops_at_five(sample: Any) -> Any:
    if sample[1] == 5:
        raise StopIteration
    return sample
