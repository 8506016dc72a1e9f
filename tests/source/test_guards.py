"""What counts as a change of a source, and how random samples are found while it is served."""

import io
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset
from torchvision.transforms import v2

from lightning_stocache.source.guards import Recheck, SourceState, StreamReader
from lightning_stocache.torch_internals import become_worker
from tests.sources import Made


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image * self.factor


class Images(Dataset[torch.Tensor]):
    size = 32

    def __init__(self) -> None:
        self.length = 8
        self.strength, self.mode, self.crop = 1.0, None, (2, 2)
        self.pixels = torch.rand(self.length, 4)
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

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"handle": None}


CHANGES: dict[str, tuple[Callable[[Images], Any], str | None]] = {
    "a number": (lambda images: setattr(images, "strength", 2.0), "strength"),
    "what was the class's": (lambda images: setattr(images, "size", 64), "size"),
    "a new name": (lambda images: setattr(images, "epoch", 3), "epoch"),
    "a deleted name": (lambda images: delattr(images, "crop"), "crop"),
    "another tensor": (lambda images: setattr(images, "pixels", torch.zeros(8, 4)), "pixels"),
    "another transform": (lambda images: setattr(images, "transform", Scale(2)), "transform"),
    "a step": (lambda images: images.transform.transforms.pop(), "transform.transforms[1]"),
    "inside a step": (
        lambda images: setattr(images.transform.transforms[0], "factor", 5),
        "transform.transforms[0].factor",
    ),
    # no change of samples: equal values, handles and growth
    "an equal number": (lambda images: setattr(images, "strength", 1.0), None),
    "an equal list": (lambda images: setattr(images, "files", ["a", "b"]), None),
    "a file that is opened": (lambda images: setattr(images, "handle", io.BytesIO()), None),
    "more samples": (lambda images: setattr(images, "length", 9), None),
}


@pytest.mark.parametrize(("change", "path"), CHANGES.values(), ids=CHANGES)
def test_changes_are_seen_where_they_are(change: Callable[[Images], Any], path: str | None) -> None:
    """Of the source, of its transform down to its steps, and of a source inside another; for good."""
    images = Images()
    states = SourceState(images), SourceState(Subset(images, [1, 2])), SourceState(ConcatDataset([images]))
    assert [state.look() for state in states] == [None] * 3
    change(images)
    for _ in range(2):
        assert states[0].look() == path
        if path is not None:
            assert [state.look() for state in states[1:]] == [f"dataset.{path}", f"datasets[0].{path}"]


def test_what_reading_moves_is_no_change() -> None:
    """What moved in a read may move from then on, as may attributes of steps after the cache, and nothing else."""
    images = Images()
    steps = images.transform.transforms
    state = SourceState(images)
    with state:
        images[0]
    assert state.look() is None
    images[1]  # the user's own read, which nobody announces
    assert state.look() is None
    images.strength = 2
    assert state.look() == "strength"
    with_tail = SourceState(images, tail=[steps[1]])
    steps[1].factor = 7
    assert with_tail.look() is None
    steps[1] = Scale(8)
    assert with_tail.look() == "transform.transforms[1]"


def test_a_copy_is_compared_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees its own changes, and those that were there; a name that worker_init_fn adds to a copy is none."""
    source = Images()
    source.handle = open(__file__)  # noqa: SIM115  cannot be pickled
    with source.handle:
        sent, state = pickle.loads(pickle.dumps((source, SourceState(source))))
        assert state.look() is None
        sent.strength = 3
        assert state.look() == "strength"
        images, state = pickle.loads(pickle.dumps((source, SourceState(source))))
        late = SourceState(source)
        source.strength = 4
        assert pickle.loads(pickle.dumps((source, late)))[1].look() == "strength"
    monkeypatch.setattr("torch.utils.data._utils.worker._worker_info", None)
    become_worker(3, 5, 7, None)
    images.worker_id = 3
    assert state.look() is None
    images.strength = 8
    assert state.look() == "strength"


LOADS = 40_000


def test_few_are_read_again_and_nothing_moves(caplog: pytest.LogCaptureFixture) -> None:
    """Eight at most, none before the 64th load; no generator has moved; what the second read raises ends nothing."""
    asked = list[int]()
    source = Made(lambda index: asked.append(index) or 0.5, LOADS)
    recheck = Recheck(source, lambda: True)
    before = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
    again = [index for index in range(LOADS) if recheck.after(index, 0.5)]
    assert (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()) == before
    assert asked == again
    assert len(again) == 8
    assert again[0] >= 63
    broken = Recheck(Made(lambda index: 1 // 0, LOADS), lambda: True)
    assert sum(broken.after(index, 0.5) for index in range(LOADS)) == 8
    assert not caplog.messages


@pytest.mark.parametrize("first_to_tell", [True, False])
def test_a_sample_that_differs_is_named_once(first_to_tell: bool, caplog: pytest.LogCaptureFixture) -> None:
    """By the first process of a node, with what to do; no sample is read again afterwards."""
    source = Made(lambda index: random.random() if index > 200 else 0.5, LOADS)
    recheck = Recheck(source, lambda: first_to_tell)
    *equal, other = [index for index in range(LOADS) if recheck.after(index, source[index])]
    assert max(equal, default=0) <= 200 < other
    told = f"sample {other} of Made is another one when it is read again"
    assert [told in words and "transform=" in words for words in caplog.messages] == [True] * first_to_tell


def test_generators_of_a_stream_are_watched() -> None:
    """The stream's own too, unless draws do not matter; what a training draws meanwhile is not the stream's."""
    own = np.random.default_rng(0)

    def noisy() -> Iterator[float]:
        return iter(own.random, 2.0)

    for stream, watched, moved in ((noisy, True, "own"), (noisy, False, None), (range(5), True, None)):
        reader = StreamReader(stream, watched)
        for _ in range(5):
            torch.rand(1)
            next(reader)
        assert reader.moved == moved
