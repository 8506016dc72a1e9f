"""Workers that serve requests: in order, none lost, none taken for another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import active_children
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.worker_pool import Request, Responder, WorkerPool
from tests.loading.twins import Faulty

pytestmark = pytest.mark.processes

LENGTH = 12


def labels(responder: Responder, request: Request) -> Any:
    """A reply: what stands for the place, the labels, the worker and its seed."""
    info: Any = get_worker_info()
    return request.missing, [responder.dataset[index][1] for index in request.indices], info.id, info.seed


def request(indices: Any, mark: Any) -> Request:
    return Request(indices, mark)


@contextmanager
def pool_of(
    monkeypatch: pytest.MonkeyPatch, num_workers: int, state: torch.Tensor | None = None, **options: Any
) -> Iterator[WorkerPool]:
    monkeypatch.setattr(Responder, "__getitems__", labels)
    options |= {"multiprocessing_context": "fork"}  # workers have what is set here
    source = Faulty(LENGTH, {7: ValueError("sample 7 is broken")})
    dataset = CachedDataset(source, "25%", allow_random=True)  # reads one sample only at set-up
    pool = WorkerPool(DataLoader(dataset, 2, num_workers=num_workers, **options), state)
    yield pool
    pool.close()
    dataset.close()
    assert active_children() == []


@pytest.mark.parametrize("num_workers", [1, 2])
def test_replies_come_in_the_order_of_the_requests(monkeypatch, num_workers):
    """However many workers there are, and however long their lists."""
    with pool_of(monkeypatch, num_workers) as pool:
        for number in range(num_workers * 2):
            pool.send(request(range(number, LENGTH, 5)[: 1 + number % 2], number))
        for number in range(num_workers * 2):
            assert pool.replies == number
            place, got, *_ = pool.receive()
            assert (place, got) == (number, list(range(number, LENGTH, 5))[: 1 + number % 2])
        assert pool.replies == num_workers * 2


def test_requests_beyond_what_may_be_under_way_wait_for_their_turn(monkeypatch):
    """They are sent as replies are taken."""
    with pool_of(monkeypatch, 1, prefetch_factor=1) as pool:
        for number in range(5):
            pool.send(request([number], number))
        assert [pool.receive()[1] for _ in range(5)] == [[0], [1], [2], [3], [4]]


def test_an_error_is_the_reply_to_its_request(monkeypatch):
    """It is raised with the worker's traceback, and the next reply is the next one's."""
    with pool_of(monkeypatch, 1) as pool:
        pool.send(request([7], "broken"))
        pool.send(request([3], "whole"))
        with pytest.raises(ValueError, match=r"(?s)in __getitem__.*sample 7 is broken"):
            pool.receive()
        assert pool.replies == 1
        assert pool.receive()[:2] == ("whole", [3])


def test_a_new_epoch_forgets_what_was_under_way(monkeypatch):
    """Nobody wants it any more; the first request goes to the first worker again."""
    with pool_of(monkeypatch, 2) as pool:
        for number in range(3):
            pool.send(request([number], "old"))
        pool.begin_epoch()
        assert pool.replies == 0
        pool.send(request([5], "new"))
        assert pool.receive()[:3] == ("new", [5], 0)


def test_workers_have_the_seeds_that_dataloader_would_give_them(monkeypatch):
    """Drawn from the state that the generator had, without touching any generator here."""
    torch.manual_seed(11)
    state, expected = torch.get_rng_state(), int(torch.empty((), dtype=torch.int64).random_())
    after = torch.get_rng_state()
    with pool_of(monkeypatch, 2, state) as pool:
        pool.send(request([0], None)), pool.send(request([1], None))
        assert [pool.receive()[3] for _ in range(2)] == [expected, expected + 1]
        assert torch.equal(torch.get_rng_state(), after)


def test_closing_twice_is_no_error(monkeypatch):
    """A loader closes, and a finalizer after it."""
    with pool_of(monkeypatch, 1) as pool:
        pool.close()
