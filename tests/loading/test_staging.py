"""What workers hand over that has no ready slot: by the area, by message, never at the wrong place."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_stocache.cache.placement import NO_SLOT
from lightning_stocache.cache.spec import SampleSpec
from lightning_stocache.loading import staging as staging_module
from lightning_stocache.loading.dataset import CachedDataset, Errand
from lightning_stocache.loading.staging import Staging, readable_slots
from tests.loading.twins import Numbers

LENGTH = 12


@pytest.fixture
def dataset() -> Iterator[CachedDataset]:
    """Half of it has slots, all of which are filled."""
    dataset = CachedDataset(Numbers(LENGTH), "50%")
    dataset.__getitems__(list(range(LENGTH)))
    yield dataset
    dataset.close()


def without_slot(dataset: CachedDataset) -> list[int]:
    assert dataset.cache is not None
    return [index for index in range(LENGTH) if dataset.cache.arc.slot(index) == NO_SLOT]


def test_samples_without_a_slot_lie_in_the_window_of_their_errand(dataset):
    """At the place that they have in it; those that are READY are left to the cache."""
    staging = Staging(dataset.cache.spec, LENGTH, windows=3)
    window = staging.window()
    other = staging.window()
    answer = staging(dataset.__getitems__(Errand(range(LENGTH), window)))
    staging(dataset.__getitems__(Errand(reversed(range(LENGTH)), other)))
    assert answer.sent == {}
    assert answer.places == without_slot(dataset)
    rows = [torch.zeros(LENGTH, nbytes, dtype=torch.uint8) for nbytes in dataset.cache.spec.row_bytes]
    for place in answer.places:
        staging.copy_to(rows, place, window, place)
        image, label = Numbers(LENGTH)[place]
        assert torch.equal(rows[0][place], image.flatten())
        assert rows[1][place].view(torch.int64).item() == label
    staging.close()


def test_windows_go_round():
    """One is given again only after all the others have been."""
    staging = Staging(SampleSpec.infer(Numbers(3)[0]), 2, windows=4)
    given = [staging.window() for _ in range(12)]
    assert all(len(set(given[start : start + 4])) == 4 for start in range(9))
    staging.close()


def test_what_is_longer_than_a_window_is_sent_by_message(dataset):
    """As plain bytes, not as a tensor in shared memory of torch's own."""
    staging = Staging(dataset.cache.spec, 4, windows=2)
    answer = pickle.loads(pickle.dumps(staging(dataset.__getitems__(Errand(range(LENGTH), staging.window())))))
    assert sorted([*answer.places, *answer.sent]) == without_slot(dataset)
    assert max(answer.places, default=0) < 4 <= min(answer.sent)
    for place, (image, _) in answer.sent.items():
        assert torch.equal(torch.from_numpy(image), Numbers(LENGTH)[place][0].flatten())
    staging.close()


def test_without_memory_all_of_it_is_sent(dataset, monkeypatch):
    """A staging area that cannot be had is no error."""

    def refuse(size: int, promised: int) -> Any:
        raise OSError("no memory")

    monkeypatch.setattr(staging_module, "transit_memory", refuse)
    staging = Staging(dataset.cache.spec, LENGTH, windows=2)
    assert staging.room == 0
    answer = staging(dataset.__getitems__(Errand(range(LENGTH), staging.window())))
    assert (answer.places, sorted(answer.sent)) == ([], without_slot(dataset))
    staging.close()


def test_a_worker_whose_cache_is_closed_hands_everything_over(dataset):
    """Then nothing is READY, whatever the main process thinks."""
    staging = Staging(dataset.cache.spec, LENGTH, windows=2)
    dataset.close()
    answer = staging(dataset.__getitems__(Errand(range(LENGTH), staging.window())))
    assert answer.places == list(range(LENGTH))
    staging.close()


def test_indices_outside_of_the_dataset_have_no_slot(dataset):
    """The ring would wrap them around; those from the end are the same samples."""
    slots = readable_slots(dataset.cache, torch.arange(-2 * LENGTH, 2 * LENGTH))
    inside = readable_slots(dataset.cache, torch.arange(LENGTH))
    assert slots[LENGTH : 2 * LENGTH].tolist() == inside.tolist()
    assert slots[2 * LENGTH : 3 * LENGTH].tolist() == inside.tolist()
    assert set(slots[:LENGTH].tolist()) == set(slots[3 * LENGTH :].tolist()) == {NO_SLOT}
