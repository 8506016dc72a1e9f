"""Batches made by workers, with a transform per sample: counts, lent memory, errors."""

import os
import signal
from contextlib import closing
from multiprocessing import active_children
from typing import Any

import pytest
from torch.utils.data import DataLoader, get_worker_info

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from tests.loading.twins import Numbers, Transformed, copied, same, to_float

LENGTH = 40
BIG = (3, 32, 32)

pytestmark = [pytest.mark.usefixtures("seeded"), pytest.mark.processes]


def test_memory_grows_with_the_batches():
    """A first batch that is small does not keep later ones from being lent."""
    batches: Any = [[0], *[list(range(start, start + 4)) for start in range(0, LENGTH, 4)]]
    expected = list(DataLoader(Transformed(Numbers(LENGTH, BIG), to_float), batch_sampler=batches))
    with closing(CachedDataset(Numbers(LENGTH, BIG), transform=to_float)) as dataset:
        loader = CachedLoader(dataset, batch_sampler=batches, num_workers=1, persistent_workers=True)
        for _ in range(2):
            assert same([copied(batch) for batch in loader], expected)
        images = [image for image, _ in loader]
        assert any(image.untyped_storage().nbytes() < 4 * 3 * 32 * 32 * 4 + 64 for image in images)
        del images
        loader.close()


class Deadly(Numbers):
    """A source that kills the worker of a loader with two of them that loads a certain sample."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        if index == 21 and info is not None and info.num_workers == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("transform", [None, to_float], ids=["gathered", "made"])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_that_is_killed_is_an_error(transform, persistent):
    """A RuntimeError that says so, as from DataLoader, and an iterator that ends: nobody waits for ever."""
    with closing(CachedDataset(Deadly(LENGTH), transform=transform)) as dataset:
        loader = CachedLoader(dataset, 4, num_workers=2, persistent_workers=persistent)
        with pytest.raises(RuntimeError, match=r"DataLoader worker .* (killed by signal|exited unexpectedly)"):
            list(loader)
        loader.close()


@pytest.mark.parametrize("transform", [None, to_float], ids=["gathered", "made"])
def test_workers_that_were_killed_between_epochs_are_replaced(transform):
    """Also where torch's handler of SIGCHLD has not said so; the next epoch is whole."""
    with closing(CachedDataset(Numbers(LENGTH), "50%", transform=transform)) as dataset:
        loader = CachedLoader(dataset, 4, num_workers=2, persistent_workers=True)
        assert len(list(loader)) == LENGTH // 4
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            victim = active_children()[0]
            victim.kill()
            victim.join(120)
        finally:
            signal.signal(signal.SIGCHLD, handler)
        assert [label for _, batch in loader for label in batch.tolist()] == list(range(LENGTH))
        assert len(active_children()) == 2
        loader.close()
