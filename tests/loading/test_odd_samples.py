"""Samples that are not stored, because they are not like the others or draw random numbers while they are loaded.

They pass through, and their batches are what DataLoader makes of them.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader
from torchvision.transforms import v2

from lightning_stocache.cache.codec import SampleMismatchError
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from tests.loading.twins import InBatches, jitter, logged_to, outcomes, pairwise, same, seed_all, totals, uncached
from tests.sources import Made

LENGTH = 40
ODD = 10
SHAPE = (3, 5, 7)

pytestmark = pytest.mark.usefixtures("seeded")


def image(index: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape or SHAPE, dtype=torch.uint8, generator=torch.Generator().manual_seed(index))


KINDS: dict[str, Callable[[], Any]] = {
    "dtype": lambda: (image(ODD).float(), ODD),
    "shape": lambda: (image(ODD, 3, 5, 8), ODD),
    "dict": lambda: {"image": image(ODD), "label": ODD},
    "None": lambda: None,
    "object": lambda: (image(ODD), lambda: None),
}


class OddOne(Made):
    """Samples `(uint8 tensor, label)`, but for one of them; indices may count from the end."""

    def __init__(self, kind: str, transform: Callable[[Any], Any] | None = None) -> None:
        super().__init__(lambda index: KINDS[kind]() if index % LENGTH == ODD else (image(index), index), LENGTH)
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index % LENGTH)
        if self.transform is not None and isinstance(sample, tuple) and isinstance(sample[0], torch.Tensor):
            return self.transform(sample[0]), *sample[1:]
        return sample


def outcomes_and_states(loader: DataLoader[Any], epochs: int = 3) -> Iterator[Any]:
    """The batches of some epochs, the type of an error in the place of one, and the generator's state after each."""
    for _ in range(epochs):
        for outcome in outcomes(loader):
            yield type(outcome) if isinstance(outcome, Exception) else outcome, torch.get_rng_state()


def flat(samples: list[Any]) -> list[Any]:
    """A collate function of the user's, which takes any sample."""
    return [sample[0] if isinstance(sample, tuple) else repr(sample) for sample in samples]


DESIGNS = pairwise(
    kind=list(KINDS),
    loader=[CachedLoader, DataLoader],
    order=["shuffled", "repeated"],
    num_workers=[0, 2],
    after=["nothing", "transform", "tail", "collate_fn"],
    wrap=[lambda source: source, InBatches],
    budget=["auto", "50%"],
)


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("way", DESIGNS)
def test_its_batch_is_that_of_a_dataloader(way: dict[str, Any]) -> None:
    """Bit for bit, or the same exception, in every epoch; all else is cached, and the odd one a bypass each time."""
    repeated = [[ODD, 3, ODD, 5], [1, ODD], [ODD], [ODD - LENGTH, 2], [1, 2, 3]]
    arguments: dict[str, Any] = {"batch_size": 4, "shuffle": True}
    if way["order"] == "repeated":
        arguments = {"batch_sampler": repeated}
    arguments["num_workers"] = way["num_workers"]
    if way["after"] == "collate_fn":
        arguments["collate_fn"] = flat
    inside = v2.Compose([v2.Identity(), v2.RandomHorizontalFlip()]) if way["after"] == "tail" else None
    transform = jitter if way["after"] == "transform" else None
    source: Any = way["wrap"](OddOne(way["kind"], inside))
    seed_all()
    expected = list(outcomes_and_states(DataLoader(uncached(source, transform), **arguments), 2))
    with closing(CachedDataset(source, way["budget"], transform=transform, layout="rows")) as dataset:
        assert dataset.cache is not None
        seed_all()
        assert same(list(outcomes_and_states(way["loader"](dataset, **arguments), 2)), expected)
        counts = totals(dataset)
        assert dataset.cache.filled == counts.fills
        if way["budget"] == "auto":
            drawn, odd = (LENGTH, 1) if way["order"] == "shuffled" else (len({1, 2, 3, 5, ODD}), 5)
            assert (counts.fills, counts.bypasses) == (drawn - 1, 2 * odd)
            assert counts.misses == counts.fills or odd > 1  # of two workers that load the same sample one stores it


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize(("budget", "num_workers"), [("auto", 0), ("50%", 1)])
def test_large_samples_are_stored_in_parts(budget: str, num_workers: int) -> None:
    """A batch of some MiB is stored piece by piece, and each sample goes to its place, wherever the odd ones lie."""
    source: Any = [(torch.full((400_000,), index, dtype=torch.uint8), index) for index in range(14)]
    for index in (3, 12):
        source[index] = source[index][0], float(index)
    with closing(CachedDataset(source, budget, layout="rows")) as dataset:
        for _ in range(2):
            batches = list(CachedLoader(dataset, 14, num_workers=num_workers))
            assert same(batches, list(DataLoader(source, 14)))
        fitting = [index for index in range(14) if index not in (3, 12) and dataset.cache.has_slot(index)]
        assert dataset.cache.filled == totals(dataset).fills == totals(dataset).misses == len(fitting)
        assert all(same(dataset[index], source[index]) for index in range(14))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_one_warning_names_it(num_workers: int, tmp_path: Path) -> None:
    """Once for the dataset, whoever loads it and however often: its index, what differs, and how to be strict."""
    with closing(CachedDataset(OddOne("dtype"), layout="rows")) as dataset, logged_to(tmp_path / "log"):
        for _ in range(2):
            list(outcomes_and_states(CachedLoader(dataset, 4, num_workers=num_workers), 2))
    [said] = [line for line in (tmp_path / "log").read_text().splitlines() if "OddOne" in line]
    assert "sample 10: field [0] must be Tensor of dtype torch.uint8" in said
    assert "got Tensor of dtype torch.float32" in said
    assert "strict=True" in said


@pytest.mark.parametrize(("num_workers", "transform"), [(0, None), (1, None), (1, jitter)])
def test_with_strict_it_is_an_error(transform: Any, num_workers: int) -> None:
    """In the place of its batch; the others come."""
    source = OddOne("dtype")
    spec = SampleSpec.infer(source[0])  # then it is not found at set-up
    with closing(CachedDataset(source, transform=transform, spec=spec, strict=True)) as dataset:
        got = [batch for batch, _ in outcomes_and_states(CachedLoader(dataset, 4, num_workers=num_workers), 1)]
        assert [number for number, batch in enumerate(got) if batch is SampleMismatchError] == [ODD // 4]
        assert len(got) == LENGTH // 4


class TransformedButOne(Made):
    """Images, of which all but one get the random transform."""

    def __init__(self) -> None:
        super().__init__(image, LENGTH)
        self.aug, self.reads = v2.RandomCrop(4), list[int]()

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        return image(index)[:, :4, :4] if index == ODD else self.aug(image(index)), index


@pytest.mark.parametrize("of", [lambda source: source, lambda source: ConcatDataset([source])], ids=["whole", "part"])
def test_a_sample_whose_transform_is_not_called_is_loaded_every_time(of, caplog):
    """Set-up has not seen it, and its transform does not run after the cache; one warning names it."""
    torch.manual_seed(0)
    expected = list(outcomes_and_states(DataLoader(of(TransformedButOne()), batch_size=5, shuffle=True), 3))
    source = TransformedButOne()
    with closing(CachedDataset(of(source))) as dataset:
        torch.manual_seed(0)
        assert same(list(outcomes_and_states(DataLoader(dataset, batch_size=5, shuffle=True), 3)), expected)
        assert totals(dataset).bypasses == 3
        source.reads.clear()
        list(outcomes_and_states(DataLoader(dataset, batch_size=5), 1))
        assert source.reads == [ODD, ODD]  # the deterministic part, and the whole
    assert len([text for text in caplog.messages if f"For sample {ODD} the transform is called 0 times" in text]) == 1


# ---- samples that draw random numbers while they are loaded


def rare(index: int) -> torch.Tensor:
    """One class of a sorted folder is augmented."""
    return torch.tensor([index, np.random.rand() if 303 <= index < 312 else 0.0])


def from_the_system(index: int) -> torch.Tensor:
    """It draws from what nobody can watch."""
    return torch.tensor([float(index), *os.urandom(8)])


@pytest.mark.processes
@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize(
    ("way", "wrap", "bypasses"),
    [
        (lambda data: [data[index] for index in range(400)], lambda source: source, 9),
        (lambda data: DataLoader(data, 8), InBatches, 16),
        (lambda data: CachedLoader(data, 8, num_workers=2), InBatches, 16),
    ],
    ids=["samples", "batches", "workers"],
)
def test_random_samples_are_not_frozen(way: Any, wrap: Any, bypasses: int, request: Any, caplog: Any) -> None:
    """A rare draw is another one in each epoch, with one warning, and all other batches are cached."""
    with closing(CachedDataset(wrap(Made(rare, 400)), spec=SampleSpec.infer(rare(0)))) as dataset:
        epochs = [torch.cat([part.view(-1, 2) for part in way(dataset)]) for _ in range(3)]
        counts = totals(dataset)
        assert (counts.served, counts.bypasses, counts.fills) == (1200, 3 * bypasses, 400 - bypasses)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        changed = (epochs[one] != epochs[other]).any(dim=1).nonzero().flatten()
        assert changed.tolist() == list(range(303, 312))
    if request.node.callspec.id == "workers":  # whose words pytest does not hear
        return
    assert len([text for text in caplog.messages if "draws random numbers for some samples" in text]) == 1
    with closing(CachedDataset(wrap(Made(from_the_system, 400)), spec=SampleSpec.infer(from_the_system(0)))) as dataset:
        for _ in range(2):  # in the second epoch one is read again
            list(way(dataset))
    assert len([text for text in caplog.messages if "is another one each time it is read" in text]) == 1
