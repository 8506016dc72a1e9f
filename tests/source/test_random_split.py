"""`split` finds what is random in a source, cuts its transform there, and proves that the two parts make the whole."""

import itertools
import pickle
import random
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, get_worker_info, random_split
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.datasets import FakeData, ImageFolder, VisionDataset
from torchvision.transforms import v2

from lightning_stocache.source.random_split import Probe, Split, split
from lightning_stocache.source.transform_split import TransformCut
from lightning_stocache.torch_internals import become_worker
from tests.loading.twins import copied, same
from tests.sources import Made, write_photos

Pair = namedtuple("Pair", "image label")


class Photos(Dataset[Any]):
    """Uint8 images that are the same on every read, with a transform, counting their reads."""

    def __init__(self, transform: Any = None, length: int = 8, make: Any = lambda image, label: (image, label)) -> None:
        self.images = torch.randint(0, 256, (length, 3, 12, 12), dtype=torch.uint8, generator=torch.Generator())
        self.transform = transform
        self.make = make
        self.reads = 0

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        image = self.images[index].clone()
        return self.make(self.transform(image) if self.transform else image, index)


class Noise(nn.Module):
    """Adds noise drawn from one of the process-wide generators, or from its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.own = kind, np.random.default_rng(0)
        OWNED.append(self.own)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        draws = {"random": random.random, "numpy": np.random.rand, "torch": lambda: float(torch.rand(()))}
        return image + draws.get(self.kind, self.own.random)()


class Rare(nn.Module):
    """Adds noise to some images, by what they show."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image + torch.rand(()) if int(image[0, 0, 0]) % 2 else image


OWNED: list[np.random.Generator] = []


def states() -> tuple[Any, ...]:
    return (
        [str(owned.bit_generator.state) for owned in OWNED],
        torch.get_rng_state().tolist(),
        pickle.dumps(np.random.get_state()),
        random.getstate(),
    )


def seed(value: int) -> None:
    for owned in OWNED:
        owned.bit_generator.state = np.random.default_rng(value).bit_generator.state
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
        assert same(parts.tail(parts.source[index]), whole)
        assert states() == after


OWN, CLOCK = np.random.default_rng(0), itertools.count()
HEAD_V1 = [v1.ConvertImageDtype(torch.float32), v1.Resize(8, antialias=True)]
HEAD_V2 = [v2.ToDtype(torch.float32, scale=True), v2.Resize(8)]


@pytest.mark.parametrize(
    ("transform", "tail"),
    [
        (v1.Compose([*HEAD_V1, v1.RandomHorizontalFlip(), v1.Normalize(0.5, 0.5)]), "RandomHorizontalFlip, Normalize"),
        (v2.Compose([*HEAD_V2, v2.RandomCrop(6), v2.Normalize([0.5], [0.5])]), "RandomCrop, Normalize"),
        (v2.Compose([v2.Compose(HEAD_V2), v1.Compose([v2.Resize(8), v2.RandomCrop(6)])]), "RandomCrop"),
        (nn.Sequential(*HEAD_V2, v2.RandomErasing(p=0.1)), "RandomErasing"),
        (v1.Compose([*HEAD_V1, v1.RandomErasing(p=0.1)]), "RandomErasing"),
        (v2.Compose([*HEAD_V2, v2.RandomApply([v2.GaussianBlur(3)], p=0.3)]), "RandomApply"),
        (v2.Compose([*HEAD_V2, Noise("numpy"), Noise("random"), Noise("torch")]), "Noise, Noise, Noise"),
        (v2.Compose([*HEAD_V2, v2.RandomErasing(p=0.1), Noise("own")]), "RandomErasing, Noise"),
        (v2.RandomCrop(6), "RandomCrop"),
        (Noise("random"), "Noise"),
        (v2.Compose([Rare(), v2.RandomCrop(6)]), "Rare, RandomCrop"),
    ],
)
def test_a_transform_is_cut_at_its_first_random_step(transform: Any, tail: str) -> None:
    """What comes before the first random step stays in the source, and the rest becomes the tail."""
    source = Photos(transform)
    parts = split(source)
    assert repr(parts.tail) == f"Tail({tail})"
    assert_same_stream(source, parts)
    assert same(parts.source[3], parts.source[3])


class OwnCompose(v2.Compose):
    """A Compose that repeats its steps: not what its list of steps says."""

    def forward(self, *inputs: Any) -> Any:
        return super().forward(super().forward(*inputs))


def test_a_compose_that_runs_its_steps_in_its_own_way_is_one_step() -> None:
    """A subclass with another `forward` is not taken apart."""
    source = Photos(OwnCompose([v2.RandomCrop(10, padding=1)]))
    parts = split(source)
    assert repr(parts.tail) == "Tail(OwnCompose)"
    assert_same_stream(source, parts)


@pytest.mark.parametrize(
    "make",
    [
        lambda image, label: {"image": image, "label": label},
        lambda image, label: [label, {"views": (image,)}],
        lambda image, label: Pair(image, label),
        lambda image, label: image,
    ],
    ids=["dict", "nested", "namedtuple", "bare"],
)
def test_the_tail_finds_the_image_in_any_structure(make: Any) -> None:
    """The tail changes that leaf alone, and works on new containers."""
    source = Photos(v2.Compose([*HEAD_V2, v2.RandomCrop(6)]), make=make)
    parts = split(source)
    assert_same_stream(source, parts)
    sample = parts.source[1]
    before = copied(sample)
    assert parts.tail is not None
    parts.tail(sample)
    assert same(sample, before)


class TwoViews(Photos):
    """SimCLR: the transform is called twice on the same image."""

    def __getitem__(self, index: int) -> Any:
        image = self.images[index].clone()
        return [self.transform(image), self.transform(image)], index


@pytest.mark.parametrize("head", [[], HEAD_V2], ids=["no head", "head"])
def test_two_views_of_an_image_stay_two(head: list[Any]) -> None:
    """A transform that is called twice per sample draws twice, in the same order."""
    source = TwoViews(v2.Compose([*head, v2.RandomCrop(6)]))
    assert_same_stream(source, split(source))


class Held(Photos):
    """Photos with a function for `__getitem__`, and whatever attributes that calls."""

    def __init__(self, read: Any, **held: Any) -> None:
        super().__init__()
        self.read = read
        vars(self).update(held)

    def __getitem__(self, index: int) -> Any:
        return self.read(self, self.images[index].clone(), index)

    def rotated(self, image: torch.Tensor) -> torch.Tensor:
        return image.rot90(dims=(1, 2)) if self.coin() else image

    def coin(self) -> bool:
        return random.random() < 0.5

    def packed(self, image: torch.Tensor, label: int) -> Any:
        return {"image": image, "label": label}


def one_by_one(held: Held, image: torch.Tensor, index: int) -> Any:
    for step in held.steps:
        image = step(image)
    return image, index


HELD = {
    "attribute": (lambda: Held(lambda held, image, index: (held.aug(image), index), aug=CROP), "RandomCrop"),
    "function": (lambda: Held(lambda held, image, index: held.aug(image), aug=noisy), "noisy"),
    "method": (lambda: Held(lambda held, image, index: held.rotated(image)), "rotated"),
    "then a method": (lambda: Held(lambda held, x, index: held.packed(held.aug(x), index), aug=CROP), "RandomCrop"),
    "by keyword": (lambda: Held(lambda held, x, index: held.aug(x=x)["x"], aug=lambda x: {"x": noisy(x)}), "<lambda>"),
    "twice": (lambda: Held(lambda held, image, index: [held.tfm(image), held.tfm(image)], tfm=CROP), "RandomCrop"),
    "dict": (lambda: Held(lambda held, image, index: held.by["train"](image), by={"train": CROP}), "RandomCrop"),
    "list": (
        lambda: Held(one_by_one, steps=[*HEAD_V2, v2.RandomCrop(6), v2.ToPureTensor()]),
        "RandomCrop, ToPureTensor",
    ),
    "tuple": (lambda: Held(one_by_one, steps=(v2.RandomCrop(9), noisy)), "RandomCrop, noisy"),
    "two": (lambda: Held(lambda held, x, index: (held.aug(x), held.rotated(x)), aug=CROP), "RandomCrop, rotated"),
    "in a dataset inside": (
        lambda: Held(lambda held, x, index: (held.base[index], 1), base=Photos(CROP)),
        "RandomCrop",
    ),
    "around a dataset": (
        lambda: Held(lambda held, x, index: held.aug(held.base[index][0]), aug=v2.RandomCrop(6), base=Photos(noisy)),
        "noisy, RandomCrop",
    ),
}


@pytest.mark.parametrize("way", HELD)
def test_a_transform_is_found_by_what_is_called(way: str) -> None:
    """A transform is cut wherever the dataset holds it; what works on its result comes after the cache, too."""
    make, tail = HELD[way]
    source = make()
    parts = split(source)
    assert repr(parts.tail) == f"Tail({tail})"
    assert_same_stream(source, parts)
    assert same(parts.source[3], parts.source[3])


def test_a_method_that_loads_and_draws_stays_whole() -> None:
    """A cut before the load would cache an index."""
    source = Held(lambda held, image, index: held.load(index), load=lambda index: torch.rand(3) + index)
    parts = split(source)
    assert (parts.source is source, parts.tail) == (True, None)


class Flipping(Photos):
    """Augments in a method."""

    def __getitem__(self, index: int) -> Any:
        return {"image": self.flipped(self.images[index].clone())}

    def flipped(self, image: torch.Tensor) -> torch.Tensor:
        return image.flip(-1) if random.random() < 0.5 else image


def concatenated() -> ConcatDataset[Any]:
    first = Photos(CROP, make=Pair) + Photos(v2.RandomErasing(p=0.1), make=Pair)
    return first + ConcatDataset([Photos(None, 6, Pair), Flipping(make=Pair)])


@pytest.mark.parametrize(
    "make",
    [concatenated, lambda: Subset(concatenated(), [29, 1, -3, 8, 20, 10])],
    ids=["whole", "subset"],
)
def test_each_part_of_a_concatenation_has_a_cut_of_its_own(make: Any) -> None:
    """A sample is finished by the transform of the part that its index lies in."""
    source = make()
    parts = split(source)
    assert_same_stream(source, parts)
    assert all(same(parts.source[index], parts.source[index]) for index in range(len(source)))
    again = pickle.loads(pickle.dumps((parts.source, parts.tail)))
    assert_same_stream(source, Split(again[0], (), 0, again[1]))


def test_one_part_that_cannot_be_split_leaves_a_concatenation_whole() -> None:
    """The reason is the reason of this part."""
    source = ConcatDataset([Photos(CROP), Made(lambda index: torch.rand(3))])
    parts = split(source)
    assert (parts.source is source, parts.tail) == (True, None)
    assert "Made has no `transform`" in str(parts.reason)


def shaken(rows: dict[str, Any]) -> dict[str, Any]:
    """One draw for a batch, and one for each value of two columns."""
    scale = random.random()
    pixels = [torch.tensor(row) * scale + torch.rand(()) for row in rows["image"]]
    return {"pixels": pixels, "noise": [np.random.rand(2) for _ in rows["image"]]}


@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: Subset(rows, [5, 0, 3])], ids=["whole", "subset"])
@pytest.mark.parametrize("options", [{}, {"columns": ["image"], "output_all_columns": True}], ids=["all", "columns"])
def test_a_dataset_of_hugging_face_is_cut_at_its_format(options: Any, wrap: Any) -> None:
    """Its transform runs after the cache, with one call per sample or per batch, as in the dataset."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"image": [[index, 1] for index in range(6)], "label": list(range(6))})
    source = wrap(rows.with_transform(shaken, **options))
    parts = split(source)
    assert_same_stream(source, parts)
    seed(7)
    whole, after = source.__getitems__([2, 0, 1]), states()
    seed(7)
    assert same(parts.tail.of_batch(parts.source.__getitems__([2, 0, 1])), whole)
    assert states() == after
    assert isinstance(parts.source[0]["image"], list)


def test_a_source_is_split_through_subsets() -> None:
    """The transform is found inside Subset, nested Subset and random_split; the copies keep their indices."""
    photos = Photos(v2.Compose([*HEAD_V2, v2.RandomCrop(6)]), length=20)
    part, _ = random_split(photos, [12, 8])
    nested = Subset(Subset(photos, [5, 3, 1, 7]), [2, 0])
    for source in (part, nested):
        parts = split(source)
        assert_same_stream(source, parts)
        assert type(parts.source) is Subset
        assert parts.source.indices == source.indices


class Masks(VisionDataset):
    """Segmentation: image and mask go through one joint transform."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        image = tv_tensors.Image(torch.arange(3 * 64).reshape(3, 8, 8).to(torch.uint8) + index)
        mask = tv_tensors.Mask(image[:1] > 64)
        image, mask = self.transforms(image, mask)
        return {"image": image, "mask": mask, "index": index}


def test_the_transform_inside_a_standard_transform_is_split() -> None:
    """A VisionDataset that calls `transforms` holds its transform there once more: the copy has both replaced."""
    source = Masks(None, transform=v2.Compose([*HEAD_V2, v2.RandomCrop(6)]), target_transform=v2.Resize(6))
    parts = split(source)
    assert repr(parts.tail) == "Tail(RandomCrop)"
    assert_same_stream(source, parts)
    assert [parts.source[0][name].shape[-1] for name in ("image", "mask")] == [8, 6]


DETERMINISTIC = {
    "tensors": lambda: TensorDataset(torch.arange(6.0), torch.tensor([float("nan")] * 6)),
    "photos": lambda: Photos(v2.Compose([*HEAD_V2, v2.CenterCrop(6), v2.Normalize([0.5], [0.5])])),
    "fake data": lambda: FakeData(5, (3, 8, 8), transform=v1.Compose([v1.Resize(6), v1.ToTensor()])),
    "pil": lambda: FakeData(5, (3, 8, 8)),
    "subset": lambda: Subset(Photos(), [3, 1]),
    "numpy": lambda: Made(lambda i: {"a": np.full(3, np.nan), "b": np.float32(i), "c": np.array([None, f"{i}x"])}),
    "numbers": lambda: Made(lambda i: (i, float("nan"), complex(0, float("nan")), True, None, "name", b"x", Path("x"))),
    "dtypes": lambda: Made(lambda i: [torch.ones(2, dtype=d) for d in (torch.bfloat16, torch.bool, torch.complex64)]),
    "odd tensors": lambda: Made(
        lambda i: [torch.eye(2).to_sparse(), torch.eye(2).T, torch.tensor(1j).conj(), torch.ones(0), torch.tensor(1)]
    ),
    "objects": lambda: Made(lambda i: [object(), {1, 2}, np.random.default_rng]),
    "boxes": lambda: Made(lambda i: tv_tensors.BoundingBoxes(torch.ones(1, 4), format="XYXY", canvas_size=(8, 8))),
    "gradient": lambda: Made(lambda i: nn.Parameter(torch.ones(2))),
}


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_a_deterministic_source_is_left_alone(name: str) -> None:
    """No false alarm: the user's own object comes back, with the samples that were read."""
    source = DETERMINISTIC[name]()
    parts = split(source)
    assert (parts.source is source, parts.tail, parts.cut, parts.reason) == (True, None, None, None)
    assert len(parts.samples) == min(4, len(source))


def test_a_deterministic_source_is_read_twice_per_index() -> None:
    """The probe costs two reads per probed index, spread from the first index to the last, and says so."""
    seen: list[int] = []
    parts = split(Made(lambda i: seen.append(i) or i, length=10))
    assert seen == [0, 0, 3, 3, 6, 6, 9, 9]
    assert parts.reads == 8
    assert parts.samples == parts.indices == (0, 3, 6, 9)


def test_one_sample_is_enough() -> None:
    """A dataset of length 1 is probed at its only index."""
    assert split(Photos(length=1)).reads == 2
    source = Photos(v2.RandomErasing(p=0.1), length=1)
    assert_same_stream(source, split(source))


@pytest.mark.parametrize(
    ("make", "sign"),
    [
        (lambda i: torch.rand(3), "moves the generator of torch"),
        (lambda i: (i, np.random.rand()), "moves the generator of numpy.random"),
        (lambda i: random.random(), "moves the generator of random"),
        (lambda i: (torch.rand(3), random.random()), "torch and random"),
        (lambda i: {"x": (i, OWN.random(3))}, "moves the generator of tests.source.test_random_split.OWN"),
        (lambda i: {"x": (i, next(CLOCK))}, "index 0 differ in sample['x'][1]"),
        (lambda i: {"x": [0] * next(CLOCK)}, "index 0 differ in sample['x']"),
        (lambda i: (i, np.random.default_rng().random() > 2), "moves the generator of the system"),
        (lambda i: torch.rand(3).sum() * 0, "moves the generator of torch"),
        (lambda i: torch.manual_seed(i).initial_seed(), "moves the generator of torch"),
    ],
)
def test_a_source_that_is_random_in_itself_stays_whole(make: Any, sign: str) -> None:
    """The reason names the generator or the leaf that moved, and why there is no split."""
    source = Made(make)
    parts = split(source)
    assert (parts.source is source, parts.tail) == (True, None)
    assert len(parts.samples) == 4
    assert sign in parts.reason
    assert "has no `transform`" in parts.reason


class Giving(Photos):
    """Gives what a function makes of it and an index."""

    def __init__(self, give: Any, transform: Any) -> None:
        super().__init__(transform)
        self.give = give

    def __getitem__(self, index: int) -> Any:
        return self.give(self, index)


plain = Photos.__getitem__


def with_its_sum(photos: Photos, index: int) -> Any:
    image, _ = plain(photos, index)
    return image, image.sum()


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


CROP = v2.Compose([*HEAD_V2, v2.RandomCrop(6)])


def noisy(image: torch.Tensor) -> torch.Tensor:
    return image + torch.rand(())


@pytest.mark.parametrize(
    ("give", "transform", "why"),
    [
        (lambda photos, i: (plain(photos, i), torch.rand(())), CROP, "random outside the transform (reading index 0 "),
        (lambda photos, i: (plain(photos, i), torch.rand(())), v2.Resize(6), "no step of its transform is random"),
        (lambda photos, i: plain(photos, i)[0] * 2, CROP, "does not hold what its transform returns"),
        (with_its_sum, CROP, "do not give its sample again"),
        (drawing_for_nothing, CROP, "do not give its sample again"),
        (sometimes_twice, CROP, "not called in the same way for every sample"),
        (lambda photos, i: photos.transform(image=photos.images[i]), noisy, "keyword arguments (image)"),
        (of_one_shape, CROP, "wrong shape"),
        (lambda photos, i: Noise("torch")(photos.images[i]), CROP, "no step of its transform is random"),
    ],
)
def test_what_cannot_be_split_soundly_stays_whole(give: Any, transform: Any, why: str) -> None:
    """A cut that would not reproduce the source is not made, and the reason says what stood against it."""
    source = Giving(give, transform)
    parts = split(source)
    assert (parts.source is source, parts.tail) == (True, None)
    assert why in parts.reason


def broken(index: int) -> Any:
    torch.rand(1), np.random.randn(), random.random()
    raise OSError("disk is gone")


@pytest.mark.parametrize(
    "source",
    [Photos(), Photos(CROP), Made(lambda i: (torch.rand(2), np.random.randn(), random.gauss(0, 1))), Made(broken)],
    ids=["deterministic", "split", "whole", "raises"],
)
def test_every_generator_is_put_back(source: Any) -> None:
    """All generators (NumPy's spare normal too) go on as if nothing had been read, also when the source raises."""
    seed(5)
    np.random.randn(), random.gauss(0, 1)
    before = states()
    try:
        split(source)
    except OSError as error:
        assert str(error) == "disk is gone"  # noqa: PT017
    assert states() == before


def test_the_users_objects_are_not_modified(tmp_path: Path) -> None:
    """Datasets, Subsets and transforms keep every attribute that they had."""
    transform = v2.Compose([v2.PILToTensor(), v2.RandomCrop(6)])
    folder = ImageFolder(write_photos(tmp_path), transform=transform)
    source = Subset(folder, [1, 2, 3])
    steps, joint, attributes = list(transform.transforms), folder.transforms, dict(vars(folder))
    parts = split(source)
    assert parts.tail is not None
    assert source.dataset is folder
    assert vars(folder) == attributes
    assert joint.transform is folder.transform is transform
    assert transform.transforms == steps


def test_a_reused_buffer_hides_nothing() -> None:
    """A source that overwrites and returns one buffer is still seen to be random."""
    buffer, own = np.zeros(3), np.random.default_rng(0)
    assert split(Made(lambda i: own.random(out=buffer))).reason is not None


def test_another_process_cuts_its_own_source_without_a_read() -> None:
    """A cut travels as a few numbers and keys, and gives the same two parts of an equal source."""
    views = {"make": lambda image, label: {"image": image, "label": label}}
    found = split(Photos(CROP, **views)).cut
    assert found == TransformCut(((("transform",), 2),), ((("transform",), ((0, ("image",)),)),))
    other = Photos(CROP, **views)
    source, tail = pickle.loads(pickle.dumps(found)).apply(other)
    assert other.reads == 0
    assert_same_stream(other, Split(source, (), 0, tail, found))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
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

    class Told(Dataset[Any]):
        def __getitem__(self, index: int) -> Any:
            info: Any = get_worker_info()
            return info.seed, info.id

    source = Told()
    first, second = Probe(source).read_twice(source, 1)
    assert first.sample != second.sample
    info: Any = get_worker_info()
    assert (info.id, info.seed) == (3, 7)
