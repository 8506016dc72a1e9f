"""Samples that are not stored, because they are not like the others or draw random numbers while they are loaded.

They pass through, and their batches are what DataLoader makes of them.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset
from torchvision.transforms import v2

from lightning_stocache.cache.codec import SampleMismatchError
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from tests.loading.twins import InBatches, Jitter, outcomes, pairwise, same, totals, uncached
from tests.sources import Made

LENGTH = 40
ODD = 10
SHAPE = (3, 5, 7)

pytestmark = [pytest.mark.usefixtures("seeded"), pytest.mark.processes]


def image(index: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape or SHAPE, dtype=torch.uint8, generator=torch.Generator().manual_seed(index))


KINDS: dict[str, Callable[[], Any]] = {
    "dtype": lambda: (image(ODD).float(), ODD),
    "shape": lambda: (image(ODD, 3, 5, 8), ODD),
    "number": lambda: (image(ODD), float(ODD)),
    "longer": lambda: (image(ODD), ODD, 1),
    "list": lambda: [image(ODD), ODD],
    "dict": lambda: {"image": image(ODD), "label": ODD},
    "None": lambda: None,
    "None inside": lambda: (None, ODD),
    "str": lambda: (image(ODD), "a label"),
    "str alone": lambda: "a sample",
    "object": lambda: (image(ODD), lambda: None),
    "grad": lambda: (torch.ones(SHAPE, requires_grad=True), ODD),
    "result": lambda: (torch.ones(SHAPE, requires_grad=True) * 2, ODD),
    "sparse": lambda: (image(ODD).to_sparse(), ODD),
    "device": lambda: (torch.empty(SHAPE, dtype=torch.uint8, device="meta"), ODD),
}


class OddOne(Dataset[Any]):
    """Samples `(uint8 tensor, label)`, but for one of them; indices may count from the end."""

    def __init__(self, kind: str, transform: Callable[[Any], Any] | None = None) -> None:
        self.kind, self.transform = kind, transform

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        index %= LENGTH
        sample = KINDS[self.kind]() if index == ODD else (image(index), index)
        if self.transform is not None and isinstance(sample, tuple) and isinstance(sample[0], torch.Tensor):
            return self.transform(sample[0]), *sample[1:]
        return sample


def told(loader: DataLoader[Any], epochs: int = 3) -> Iterator[Any]:
    """The batches of some epochs, the type of an error in the place of one, and the generator's state after each."""
    for _ in range(epochs):
        for outcome in outcomes(loader):
            yield type(outcome) if isinstance(outcome, Exception) else outcome, torch.get_rng_state()


def alike(got: Any, expected: Any) -> bool:
    """As `same`, where a tensor may also require grad."""
    return same(bare(list(got)), bare(list(expected)))


def bare(node: Any) -> Any:
    if isinstance(node, torch.Tensor):
        return [node.requires_grad, node.detach()]
    if isinstance(node, list | tuple):
        return [type(node), *map(bare, node)]
    return node


def flat(samples: list[Any]) -> list[Any]:
    """A collate function of the user's, which takes any sample."""
    return [repr(sample) if isinstance(sample, str) or sample is None else sample[0] for sample in samples]


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize(("kind", "num_workers"), list(zip(KINDS, [0, 2] * 8, strict=False)))
def test_its_batch_is_that_of_a_dataloader(kind: str, num_workers: int) -> None:
    """Bit for bit, or the same exception, in every epoch; all else is cached, and the odd one a bypass each time."""
    arguments: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": num_workers}
    torch.manual_seed(0)
    expected = list(told(DataLoader(OddOne(kind), **arguments)))
    with closing(CachedDataset(OddOne(kind), layout="rows")) as dataset:
        torch.manual_seed(0)
        assert alike(told(CachedLoader(dataset, **arguments)), expected)
        assert dataset.cache.filled == totals(dataset).fills == totals(dataset).misses == LENGTH - 1
        assert totals(dataset).bypasses == 3
        if not any(isinstance(batch, type) for batch, _ in expected):
            assert totals(dataset).served == 3 * LENGTH


DESIGNS = pairwise(
    kind=["dtype", "shape", "longer", "None", "str", "grad"],
    wrap=[lambda source: source, InBatches],
    after=["nothing", "transform", "tail", "collate_fn"],
    num_workers=[0, 2],
    loader=[CachedLoader, DataLoader],
    budget=["auto", "50%"],
)


@pytest.mark.parametrize("way", DESIGNS)
def test_on_every_way_through_a_loader(way: dict[str, Any]) -> None:
    """With a transform, a tail cut off the source, a collate_fn, sources of batches, and where few have a slot."""
    arguments: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": way["num_workers"]}
    if way["after"] == "collate_fn":
        arguments["collate_fn"] = flat
    inside = v2.Compose([v2.Identity(), v2.RandomHorizontalFlip()]) if way["after"] == "tail" else None
    source: Any = way["wrap"](OddOne(way["kind"], inside))
    jitter = Jitter("torch") if way["after"] == "transform" else None
    torch.manual_seed(0)
    expected = list(told(DataLoader(uncached(source, jitter), **arguments), 2))
    with closing(CachedDataset(source, way["budget"], transform=jitter, layout="rows")) as dataset:
        assert dataset.cache is not None
        torch.manual_seed(0)
        assert alike(told(way["loader"](dataset, **arguments), 2), expected)


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("budget", ["auto", "50%"])
def test_large_samples_are_stored_in_parts(budget: str, num_workers: int) -> None:
    """A batch of some MiB is stored piece by piece, and each sample goes to its place, wherever the odd ones lie."""
    source: Any = [(torch.full((400_000,), index, dtype=torch.uint8), index) for index in range(14)]
    for index in (3, 12):
        source[index] = source[index][0], float(index)
    with closing(CachedDataset(source, budget, layout="rows")) as dataset:
        loader = CachedLoader(dataset, 14, num_workers=num_workers)
        for _ in range(2):
            assert same(list(loader), list(DataLoader(source, 14)))
        fitting = [index for index in range(14) if index not in (3, 12) and dataset.cache.has_place(index)]
        assert dataset.cache.filled == totals(dataset).fills == totals(dataset).misses == len(fitting)
        assert totals(dataset).served == 2 * 14
        assert all(same(dataset[index], source[index]) for index in range(14))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_one_warning_names_it(num_workers: int, tmp_path: Path) -> None:
    """Once for the dataset, whoever loads it and however often: its index, what differs, and how to be strict."""
    handler = logging.FileHandler(tmp_path / "log")
    logging.getLogger("lightning_stocache").addHandler(handler)
    try:
        with closing(CachedDataset(OddOne("dtype"), layout="rows")) as dataset:
            for _ in range(2):
                list(told(CachedLoader(dataset, 4, num_workers=num_workers), 2))
    finally:
        logging.getLogger("lightning_stocache").removeHandler(handler)
        handler.close()
    [said] = [line for line in (tmp_path / "log").read_text().splitlines() if "OddOne" in line]
    assert "sample 10: field [0] must be Tensor of dtype torch.uint8" in said
    assert "got Tensor of dtype torch.float32" in said
    assert "strict=True" in said


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("transform", [None, Jitter("torch")])
def test_with_strict_it_is_an_error(transform: Any, num_workers: int) -> None:
    """In the place of its batch; the others come."""
    source = OddOne("dtype")
    spec = SampleSpec.infer(source[0])  # then it is not found at set-up
    with closing(CachedDataset(source, transform=transform, spec=spec, strict=True)) as dataset:
        got = [batch for batch, _ in told(CachedLoader(dataset, 4, num_workers=num_workers), 1)]
        assert [number for number, batch in enumerate(got) if batch is SampleMismatchError] == [ODD // 4]
        assert len(got) == LENGTH // 4


class TransformedButOne(Dataset[Any]):
    """Images, of which all but one get the random transform."""

    def __init__(self) -> None:
        self.aug, self.reads = v2.RandomCrop(4), list[int]()

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        return image(index)[:, :4, :4] if index == ODD else self.aug(image(index)), index


@pytest.mark.parametrize("of", [lambda source: source, lambda source: ConcatDataset([source])], ids=["whole", "part"])
def test_a_sample_whose_transform_is_not_called_is_loaded_every_time(of, caplog):
    """Set-up has not seen it, and its transform does not run after the cache; one warning names it."""
    torch.manual_seed(0)
    expected = list(told(DataLoader(of(TransformedButOne()), batch_size=5, shuffle=True), 3))
    source = TransformedButOne()
    with closing(CachedDataset(of(source))) as dataset:
        torch.manual_seed(0)
        assert alike(told(DataLoader(dataset, batch_size=5, shuffle=True), 3), expected)
        assert totals(dataset).bypasses == 3
        source.reads.clear()
        list(told(DataLoader(dataset, batch_size=5), 1))
        assert source.reads == [ODD, ODD]  # the deterministic part, and the whole
    assert len([text for text in caplog.messages if f"For sample {ODD} the transform is called 0 times" in text]) == 1


@pytest.mark.parametrize(("kind", "num_workers"), [("shape", 0), ("dtype", 1), ("str", 0), ("shape", 1)])
def test_an_index_that_comes_twice_in_a_batch(kind: str, num_workers: int) -> None:
    """Each time it is loaded, and a bypass."""
    batches = [[ODD, 3, ODD, 5], [1, ODD], [ODD], [ODD - LENGTH, 2], [1, 2, 3]]
    arguments: dict[str, Any] = {"batch_sampler": batches, "num_workers": num_workers}
    expected = [batch for batch, _ in told(DataLoader(OddOne(kind), **arguments))]
    with closing(CachedDataset(OddOne(kind), layout="rows")) as dataset:
        assert alike((batch for batch, _ in told(CachedLoader(dataset, **arguments))), expected)
        assert totals(dataset).bypasses == 3 * 5


# ---- samples that draw random numbers while they are loaded


def rare(index: int) -> torch.Tensor:
    """One class of a sorted folder is augmented."""
    return torch.tensor([index, np.random.rand() if 303 <= index < 312 else 0.0])


def from_the_system(index: int) -> torch.Tensor:
    """It draws from what nobody can watch."""
    return torch.tensor([float(index), *os.urandom(8)])


RARE, SYSTEM = Made(rare, 400), Made(from_the_system, 400)


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_random_class_is_not_frozen(num_workers: int) -> None:
    """It has other draws in every epoch, and is counted as a bypass; the rest is cached."""
    with closing(CachedDataset(RARE)) as dataset:
        loader = CachedLoader(dataset, 8, num_workers=num_workers)
        epochs = [torch.cat(list(loader))[303:312, 1].tolist() for _ in range(3)]
        assert dataset.cache is not None
        assert dataset.cache.filled == 400 - 16  # the two batches that hold it
        assert (totals(dataset).served, totals(dataset).bypasses) == (3 * 400, 3 * 16)
    assert len({*epochs[0], *epochs[1], *epochs[2]}) == 27


WAYS: dict[str, Callable[[CachedDataset], Any]] = {
    "samples": lambda dataset: [dataset[index] for index in range(400)],
    "batches": lambda dataset: [torch.stack(dataset.__getitems__(list(range(at, at + 8)))) for at in range(0, 400, 8)],
    "a wrapper": lambda dataset: map(ConcatDataset([dataset]).__getitem__, range(400)),
    "a DataLoader": lambda dataset: DataLoader(dataset, 8),
    "a CachedLoader": lambda dataset: CachedLoader(dataset, 8),
}


@pytest.mark.parametrize("wrap", [lambda source: source, InBatches], ids=["one by one", "in batches"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_random_samples_are_noticed_on_every_way(way: Any, wrap: Any, caplog: pytest.LogCaptureFixture) -> None:
    """However a sample is asked for: a rare draw is not frozen, and one warning says so. What draws from the system
    cannot be seen to draw; a second read tells."""
    with closing(CachedDataset(wrap(RARE), spec=SampleSpec.infer(rare(0)))) as dataset:
        epochs = [torch.stack([row for part in way(dataset) for row in part.reshape(-1, 2)]) for _ in range(2)]
    assert (epochs[0] != epochs[1]).any(dim=1).nonzero().flatten().tolist() == list(range(303, 312))
    assert len([text for text in caplog.messages if "draws random numbers for some samples" in text]) == 1
    with closing(CachedDataset(wrap(SYSTEM), spec=SampleSpec.infer(from_the_system(0)))) as dataset:
        for _ in way(dataset):
            pass
    assert "is another one when it is read again" in caplog.text
