"""Workers that run errands: in order, none lost, none taken for another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import active_children
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from lightning_stocache.loading.crew import Crew
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.errand import Delivery, Errand
from tests.loading.twins import Numbers

pytestmark = pytest.mark.processes

LENGTH = 12


class Broken(Numbers):
    """A source that cannot load one of its samples."""

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise ValueError("sample 7 is broken")
        return super().__getitem__(index)


def labels(delivery: Delivery) -> tuple[Any, list[int], int, int]:
    """A clerk: the place, the labels, the worker and its seed."""
    info = get_worker_info()
    return delivery.errand.place, [label for _, label in delivery.samples], info.id, info.seed


@contextmanager
def crew_of(num_workers: int, state: torch.Tensor | None = None, **options: Any) -> Iterator[Crew]:
    dataset = CachedDataset(Broken(LENGTH), "25%", allow_random=True)  # reads one sample only at set-up
    crew = Crew(DataLoader(dataset, 2, num_workers=num_workers, **options), labels, state)
    yield crew
    crew.close()
    dataset.close()
    assert active_children() == []


@pytest.mark.parametrize("num_workers", [1, 2])
def test_answers_come_in_the_order_of_the_errands(num_workers):
    """However many workers there are, and however long their lists."""
    with crew_of(num_workers) as crew:
        for number in range(num_workers * 2):
            crew.send(Errand(range(number, LENGTH, 5)[: 1 + number % 2], number))
        for number in range(num_workers * 2):
            assert crew.answered == number
            place, got, *_ = crew.receive()
            assert (place, got) == (number, list(range(number, LENGTH, 5))[: 1 + number % 2])
        assert crew.answered == num_workers * 2


def test_errands_beyond_what_may_be_under_way_wait_for_their_turn():
    """They are sent as answers are taken."""
    with crew_of(1, prefetch_factor=1) as crew:
        for number in range(5):
            crew.send(Errand([number], number))
        assert [crew.receive()[1] for _ in range(5)] == [[0], [1], [2], [3], [4]]


def test_an_error_is_the_answer_to_its_errand():
    """It is raised with the worker's traceback, and the next answer is the next one's."""
    with crew_of(1) as crew:
        crew.send(Errand([7], "broken"))
        crew.send(Errand([3], "whole"))
        with pytest.raises(ValueError, match=r"(?s)in __getitem__.*sample 7 is broken"):
            crew.receive()
        assert crew.answered == 1
        assert crew.receive()[:2] == ("whole", [3])


def test_a_new_epoch_forgets_what_was_under_way():
    """Nobody wants it any more; the first errand goes to the first worker again."""
    with crew_of(2) as crew:
        for number in range(3):
            crew.send(Errand([number], "old"))
        crew.begin_epoch()
        assert crew.answered == 0
        crew.send(Errand([5], "new"))
        assert crew.receive()[:3] == ("new", [5], 0)


def test_workers_have_the_seeds_that_dataloader_would_give_them():
    """Drawn from the state that the generator had, without touching any generator here."""
    torch.manual_seed(11)
    state, expected = torch.get_rng_state(), int(torch.empty((), dtype=torch.int64).random_())
    after = torch.get_rng_state()
    with crew_of(2, state) as crew:
        crew.send(Errand([0], None)), crew.send(Errand([1], None))
        assert [crew.receive()[3] for _ in range(2)] == [expected, expected + 1]
        assert torch.equal(torch.get_rng_state(), after)


def test_closing_twice_is_no_error():
    """A loader closes, and a finalizer after it."""
    with crew_of(1) as crew:
        crew.close()
