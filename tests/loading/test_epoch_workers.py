"""Batches made by workers, with a transform per sample: counts, lent memory, errors."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import closing, suppress
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
from torch.utils.data import DataLoader, get_worker_info

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from tests.loading.twins import Numbers, Transformed, copied, same, to_float

LENGTH = 40
BIG = (3, 32, 32)

pytestmark = [pytest.mark.usefixtures("seeded"), pytest.mark.processes]


def test_memory_is_made_once_and_lent_again_and_again():
    """Seven are enough for two workers, however many epochs there are; batches are not copied."""
    with closing(CachedDataset(Numbers(LENGTH, BIG), transform=to_float)) as dataset:
        loader = CachedLoader(dataset, 4, num_workers=2, persistent_workers=True)
        list(loader)
        made = {image.data_ptr() for image, _ in loader}
        taken = loader.resources.pool.shared_bytes
        assert len(made) <= 7
        for _ in range(5):
            list(loader)
        assert loader.resources.pool.shared_bytes <= max(taken, 7 * (4 * 3 * 32 * 32 * 4 + 64))
        loader.close()


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


def test_the_trainer_may_hold_a_batch_in_another_thread():
    """The memory is free again in whatever thread the last of its tensors goes."""
    with closing(CachedDataset(Numbers(LENGTH, BIG), transform=to_float)) as dataset:
        loader = CachedLoader(dataset, 4, num_workers=1, persistent_workers=True)
        for _ in range(3):
            for batch in loader:
                held = [batch]
                thread = threading.Thread(target=held.clear)
                del batch
                thread.start()
                thread.join()
        assert loader.resources.pool.shared_bytes <= 5 * (4 * 3 * 32 * 32 * 4 + 64)
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


def killed_unheard(victim: BaseProcess) -> None:
    """It is dead, and torch's handler of SIGCHLD has not run: the consumer is in another thread, or looks first."""
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        victim.kill()
        victim.join(120)
    finally:
        signal.signal(signal.SIGCHLD, handler)


def killed_in_vain(victim: BaseProcess) -> None:
    """Torch's handler raises in what takes that for an error of its own, as Lightning's broadcast of SIGTERM does."""
    with suppress(RuntimeError):
        victim.kill()
        time.sleep(120)
        pytest.fail("torch has said nothing")


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("transform", [None, to_float], ids=["gathered", "made"])
@pytest.mark.parametrize("kill", [killed_unheard, killed_in_vain])
def test_a_worker_that_is_killed_between_epochs_is_an_error_once(kill, transform):
    """The next epoch says so, whether or not anybody has heard of it before; the one after has new workers."""
    with closing(CachedDataset(Numbers(LENGTH), "50%", transform=transform)) as dataset:
        loader = CachedLoader(dataset, 4, num_workers=2, persistent_workers=True)
        assert len(list(loader)) == LENGTH // 4
        victim = active_children()[0]
        kill(victim)
        with pytest.raises(RuntimeError, match=rf"DataLoader worker .pid {victim.pid}, exit code -9. exited"):
            iter(loader)
        assert [label for _, batch in loader for label in batch.tolist()] == list(range(LENGTH))
        assert len(active_children()) == 2
        loader.close()
