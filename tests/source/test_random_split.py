"""`split` finds what is random in a source, cuts its transform there, and proves that the two parts make the whole."""

import copy
import importlib
import itertools
import pickle
import random
import sys
import time
import weakref
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset, get_worker_info
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2

from lightning_stocache.source.probe import Probe
from lightning_stocache.source.random_split import Split, split
from lightning_stocache.source.transform_split import Tail
from lightning_stocache.torch_internals import become_worker
from tests.loading.twins import copied, same
from tests.sources import Made

Pair = namedtuple("Pair", "image label")


class Photos(Dataset[Any]):
    """Uint8 images that are the same on every read, of which `read(photos, index)` makes samples."""

    def __init__(self, transform: Any = None, read: Any = None, length: int = 8, **held: Any) -> None:
        self.images = torch.randint(0, 256, (length, 3, 12, 12), dtype=torch.uint8, generator=torch.Generator())
        self.transform, self.read = transform, read or plain
        vars(self).update(held)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return self.read(self, index)

    def rotated(self, image: torch.Tensor) -> torch.Tensor:
        return image.rot90(dims=(1, 2)) if random.random() < 0.5 else image

    def packed(self, image: torch.Tensor, label: int) -> Any:
        return {"image": image, "label": label}


def plain(photos: Photos, index: int) -> Any:
    image = photos.images[index]
    return (photos.transform(image) if photos.transform else image), index


def by_name(photos: Photos, index: int) -> Any:
    return photos.transform(image=photos.images[index])["image"], index


def as_pair(photos: Photos, index: int) -> Any:
    return Pair(*plain(photos, index))


def two_views(photos: Photos, index: int) -> Any:
    """SimCLR: the transform is called twice on the same image."""
    return [plain(photos, index)[0], plain(photos, index)[0]], index


def rotated(photos: Photos, index: int) -> Any:
    """Augments in a method."""
    return {"image": photos.rotated(photos.images[index])}


def one_by_one(photos: Any, index: int) -> Any:
    image = photos.images[index]
    for step in photos.steps:
        image = step(image)
    return image, index


OWN, CLOCK, BUFFER = np.random.default_rng(0), itertools.count(), np.zeros(3)


def rarely(image: torch.Tensor) -> torch.Tensor:
    """Adds noise to some images, by what they show."""
    return noisy(image) if int(image[0, 0, 0]) % 2 else image


def noisy(image: torch.Tensor) -> torch.Tensor:
    return image + torch.rand(())


def by_three(image: torch.Tensor) -> torch.Tensor:
    return image + np.random.rand() + random.random() + OWN.random()


def states() -> tuple[Any, ...]:
    numpys = pickle.dumps(np.random.get_state())
    return str(OWN.bit_generator.state), torch.get_rng_state().tolist(), numpys, random.getstate()


def seed(value: int) -> None:
    OWN.bit_generator.state = np.random.default_rng(value).bit_generator.state
    torch.manual_seed(value)
    np.random.seed(value)
    random.seed(value)


def assert_same_stream(source: Any, parts: Split) -> None:
    """The two parts give the source's samples and draws, bit for bit, for a seed that the probe did not use."""
    assert parts.reason is None
    assert parts.tail is not None
    for index in range(len(source)):
        seed(1000 + index)
        whole, after = source[index], states()
        seed(1000 + index)
        sample = parts.source[index]
        before = copied(sample)
        assert same(parts.tail(sample, index), whole)
        assert states() == after
        assert same(sample, before)
        assert same(parts.source[index], before)


HEAD = [v2.ToDtype(torch.float32, scale=True), v2.Resize(8)]
CROP = v2.Compose([*HEAD, v2.RandomCrop(6)])
ERASING = v2.RandomErasing(p=0.1)

# `tests/interop` has the transforms and datasets of the libraries.
CUT: dict[str, tuple[Dataset[Any], str]] = {
    # by its steps
    "nested": (Photos(v2.Compose([v2.Compose(HEAD), v1.Compose([v2.Resize(8), v2.RandomCrop(6)])])), "RandomCrop"),
    "Sequential": (Photos(nn.Sequential(*HEAD, ERASING)), "RandomErasing"),
    "generators": (Photos(v2.Compose([*HEAD, ERASING, by_three])), "RandomErasing, by_three"),
    "some images": (Photos(v2.Compose([rarely, v2.RandomCrop(6)])), "rarely, RandomCrop"),
    # by where its result lies
    "deep": (Photos(CROP, lambda photos, i: [i, {"views": (plain(photos, i)[0],)}]), "RandomCrop"),
    "two views": (Subset(Subset(Photos(CROP, two_views), [5, 3, 1, 7]), [2, 0]), "RandomCrop"),
    # by what is called, whatever it is called like
    "then a method": (Photos(None, lambda held, i: held.packed(held.aug(held.images[i]), i), aug=CROP), "RandomCrop"),
    "by keyword": (
        Photos(None, lambda held, i: held.aug(x=held.images[i])["x"], aug=lambda x: {"x": noisy(x)}),
        "<lambda>",
    ),
    "in a dict": (Photos(None, lambda held, i: held.by["train"](held.images[i]), by={"train": CROP}), "RandomCrop"),
    "in a tuple": (Photos(None, one_by_one, steps=(*HEAD, v2.RandomCrop(6), noisy)), "RandomCrop, noisy"),
    "two": (
        Photos(None, lambda held, i: (held.aug(held.images[i]), held.rotated(held.images[i])), aug=CROP),
        "RandomCrop, rotated",
    ),
    "around a dataset": (
        Photos(None, lambda held, i: held.aug(held.base[i][0]), aug=v2.RandomCrop(6), base=Photos(noisy)),
        "noisy, RandomCrop",
    ),
}


@pytest.mark.parametrize(("source", "tail"), CUT.values(), ids=CUT)
def test_a_transform_is_cut_at_its_first_random_step(source: Any, tail: str) -> None:
    """What comes before it stays in the source, wherever that holds the transform; the rest becomes the tail."""
    parts = split(source)
    assert str(parts.tail) == tail
    assert_same_stream(source, parts)


def test_each_part_of_a_concatenation_has_a_cut_of_its_own() -> None:
    """A sample is finished by the transform of the part that its index lies in; also in another process."""
    first = Photos(CROP, as_pair, 3) + Photos(ERASING, as_pair, 3)
    source = first + ConcatDataset([Photos(None, as_pair, 2), Photos(None, rotated, 3)])
    assert_same_stream(source, split(source))
    part = Subset(source, [10, 1, -3, 4, 7, 6])
    parts = split(part)
    head, tail = pickle.loads(pickle.dumps((parts.source, parts.tail)))
    assert_same_stream(part, Split(head, (), 0, tail))


def shaken(rows: dict[str, Any]) -> dict[str, Any]:
    """One draw for a batch, and one for each value of two columns."""
    scale = random.random()
    pixels = [torch.tensor(row) * scale + torch.rand(()) for row in rows["image"]]
    return {"pixels": pixels, "noise": [np.random.rand(2) for _ in rows["image"]]}


@pytest.mark.parametrize("options", [{}, {"columns": ["image"], "output_all_columns": True}], ids=["all", "columns"])
def test_a_dataset_of_hugging_face_is_cut_at_its_format(options: Any) -> None:
    """Its transform runs after the cache, with one call per sample or per batch, as in the dataset."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"image": [[index, 1] for index in range(6)], "label": list(range(6))})
    source = rows.with_transform(shaken, **options)
    if options:
        source = Subset(source, [5, 0, 3])
    parts = split(source)
    assert_same_stream(source, parts)
    seed(7)
    whole, after = source.__getitems__([2, 0, 1]), states()
    seed(7)
    assert same(parts.tail.finish_batch(parts.source.__getitems__([2, 0, 1]), [2, 0, 1]), whole)
    assert states() == after
    assert isinstance(parts.source[0]["image"], list)


LEAVES = [
    *(float("nan"), complex(0, float("nan")), np.full(3, np.nan), torch.eye(2).to_sparse(), torch.eye(2).T),
    *(torch.tensor(1j).conj(), torch.ones(0), nn.Parameter(torch.ones(2)), Path("x"), np.random.default_rng),
    tv_tensors.BoundingBoxes(torch.ones(1, 4), format="XYXY", canvas_size=(8, 8)),
]


def test_a_deterministic_source_is_left_alone() -> None:
    """No false alarm: the user's own object comes back, with the samples that were read, twice each."""
    for source in (
        Subset(Photos(v2.Compose([*HEAD, v2.CenterCrop(6), v2.Normalize([0.5], [0.5])])), [3, 1]),
        Made(lambda i: [*copy.deepcopy(LEAVES), object(), {1, 2}, np.array([None, f"{i}x"])]),
    ):
        parts = split(source)
        assert (parts.source is source, parts.tail, parts.cut, parts.reason) == (True, None, None, None)
        assert len(parts.samples) == min(4, len(source))
        assert parts.reads == 2 * len(parts.samples)


class Compose:
    """One of albumentations without steps: it draws whether to run at all."""

    p, transforms = 1.0, ()

    def __call__(self, **named: Any) -> dict[str, Any]:
        random.random()
        return named


def test_a_compose_without_steps_is_no_reason_against_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """It draws, but changes no sample: in a Subset or a ConcatDataset, too, whose reads have other indices inside."""
    monkeypatch.setitem(sys.modules, "albumentations", SimpleNamespace(Compose=Compose))
    photos = Photos(Compose(), by_name)
    for source in (photos, Subset(photos, [5, 0, 3]), ConcatDataset([photos, photos])):
        assert split(source).reason is None


def test_a_source_that_is_random_in_itself_stays_whole() -> None:
    """The reason names the generator or the leaf that moved, and why there is no split."""
    for make, sign in (
        (lambda i: (i, np.random.rand()), "moves the generator of numpy.random"),
        (lambda i: (torch.rand(3), random.random()), "torch and random"),
        (lambda i: {"x": (i, OWN.random(3))}, "moves the generator of tests.source.test_random_split.OWN"),
        (lambda i: {"x": (i, next(CLOCK))}, "it is random, or depends on the time, on earlier reads "),
        (lambda i: {"x": (i, next(CLOCK))}, "index 0 differ in sample['x'][1]"),
        (lambda i: np.copyto(BUFFER, next(CLOCK)) or BUFFER, "index 0 differ in sample"),  # a buffer that is reused
        (lambda i: (i, np.random.default_rng().random() > 2), "moves the generator of the system"),
        (lambda i: (i, random.SystemRandom().random() > 2), "moves the generator of the system"),
        (lambda i: torch.rand(3).sum() * 0, "moves the generator of torch"),
        (lambda i: torch.manual_seed(i).initial_seed(), "moves the generator of torch"),
    ):
        source = Made(make)
        parts = split(source)
        assert (parts.source is source, parts.tail) == (True, None)
        assert len(parts.samples) == 4
        assert sign in parts.reason
        assert "no transform that it holds and calls is random" in parts.reason


def drawing_for_nothing(photos: Photos, index: int) -> Any:
    """But only after the whole transform."""
    image, _ = plain(photos, index)
    if image.shape == (3, 6, 6):
        torch.rand(())
    return image


def sometimes_twice(photos: Photos, index: int) -> Any:
    """Transforms every index but the first twice."""
    return *plain(photos, index), photos.transform(photos.images[index]) if index else None


def of_one_shape(photos: Photos, index: int) -> Any:
    """It cannot live with what stands before the cut."""
    image, _ = plain(photos, index)
    if image.shape != (3, 6, 6):
        raise RuntimeError("wrong shape")
    return image


class Mosaic:
    """Puts an image of those that were read before below a new one, as of detectors' augmentations."""

    def __init__(self) -> None:
        self.dataset = Photos(self, lambda photos, i: photos.transform(photos.image(i)), read_before=[])
        self.dataset.image = self.image

    def image(self, index: int) -> torch.Tensor:
        self.dataset.read_before.append(index)
        return self.dataset.images[index]

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return torch.cat([image, self.image(random.choice(self.dataset.read_before))])


def test_what_cannot_be_split_soundly_stays_whole() -> None:
    """A cut that would not reproduce the source is not made, and the reason says what stood against it."""
    for source, why in (
        (Photos(CROP, lambda photos, i: (plain(photos, i), torch.rand(()))), "outside the transform (reading index 0 "),
        (Photos(CROP, lambda photos, i: plain(photos, i)[0] * 2), "does not hold what its transform returns"),
        (Photos(CROP, lambda photos, i: (it := plain(photos, i)[0], it.sum())), "do not give its sample again"),
        (Photos(CROP, drawing_for_nothing), "do not give its sample again"),
        (Photos(CROP, sometimes_twice), "not called in the same way for every sample"),
        (Photos(CROP, of_one_shape), "looks at the result (it raised RuntimeError: wrong shape without it)"),
        (Mosaic().dataset, "its transform holds a dataset, and makes each sample from other samples, too"),
        (Photos(CROP, lambda photos, i: noisy(photos.images[i])), "no transform that it holds and calls is random"),
        # a cut before the load would cache an index
        (
            Photos(None, lambda held, i: held.load(i), load=lambda i: torch.rand(3) + i),
            "no transform that it holds and calls",
        ),
        (ConcatDataset([Photos(CROP), Made(lambda index: torch.rand(3))]), "no transform that it holds"),
    ):
        parts = split(source)
        assert (parts.source is source, parts.tail) == (True, None)
        assert why in str(parts.reason)


class Wrapper(Dataset[Any]):
    """Forwards what it has not, also while it is copied and has nothing yet."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def in_a_thread(photos: Photos, index: int) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(photos.transform, photos.images[index]).result()


def augmented(photos: Any, index: int) -> Any:
    return photos.augment(photos.images[index]) * 2


def test_the_reason_is_that_of_the_transform_that_draws() -> None:
    """Whatever its name: not that no other is random, nor what follows from the try."""
    for source, why in (
        (Photos(None, augmented, augment=noisy), "the sample does not hold what its transform returns"),
        (Photos(torch.nn.Identity(), augmented, augment=noisy), "the sample does not hold what its transform returns"),
        (
            Photos(None, lambda photos, i: photos.augment(image=photos.images[i]) * 2, augment=noisy),
            "the sample does not hold what its transform returns",
        ),
        (Subset(Photos(None, augmented, augment=noisy), range(4)), "the sample does not hold what its transform"),
        (Wrapper(Photos(CROP)), "a Wrapper cannot be copied: copy.copy raises RecursionError"),
        (Photos(noisy, in_a_thread), "its transform is called by another thread than the one that reads"),
        (Photos(CROP, in_a_thread), "its transform is called by another thread than the one that reads"),
    ):
        assert str(split(source).reason).partition(", and cannot be split: ")[2].startswith(why)


@pytest.mark.parametrize(("passes", "is_cut"), [(2, False), (100, True)])
def test_a_cut_that_takes_longer_than_it_saves_is_not_looked_for(passes: int, is_cut: bool) -> None:
    """Of four samples that take a while: 24 reads more are fewer than those of 100 epochs, not of two."""

    def slow(photos: Photos, index: int) -> Any:
        reads.append(index)
        time.sleep(0.05)
        return photos.transform(photos.images[index])

    reads: list[int] = []
    parts = split(Photos(v2.RandomHorizontalFlip(), slow, length=4), passes=passes)
    assert (parts.tail is not None) is is_cut
    if not is_cut:
        assert len(reads) == 8
        assert "more than 2 epochs of 4 samples save" in str(parts.reason)


def test_entropy_for_a_module_that_is_imported_is_no_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first read imports it."""
    (tmp_path / "asks_for_entropy.py").write_text("import uuid\n\nKEY = uuid.uuid4()\n")
    monkeypatch.syspath_prepend(tmp_path)
    parts = split(Made(lambda index: (index, importlib.import_module("asks_for_entropy").__name__)))
    monkeypatch.delitem(sys.modules, "asks_for_entropy")
    assert parts.reason is None


def broken(index: int) -> Any:
    torch.rand(1), np.random.randn(), random.random()
    raise OSError("disk is gone")


def test_every_generator_is_put_back() -> None:
    """All go on as if nothing had been read, also when the source raises; sources keep their attributes."""
    photos = Photos(v2.Compose([v2.CenterCrop(8), v2.RandomCrop(6)]))
    subset, steps, attributes = Subset(photos, [1, 2, 3]), list(photos.transform.transforms), dict(vars(photos))
    seed(5)
    np.random.randn(), random.gauss(0, 1)
    before = states()
    for source in (subset, Made(lambda i: (torch.rand(2), np.random.randn(), random.gauss(0, 1)))):
        split(source)
        assert states() == before
    assert (subset.dataset, vars(photos), photos.transform.transforms) == (photos, attributes, steps)
    with pytest.raises(OSError, match="disk is gone"):
        split(Made(broken))
    assert states() == before


@pytest.mark.gpu
def test_the_cuda_generator_is_watched_and_put_back() -> None:
    """Once CUDA runs, a source that draws there is random, and its generator is put back too."""
    torch.cuda.init()
    before = torch.cuda.get_rng_state()
    parts = split(Made(lambda i: torch.rand(2, device="cuda")))
    assert "moves the generator of torch.cuda" in parts.reason
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_a_worker_keeps_its_seed_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are others while a sample is read, and those of the worker afterwards."""
    monkeypatch.setattr("torch.utils.data._utils.worker._worker_info", None)
    become_worker(3, 5, 7, None)

    def of_worker(index: int) -> Any:
        info: Any = get_worker_info()
        return info.seed, info.id

    first, second = Probe(Made(of_worker)).read_twice(Made(of_worker), 1)
    assert first.sample != second.sample
    assert of_worker(0) == (7, 3)


class Large(Dataset[Any]):
    """Samples of 2 MiB, of which it notes how many are alive."""

    def __init__(self) -> None:
        self.alive, self.most = weakref.WeakSet[torch.Tensor](), 0

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = torch.full((1 << 21,), index, dtype=torch.uint8)
        self.alive.add(sample)
        self.most = max(self.most, len(self.alive))
        return sample


def test_of_large_samples_few_are_in_memory() -> None:
    """One for each index that decides on the codec, and 64 MiB of others."""
    source = Large()
    parts = split(source)
    assert len(parts.samples) == 4
    assert source.most == 4
    with_more = Large()
    assert len(split(with_more, quick=90).samples) <= 34
    assert with_more.most <= 34


def test_a_byte_of_a_large_sample_counts() -> None:
    """Of leaves that are kept as digests, too: arrays, bytes and pickled objects."""
    reads = itertools.count()

    def make(kind: Any, index: int) -> Any:
        content = bytearray(1 << 21)
        content[-1] = next(reads) % 2
        return kind(content)

    for kind in (bytes, lambda content: np.frombuffer(content, np.uint8), lambda content: {bytes(content)}):
        assert "differ in sample" in str(split(Made(lambda index, kind=kind: make(kind, index))).reason)


def test_calls_of_a_head_are_counted_by_thread() -> None:
    """A thread that reads beside does not make a sample odd."""
    parts = split(CUT["nested"][0])
    assert isinstance(parts.tail, Tail)
    [head] = parts.tail.heads
    before = head.thread.calls
    with ThreadPoolExecutor(1) as executor:
        executor.submit(parts.source.__getitem__, 0).result()
        assert head.thread.calls == before
        assert executor.submit(lambda: head.thread.calls).result() == 1
    parts.source[0]
    assert head.thread.calls == before + 1
