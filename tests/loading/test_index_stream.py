"""When indices are drawn: at DataLoader's moments, and ahead of them only where nobody can notice."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from tests.loading.twins import SAMPLERS, LazySampler, Numbers, assert_as_plain, outcomes, pairwise, with_batches

LENGTH = 30

pytestmark = [pytest.mark.usefixtures("seeded"), pytest.mark.processes, pytest.mark.epoch_one_reads_all]


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_are_asked_when_dataloader_asks_them(name):
    """Also the user's own, subclasses of known ones, and where nothing is missing and batches could be drawn ahead."""

    def run_of(*, batch_size: int, drop_last: bool, generator: bool, **options: Any) -> Any:
        def arguments() -> dict[str, Any]:
            own = {"generator": torch.Generator().manual_seed(5)} if generator else {}
            drawn = SAMPLERS[name](range(LENGTH))
            return options | own | with_batches(drawn, batch_size=batch_size, drop_last=drop_last)

        return CachedLoader, arguments

    flags = (False, True)
    designs = pairwise(batch_size=(7, 256), drop_last=flags, generator=flags)  # a seed may be drawn or not
    runs = [run_of(**design) for design in [*designs, designs[0] | {"num_workers": 1}]]
    source = Numbers(LENGTH)
    assert_as_plain(source, runs, ["quarter", "all"], spec=SampleSpec.infer(source[0]))


def test_set_epoch_after_iter_is_as_in_dataloader():
    """What a sampler is told between `iter` and the first batch counts, as far as it counts there."""

    def epochs(kind: Any, dataset: Any, num_workers: int) -> list[Any]:
        loader, seen = kind(dataset, 3, sampler=DistributedSampler(dataset, 2, 0), num_workers=num_workers), []
        for epoch in range(3):
            iterator = iter(loader)
            loader.sampler.set_epoch(epoch)
            seen.append([batch[1].tolist() for batch in iterator])
        return seen

    with closing(CachedDataset(Numbers(LENGTH))) as dataset:
        for num_workers in (0, 1):
            assert epochs(CachedLoader, dataset, num_workers) == epochs(DataLoader, Numbers(LENGTH), num_workers)


class Failing(Sampler[int]):
    """A sampler that raises in the middle."""

    def __iter__(self) -> Iterator[int]:
        yield from range(7)
        raise OSError("the list of files is gone")


def labels(loader: DataLoader[Any]) -> list[Any]:
    """Labels of the batches, and the errors, in the order in which they come."""
    return [repr(came) if isinstance(came, Exception) else came[1].tolist() for came in outcomes(loader)]


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_sampler_comes_where_dataloader_raises_it(num_workers, batch_size):
    """In `iter` or with a batch, as soon as DataLoader would have drawn so far, and then the iteration goes on."""
    with closing(CachedDataset(Numbers(LENGTH))) as dataset:
        arguments: dict[str, Any] = {"batch_size": batch_size, "sampler": Failing(), "num_workers": num_workers}
        assert labels(CachedLoader(dataset, **arguments)) == labels(DataLoader(Numbers(LENGTH), **arguments))


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
