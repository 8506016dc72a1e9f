"""Who loads what, where several processes fill one cache under a name."""

from __future__ import annotations

import logging
import os
import signal
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from lightning_stocache.cache import claims
from tests.cache.disks import Disk

pytestmark = pytest.mark.processes


def load_for_ever(folder: str, ready: Any) -> None:
    store = Disk(Path(folder), "rows").open()
    assert store.turns.take([3, 4]) == [3, 4]
    ready.set()
    signal.pause()


def test_what_another_process_loads_is_waited_for_but_not_for_ever(
    tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    """A process that stands still is waited for once; when it is gone, its samples are free."""
    monkeypatch.setattr(claims, "PATIENCE", 0.2)
    context = get_context("fork")
    ready = context.Event()
    other = context.Process(target=load_for_ever, args=(str(tmp_path), ready))
    other.start()
    assert ready.wait(200)
    store = Disk(tmp_path, "rows").open()
    assert store.turns.take([2, 3, 4, 5]) == [2, 5]
    with caplog.at_level(logging.WARNING):
        assert not store.turns.wait([3])
        assert not store.turns.wait([4])
    assert len(caplog.records) == 1, "who has waited in vain does not wait again soon"
    assert other.pid is not None
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    assert store.turns.take([3, 4]) == [3, 4]
    store.turns.give_up([2, 3, 4, 5])
    store.close()


def test_a_forked_child_has_none_of_its_parent_s_turns(tmp_path: Path) -> None:
    """It has their numbers, and none of the claims: to store without one would be to store into another's slot."""
    store = Disk(tmp_path, "rows").open()
    assert store.turns.take([7]) == [7]
    slot = store.arc.slot(7)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writer, bytes([store.turns.ends(slot), len(store.turns.take([7]))]))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 2) == bytes([False, 0])
    os.close(reader)
    os.close(writer)
    assert store.turns.ends(slot)
    store.close()
