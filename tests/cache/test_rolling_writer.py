"""The way into a rolling cache for processes of the user's own."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import torch

from lightning_stocache import RollingCache, RollingWriter, SampleSpec
from lightning_stocache.cache.store import Store, StoreHandle
from lightning_stocache.node import waiting
from tests.processes import Child

pytestmark = pytest.mark.processes


def stand_still(handle: StoreHandle, count: int, flag: str) -> None:
    """Begin to write to all slots, and do not get on."""
    store = Store.attach(handle)
    taken = [store.roll.take() for _ in range(count)]
    assert None not in taken
    Path(flag).touch()
    time.sleep(300)


def test_who_waits_behind_a_process_that_stands_still_is_told_which(tmp_path, monkeypatch, caplog):
    """And goes on when that one has ended."""
    monkeypatch.setattr(waiting, "TOLD_SECONDS", 0.05)
    pool = RollingCache(budget=500, spec=SampleSpec.infer(torch.zeros(10)), minimum=1)
    with RollingWriter.attach(pool.handle) as writer:
        store = Store.attach(pool.handle)
        flag = tmp_path / "flag"
        child = Child(stand_still, pool.handle, store.roll.count, str(flag))
        while not flag.exists():
            time.sleep(0.005)
        pid = child.process.pid
        log = logging.getLogger("lightning_stocache.loading.rolling_writer")
        log.addFilter(ends := lambda record: not child.ended and child.kill() is None)  # when it has been told of
        writer.append(torch.ones(10))
        log.removeFilter(ends)
        store.close()
    assert pool[0].tolist() == [1.0] * 10
    pool.close()
    messages = [record.getMessage() for record in caplog.records if "RollingWriter" in record.getMessage()]
    assert messages
    assert all(message.endswith(f"process {pid} writes, and does not get on") for message in messages)
