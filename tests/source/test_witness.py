"""What a read depends on: data, settings and machinery, seen where they lie; digests for other processes."""

import array
import ctypes
import functools
import io
import logging
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import threading
import time
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset
from torchvision.transforms import v2

from lightning_stocache.source import reach
from lightning_stocache.source.witness import Difference, Witness, digest_of_state, same_state
from lightning_stocache.torch_internals import become_worker

LENGTH = 200
SHARED = multiprocessing.Value("i", 0)  # makes the memory from which all later ones come
Change = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No other thread counts: some libraries start one. It ends with the test, for the sake of the others."""
    monkeypatch.setattr("lightning_stocache.source.witness.are_draws_evidence", lambda: True)
    yield
    if (zarr := sys.modules.get("zarr.core.sync")) is not None:
        zarr.cleanup_resources()


class Source(Dataset[Any]):
    """Samples that depend on whatever `state` is."""

    def __init__(self, state: Any = None, length: int = LENGTH, **others: Any) -> None:
        self.state, self.length = state, length
        vars(self).update(others)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.state


@dataclass
class Row:
    path: str
    label: int


class Slotted:
    __slots__ = ("__hidden", "gain")

    def __init__(self, gain: float) -> None:
        self.gain = gain
        self.__hidden = gain

    def hide(self, gain: float) -> None:
        """Change a name that is private to the class."""
        self.__hidden = gain


class Mode(Enum):
    EASY = 1
    HARD = 2

    @property
    def gain(self) -> Any:
        return vars(self).get("boost", 0)


class Meta(type):
    level = 0


class Config(metaclass=Meta):
    """Has what its metaclass has."""


def of_other_places(index: int) -> Any:
    import a_module_of_the_user

    return a_module_of_the_user.gain, os.environ[f"WITNESS_{index}"], Mode.EASY.gain, Config.level


def labels(kind: str) -> Any:
    """A label for each sample, in one of the forms that people use."""
    zeros = [0] * LENGTH
    forms: dict[str, Callable[[], Any]] = {
        "list": lambda: zeros,
        "dict": lambda: dict(enumerate(zeros)),
        "OrderedDict": lambda: OrderedDict(enumerate(zeros)),
        "deque": lambda: deque(zeros),
        "array": lambda: np.zeros(LENGTH, dtype=np.int64),
        "a part of an array": lambda: np.zeros((LENGTH, 5))[:, 2],
        "texts": lambda: np.array(["a"] * LENGTH),
        "objects": lambda: np.array(["a"] * LENGTH, dtype=object),
        "tensor": lambda: torch.zeros(LENGTH, 2),
        "bfloat16": lambda: torch.zeros(LENGTH, dtype=torch.bfloat16),
        "a shared tensor": lambda: torch.zeros(LENGTH).share_memory_(),
        "array.array": lambda: array.array("l", zeros),
        "bytearray": lambda: bytearray(LENGTH),
        "multiprocessing.Array": lambda: multiprocessing.Array("i", LENGTH),
        "RawArray": lambda: multiprocessing.RawArray("d", LENGTH),
        "lists": lambda: [["a.png", 0] for _ in zeros],
        "dicts": lambda: [{"boxes": [[0.0, 0.0, 1.0, 1.0]], "label": 0} for _ in zeros],
        "dicts of tensors": lambda: [{"label": torch.zeros(2)} for _ in zeros],
        "objects of a class": lambda: [Row("a.png", 0) for _ in zeros],
        "tensors": lambda: [torch.zeros(2) for _ in zeros],
    }
    return forms[kind]()


def relabel(kind: str, state: Any) -> None:
    """Change two labels in place."""
    for index in (7, 150):
        if kind in ("lists",):
            state[index][1] = 1
        elif kind in ("dicts", "dicts of tensors"):
            state[index]["label"] += 1
        elif kind == "objects of a class":
            state[index].label = 1
        elif kind in ("texts", "objects"):
            state[index] = "b"
        else:
            state[index] = 1 if not isinstance(state[index], torch.Tensor) else state[index] + 1


LABELS = """list|dict|OrderedDict|deque|array|a part of an array|texts|objects|tensor|bfloat16|a shared tensor
array.array|bytearray|multiprocessing.Array|RawArray|lists|dicts|dicts of tensors|objects of a class|tensors"""


@pytest.mark.parametrize("kind", re.split(r"[|\n]", LABELS))
def test_labels_that_change_in_place_are_named_by_index(kind: str) -> None:
    """Whatever holds a label for each sample: the two samples of other labels, once, also within a Subset."""
    source = Source(labels(kind))
    subset = Subset(source, list(range(100, 200)))
    witness, inside = Witness(source), Witness(subset)
    assert witness.differences() == inside.differences() == []
    relabel(kind, source.state)
    assert [difference[1:3] for difference in witness.differences()] == [("data", (7, 150))]
    assert [difference[1:3] for difference in inside.differences()] == [("data", (50,))]
    assert witness.differences() == inside.differences() == []


@pytest.mark.parametrize("kind", ["list", "array", "tensor", "dicts", "multiprocessing.Array"])
def test_labels_that_are_replaced_are_compared_by_content(kind: str) -> None:
    """An equal object in their place is no difference; one with two other labels is compared with the old one."""
    source = Source(labels(kind))
    witness = Witness(source)
    source.state = labels(kind)
    assert witness.differences() == []
    source.state = labels(kind)
    relabel(kind, source.state)
    assert witness.differences() == [Difference("state", "data", (7, 150))]


def test_labels_by_name_are_named_by_index() -> None:
    """A dict of labels by file name has no order of its own: a list of the names says which sample each belongs to."""
    names = [f"{number}.png" for number in range(LENGTH)]
    source = Source(dict.fromkeys(reversed(names), 0), names=names)
    witness = Witness(source)
    source.state["7.png"] = 1
    assert witness.differences() == [Difference("state", "data", (7,))]


frames = pytest.importorskip("pandas")


def test_columns_of_a_frame_are_data() -> None:
    """Numbers, texts and categories; written in place, or replaced."""
    frame = frames.DataFrame({"y": np.zeros(LENGTH), "name": ["a"] * LENGTH})
    frame["kind"] = frames.Categorical(["x"] * LENGTH, categories=["x", "y"])
    witness = Witness(Source(frame))
    assert witness.differences() == []
    for column, value in (("y", 3.0), ("name", "b"), ("kind", "y")):
        frame.loc[5, column] = value
        [difference] = witness.differences()
        assert difference.path == f"state[{column!r}]"
        assert difference.kind == "data"
    frame["y"] = np.ones(LENGTH)
    assert [difference.kind for difference in witness.differences()] == ["data"]


def test_results_that_an_index_keeps_are_no_change() -> None:
    """An Index of pandas keeps what it has computed, such as its places by name; other names are a change."""
    source = Source({"columns": frames.Index(["y", "name", "kind"])})
    witness = Witness(source)
    assert source.state["columns"].get_loc("name") == 1
    assert source.state["columns"].is_unique
    assert witness.differences() == []
    source.state["columns"] = frames.Index(["y", "label", "kind"])
    [difference] = witness.differences()
    assert difference.path.startswith("state['columns']")


gain, CONFIG, TABLE = 1.0, {"size": 32}, [0] * 100


def doubled(value: float) -> float:
    return value * helper()


def helper() -> float:
    return gain + CONFIG["size"]


class Reads(Source):
    """Code that reads what lies outside of the dataset."""

    size = 32

    @functools.wraps(doubled)
    def decorated(self) -> Any:
        return TABLE

    def extra(self) -> float:
        return 0.0

    @property
    def width(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return doubled(index), self.width, self.extra(), os.environ.get("WITNESS_PART"), self.decorated()


def scaled(factor: float) -> Callable[[float], float]:
    def scale(value: float) -> float:
        return value * factor

    return scale


def cell_of(function: Any) -> Any:
    return function.__closure__[0]


def imports() -> Any:
    module: Any = types.ModuleType("a_module_of_the_user")
    module.gain = 1
    sys.modules["a_module_of_the_user"] = module
    return Source(of_other_places)


OUTSIDE: dict[str, tuple[Callable[[], Any], Change, str, str]] = {
    "a global number of a helper's helper": (Reads, lambda _: globals().update(gain=time.time()), "gain", "setting"),
    "a global of the second of two lambdas": (
        lambda: Source([lambda: CONFIG["size"], lambda: gain]),
        lambda _: globals().update(gain=time.time()),
        "gain",
        "setting",
    ),
    "a module imported in a function": (
        imports,
        lambda _: vars(sys.modules["a_module_of_the_user"]).update(gain=time.time()),
        "a_module_of_the_user.gain",
        "setting",
    ),
    "a name made of parts": (imports, lambda _: os.environ.update(WITNESS_PART="3"), "environ.WITNESS_PART", "setting"),
    "an attribute of an enum": (imports, lambda _: vars(Mode.EASY).update(boost=time.time()), "EASY.boost", "setting"),
    "an attribute of a metaclass": (imports, lambda _: setattr(Meta, "level", time.time()), "Meta.level", "setting"),
    "a global dict": (Reads, lambda _: CONFIG.update(size=CONFIG["size"] + 1), "CONFIG['size']", "setting"),
    "a global list": (Reads, lambda _: TABLE.__setitem__(3, TABLE[3] + 1), "TABLE", "data"),
    "a class attribute": (Reads, lambda _: setattr(Reads, "size", Reads.size + 1), "Reads.size", "setting"),
    "the environment": (Reads, lambda _: os.environ.update(WITNESS_PART=str(time.time())), "environ", "setting"),
    "a method of a class": (
        lambda: Reads(),
        lambda _: setattr(Reads, "extra", lambda self: time.time()),
        "Reads.extra",
        "setting",
    ),
    "a closure": (
        lambda: Source(scaled(2.0)),
        lambda s: setattr(cell_of(s.state), "cell_contents", 3.0),
        "factor",
        "setting",
    ),
    "a default": (
        lambda: Source(lambda value, table=[0] * 99: table),
        lambda s: s.state.__defaults__[0].append(1) or s.state.__defaults__[0].__setitem__(0, 1),
        "default 0",
        "data",
    ),
    "a partial": (
        lambda: Source(functools.partial(doubled, scale={"by": 1})),
        lambda s: s.state.keywords["scale"].update(by=2),
        "keywords['scale']['by']",
        "setting",
    ),
    "a bound method": (
        lambda: Source(Row("a", 0).__init__),  # type: ignore[misc]
        lambda s: setattr(s.state.__self__, "label", 4),
        "__self__.label",
        "setting",
    ),
    "an object in an object": (
        lambda: Source(types.SimpleNamespace(inner=types.SimpleNamespace(gain=1))),
        lambda s: setattr(s.state.inner, "gain", 2),
        "state.inner.gain",
        "setting",
    ),
    "a slot": (lambda: Source(Slotted(1.0)), lambda s: setattr(s.state, "gain", 2.0), "state.gain", "setting"),
    "a private slot": (lambda: Source(Slotted(1.0)), lambda s: s.state.hide(2.0), "__hidden", "setting"),
    "an enum": (lambda: Source(Mode.EASY), lambda s: setattr(s, "state", Mode.HARD), "state", "setting"),
    "a path": (lambda: Source(Path("a")), lambda s: setattr(s, "state", Path("b")), "state", "setting"),
    "a Value": (
        lambda: Source(multiprocessing.Value("i", 0)),
        lambda s: setattr(s.state, "value", 5),
        "state",
        "setting",
    ),
    "a RawValue": (
        lambda: Source(multiprocessing.RawValue(ctypes.c_double, 0)),
        lambda s: setattr(s.state, "value", 5),
        "state",
        "setting",
    ),
    "a tensor of one number": (lambda: Source(torch.zeros(())), lambda s: s.state.fill_(2), "state", "setting"),
    "a network": (lambda: Source(torch.nn.Linear(2, 2)), lambda s: s.state.weight.data.fill_(1), "tensors", "setting"),
    "a step of a network": (
        lambda: Source(torch.nn.Sequential(torch.nn.ReLU())),
        lambda s: s.state.__setitem__(0, torch.nn.Tanh()),
        "state.0",
        "setting",
    ),
    "a function": (lambda: Source(doubled), lambda s: setattr(s, "state", helper), "state", "setting"),
    "a set": (lambda: Source(set(range(99))), lambda s: s.state.discard(3), "state", "data"),
    "a table of another length": (lambda: Source([0.5] * 99), lambda s: s.state.__setitem__(4, 1.0), "state", "data"),
    "a tree": (
        lambda: Source({k: {"x": [k]} for k in range(99)}),
        lambda s: s.state[4]["x"].__setitem__(0, -1),
        "state",
        "data",
    ),
    "parts of a ConcatDataset": (
        lambda: ConcatDataset([Source(0, 5), Source([0] * LENGTH)]),
        lambda c: c.datasets[1].state.__setitem__(7, 1),
        "datasets[1].state",
        "data",
    ),
    "a TensorDataset": (
        lambda: TensorDataset(torch.zeros(LENGTH, 3), torch.zeros(LENGTH)),
        lambda s: s.tensors[1].__setitem__(9, 1),
        "tensors[1]",
        "data",
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_state_is_seen_wherever_the_code_reaches_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, with a path that names it, and of the kind that says what follows."""
    make, change, path, kind = OUTSIDE[name]
    monkeypatch.setenv("WITNESS_PART", "0")
    source = make()
    witness = Witness(source)
    assert witness.differences() == []
    change(source)
    differences = witness.differences()
    assert {difference.kind for difference in differences} == {kind}
    assert path in differences[0].path
    assert witness.differences() == []


class Harmless(Source):
    """Reads that move what decides no sample."""

    def __init__(self, **others: Any) -> None:
        super().__init__(torch.zeros(LENGTH), **others)
        self.calls, self.memo, self.file = 0, dict[int, int](), None
        self.losses, self.failed = deque[float](maxlen=80), list[int]()
        self.weights = np.ones(LENGTH)

    @functools.cache  # noqa: B019
    def squared(self, index: int) -> int:
        return index * index

    def sampler(self) -> Any:
        """Draw by the weights."""
        return torch.utils.data.WeightedRandomSampler(list(self.weights), LENGTH)

    def set_epoch(self, epoch: int) -> None:
        """Note an epoch that no sample depends on."""
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        self.memo[index] = index
        return self.state[index], self.squared(index)


class Opens(Harmless):
    """Opens what it reads when it reads first."""

    def __init__(self, opener: Callable[[], Any]) -> None:
        super().__init__()
        self.opener, self.handle = opener, None

    def __getitem__(self, index: int) -> Any:
        if self.handle is None:
            self.handle = self.opener()
        return super().__getitem__(index)


class Module(LightningDataModule):
    """A DataModule whose method transforms samples."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.seen, self.metrics = 0.5, 0, {}

    def changed(self, value: Any) -> Any:
        return value - self.mean


def read_all(source: Any) -> None:
    for index in range(0, LENGTH, 3):
        source[index]


def of_module() -> Any:
    module = Module()
    source = Source(torch.zeros(LENGTH), transform=module.changed, owner=lambda: module)
    return source, lambda: (
        setattr(module, "seen", 4),
        module.metrics.update(loss=1.0),
        setattr(module, "trainer", None),
    )


def of_library(name: str, make: Callable[[Any], tuple[Any, Callable[[], Any]]]) -> Callable[[], Any]:
    return lambda: make(pytest.importorskip(name))


def in_datasets(datasets: Any) -> Any:
    table = datasets.Dataset.from_dict({"x": list(range(LENGTH)), "y": ["a"] * LENGTH})
    return Source(table.with_format("torch")), lambda: [table[index] for index in range(0, LENGTH, 5)]


def in_hydra(omegaconf: Any) -> Any:
    config = omegaconf.OmegaConf.create({"data": {"size": 32, "path": "${oc.env:HOME}"}, "names": ["a", "b"]})
    return Source(torch.zeros(LENGTH), config=config), lambda: (config.data.path, config.names[1])


def with_model(transformers: Any) -> Any:
    config = transformers.BertConfig()
    return Source(torch.zeros(LENGTH), config=config), lambda: setattr(config, "use_cache", False)


def with_tokenizer(tokenizers: Any) -> Any:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    return Source(torch.zeros(LENGTH), tokenizer=words), lambda: words.encode("a b")


def with_progress(tqdm: Any) -> Any:
    bar = tqdm.tqdm(total=9, file=io.StringIO())
    return Source(torch.zeros(LENGTH), bar=bar, log=logging.getLogger("witness")), lambda: bar.update(3)


def plain(after: Callable[[Any], Any] = lambda source: None, **others: Any) -> Callable[[], Any]:
    def make() -> Any:
        source = Harmless(**others)
        return source, lambda: after(source)

    return make


def opens(opener: Callable[[], Any]) -> Callable[[], Any]:
    def make() -> Any:
        source = Opens(opener)
        return source, lambda: source[0]

    return make


def of_h5py(h5py: Any) -> Any:
    return opens(lambda: h5py.File("witness", "w", driver="core", backing_store=False))()


def of_zarr(zarr: Any) -> Any:
    return opens(lambda: zarr.zeros((4, 4)))()


HARMLESS: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "counter, memo, lru_cache": (plain(), set()),
    "late file": (opens(io.BytesIO), set()),
    "late h5py": (of_library("h5py", of_h5py), set()),
    "late zarr": (of_library("zarr", of_zarr), {"handle"}),
    "a generator that is seeded": (plain(lambda s: setattr(s, "rng", np.random.default_rng(1)), rng=None), {"rng"}),
    "a method of a DataModule": (of_module, set()),
    "logger and bar": (of_library("tqdm", with_progress), set()),
    "tokenizer": (of_library("tokenizers", with_tokenizer), set()),
    "rank, time and run directory": (
        plain(rank=1, time=time.time(), run=Path("runs/7"), device=torch.device("cpu")),
        set(),
    ),
    "a Hydra config": (
        of_library("omegaconf", in_hydra),
        {"_flags_cache"},
    ),
    "set_epoch that is ignored": (plain(lambda s: s.set_epoch(3), epoch=0), {"epoch"}),
    "weights for the sampler": (plain(lambda s: s.weights.__setitem__(slice(9), 2.0)), {"weights"}),
    "failed files": (plain(lambda s: s.failed.extend(range(99))), {"failed"}),
    "a ring of losses": (plain(lambda s: s.losses.extend([time.time()] * 99)), {"losses"}),
    "a Hugging Face dataset": (of_library("datasets", in_datasets), set()),
    "the model's config": (of_library("transformers", with_model), {"use_cache"}),
    "a lock and a thread": (
        plain(lambda s: s.lock.acquire(blocking=False), lock=threading.Lock(), thread=threading.Thread()),
        set(),
    ),
}


@pytest.mark.processes  # some libraries start one when they are imported
@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_sources_have_no_other_data(name: str) -> None:
    """What their reads move is machinery; a setting that no sample depends on is left to the samples."""
    make, settings = HARMLESS[name]
    source, use = make()
    witness = Witness(source)
    with witness.learning():
        read_all(source)
    for _ in range(3):
        use()
        read_all(source)
        differences = witness.differences()
        assert {d.path.rpartition(".")[2] for d in differences if d.kind != "machinery"} <= settings
        assert not [d for d in differences if d.kind == "data"]
        assert witness.look() in {None, *settings} | ({"rng"} if "rng" in vars(source) else set())


# ---- before each batch ----


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
        if self.mode == "small" or (self.crop, self.files, self.size) is None:
            return self.pixels[index] * self.strength
        return self.transform(self.pixels[index])

    def set_epoch(self, epoch: int) -> None:
        """Note an epoch that no sample depends on."""
        self.epoch = epoch

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"handle": None}


CHANGES: dict[str, tuple[Callable[[Images], Any], str | None]] = {
    "a number": (lambda images: setattr(images, "strength", 2.0), "strength"),
    "what was the class's": (lambda images: setattr(images, "size", 64), "size"),
    "a new name": (lambda images: setattr(images, "memo", 3), "memo"),
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
    # left to the samples: a number that no code of a read names
    "an epoch that is ignored": (lambda images: images.set_epoch(3), None),
}


@pytest.mark.parametrize(("change", "path"), CHANGES.values(), ids=CHANGES)
def test_changes_are_seen_where_they_are(change: Callable[[Images], Any], path: str | None) -> None:
    """Of the source, of its transform down to its steps, and of a source inside another; for good."""
    images = Images()
    states = Witness(images), Witness(Subset(images, [1, 2])), Witness(ConcatDataset([images]))
    assert [state.look() for state in states] == [None] * 3
    change(images)
    for _ in range(2):
        assert states[0].look() == path
        if path is not None:
            assert [state.look() for state in states[1:]] == [f"dataset.{path}", f"datasets[0].{path}"]
    assert states[0].doubtful == ({"epoch"} if hasattr(images, "epoch") else set())


def test_what_reading_moves_is_no_change() -> None:
    """What moved in a read may move from then on, as may attributes of steps after the cache, and nothing else."""
    images = Images()
    steps = images.transform.transforms
    state = Witness(images)
    with state:
        images[0]
    assert state.look() is None
    images[1]  # the user's own read, which nobody announces
    assert state.look() is None
    images.strength = 2
    assert state.look() == "strength"
    with_tail = Witness(images, tail=[steps[1]])
    steps[1].factor = 7
    assert with_tail.look() is None
    steps[1] = Scale(8)
    assert with_tail.look() == "transform.transforms[1]"


def test_beside_a_thread_what_reads_set_is_left_to_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread may have set it. What no read sets is a change."""
    monkeypatch.setattr("lightning_stocache.source.witness.are_draws_evidence", lambda: False)
    images = Images()
    state = Witness(images)
    images.reads = 5
    assert state.look() is None
    assert state.take_doubtful() == {"reads"}
    images.strength = 2
    assert state.look() == "strength"


def test_a_copy_is_compared_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees its own changes, and those that were there; a name that worker_init_fn adds to a copy is none."""
    source = Images()
    source.handle = open(__file__)  # noqa: SIM115  cannot be pickled
    with source.handle:
        sent, state = pickle.loads(pickle.dumps((source, Witness(source))))
        assert state.look() is None
        sent.strength = 3
        assert state.look() == "strength"
        images, state = pickle.loads(pickle.dumps((source, Witness(source))))
        late = Witness(source)
        source.strength = 4
        assert pickle.loads(pickle.dumps((source, late)))[1].look() == "strength"
    monkeypatch.setattr("torch.utils.data._utils.worker._worker_info", None)
    become_worker(3, 5, 7, None)
    images.worker_id = 3
    assert state.look() is None
    images.strength = 8
    assert state.look() == "strength"


# ---- for other processes and jobs ----


class Files(Dataset[Any]):
    def __init__(self, files: Any, rank: int = 0) -> None:
        self.files, self.rank, self.path = files, rank, f"/tmp/{rank}"

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        return self.files[index]


def framed(value: float) -> torch.Tensor:
    """Images with a black frame, whose middle has this value."""
    images = torch.zeros(40, 1, 28, 28)
    images[:, :, 8:20, 8:20] = value
    return images


def digests_of(source: Any) -> dict[str, str]:
    """The digests of a source's data and of its settings, as ranks and jobs compare them."""
    sums = Witness(source).sums()
    return {kind: digest_of_state(sums, kind) for kind in ("data", "setting")}  # type: ignore[arg-type]


def test_other_data_has_another_digest() -> None:
    """Subsets, lists of files, tensors and arrays, inside other datasets too. What ranks have of their own is none."""
    for left, right in (
        (Subset(range(10), range(0, 10, 2)), Subset(range(10), range(1, 10, 2))),
        (Files(["a", "b"]), Files(["a", "c"])),
        (Files(torch.arange(3)), Files(torch.arange(3) + 1)),
        (Files(np.arange(40).reshape(2, 20).T), Files(np.arange(1, 41).reshape(2, 20).T)),
        (Files(framed(1.0)), Files(framed(1.00001))),
        (Subset(Subset(Files(["a", "b"]), [0]), [0]), Subset(Subset(Files(["a", "c"]), [0]), [0])),
        (ConcatDataset([Files(["a"])]), ConcatDataset([Files(["b"])])),
        ([1, 2], (1, 2)),
    ):
        assert digests_of(left) == digests_of(left) != digests_of(right)
    ours, theirs = (digests_of(Files(["a"] * 9, rank=rank)) for rank in (0, 1))
    assert ours["data"] == theirs["data"]
    assert ours["setting"] != theirs["setting"]
    assert digests_of(Files([0] * 99))["data"] != digests_of(Files([0] * 50 + [1] + [0] * 48))["data"]


def _labels(value: int) -> Any:
    """Labels that differ at three of 200 places."""
    labels = np.arange(LENGTH)
    labels[[20, 101, 150]] += value
    return labels


def _mapped(value: int, path: Path) -> Any:
    np.save(path / f"{value}.npy", _labels(value))
    return np.load(path / f"{value}.npy", mmap_mode="r")


def _in_hdf5(value: int, path: Path) -> Any:
    h5py = pytest.importorskip("h5py")
    if not (path / f"{value}.h5").exists():
        with h5py.File(path / f"{value}.h5", "w") as file:
            file["y"] = _labels(value)
    return h5py.File(path / f"{value}.h5", "r")["y"]


def _shared(value: int) -> Any:
    memory = SharedMemory(create=True, size=LENGTH)
    memory.buf[:] = bytes(_labels(value).astype(np.uint8))
    memory.unlink()
    return memory


def _with_buffer(value: int) -> torch.nn.Module:
    module = torch.nn.Module()
    module.register_buffer("labels", torch.tensor(_labels(value)).repeat(3))
    return module


def _nested(value: int, layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.full((2,), float(label)) for label in _labels(value)], layout=layout)


HELD: dict[str, Callable[[int, Path], Any]] = {
    "a table": lambda value, path: pytest.importorskip("pyarrow").table({"y": _labels(value)}),
    "a column in a list": lambda value, path: [pytest.importorskip("pyarrow").array(_labels(value))],
    "the index of a frame": lambda value, path: frames.DataFrame({"y": np.arange(LENGTH)}, index=_labels(value)),
    "the columns of a frame": lambda value, path: frames.DataFrame({f"y{value}": np.arange(LENGTH)}),
    "notes of a frame": lambda value, path: _noted_frame(value),
    "boxes in a frame": lambda value, path: frames.DataFrame({"y": [np.array([y]) for y in _labels(value)]}),
    "a mask": lambda value, path: np.ma.MaskedArray(np.arange(LENGTH), _labels(value) != np.arange(LENGTH)),
    "a file map": _mapped,
    "a part of a file map": lambda value, path: np.asarray(_mapped(value, path))[5:],
    "a file of h5py": _in_hdf5,
    "a nested tensor": lambda value, path: _nested(value, torch.strided),
    "a jagged tensor": lambda value, path: _nested(value, torch.jagged),
    "a sparse tensor": lambda value, path: torch.diag(torch.tensor(_labels(value)) + 1).to_sparse(),
    "a quantised tensor": lambda value, path: torch.quantize_per_tensor(
        torch.tensor(_labels(value)).float(), 1.0, 0, torch.qint32
    ),
    "a scale": lambda value, path: torch.quantize_per_tensor(torch.ones(LENGTH), 1.0 + value, 0, torch.qint8),
    "a buffer": lambda value, path: _with_buffer(value),
    "shared memory": lambda value, path: _shared(value),
    "a view of memory": lambda value, path: memoryview(bytes(_labels(value).astype(np.uint8))),
}


def _noted_frame(value: int) -> Any:
    frame = frames.DataFrame({"y": np.arange(LENGTH)})
    frame.attrs["offset"] = value
    return frame


@pytest.mark.processes  # shared memory has a process that removes it
@pytest.mark.filterwarnings("ignore:.*nested tensors|.*quantize:UserWarning")
@pytest.mark.parametrize("name", HELD)
def test_whatever_holds_data_has_a_digest_of_its_content(name: str, tmp_path: Path) -> None:
    """The same for the same content, in the object itself and in one that takes its place; another one otherwise."""
    make = HELD[name]
    same, equal, other = (Source(make(value, tmp_path)) for value in (0, 0, 9))
    witness = Witness(same)
    assert digests_of(same) == digests_of(equal) != digests_of(other)
    same.state = equal.state
    assert [difference for difference in witness.differences() if difference.kind != "machinery"] == []
    same.state = other.state
    assert witness.differences()


IN_PLACE: dict[str, tuple[Callable[[], Any], Change]] = {
    "an index": (lambda: _noted_frame(0), lambda frame: setattr(frame, "index", frame.index[::-1])),
    "a new column": (lambda: _noted_frame(0), lambda frame: frame.insert(1, "z", np.zeros(LENGTH))),
    "notes": (lambda: _noted_frame(0), lambda frame: frame.attrs.update(offset=3)),
    "a box": (lambda: HELD["boxes in a frame"](0, Path()), lambda frame: frame["y"].iloc[5].__setitem__(0, -1)),
    "a mask": (lambda: np.ma.MaskedArray(np.zeros(LENGTH), np.zeros(LENGTH, bool)), lambda a: a.mask.__setitem__(5, 1)),
    "a nested tensor": (lambda: _nested(0, torch.strided), lambda tensor: tensor[5].fill_(-1)),
    "a sparse tensor": (lambda: torch.eye(LENGTH).to_sparse(), lambda tensor: tensor.values().__setitem__(5, 7)),
    "a buffer": (lambda: _with_buffer(0), lambda module: module.labels.data.__setitem__(300, -1)),
    "shared memory": (lambda: _shared(0), lambda memory: memory.buf.__setitem__(5, 77)),
    "a view": (lambda: memoryview(bytearray(LENGTH)), lambda view: view.__setitem__(5, 7)),
}


@pytest.mark.processes  # shared memory has a process that removes it
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_written_in_place_is_seen(name: str) -> None:
    """In frames, masks, tensors of other layouts, buffers and shared memory."""
    make, change = IN_PLACE[name]
    source = Source(make())
    witness = Witness(source)
    assert witness.differences() == []
    change(source.state)
    assert witness.differences()
    assert witness.differences() == []


def test_a_source_that_grew_has_the_state_that_it_had() -> None:
    """Without the items that are new, and whatever says how long it is; other labels before them are another state."""
    short = Source(list(range(100)), 100, array=np.arange(100), pairs=[[k, "a"] for k in range(100)])
    known = Witness(short).sums()
    for start, same in ((0, True), (1, False)):
        states = [start, *range(1, 120)], np.arange(120), [[k, "a"] for k in range(120)]
        grown = Source(states[0], 120, array=states[1], pairs=states[2])
        assert same_state(known, Witness(grown).sums(100)) is same


def digest_in_a_job(part: str) -> Any:
    """The digest of a source with sets, functions, a frame and a network, as another job has it."""
    torch.manual_seed(0)
    state = {"names": {f"name {k}" for k in range(50)}, "kinds": frozenset("abc"), "by": scaled(2.0)}
    frame = frames.DataFrame({"y": np.arange(LENGTH), "name": [f"file {k}" for k in range(LENGTH)]})
    trees = [{"tags": {f"tag {j}" for j in range(9)}, "k": k} for k in range(LENGTH)]
    source = Source(state, frame=frame, net=torch.nn.Linear(2, 2), trees=trees, part=part)
    return tuple(digests_of(source).values())


@pytest.mark.processes
def test_a_digest_is_the_same_in_another_job() -> None:
    """Where strings have other hashes, so that sets have another order; not with another setting."""
    code = f"from {__name__} import digest_in_a_job as digest; print(*digest('a'))"
    jobs = []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        job = subprocess.run(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, check=True, text=True
        )
        jobs.append(job.stdout.split())
    assert jobs[0] == jobs[1] == list(digest_in_a_job("a"))
    data, settings = digest_in_a_job("b")
    assert data == jobs[0][0]
    assert settings != jobs[0][1]


# ---- of what reads move, and of bounds ----


def test_what_a_read_moves_hides_nothing_beside_it() -> None:
    """A counter in a dict is learned by its key, and can be told to the witness of another process."""
    source = Source({"calls": 0, "epoch": 0, "history": [0] * 99})
    witness, other = Witness(source), Witness(source)
    with witness.learning():
        source.state["calls"] += 1
    assert witness.machinery == {"state['calls']"}
    other.learn(witness.machinery)
    source.state.update(calls=2, epoch=1)
    for each in (witness, other):
        kinds = {difference.path: difference.kind for difference in each.differences()}
        assert kinds == {"state['calls']": "machinery", "state['epoch']": "setting"}


# ---- of what reads fill ----


class Lazy(Source):
    """Its first read makes what samples depend on."""

    labels: Any = None

    def __init__(self, fill: Callable[[Any, int], Any]) -> None:
        super().__init__()
        self.fill, self.memo, self.config = fill, dict[int, Any](), dict[str, int]()

    @functools.cached_property
    def made(self) -> Any:
        """Labels that are made when they are asked for."""
        return np.zeros(LENGTH)

    def __getitem__(self, index: int) -> Any:
        return self.fill(self, index)


def fill_array(source: Any, index: int) -> Any:
    if source.labels is None:
        source.labels = np.zeros(LENGTH)
    return source.labels[index]


def fill_list(source: Any, index: int) -> Any:
    if not hasattr(source, "late"):
        source.late = [0] * LENGTH
    return source.late[index]


def fill_object(source: Any, index: int) -> Any:
    if source.labels is None:
        source.labels = Slotted(1.0)
    return source.labels.gain


FILLS: dict[str, tuple[Callable[[Any, int], Any], Change, tuple[int, ...] | None]] = {
    "an array": (fill_array, lambda s: s.labels.__setitem__(7, 1), (7,)),
    "another array": (fill_array, lambda s: setattr(s, "labels", np.arange(LENGTH) // 198.0), (198, 199)),
    "a list": (fill_list, lambda s: s.late.__setitem__(7, 1), (7,)),
    "an object": (fill_object, lambda s: setattr(s.labels, "gain", 2.0), None),
    "a cached property": (lambda s, index: s.made[index], lambda s: s.made.__setitem__(7, 1), (7,)),
    "a key": (
        lambda s, index: s.config.setdefault("offset", 0),
        lambda s: s.config.update(offset=1),
        None,
    ),
    "a memo": (lambda s, index: s.memo.setdefault(index, index), lambda s: s.memo.update({0: -1}), None),
}


@pytest.mark.parametrize("name", FILLS)
def test_what_reads_fill_is_compared_from_then_on(name: str) -> None:
    """Filling it is no change, in the process that learned it or in another; a change of it is left to samples."""
    fill, change, indices = FILLS[name]
    source = Lazy(fill)
    witness = Witness(source)
    with witness.learning():
        source[0]
    there = Lazy(fill)
    other = Witness(there)
    other.learn(witness.machinery)
    for index in range(0, LENGTH, 9):
        source[index], there[index]
    assert {difference.kind for each in (witness, other) for difference in each.differences()} <= {"machinery"}
    for each, changed in ((witness, source), (other, there)):
        change(changed)
        found = each.differences()
        assert {(difference.kind, difference.is_filled) for difference in found} == {("setting", True)}
        assert indices in {difference.indices for difference in found}


@pytest.mark.parametrize(
    ("make", "move", "change", "path"),
    [
        (lambda: [0, 0], lambda s, k: s.__setitem__(0, s[0] + 1), lambda s: s.__setitem__(1, 5), "state[1]"),
        (lambda: np.zeros(2), lambda s, k: s.__setitem__(0, s[0] + 1), lambda s: s.__setitem__(1, 5), "state[1]"),
        (
            lambda: np.zeros((LENGTH, 3)),
            lambda s, k: s.__setitem__((k, 1), s[k, 1] + 1),
            lambda s: s.__setitem__((4, 2), 5),
            "state[:, 2]",
        ),
        (
            lambda: torch.zeros(LENGTH, 2),
            lambda s, k: s.__setitem__((k, 0), s[k, 0] + 1),
            lambda s: s.__setitem__((4, 1), 5),
            "state[:, 1]",
        ),
    ],
)
def test_a_counter_hides_no_data_in_the_same_container(make: Any, move: Any, change: Any, path: str) -> None:
    """What reads move is learned by item, or by column of a table with a row for each sample."""
    source = Source(make())
    witness = Witness(source)
    with witness.learning():
        for index in range(4):
            move(source.state, index)
    move(source.state, 9)
    assert {difference.kind for difference in witness.differences()} == {"machinery"}
    move(source.state, 8)
    change(source.state)
    assert [difference.path for difference in witness.differences() if difference.kind != "machinery"] == [path]


class Reader:
    """The user's own, with a method to close it."""

    def __init__(self, gain: float) -> None:
        self.gain = gain

    def close(self) -> None:
        """Close nothing."""


def picture(value: int) -> Any:
    return pytest.importorskip("PIL.Image").new("L", (3, 3), value)


@pytest.mark.parametrize(
    ("make", "change", "path"),
    [
        (lambda: Reader(1), lambda s: setattr(s, "state", Reader(2)), "state.gain"),
        (lambda: Reader(1), lambda s: setattr(s.state, "gain", 2), "state.gain"),
        (lambda: None, lambda s: setattr(s, "state", Reader(2)), "state"),
        (lambda: picture(1), lambda s: setattr(s, "state", picture(2)), "state"),
        (lambda: picture(1), lambda s: s.state.paste(7, (0, 0, 2, 2)), "state"),
        (lambda: None, lambda s: setattr(s, "state", np.random.default_rng(1)), "state"),
    ],
)
def test_what_can_be_closed_may_hold_content(make: Any, change: Change, path: str) -> None:
    """An object of the user's class, an image, and a generator where there was none are no handles."""
    source = Source(make())
    witness = Witness(source)
    assert witness.differences() == []
    change(source)
    assert [(difference.path, difference.kind) for difference in witness.differences()] == [(path, "setting")]


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (dict, lambda state: state.update({5: -1, 23: -1})),
        (set, lambda state: state.update((5, 23))),
        (lambda: {5: 0, 99: 0}, lambda state: state.update({5: -1, 23: -1})),
        (lambda: set(range(100, 180)), lambda state: state.update((5, 23))),
    ],
)
def test_keys_that_are_indices_name_samples(make: Any, change: Change) -> None:
    """Samples at the changed keys are read besides others."""
    source = Source(make())
    witness = Witness(source)
    change(source.state)
    found = witness.differences()
    assert {5, 23} in [set(difference.indices or ()) for difference in found]
    assert None in [difference.indices for difference in found]


@pytest.mark.parametrize(("old", "new"), [(1, True), (1, 1.0), (0.0, -0.0)])
@pytest.mark.parametrize("make", [lambda value: {"k": value}, lambda value: [value] * 9, lambda value: (value, "a")])
def test_equal_numbers_of_another_class_or_sign_are_others(old: Any, new: Any, make: Any) -> None:
    """Samples would be of another class or sign."""
    source = Source(make(old))
    witness = Witness(source)
    source.state = make(new)
    assert {difference.kind for difference in witness.differences()} == {"setting"}


class ByProgress(Source):
    """Samples that depend on how far the training is."""

    def __getitem__(self, index: int) -> Any:
        return self.state.current_epoch + self.state.global_step


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("of_model", [False, True])
def test_the_progress_of_a_trainer_counts_where_code_names_it(is_late: bool, of_model: bool) -> None:
    """Nothing else of a Trainer does, and nothing where no code names it."""
    trainer = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu")
    state: Any = trainer
    if of_model:
        state = LightningModule()
        state.trainer = trainer
    source, ignorant = ByProgress(None if is_late else state), Source(state)
    witness, other = Witness(source), Witness(ignorant)
    source.state = state
    witness.differences()
    assert [each.differences() for each in (witness, other)] == [[], []]
    trainer.fit_loop.epoch_progress.current.completed += 1
    assert witness.differences() == [Difference("state.current_epoch", "setting")]
    assert other.differences() == []


def test_what_moves_beside_other_threads_is_doubtful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until samples were the same: by a read of this thread or by another one, an attribute or an item of it."""
    source = Source({"calls": 0}, count=0)
    witness = Witness(source)
    monkeypatch.setattr("lightning_stocache.source.witness.are_draws_evidence", lambda: False)
    with witness.learning(), witness:
        source.state["calls"] += 1
        source.count += 1
    assert witness.machinery == set()
    doubtful = witness.take_doubtful()
    assert doubtful == {"state['calls']", "count"}
    assert (witness.doubtful, witness.look()) == (set(), None)
    witness.excuse(doubtful)
    source.count += 1
    source.state["calls"] += 1
    assert {difference.kind for difference in witness.differences()} == {"machinery"}
    begun, ended = threading.Event(), threading.Event()

    def read() -> None:
        with witness:
            begun.set()
            ended.wait()

    reader = threading.Thread(target=read)
    reader.start()
    begun.wait()
    source.state = "b"
    assert witness.look() is None
    ended.set()
    reader.join()
    assert witness.take_doubtful() == {"state"}


def test_a_copy_knows_what_had_changed_before_it_was_sent() -> None:
    """It arrives as it is now, and is compared with what the witness of the original had seen."""
    source = Source([0] * LENGTH)
    witness = Witness(source)
    source.state[5] = 1
    sent = pickle.loads(pickle.dumps(witness))
    for each in (sent, witness):
        assert each.differences() == [Difference("state", "data", (5,))]
        assert each.differences() == []


def test_a_change_before_a_read_is_not_taken_for_its_trace() -> None:
    """Learning what reads move loses nothing that had changed before."""
    source = Source([0] * LENGTH)
    witness = Witness(source)
    source.state[5] = 1
    with witness.learning():
        source.reads = 1
    assert witness.differences() == [Difference("state", "data", (5,))]


def test_bounds_are_bytes_and_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond them, checksums of pages and spread items are compared."""
    monkeypatch.setattr(reach, "COPIED_BYTES", 1 << 16)
    large = Source(np.zeros(1 << 20, dtype=np.uint8))
    rows = Source([{"label": k, "text": "a" * 20} for k in range(5_000)], 5_000)
    many = Source([object() for _ in range(9)] + [Row(str(k), k) for k in range(8_000)], 8_009)
    witnesses = list(map(Witness, (large, rows, many)))
    large.state[:] = 1
    for row in rows.state:
        row["label"] += 1
    for row in many.state[9:]:
        row.label += 1
    assert [{d.kind for d in witness.differences()} for witness in witnesses] == [{"data"}] * 3


class Peer:
    """One of many objects that know each other."""

    peers: list[Any]


def test_objects_that_know_each_other_are_looked_at_once() -> None:
    """From each of a hundred lead a hundred ways to the others, and from these as many again."""
    peers = [Peer() for _ in range(100)]
    for peer in peers:
        peer.peers = peers
    witness = Witness(Source(peers))
    assert not witness.differences()


def test_a_class_whose_module_is_no_text_is_seen() -> None:
    """SWIG's classes have a descriptor there."""
    kind = type("Odd", (), {"__module__": property(str)})
    source = Source(kind())
    source.state.level = 1
    witness = Witness(source)
    source.state.level = 2
    assert [difference.path for difference in witness.differences()] == ["state.level"]


class Proxy:
    """Loads what it stands for when any attribute is asked for."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"somebody asked for {name}")


def test_no_attribute_of_a_users_object_is_asked_for() -> None:
    """A proxy would load what it stands for."""
    source = Source({"late": Proxy()}, late=[Proxy() for _ in range(100)])
    witness = Witness(source)
    source.state["late"] = Proxy()
    assert {difference.kind for difference in witness.differences()} <= {"data", "setting"}
    assert witness.look() is None
    witness.sums()


def test_an_equal_table_of_a_library_is_no_other_data() -> None:
    """Arrow tells by content, `datasets` by its fingerprint; another table is data."""
    arrow = pytest.importorskip("pyarrow")
    source = Source(arrow.table({"x": list(range(LENGTH))}))
    witness = Witness(source)
    source.state = arrow.table({"x": list(range(LENGTH))})
    assert witness.differences() == []
    source.state = arrow.table({"x": [1] * LENGTH})
    assert witness.differences() == [Difference("state", "data")]
