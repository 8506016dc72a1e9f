"""What counts as a change of a source, and what does not."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, get_worker_info
from torchvision.transforms import v2

from lightning_stocache.source.state import SourceState
from tests.processes import context


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
    "a name that is ignored": lambda images: setattr(images, "told", True),
}


@pytest.mark.parametrize("move", UNCHANGED.values(), ids=UNCHANGED)
def test_what_does_not_change_samples_is_no_change(move: Callable[[Images], Any]) -> None:
    """Equal values, handles, growth, and what others know to move."""
    images = Images()
    state = SourceState(images, ignored=["told"])
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
