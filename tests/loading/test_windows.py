"""Batches collated into windows: what lies there, what is sent, what travels as DataLoader sends it."""

from __future__ import annotations

import collections
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from lightning_stocache.loading import windows as windows_module
from lightning_stocache.loading.errand import Delivery, Errand
from lightning_stocache.loading.windows import WindowClerk, Windows
from tests.loading.twins import same

Pair = collections.namedtuple("Pair", "image label")


def deliver(clerk: WindowClerk, windows: Windows, samples: list[Any], window: int | None) -> Any:
    """What the main process gets of a batch, after the way that it takes through a pipe."""
    errand = Errand(range(len(samples)), None if window is None else windows.place(window))
    return pickle.loads(pickle.dumps(clerk(Delivery(None, errand, samples))))  # type: ignore[arg-type]


def through(samples: list[Any]) -> tuple[Any, Any]:
    """The batch as it comes without a window, and then in one."""
    windows, clerk = Windows(3), WindowClerk()
    first = windows.open(deliver(clerk, windows, samples, None), None)
    window = windows.take()
    answer = deliver(clerk, windows, samples, window)
    second = windows.open(answer, window)
    windows.close()
    return first, second


SAMPLES: dict[str, list[Any]] = {
    "pairs": [(torch.full((2, 3), float(i)), i) for i in range(4)],
    "one": [(torch.ones(5), 1)],
    "dict": [{"a": torch.tensor([i]), "b": {"c": np.arange(3) + i}, "d": [float(i), True]} for i in range(3)],
    "OrderedDict": [collections.OrderedDict(z=torch.tensor([i]), a=i) for i in range(3)],
    "namedtuple": [Pair(torch.full((3,), i, dtype=torch.uint8), i) for i in range(3)],
    "strings": [(torch.tensor([i]), f"file {i}", b"bytes") for i in range(3)],
    "half": [torch.full((3,), i, dtype=torch.bfloat16) for i in range(3)],
    "bool and complex": [(torch.tensor([i % 2 == 0]), torch.tensor([1j * i])) for i in range(3)],
    "empty": [(torch.empty(0, 2), torch.tensor([i])) for i in range(3)],
    "not contiguous": [torch.arange(12).reshape(3, 4).t() + i for i in range(3)],
    "conjugated": [torch.tensor([1 + 1j * i]).conj() for i in range(3)],
    "defaultdict": [(collections.defaultdict(list, a=torch.tensor([i])), torch.ones(99)) for i in range(3)],
    "deque": [(collections.deque([torch.tensor([i])]), torch.ones(99)) for i in range(3)],
    "UserDict": [(collections.UserDict(a=torch.tensor([i])), torch.ones(99)) for i in range(3)],
}


@pytest.mark.parametrize("name", SAMPLES)
def test_batches_are_those_of_default_collate(name):
    """In a window or not, whatever the samples are."""
    expected = default_collate(SAMPLES[name])
    for got in through(SAMPLES[name]):
        assert same(got, expected)


class Graph:
    """A type of the user's."""

    def __init__(self, nodes: torch.Tensor) -> None:
        self.nodes = nodes


class Point(tuple[Any, ...]):
    """A tuple of the user's."""


def collate_graphs(graphs: list[Graph], *, collate_fn_map: Any = None) -> Graph:
    return Graph(default_collate([graph.nodes for graph in graphs]))


def collate_points(points: list[Point], *, collate_fn_map: Any = None) -> str:
    return f"{len(points)} points"


def test_types_that_the_user_registered_are_collated_by_the_users_function(monkeypatch):
    """Registered after the import too; what it makes is not looked into."""
    monkeypatch.setitem(default_collate_fn_map, Graph, collate_graphs)
    monkeypatch.setitem(default_collate_fn_map, Point, collate_points)
    for got in through([(Graph(torch.tensor([i])), i) for i in range(3)]):
        assert got[0].nodes.flatten().tolist() == [0, 1, 2]
    for got in through([{"p": Point((torch.tensor(i),))} for i in range(3)]):
        assert got == {"p": "3 points"}


@pytest.mark.parametrize(
    "samples",
    [
        [torch.zeros(2), torch.zeros(3)],
        [(1, 2), (1,)],
        [{"a": 1}, {"b": 2}],
        [object(), object()],
        [torch.zeros(2), torch.zeros(2, dtype=torch.int64).view(torch.float64), None],
    ],
    ids=["shapes", "lengths", "keys", "objects", "types"],
)
def test_what_default_collate_refuses_is_its_error(samples):
    """With its words."""
    with pytest.raises(Exception) as expected:
        default_collate(samples)
    with pytest.raises(type(expected.value)) as got:
        WindowClerk()(Delivery(None, Errand(range(len(samples))), samples))  # type: ignore[arg-type]
    assert str(got.value) == str(expected.value)


def test_tensors_of_a_window_lie_in_it_and_labels_in_the_message():
    """The batch is the window: nothing is copied but the labels."""
    windows, clerk = Windows(3), WindowClerk()
    samples = [(torch.full((100,), float(i)), torch.full((7,), i), i) for i in range(4)]
    windows.open(deliver(clerk, windows, samples, None), None)
    window = windows.take()
    assert window is not None
    message = clerk(Delivery(None, Errand(range(4), windows.place(window)), samples))  # type: ignore[arg-type]
    assert len(pickle.dumps(message)) < 1000
    images, others, _ = windows.open(message, window)
    start = torch.frombuffer(windows._segments[window].memory(0, 1), dtype=torch.uint8).data_ptr()
    assert (images.data_ptr() - start, others.data_ptr() - start) == (0, 1600)
    windows._segments[window].bytes(0, 4).view(torch.float32)[0] = 9
    assert images[0, 0] == 9
    del images, others
    windows.close()


def test_a_window_is_free_again_when_the_last_tensor_of_it_is_gone():
    """Not before: one of two is enough to keep it."""
    windows, clerk = Windows(3), WindowClerk()
    samples = [(torch.ones(100), torch.ones(50)) for _ in range(4)]
    windows.open(deliver(clerk, windows, samples, None), None)
    window = windows.take()
    ones, others = windows.open(deliver(clerk, windows, samples, window), window)
    assert window not in windows._free
    del ones
    assert window not in windows._free
    row = others[2, 3:]
    del others
    assert window not in windows._free
    del row
    assert window in windows._free
    windows.close()


def test_the_last_window_is_copied_out_of():
    """A trainer that keeps batches is lent all but one; the last one is used again and again."""
    windows, clerk = Windows(3), WindowClerk()
    samples = [(torch.full((100,), float(i)), i) for i in range(4)]
    windows.open(deliver(clerk, windows, samples, None), None)
    held = []
    for _ in range(6):
        window = windows.take()
        assert window is not None
        held.append(windows.open(deliver(clerk, windows, samples, window), window))
    assert len(windows._free) == 1
    assert all(same(batch, default_collate(samples)) for batch in held)
    held.clear()
    windows.close()


def test_what_does_not_fit_its_window_is_sent_and_the_next_window_is_larger():
    """And the worker lets go of the one that it has replaced."""
    windows, clerk = Windows(1), WindowClerk()
    small, large = [torch.ones(10)] * 2, [torch.full((1000,), 3.0)] * 2
    windows.open(deliver(clerk, windows, small, None), None)
    window = windows.take()
    assert window is not None
    before = windows._segments[window]
    assert same(windows.open(deliver(clerk, windows, large, window), window), default_collate(large))
    assert windows.take() == window
    assert before.closed
    assert windows._segments[window].size >= 8000
    answer = deliver(clerk, windows, large, window)
    assert len(pickle.dumps(answer)) < 500
    assert same(windows.open(answer, window), default_collate(large))
    windows.close()


def test_a_batch_of_labels_alone_is_small_and_still_right():
    """Whatever there is to lend."""
    for got in through([1, 2, 3]):
        assert same(got, torch.tensor([1, 2, 3]))
    for got in through(["a", "b"]):
        assert got == ["a", "b"]


def test_windows_without_memory_are_not_asked_for_again_and_again(monkeypatch):
    """Each is tried once; then batches are sent."""
    tries: list[int] = []

    def refuse(size: int, promised: int) -> Any:
        tries.append(size)
        raise OSError("no memory")

    monkeypatch.setattr(windows_module, "transit_memory", refuse)
    windows, clerk = Windows(3), WindowClerk()
    windows.open(deliver(clerk, windows, [torch.ones(100)], None), None)
    assert [windows.take() for _ in range(5)] == [None] * 5
    assert len(tries) == 3


def test_samples_are_put_away_as_they_come():
    """In a window no sample's tensor is kept until the batch is complete; the batch is the same."""
    windows, clerk, alive = Windows(3), WindowClerk(), []

    def samples() -> Iterator[tuple[torch.Tensor, int]]:
        for number in range(6):
            assert not [one for one in alive[:-1] if one() is not None]
            image = torch.full((100,), float(number))
            alive.append(weakref.ref(image))
            yield image, number
            del image

    expected = default_collate([(torch.full((100,), float(number)), number) for number in range(6)])
    windows.open(deliver(clerk, windows, [(torch.zeros(100), 0)] * 6, None), None)
    window = windows.take()
    assert window is not None
    message = clerk(Delivery(None, Errand(range(6), windows.place(window)), samples()))  # type: ignore[arg-type]
    batch = windows.open(message, window)
    assert same(batch, expected)
    del batch
    windows.close()


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(2, dtype=torch.int16)], ids=["shape", "dtype"])
def test_a_sample_that_differs_in_a_window_is_as_without_one(other):
    """What does not fit the rows of the first sample is left to default_collate, whatever it makes of it."""
    samples = [torch.ones(2), other, torch.ones(2)]
    windows, clerk = Windows(3), WindowClerk()
    windows.open(deliver(clerk, windows, [torch.zeros(100)] * 3, None), None)
    window = windows.take()
    assert window is not None

    def outcome(make: Callable[[], Any]) -> Any:
        try:
            return make()
        except RuntimeError as refused:
            return str(refused)

    got = outcome(lambda: windows.open(deliver(clerk, windows, samples, window), window))
    assert same(got, outcome(lambda: default_collate(samples)))
    windows.close()
