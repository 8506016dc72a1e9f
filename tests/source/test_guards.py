"""What counts as a change of a source, and how random samples are found while it is served."""

import io
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, get_worker_info
from torchvision.transforms import v2

from lightning_stocache.source.guards import Recheck, SourceState, StreamReader
from tests.processes import context

# ---- changed ----


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image * self.factor


class Images(Dataset[torch.Tensor]):
    size = 32

    def __init__(self, length: int = 8) -> None:
        self.length = length
        self.strength, self.mode, self.crop = 1.0, None, (2, 2)
        self.pixels = torch.rand(length, 4)
        self.files = ["a", "b"]
        self.transform: Any = v2.Compose([Scale(2), Scale(3)])
        self.handle: Any = None
        self.reads = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        self.memo = index
        return self.transform(self.pixels[index])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


CHANGES: dict[str, tuple[Callable[[Images], Any], str]] = {
    "a number": (lambda images: setattr(images, "strength", 2.0), "strength"),
    "None to a word": (lambda images: setattr(images, "mode", "hard"), "mode"),
    "a tuple": (lambda images: setattr(images, "crop", (3, 3)), "crop"),
    "what was the class's": (lambda images: setattr(images, "size", 64), "size"),
    "a new name, by a method": (lambda images: images.set_epoch(3), "epoch"),
    "a deleted name": (lambda images: delattr(images, "crop"), "crop"),
    "another tensor": (lambda images: setattr(images, "pixels", torch.zeros(8, 4)), "pixels"),
    "another list": (lambda images: setattr(images, "files", ["b"]), "files"),
    "another transform": (lambda images: setattr(images, "transform", Scale(2)), "transform"),
    "no transform": (lambda images: setattr(images, "transform", None), "transform"),
    "a step": (lambda images: images.transform.transforms.pop(), "transform.transforms[1]"),
    "inside a step": (
        lambda images: setattr(images.transform.transforms[0], "factor", 5),
        "transform.transforms[0].factor",
    ),
}


@pytest.mark.parametrize(("change", "path"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("wrap", [None, Subset, ConcatDataset], ids=["itself", "Subset", "ConcatDataset"])
def test_changes_are_seen_where_they_are(change: Callable[[Images], Any], path: str, wrap: Any) -> None:
    """Of the source, of one inside Subset or ConcatDataset, and of its transform down to its steps; for good."""
    images = Images()
    state = SourceState(
        images if wrap is None else Subset(images, [1, 2]) if wrap is Subset else ConcatDataset([images])
    )
    assert state.look() is None
    change(images)
    inside = "" if wrap is None else "dataset." if wrap is Subset else "datasets[0]."
    assert state.look() == inside + path
    assert state.look() == inside + path


UNCHANGED: dict[str, Callable[[Images], Any]] = {
    "an equal number": lambda images: setattr(images, "strength", 1.0),
    "an equal list": lambda images: setattr(images, "files", ["a", "b"]),
    "a file that is opened": lambda images: setattr(images, "handle", io.BytesIO()),
    "more samples": lambda images: setattr(images, "length", 9),
}


@pytest.mark.parametrize("move", UNCHANGED.values(), ids=UNCHANGED)
def test_what_does_not_change_samples_is_no_change(move: Callable[[Images], Any]) -> None:
    """Equal values, handles and growth."""
    images = Images()
    state = SourceState(images)
    move(images)
    assert state.look() is None


def test_what_reading_moves_is_no_change() -> None:
    """A counter and a memo that moved in a read of this process may move from then on; other names may not."""
    images = Images()
    state = SourceState(images)
    with state:
        images[0]
    assert state.look() is None
    images[1]  # the user's own read, which nobody announces
    assert state.look() is None
    images.strength = 2
    assert state.look() == "strength"


def test_steps_after_the_cache_may_change() -> None:
    """They are the user's own objects and take effect at once; that there are others does not."""
    images = Images()
    steps = images.transform.transforms
    state = SourceState(images, tail=[steps[1]])
    steps[1].factor = 7
    assert state.look() is None
    steps[1] = Scale(8)
    assert state.look() == "transform.transforms[1]"


class Sendable(Images):
    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"handle": None}


def test_a_copy_is_compared_with_itself() -> None:
    """It is sent without what the source does not send, with a change that was there, and sees its own from then on."""
    source = Sendable()
    source.handle = open(__file__)  # noqa: SIM115  cannot be pickled
    with source.handle:
        sent, state = pickle.loads(pickle.dumps((source, SourceState(source))))
        assert state.look() is None
        sent.strength = 3
        assert state.look() == "strength"
        late = SourceState(source)
        source.strength = 4
        assert pickle.loads(pickle.dumps((source, late)))[1].look() == "strength"


class Telling(Dataset[str | None]):
    """Samples that say what the source's state saw in the worker, when worker_init_fn had run."""

    def __init__(self, name: str) -> None:
        self.images, self.name = Images(), name
        self.state = SourceState(self.images)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str | None:
        return self.state.look()


def assign(worker: int) -> None:
    info = get_worker_info()
    assert isinstance(info.dataset, Telling)
    setattr(info.dataset.images, info.dataset.name, worker + 5)


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize(("name", "seen"), [("worker_id", None), ("strength", "strength")])
def test_a_worker_may_be_told_who_it_is(method: str, name: str, seen: str | None) -> None:
    """A name that worker_init_fn adds to the worker's copy is no change; one that it changes is."""
    loader = DataLoader(
        Telling(name), None, num_workers=1, worker_init_fn=assign, multiprocessing_context=context(method)
    )
    assert list(loader) == [seen]


# ---- random: read again ----

LOADS = 40_000


class Seldom(Dataset[Any]):
    """Draws for some samples; each time it is asked it adds the index to `asked`."""

    def __init__(self, is_random: Any) -> None:
        self.is_random, self.asked = is_random, list[int]()

    def __len__(self) -> int:
        return LOADS

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked.append(index)
        return torch.rand(2) if self.is_random(index) else torch.tensor([index, 0.5])


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


def test_few_are_read_again_and_nothing_moves(caplog: pytest.LogCaptureFixture) -> None:
    """Eight at most, none before the 64th load; no generator has moved, and there is no warning."""
    source = Seldom(lambda index: False)
    recheck = Recheck(source, lambda: True)
    before = states()
    again = [recheck.after(index, torch.tensor([index, 0.5])) for index in range(LOADS)]
    assert states() == before
    assert sum(again) == len(source.asked) == 8
    assert not any(again[:63])
    assert source.asked == [index for index, read in enumerate(again) if read]
    assert not caplog.messages


def test_a_sample_that_differs_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """The warning names index and source, says what to do, and comes once."""
    source = Seldom(lambda index: index > 200)
    recheck = Recheck(source, lambda: True)
    for index in range(LOADS):
        recheck.after(index, source[index])
    [warning] = caplog.messages
    assert warning.startswith("sample ")
    assert int(warning.split()[1]) > 200
    assert "of Seldom is another one when it is read again" in warning
    assert "transform=" in warning


def test_only_one_process_of_a_node_tells(caplog: pytest.LogCaptureFixture) -> None:
    """Who is told that somebody else has warned is silent."""
    source = Seldom(lambda index: True)
    recheck = Recheck(source, lambda: False)
    assert sum(recheck.after(index, source[index]) for index in range(LOADS)) == 1
    assert not caplog.messages


def test_an_error_of_the_second_read_is_nobodys() -> None:
    """The sample has been served; what the user's code raises when it is asked twice ends nothing."""

    def raises(index: int) -> bool:
        raise OSError("gone")

    recheck = Recheck(Seldom(raises), lambda: True)
    assert sum(recheck.after(index, torch.zeros(2)) for index in range(LOADS)) == 8


# ---- random: streams ----


@pytest.mark.parametrize("draw", [torch.rand, lambda _: np.random.rand(), lambda _: random.random()])
def test_draws_are_seen_but_of_the_first_sample(draw: Callable[[int], Any]) -> None:
    """The first may draw the order of all; what the others draw is random."""

    def stream() -> Iterator[int]:
        for number in range(3):
            if number != 1:
                draw(1)
            yield number

    reader = StreamReader(stream)
    for number in range(3):
        assert next(reader) == number
        assert reader.source_ns > 0
        assert (reader.moved is not None) == (number == 2)
    assert reader.moved in ("torch", "numpy.random", "random")
    with pytest.raises(StopIteration):
        next(reader)


class Noisy:
    draws = np.random.default_rng(0)

    def __iter__(self) -> Iterator[float]:
        while True:
            yield self.draws.random()


@pytest.mark.parametrize("watched", [True, False])
def test_generators_of_a_stream_are_watched(watched: bool) -> None:
    """One that belongs to the stream counts as the process-wide ones do; where draws do not matter, none does."""
    reader = StreamReader(Noisy(), watched)
    next(reader), next(reader)
    assert ("draws" in str(reader.moved)) == watched


def test_draws_between_samples_are_nobodys() -> None:
    """What a training draws while it has the sample is not the stream's."""
    reader = StreamReader(range(5))
    for _ in range(5):
        torch.rand(1)
        next(reader)
    assert reader.moved is None
