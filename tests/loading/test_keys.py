"""What a sampler yields reaches the dataset as it is. Numbers are looked up; other keys are never a hit."""

import logging
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler, SubsetRandomSampler

from lightning_stocache import CachedDataset, CachedLoader, StochasticCache
from tests.jobs import warnings
from tests.loading.twins import copied, same
from tests.training.tiny import make_trainer

LENGTH = 24


class AnyKey(Dataset[Any]):
    """Makes a sample of any key."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, key: Any) -> Any:
        return self.make(key)


class BatchesToo(AnyKey):
    """Loads a batch in one call."""

    def __getitems__(self, keys: Any) -> list[Any]:
        return [self.make(key) for key in keys]


class Sized(int):
    """A number that says more than its value."""

    size = 5


def padded(index: int) -> Any:
    """Zeros for -1, as the padding of an evaluation."""
    return torch.zeros(2) if index == -1 else torch.full((2,), float(index) + 1)


def by_kind(key: Any) -> Any:
    """Depends on the class of its key, but for numbers of Python and numpy."""
    names = "number" if type(key) in (int, np.int64) else type(key).__name__
    return torch.full((2,), float(np.asarray(key).sum())), names


def by_item(index: Any) -> Any:
    """Takes the tensors of a sampler alone, and at set-up numbers."""
    return torch.tensor(float(index if isinstance(index, int) else index.item()))


def by_size(index: Any) -> Any:
    return torch.full((getattr(index, "size", 2),), float(index))


@pytest.mark.parametrize(("kind", "num_workers"), [(AnyKey, 0), (AnyKey, 1), (BatchesToo, 0)])
@pytest.mark.parametrize(
    ("make", "arguments_of"),
    [
        (padded, lambda: {"sampler": [0, 1, 2, -1]}),
        (padded, lambda: {"batch_sampler": [[0, 3], [-1, 5], [7, -1]]}),
        (by_kind, lambda: {"sampler": np.arange(8)}),
        (by_kind, lambda: {"batch_sampler": [np.arange(4), np.array([2, 2])]}),
        (by_kind, lambda: {"sampler": [True, 0, False, 1]}),
        (by_kind, lambda: {"sampler": [np.array(3), 3, np.array(True), np.bool_(True)]}),
        (by_kind, lambda: {"batch_sampler": [[torch.tensor(3), torch.tensor([3])], [3, 3]]}),
        (by_kind, lambda: {"batch_sampler": [[np.eye(2)[0] > 0, np.ones(2, dtype=bool)], [0, 1]]}),
        (by_item, lambda: {"sampler": torch.tensor([3, 0, 2])}),
        (by_item, lambda: {"batch_sampler": [torch.tensor([3, 0]), torch.tensor([1])]}),
        (by_size, lambda: {"batch_sampler": [[Sized(3), Sized(4)], [3, 4]]}),
    ],
)
def test_a_key_reaches_the_dataset_as_it_is(make: Any, arguments_of: Any, kind: Any, num_workers: int) -> None:
    """In each epoch the batches are those of a DataLoader, with and without slots."""
    arguments = arguments_of()
    if "sampler" in arguments:
        arguments |= {"batch_size": 2}
    plain = copied(list(DataLoader(kind(make), **arguments)))
    for budget in ("50%", 0):
        with closing(CachedDataset(kind(make), budget)) as dataset:
            for loader_kind in (CachedLoader, DataLoader):
                loader = loader_kind(dataset, num_workers=num_workers, **arguments)
                assert same([copied(list(loader)) for _ in range(2)], [plain] * 2)
                del loader


class Keys:
    """A sampler of keys of the dataset's own."""

    def __init__(self, of: Callable[[int], Any]) -> None:
        self.of = of

    def __len__(self) -> int:
        return 2 * LENGTH

    def __iter__(self) -> Iterator[Any]:
        return (self.of(index % LENGTH) for index in range(len(self)))


def of_key(key: Any) -> Any:
    return torch.tensor(float(len(str(key))))


@pytest.mark.parametrize(
    "key",
    [
        lambda index: f"cut {index}",
        lambda index: (index, 64),
        lambda index: slice(index, index + 2) and (index, index + 2, (0.5, 1.5)),
        lambda index: [index, index],
        lambda index: frozenset([index]),
        torch.tensor,
        np.array,
    ],
    ids=["strings", "index and size", "boxes", "lists", "sets", "tensors", "arrays"],
)
def test_keys_that_are_no_index_are_told_once_and_take_no_memory(key: Any, caplog: pytest.LogCaptureFixture) -> None:
    """One warning shows a key; what set-up has stored is given back, and epochs are those of a DataLoader."""
    plain = list(DataLoader(AnyKey(of_key), batch_size=4, sampler=Keys(key)))
    with closing(CachedDataset(AnyKey(of_key))) as dataset:
        loader = CachedLoader(dataset, batch_size=4, sampler=Keys(key))
        assert same([list(loader) for _ in range(3)], [plain] * 3)
        counts = dataset.counters.totals()
        assert (counts.hits, counts.fills, counts.bypasses) == (0, 0, 6 * LENGTH)
        assert dataset.cache is None
    [words] = warnings(caplog)
    assert f"is asked for keys that are no indices, as {key(0)!r}" in words


def test_keys_are_counted_not_batches() -> None:
    """A few large batches of such keys give the memory back, too."""
    with closing(CachedDataset(AnyKey(of_key))) as dataset:
        loader = CachedLoader(dataset, batch_size=2 * LENGTH, sampler=Keys(str))
        assert [len(list(loader)) for _ in range(2)] == [1, 1]
        assert dataset.cache is None


class Several:
    """A sampler that gives a key for each few samples."""

    def __init__(self, of: Callable[[int], Any], step: int) -> None:
        self.of, self.step = of, step

    def __len__(self) -> int:
        return LENGTH // self.step

    def __iter__(self) -> Iterator[Any]:
        return map(self.of, range(0, LENGTH, self.step))


class Unreadable:
    """A key without a text."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


def of_several(key: Any) -> Any:
    return torch.zeros(2) if isinstance(key, int | slice | np.ndarray | torch.Tensor) else torch.ones(2)


SEVERAL: dict[str, Callable[[int], Any]] = {
    "slices": lambda index: slice(index, index + 2),
    "arrays": lambda index: np.arange(index, index + 2),
    "masks": lambda index: torch.arange(LENGTH) == index,
    "unreadable": lambda index: Unreadable(),
}
WORKERS: dict[str, dict[str, Any]] = {
    "no workers": {"num_workers": 0},
    "workers": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "spawned": {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "spawn"},
}


@pytest.mark.parametrize(
    ("kind", "key", "workers"),
    [
        *(pytest.param(CachedLoader, key, "no workers") for key in SEVERAL),
        *(pytest.param(CachedLoader, "slices", workers, marks=pytest.mark.processes) for workers in [*WORKERS][1:]),
        *(pytest.param(CachedLoader, key, "persistent", marks=pytest.mark.processes) for key in [*SEVERAL][1:]),
        pytest.param(DataLoader, "slices", "no workers"),
        *(pytest.param(DataLoader, key, "persistent", marks=pytest.mark.processes) for key in SEVERAL),
    ],
)
def test_keys_of_several_samples_are_told_once_in_a_job(
    kind: Any, key: str, workers: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whichever processes read, one warning comes, and the memory of set-up is given back after some keys."""
    log, handler = logging.getLogger("lightning_stocache"), logging.FileHandler(tmp_path / "log")
    log.addHandler(handler)  # of forked workers, too
    with closing(CachedDataset(AnyKey(of_several))) as dataset, closing(handler):
        loader = kind(dataset, batch_size=None, sampler=Several(SEVERAL[key], 2), **WORKERS[workers])
        for _ in range(4):
            assert len(list(loader)) == LENGTH // 2
        del loader
        list(DataLoader(dataset, batch_size=None))
        assert dataset.cache is None
    log.removeHandler(handler)
    told = (tmp_path / "log").read_text() + capfd.readouterr().err
    shown = {"slices": "slice(", "arrays": "array([", "masks": "tensor([", "unreadable": "an object of class Unread"}
    assert told.count("keys that are no indices") == told.count(f"that are no indices, as {shown[key]}") == 1


def test_indices_beside_other_keys_are_cached(caplog: pytest.LogCaptureFixture) -> None:
    """In a batch of both, an index is looked up, and any other key is loaded each time."""
    asked: list[Any] = []

    def make(key: Any) -> Any:
        asked.append(key)
        return torch.tensor(float(len(str(key))))

    batches = [[index, f"{index}"] for index in range(LENGTH)]
    plain = list(DataLoader(AnyKey(make), batch_sampler=batches))
    with closing(CachedDataset(AnyKey(make))) as dataset:
        loader = CachedLoader(dataset, batch_sampler=batches)
        assert same([list(loader) for _ in range(3)], [plain] * 3)
        asked.clear()
        list(loader)
        assert asked == [f"{index}" for index in range(LENGTH)]
    [words] = warnings(caplog)
    assert "as '0'" in words


@pytest.mark.parametrize("first", [-LENGTH, LENGTH])
def test_numbers_outside_of_the_dataset_are_told_if_there_are_no_others(
    first: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Numbers from the end, or of another dataset, are never a hit; among others they are padding."""
    with closing(CachedDataset(AnyKey(of_key))) as dataset:
        loader = CachedLoader(dataset, batch_size=4, sampler=range(first, first + LENGTH))
        assert [len(list(loader)) for _ in range(3)] == [LENGTH // 4] * 3
        assert dataset.cache is None
    [words] = warnings(caplog)
    assert "is asked for numbers below zero or beyond its length" in words
    caplog.clear()
    with closing(CachedDataset(AnyKey(of_key))) as dataset:
        loader = CachedLoader(dataset, batch_size=4, sampler=[*range(LENGTH), -1, LENGTH])
        assert [len(list(loader)) for _ in range(9)] == [-(-(LENGTH + 2) // 4)] * 9
        assert dataset.cache is not None
    assert warnings(caplog) == []


def test_a_batch_of_keys_may_be_an_iterator() -> None:
    """A batch sampler that gives iterators works as with a DataLoader."""

    class Iterators:
        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Iterator[Any]:
            return map(iter, [[0, 1], [2, 3]])

    plain = list(DataLoader(AnyKey(of_key), batch_sampler=Iterators()))  # type: ignore[arg-type]
    with closing(CachedDataset(AnyKey(of_key))) as dataset:
        for kind in (CachedLoader, DataLoader):
            loader = kind(dataset, batch_sampler=Iterators())
            assert same([list(loader) for _ in range(2)], [plain] * 2)


def test_indices_of_a_tensor_are_told_the_way_out(caplog: pytest.LogCaptureFixture) -> None:
    """A SubsetRandomSampler of a tensor draws tensors, which are never a hit; of its list it draws numbers."""
    order = torch.randperm(LENGTH)
    with closing(CachedDataset(AnyKey(padded))) as dataset:
        loader = CachedLoader(dataset, batch_size=4, sampler=SubsetRandomSampler(order))  # type: ignore[arg-type]
        assert sum(map(len, loader)) == LENGTH
        assert dataset.counters.totals().hits == 0
    [words] = warnings(caplog)
    assert "as tensor(" in words
    assert words.splitlines()[1].startswith(
        "To cache them, let the sampler draw numbers (of a tensor or array: its .tolist()"
    )
    caplog.clear()
    with closing(CachedDataset(AnyKey(padded))) as dataset:
        loader = CachedLoader(dataset, batch_size=4, sampler=SubsetRandomSampler(order.tolist()))
        assert [sum(map(len, loader)) for _ in range(2)] == [LENGTH] * 2
        assert dataset.counters.totals().hits >= LENGTH
    assert warnings(caplog) == []


def test_a_list_or_slice_by_hand_leaves_the_cache(caplog: pytest.LogCaptureFixture) -> None:
    """A look at a few samples before the training takes nothing away, and a slice is not worth a warning."""
    with closing(CachedDataset(AnyKey(lambda key: torch.arange(LENGTH)[key] + 0))) as dataset:
        assert dataset[2:5].tolist() == [2, 3, 4]
        assert warnings(caplog) == []
        assert dataset[[3, 1]].tolist() == [3, 1]
        assert [int(dataset[index]) for index in range(LENGTH)] == list(range(LENGTH))
        assert dataset.counters.totals().hits + dataset.counters.totals().misses == LENGTH


# ---- lists of indices, each as one key ----

TABLE = torch.arange(LENGTH * 3.0).reshape(LENGTH, 3)
LABELS = np.arange(LENGTH) % 5
Row = namedtuple("Row", "x y")
STACKS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda key: TABLE[key] * 2,
    "a dict": lambda key: {"x": TABLE[key] * 2, "y": LABELS[key]},
    "a tuple": lambda key: (TABLE.numpy()[key] * 2, LABELS[key]),
    "a namedtuple": lambda key: Row(TABLE[key] * 2, torch.from_numpy(LABELS)[key] + 0),
}
OTHERS: dict[str, Callable[[Any], Any]] = {
    "a mean": lambda key: TABLE[key].mean(0) if isinstance(key, list) else TABLE[key] * 1,
    "sorted": lambda key: TABLE[sorted(key)] if isinstance(key, list) else TABLE[key] * 1,
    "each once": lambda key: TABLE[list(dict.fromkeys(key))] if isinstance(key, list) else TABLE[key] * 1,
    "another dtype": lambda key: TABLE[key].double() if isinstance(key, list) else TABLE[key] * 1,
    "text": lambda key: [f"{one}" for one in key] if isinstance(key, list) else f"{key}",
}


class Notes(LightningModule):
    """Notes its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.batches: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.batches.append(batch)
        return self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(tmp_path: Any, make: Any, callbacks: Any, sampler: Any, num_workers: int = 0) -> Any:
    torch.manual_seed(0)
    model = Notes()
    loader = DataLoader(AnyKey(make), sampler=sampler, batch_size=None, num_workers=num_workers)
    make_trainer(tmp_path, callbacks, epochs=3, logger=False).fit(model, loader)
    return model.batches


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.processes)])
@pytest.mark.parametrize("kind", [*STACKS, *OTHERS])
def test_a_list_of_indices_is_served_where_the_dataset_stacks_its_samples(
    kind: str, num_workers: int, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Set-up proves it; else the dataset passes through with one warning, and no memory is taken."""
    make = (STACKS | OTHERS)[kind]

    def sampler() -> Any:
        return BatchSampler(RandomSampler(range(LENGTH), replacement=True), 7, False)

    callback = StochasticCache(verbose=False, keep_cache=True)
    plain = fit(tmp_path, make, [], sampler(), num_workers)
    batches = fit(tmp_path, make, [callback], sampler(), num_workers)
    assert same(batches, plain)
    [state] = callback.cache_state()
    callback.close()
    if kind in STACKS:
        assert state["slots"] == LENGTH
        assert warnings(caplog) == []
    else:
        assert state["memory_bytes"] == 0
        [words] = warnings(caplog)
        assert "draws lists of indices" in words


def test_lists_in_order_are_all_hits_in_later_epochs(tmp_path: Any) -> None:
    """Each sample is loaded once, whatever list asks for it."""
    asked: list[Any] = []

    def make(key: Any) -> Any:
        asked.append(key)
        return TABLE[key] * 2

    callback = StochasticCache(verbose=False, keep_cache=True)
    fit(tmp_path, make, [callback], BatchSampler(SequentialSampler(range(LENGTH)), 7, False))
    callback.close()
    assert not any(isinstance(key, list) for key in asked)
