"""Ctrl-C ends the epoch, and the next one is whole."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import closing, suppress
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_stocache.cache.store import Store
from lightning_stocache.loading import epoch
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.index_stream import IndexStream
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.loading.prefetch import held_back
from lightning_stocache.loading.serve import CachedSource
from lightning_stocache.loading.worker_pool import WorkerPool
from tests.loading.twins import Jitter, Numbers, same
from tests.processes import wait_until

LENGTH = 38
PERSISTENT: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}

pytestmark = [pytest.mark.usefixtures("seeded", "interruptible"), pytest.mark.processes]

STEPS: dict[str, tuple[Any, str, dict[str, Any], Any]] = {
    "drawing": (IndexStream, "draw", {}, None),
    "looking up": (Store, "lookup", {}, None),
    "gathering": (Store, "gather", {}, None),
    "loading": (CachedSource, "load_into", {}, None),
    "counting": (epoch, "count", {}, None),
    "asking a worker": (WorkerPool, "send", PERSISTENT, None),
    "waiting for a worker": (WorkerPool, "receive", PERSISTENT, None),
    "gathering for a worker": (Store, "gather", {"num_workers": 2}, None),
    "waiting for a batch": (WorkerPool, "receive", {"num_workers": 2}, Jitter("torch")),
}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_ctrl_c_ends_the_epoch_and_the_next_one_is_whole(step: Any, after: bool, monkeypatch: Any) -> None:
    """Before or after a step: no worker and no thread is left, and the iterator has ended."""
    where, name, arguments, transform = step
    done, armed = getattr(where, name), threading.Event()

    def pressed(*given: Any, **named: Any) -> Any:
        if not armed.is_set():
            return done(*given, **named)
        armed.clear()
        if after:
            done(*given, **named)
        raise KeyboardInterrupt

    expected = list(DataLoader(Numbers(LENGTH), 4))
    with closing(CachedDataset(Numbers(LENGTH), "50%", transform=transform)) as dataset:
        loader = CachedLoader(dataset, 4, **arguments)
        list(loader)  # what is gathered is READY
        monkeypatch.setattr(where, name, pressed)
        for _ in range(2):
            batches = iter(loader)
            for _ in range(2):
                next(batches)
            armed.set()
            with pytest.raises(KeyboardInterrupt):
                list(batches)
            assert active_children() == []
            assert [thread for thread in threading.enumerate() if thread.name == "stocache-prefetch"] == []
            assert next(batches, None) is None
            got = list(loader)
            assert [labels.tolist() for _, labels in got] == [labels.tolist() for _, labels in expected]
            assert transform is not None or same(got, expected)
        loader.close()


class Leaving:
    """Ends the worker without an error, as Ctrl-C in a terminal does, once a file is there."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __call__(self, worker: int) -> None:
        threading.Thread(target=self.wait, daemon=True).start()

    def wait(self) -> None:
        while not self.sign.exists():
            time.sleep(0.01)
        os._exit(0)


def test_workers_that_ctrl_c_has_ended_are_replaced(tmp_path: Path) -> None:
    """They were not killed: the next epoch has new ones, without an error."""
    with closing(CachedDataset(Numbers(LENGTH), "50%")) as dataset:
        loader = CachedLoader(dataset, 4, worker_init_fn=Leaving(tmp_path / "leave"), **PERSISTENT)
        list(loader)
        (tmp_path / "leave").touch()
        wait_until(lambda: not active_children())
        (tmp_path / "leave").unlink()
        assert [label for _, batch in loader for label in batch.tolist()] == list(range(LENGTH))
        loader.close()


# ---- holding back


def test_the_handler_of_the_user_is_put_back() -> None:
    """Also after Ctrl-C, which waits for the end of the block; and who ignores it goes on ignoring it."""
    before, pressed = signal.getsignal(signal.SIGINT), list[int]()
    with suppress(KeyboardInterrupt), held_back():
        signal.raise_signal(signal.SIGINT)
        pressed.append(0)
    assert pressed == [0]
    assert signal.getsignal(signal.SIGINT) is before
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_back():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.parametrize("transform", [None, Jitter("torch")])
def test_workers_that_are_being_started_are_somebodys(transform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while they start is raised when they are known, and ends them; the next epoch is whole."""
    start = BaseProcess.start

    def pressed(process: BaseProcess) -> None:
        start(process)
        signal.raise_signal(signal.SIGINT)

    with closing(CachedDataset(Numbers(12), "50%", transform=transform)) as dataset:
        loader = CachedLoader(dataset, 4, num_workers=2)
        with monkeypatch.context() as patch:
            patch.setattr(BaseProcess, "start", pressed)
            with pytest.raises(KeyboardInterrupt):
                iter(loader)
        assert active_children() == []
        assert sum(len(labels) for _, labels in loader) == 12
