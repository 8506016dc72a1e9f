"""When indices are drawn: at DataLoader's moments, and ahead of them only where nobody can notice."""

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from tests.loading.twins import LazySampler, Numbers, outcomes, run, same

LENGTH = 20

pytestmark = pytest.mark.usefixtures("seeded")


class LazyDistributed(DistributedSampler[Any]):
    """A DistributedSampler with a way of its own to draw: from the global generator, when it is asked."""

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(0, LENGTH, ())) for _ in range(self.num_samples))


class LazyBatches(BatchSampler):
    """A BatchSampler that draws before every batch."""

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            torch.rand(1)
            yield batch


class EagerBatches:
    """A batch sampler that draws when it is asked for an iterator."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(LENGTH).reshape(-1, 4).tolist())


def distributed(kind: Any) -> Any:
    return kind(range(LENGTH), 2, 0)


OWN_SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "a distributed sampler that draws": lambda: {"batch_size": 3, "sampler": distributed(LazyDistributed)},
    "a batch sampler that draws": lambda: {"batch_sampler": LazyBatches(SequentialSampler(range(LENGTH)), 3, False)},
    "a batch sampler that draws at once": lambda: {"batch_sampler": EagerBatches()},
    "a subclass of RandomSampler": lambda: {
        "batch_size": 3,
        "sampler": type("Own", (RandomSampler,), {})(range(LENGTH)),
    },
    "a shared generator": lambda: {
        "batch_size": 3,
        "sampler": RandomSampler(range(LENGTH), generator=torch.default_generator),
    },
    "a generator in a BatchSampler": lambda: {
        "batch_sampler": BatchSampler(RandomSampler(range(LENGTH), generator=torch.Generator().manual_seed(2)), 3, True)
    },
    "a sampler that draws in a BatchSampler": lambda: {"batch_sampler": BatchSampler(LazySampler(LENGTH), 3, False)},
    "a list": lambda: {"batch_size": 3, "sampler": list(range(0, LENGTH, 2))},
    "a list of lists": lambda: {"batch_sampler": [[1, 2], [3], [4, 5, 6]]},
    "a bare BatchSampler": lambda: {"batch_sampler": BatchSampler(range(LENGTH), 6, True)},
}


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("name", OWN_SAMPLERS)
def test_samplers_of_the_users_are_asked_when_dataloader_asks_them(name, num_workers):
    """Also where they are subclasses of known ones, and where nothing is missing and batches could be drawn ahead."""
    arguments = OWN_SAMPLERS[name]
    torch.manual_seed(1)
    expected = run(DataLoader(Numbers(LENGTH), num_workers=num_workers, **arguments()))
    with closing(CachedDataset(Numbers(LENGTH))) as dataset:
        dataset.__getitems__(list(range(LENGTH)))
        torch.manual_seed(1)
        assert same(run(CachedLoader(dataset, num_workers=num_workers, **arguments())), expected)


@pytest.mark.processes
def test_set_epoch_after_iter_is_as_in_dataloader():
    """What a sampler is told between `iter` and the first batch counts, as far as it counts there."""

    def epochs(loader: DataLoader[Any]) -> list[Any]:
        seen = []
        for epoch in range(3):
            iterator = iter(loader)
            loader.sampler.set_epoch(epoch)  # type: ignore[union-attr]
            seen.append([batch[1].tolist() for batch in iterator])
        return seen

    with closing(CachedDataset(Numbers(LENGTH))) as dataset:
        for num_workers in (0, 1):
            arguments: dict[str, Any] = {"batch_size": 3, "num_workers": num_workers}
            plain = DataLoader(Numbers(LENGTH), sampler=distributed(DistributedSampler), **arguments)
            assert epochs(CachedLoader(dataset, sampler=distributed(DistributedSampler), **arguments)) == epochs(plain)


class Failing(Sampler[int]):
    """A sampler that raises in the middle."""

    def __iter__(self) -> Iterator[int]:
        yield from range(7)
        raise OSError("the list of files is gone")


def labels(loader: DataLoader[Any]) -> list[Any]:
    """Labels of the batches, and the errors, in the order in which they come."""
    return [repr(came) if isinstance(came, Exception) else came[1].tolist() for came in outcomes(loader)]


@pytest.mark.processes
@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_sampler_comes_where_dataloader_raises_it(num_workers, batch_size):
    """In `iter` or with a batch, as soon as DataLoader would have drawn so far, and then the iteration goes on."""
    with closing(CachedDataset(Numbers(LENGTH))) as dataset:
        arguments: dict[str, Any] = {"batch_size": batch_size, "sampler": Failing(), "num_workers": num_workers}
        assert labels(CachedLoader(dataset, **arguments)) == labels(DataLoader(Numbers(LENGTH), **arguments))


@pytest.mark.processes
def test_nothing_is_drawn_of_what_is_not_asked_for():
    """An epoch that nobody reads from draws what DataLoader draws, and an empty dataset's worth of batches ends it."""
    with closing(CachedDataset(Numbers(LENGTH))) as dataset:
        for arguments in ({"shuffle": True}, {"shuffle": True, "num_workers": 1}, {"sampler": LazySampler(LENGTH)}):
            after = []
            for loader in (CachedLoader(dataset, 3, **arguments), DataLoader(Numbers(LENGTH), 3, **arguments)):  # type: ignore[arg-type]
                torch.manual_seed(1)
                iter(loader)
                after.append(torch.get_rng_state())
            assert torch.equal(*after)
        assert list(CachedLoader(dataset, 64, drop_last=True)) == []
        assert list(CachedLoader(dataset, batch_sampler=[], num_workers=1)) == []
