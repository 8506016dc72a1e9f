"""What changes where no attribute shows it is seen by reading again, and served by no process from then on."""

import copy
import logging
import multiprocessing
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate, get_worker_info
from torchvision.transforms import v2

from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from tests.cache.leaves import same
from tests.loading.twins import copied, looked, totals
from tests.sources import CountedFiles, Made

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("seeded")]

LENGTH = 40
GLOBAL = [0]
FIRST_VALUE = multiprocessing.Value("i", 0)  # the memory of values stays for good


class Stateful(Dataset[Any]):
    """Samples that depend on a state in one of many places; no attribute becomes another object when it changes."""

    def __init__(self, place: str, folder: Path) -> None:
        self.place, self.file = place, folder / "state"
        GLOBAL[0] = 0
        self.file.write_text("0")
        states: dict[str, Callable[[], Any]] = {
            "value": lambda: multiprocessing.Value("i", 0),
            "shared array": lambda: multiprocessing.Array("i", LENGTH),
            "shared tensor": lambda: torch.zeros(LENGTH, dtype=torch.int64).share_memory_(),
            "array": lambda: np.zeros(LENGTH, dtype=np.int64),
            "list": lambda: [0] * LENGTH,
            "dict": lambda: {"deep": {"label": 0}},
            "object": lambda: SimpleNamespace(label=0),
            "bytes": lambda: bytearray(LENGTH),
        }
        self.state = states.get(place, lambda: None)()
        self.transform: Any = None

    def __len__(self) -> int:
        return LENGTH

    def set(self, label: int) -> None:
        if self.place == "value":
            self.state.value = label
        elif self.place == "object":
            self.state.label = label
        elif self.place == "dict":
            self.state["deep"]["label"] = label
        elif self.place == "global":
            GLOBAL[0] = label
        elif self.place == "file":
            self.file.write_text(str(label))
        else:
            for index in range(LENGTH):
                self.state[index] = label

    def label(self, index: int) -> int:
        if self.place == "value":
            return self.state.value
        if self.place == "object":
            return self.state.label
        if self.place == "dict":
            return self.state["deep"]["label"]
        if self.place == "global":
            return GLOBAL[0]
        if self.place == "file":
            return int(self.file.read_text())
        return int(self.state[index])

    def __getitem__(self, index: int) -> Any:
        image = torch.full((2, 4, 4), float(index)) + torch.arange(4.0)
        return (image if self.transform is None else self.transform(image)), self.label(index)


SHARED = ["value", "shared array", "shared tensor", "file"]
OF_THIS_PROCESS = ["array", "list", "dict", "object", "bytes", "global"]
NONE: dict[str, Any] = {}
WORKERS: dict[str, Any] = {"num_workers": 2}
PERSISTENT = WORKERS | {"persistent_workers": True}


def epochs_of(loader: Any, source: Any, *, change: int, epochs: int = 4) -> list[Any]:
    """The batches of some epochs; before one of them the state changes."""
    got = []
    for epoch in range(epochs):
        if epoch == change:
            source.set(5)
        got.append([copied(batch) for batch in loader])
    return got


def plain_epochs(make: Callable[[], Any], change: int = 1, **options: Any) -> list[Any]:
    torch.manual_seed(3)
    source, threads = make(), set(threading.enumerate())
    got = epochs_of(DataLoader(source, 8, shuffle=True, **options), source, change=change)
    for thread in set(threading.enumerate()) - threads:  # set-up stores nothing that it reads beside a thread
        thread.join()
    return got


def cached_epochs(make: Callable[[], Any], kind: Any = CachedLoader, change: int = 1, **options: Any) -> Any:
    """The same batches of a cached dataset, whether a change was said to all, and how many samples were read again."""
    torch.manual_seed(3)
    source = make()
    with closing(CachedDataset(source)) as dataset:
        loader = kind(dataset, 8, shuffle=True, **options)
        got = epochs_of(loader, source, change=change)
        outcome = got, dataset.counters.says_changed, looked(dataset)  # type: ignore[union-attr]
        if kind is CachedLoader:
            loader.close()
    return outcome


def warnings(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if words in record.getMessage()]


@pytest.mark.parametrize(
    ("place", "options"),
    [
        *[(place, NONE) for place in SHARED + OF_THIS_PROCESS],
        *[(place, WORKERS) for place in [*SHARED, "array", "global"]],
        *[(place, PERSISTENT) for place in SHARED],
    ],
)
def test_a_change_in_any_place_is_served_from_its_epoch_on(
    place: str, options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Batches are a plain loader's, also with random steps after the cache; there is one warning."""
    for transform in (None, v2.RandomHorizontalFlip()):

        def make(transform: Any = transform) -> Stateful:
            source = Stateful(place, tmp_path)
            source.transform = transform
            return source

        expected = plain_epochs(make, **options)
        caplog.clear()
        got, says_changed, samples = cached_epochs(make, **options)
        assert same(got, expected)
        assert says_changed
        assert 1 <= samples <= 5  # a setting may be a change without a read
        [warning] = warnings(caplog, "has changed")
        assert "transform=" in warning
        assert "RollingCache" in warning


@pytest.mark.parametrize("place", ["array", "list", "global"])
def test_what_only_the_trainer_changes_is_no_change_for_persistent_workers(place: str, tmp_path: Path) -> None:
    """As with DataLoader: they have a source of their own, and stay although everything is stored."""
    make = partial(Stateful, place, tmp_path)
    expected = plain_epochs(make, **PERSISTENT)
    got, says_changed, samples = cached_epochs(make, **PERSISTENT)
    assert same(got, expected)
    assert not says_changed
    assert samples >= 2


@pytest.mark.parametrize("options", [NONE, WORKERS, PERSISTENT])
def test_nothing_changes_where_nothing_has_changed(options: dict[str, Any], tmp_path: Path) -> None:
    """Later epochs are hits alone, and the samples that were read again are in no count."""
    source = Made(lambda index: torch.full((3,), index), LENGTH, tmp_path / "loads")
    with closing(CachedDataset(source)) as dataset:
        at_setup = source.loads
        loader = CachedLoader(dataset, 8, **options)
        for _ in range(5):
            assert torch.cat(list(loader))[:, 0].tolist() == list(range(LENGTH))
        loader.close()
        counts = totals(dataset)
        assert counts.hits + counts.misses == counts.served == 5 * LENGTH
        assert counts.bypasses == 0
        assert source.loads == at_setup + counts.misses + looked(dataset)
        assert looked(dataset) >= 2


class Labelled(Dataset[Any]):
    """Many labels, in one of the forms that people use."""

    def __init__(self, kind: str) -> None:
        zeros = [0] * 400
        self.kind = kind
        self.labels: Any = {
            "list": lambda: zeros,
            "array": lambda: np.zeros(400, dtype=np.int64),
            "rows": lambda: [{"label": 0} for _ in zeros],
            "shared tensor": lambda: torch.zeros(400, dtype=torch.int64).share_memory_(),
        }[kind]()

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Any:
        label = self.labels[index]
        return index, int(label["label"] if self.kind == "rows" else label)


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *[(kind, NONE) for kind in ("list", "array", "rows")],
        *[("shared tensor", each) for each in (WORKERS, PERSISTENT)],
    ],
)
def test_few_labels_that_change_in_place_are_trained_on_from_their_epoch_on(kind: str, options: Any) -> None:
    """One in a hundred, in an epoch without a look: those are read again."""
    source = Labelled(kind)
    with closing(CachedDataset(source)) as dataset:
        loader = CachedLoader(dataset, 50, **options)
        for epoch in range(1, 6):
            if epoch == 4:
                for index in (7, 130, 260, 399):
                    if kind == "rows":
                        source.labels[index]["label"] = 1
                    else:
                        source.labels[index] = 1
            assert sum(int(labels.sum()) for _, labels in loader) == 4 * (epoch >= 4)
        loader.close()


class Harmless(Dataset[Any]):
    """Its reads, and its user, move what decides no sample."""

    def __init__(self) -> None:
        self.calls, self.epoch, self.memo, self.handle = 0, 0, dict[int, int](), None
        self.losses, self.failed = deque[float](maxlen=80), list[int]()
        self.counts = {"calls": 0}
        self.weights, self.rng = np.ones(LENGTH), np.random.default_rng(0)
        self.rank, self.time, self.folder = 1, time.time(), Path("runs/7")
        self.log = logging.getLogger("harmless")

    def set_epoch(self, epoch: int) -> None:
        """Note an epoch that no sample depends on."""
        self.epoch = epoch

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        if self.handle is None:
            self.handle = open(os.devnull)  # noqa: SIM115
        self.calls += 1
        self.counts["calls"] += 1
        self.memo[index] = index
        self.log.debug("sample %d", index)
        return torch.full((3,), float(index))

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"handle": None}


HARMLESS: dict[str, Callable[[Harmless, int], Any]] = {
    "nothing": lambda source, epoch: None,
    "set_epoch that is ignored": Harmless.set_epoch,
    "weights for the sampler": lambda source, epoch: source.weights.__setitem__(epoch, 2.0),
    "failed files": lambda source, epoch: source.failed.extend(range(epoch * 30)),
    "a ring of losses": lambda source, epoch: source.losses.extend([time.time()] * 50),
    "a generator that is seeded": lambda source, epoch: setattr(source, "rng", np.random.default_rng(epoch)),
    "reads of the user": lambda source, epoch: [source[index] for index in range(epoch, 20)],
}


@pytest.mark.parametrize("options", [NONE, WORKERS, PERSISTENT])
@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_sources_stay_cached(name: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Every later epoch is hits alone, without a word."""
    source = Harmless()
    with closing(CachedDataset(source)) as dataset:
        loader = CachedLoader(dataset, 8, **options)
        for epoch in range(1, 6):
            before = totals(dataset)
            assert torch.cat(list(loader))[:, 0].tolist() == list(range(LENGTH))
            if epoch > 1:
                assert totals(dataset).hits - before.hits == LENGTH
            HARMLESS[name](source, epoch)
        loader.close()
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


class Ringed(Dataset[Any]):
    """Each read writes into a ring of the last hundred."""

    def __init__(self) -> None:
        self.last, self.reads = np.zeros(100), 0

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        self.last[self.reads % 100] = index + 1
        self.reads += 1
        return torch.full((3,), float(index))


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("options", [NONE, WORKERS, PERSISTENT])
def test_what_reads_move_is_known_since_set_up(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """The first look can learn nothing where nothing is stored; the array is no change all the same."""
    with closing(CachedDataset(Ringed())) as dataset:
        loader = CachedLoader(dataset, 8, **options)
        for _ in range(4):
            assert torch.cat(list(loader))[:, 0].tolist() == list(range(LENGTH))
        loader.close()
        assert totals(dataset).hits == 3 * LENGTH
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("kind", [DataLoader, partial(DataLoader, batch_size=None)])
@pytest.mark.parametrize("place", ["array", "dict", "file"])
def test_another_loader_class_sees_it_too(kind: Any, place: str, tmp_path: Path) -> None:
    """After as many samples as the dataset has."""
    source = Stateful(place, tmp_path)
    with closing(CachedDataset(source)) as dataset:
        loader = kind(dataset)
        epochs_of(loader, source, change=9, epochs=1)
        source.set(5)
        assert {int(batch[1]) for batch in loader} == {5}
        assert dataset.cache is None


@pytest.mark.parametrize("place", ["list", "object", "value"])
def test_single_reads_see_it_too(place: str, tmp_path: Path) -> None:
    """At the first call of a process, and after each pass over the dataset."""
    source = Stateful(place, tmp_path)
    with closing(CachedDataset(source)) as dataset:
        source.set(4)  # set-up has stored the samples as they were
        assert [dataset[index][1] for index in range(LENGTH)] == [4] * LENGTH
        assert dataset.cache is None
    source = Stateful(place, tmp_path)
    with closing(CachedDataset(source)) as dataset:
        assert [dataset[index][1] for index in range(LENGTH)] == [0] * LENGTH
        source.set(6)
        assert [dataset[index][1] for index in range(LENGTH)] == [6] * LENGTH


def give_the_value(value: Any, worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.epoch = value


class Given(Dataset[Any]):
    epoch: Any = None

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return index, self.epoch.value if self.epoch is not None else 0


@pytest.mark.parametrize("options", [WORKERS, PERSISTENT, PERSISTENT | {"gather": "worker"}])
def test_no_stale_batch_comes_after_the_warning(options: dict[str, Any]) -> None:
    """What only workers see, by their `worker_init_fn`, ends hits of the main process, too."""
    value = multiprocessing.Value("i", 0)
    with closing(CachedDataset(Given())) as dataset:
        loader = CachedLoader(dataset, 8, shuffle=True, worker_init_fn=partial(give_the_value, value), **options)
        for epoch in range(4):
            value.value = epoch
            assert {label for _, labels in loader for label in labels.tolist()} == {epoch}
        loader.close()


def test_a_change_that_another_process_says_ends_hits_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """Batches that were gathered ahead are not handed out, and each sample comes once."""
    source = Stateful("array", tmp_path)
    with closing(CachedDataset(source)) as dataset:
        assert dataset.counters is not None
        loader = CachedLoader(dataset, 4)
        for _ in range(2):
            list(loader)
        for stop in (1, 6):
            source.set(0)
            batches = iter(loader)
            first = [next(batches) for _ in range(stop)]
            source.set(stop)
            dataset.counters.say_changed()
            rest = list(batches)
            assert {label for _, labels in rest for label in labels.tolist()} == {stop}
            images = torch.cat([images for images, _ in [*first, *rest]])
            assert images[:, 0, 0, 0].tolist() == list(range(LENGTH))


def test_copies_in_one_process_change_by_themselves() -> None:
    """A copy that becomes another dataset is served as changed; the original stays cached."""

    class Scaled(Made):
        scale = 1

        def expected(self, index: int) -> Any:
            return torch.full((2,), index * self.scale)

    with closing(CachedDataset(Scaled(torch.tensor, 12))) as dataset:
        for duplicate in (copy.copy, copy.deepcopy):
            other = duplicate(dataset)
            other.scale = 3
            assert other[2].tolist() == [6, 6]
            assert dataset[2].tolist() == [2, 2]
            assert (other.cache is None, dataset.cache is None) == (True, False)


# ---- options ----


def draws(index: int) -> torch.Tensor:
    return torch.full((2,), random.SystemRandom().random()) + index


def test_frozen_randomness_is_not_read_again() -> None:
    """With `freeze_random` no sample is read again; without, a source that nobody can watch is called random."""
    frozen = SampleSpec.infer(draws(0))
    with closing(CachedDataset(Made(draws), freeze_random=True)) as dataset:
        epochs = [torch.cat(list(CachedLoader(dataset, 4))).tolist() for _ in range(3)]
        assert epochs[0] == epochs[1] == epochs[2]
        assert looked(dataset) == 0
    with closing(CachedDataset(Made(draws), spec=frozen)) as dataset:
        epochs = [torch.cat(list(CachedLoader(dataset, 4))).tolist() for _ in range(3)]
        assert epochs[0] != epochs[1] != epochs[2]
        assert looked(dataset) == 1


def test_random_is_called_so(caplog: pytest.LogCaptureFixture) -> None:
    """One warning says it, and the way out."""
    with closing(CachedDataset(Made(draws), spec=SampleSpec.infer(draws(0)))) as dataset:
        for _ in range(3):
            list(CachedLoader(dataset, 4))
    [warning] = warnings(caplog, "is another one each time it is read")
    assert "transform=" in warning
    assert not warnings(caplog, "has changed")


def content(files: dict[int, bytes], index: int) -> bytes:
    return files[index]


@pytest.mark.parametrize(
    "options", [{"spec": SampleSpec.infer(torch.zeros(2))}, {"prefill": True}, {"store": "encoded"}]
)
def test_looks_under_other_options(options: dict[str, Any]) -> None:
    """Without a look at set-up, with samples that nobody asked for yet, and of stored files."""
    files = {index: bytes([index, 1]) for index in range(12)}
    source = CountedFiles(partial(content, files), lambda read, index: torch.tensor(list(read)).float(), 12)
    with closing(CachedDataset(source, **options)) as dataset:
        loader = CachedLoader(dataset, 4)
        list(loader)
        files.update({index: bytes([index, 2]) for index in range(12)})
        assert torch.cat(list(loader))[:, 1].tolist() == [2.0] * 12
        assert dataset.cache is None
        loader.close()


# ---- threads ----


@contextmanager
def running(work: Callable[[], Any]) -> Iterator[None]:
    """A thread that works all the time."""
    stop = threading.Event()

    def go() -> None:
        while not stop.wait(0.001):
            work()

    thread = threading.Thread(target=go)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Reads(Dataset[Any]):
    """Counts, remembers and waits in each read; a subclass says how a sample is made."""

    def __init__(self) -> None:
        self.reads, self.memo, self.last = 0, dict[int, int](), None
        self.transform: Any = None

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        self.memo[index] = self.last = index
        time.sleep(0.0005)
        image = torch.full((4, 4), float(index))
        return (image if self.transform is None else self.transform(image)), index


class ReadsInThreads(Reads):
    """A pool of its own loads the parts of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.pool: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.pool is None:
            self.pool = ThreadPoolExecutor(2)
        parts = list(self.pool.map(super().__getitem__, [index, index]))
        return parts[0]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"pool": None}


@pytest.mark.parametrize("transform", [None, torch.nn.Sequential(torch.nn.Flatten(0), torch.nn.Dropout(0.5))])
def test_a_dataset_that_several_threads_read_stays_cached(transform: Any, caplog: pytest.LogCaptureFixture) -> None:
    """What reads move in one thread is no change for another, and calls of the transform are told apart."""
    source = Reads()
    source.transform = transform
    with closing(CachedDataset(source)) as dataset, ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            samples = list(pool.map(dataset.__getitem__, range(LENGTH)))
            assert [label for _, label in samples] == list(range(LENGTH))
        counts = totals(dataset)
        assert (counts.served, counts.bypasses) == (3 * LENGTH, 0)
        assert counts.hits >= 2 * LENGTH
        assert dataset.cache is not None
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


class ReadsUnseen(Dataset[Any]):
    """Sets its count in a way that its code does not show."""

    def __init__(self) -> None:
        vars(self)["reads"] = 0

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        vars(self)["reads"] += 1
        time.sleep(0.0005)
        return torch.full((4, 4), float(index)), index


def test_what_a_read_of_another_thread_moves_is_no_change() -> None:
    """Without set-up's reads nobody knows yet that reads move it."""
    spec = SampleSpec.infer((torch.zeros(4, 4), 0))
    with closing(CachedDataset(ReadsUnseen(), spec=spec)) as dataset, ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            assert [label for _, label in pool.map(dataset.__getitem__, range(LENGTH))] == list(range(LENGTH))
        assert dataset.cache is not None


def test_what_several_threads_see_changed_is_served_so() -> None:
    """An attribute that the user changes while threads read is a change, although a read might have moved it."""

    class Scaled(Reads):
        scale = 1

        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index)[0] * self.scale, index

    scaled = Scaled()
    with closing(CachedDataset(scaled)) as dataset, ThreadPoolExecutor(4) as pool:
        list(pool.map(dataset.__getitem__, range(LENGTH)))
        scaled.scale = 3
        samples = list(pool.map(dataset.__getitem__, range(LENGTH)))
        assert [image[0, 0].item() for image, _ in samples] == [3.0 * index for index in range(LENGTH)]
        assert dataset.cache is None


@pytest.mark.parametrize(
    "work", [random.random, partial(torch.rand, 1), partial(np.random.rand)], ids=["random", "torch", "numpy"]
)
def test_a_thread_that_draws_beside_it_is_no_evidence(work: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Every sample is stored, and nobody calls the source random."""
    with closing(CachedDataset(Reads())) as dataset, running(work):
        for _ in range(3):
            list(DataLoader(dataset, 8))
        counts = totals(dataset)
        assert counts.hits >= 2 * LENGTH
        assert counts.bypasses == 0
        assert dataset.cache is not None
        assert dataset.cache.filled == LENGTH
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("options", [NONE, {"spec": SampleSpec.infer(Reads()[0])}])
def test_a_thread_that_logs_beside_it_is_no_evidence(options: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Also one that writes where reads write, and no sample depends on it; also if set-up has read none."""
    source = Reads()
    writes = partial(setattr, source, "last")
    with closing(CachedDataset(source, **options)) as dataset, running(lambda: writes(time.monotonic())):
        for _ in range(3):
            writes(time.monotonic())  # at least once between two reads, however busy the machine is
            list(DataLoader(dataset, 8))
        assert totals(dataset).hits >= 2 * LENGTH
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.epoch_one_reads_all
def test_nothing_is_excused_without_a_sample() -> None:
    """A number that reads set and a thread may have set: if nothing was stored when it moved, it is compared later."""

    class Scaled(Reads):
        scale = 1

        def __getitem__(self, index: int) -> Any:
            if self.scale < 0:
                self.scale = 0
            return index * self.scale

    source = Scaled()
    with closing(CachedDataset(source)) as dataset, running(random.random):
        for scale in (2, 2, 2, 3):  # no look is due in epoch four
            source.scale = scale
            assert torch.cat(list(DataLoader(dataset, 8))).tolist() == [index * scale for index in range(LENGTH)]
        assert dataset.cache is None


@pytest.mark.parametrize("kind", [DataLoader, CachedLoader])
def test_a_source_with_a_pool_of_its_own(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It is cached: the threads that read have no part in what is compared."""
    with closing(CachedDataset(ReadsInThreads(), spec=SampleSpec.infer(Reads()[0]))) as dataset:
        for _ in range(3):
            assert torch.cat([labels for _, labels in kind(dataset, 8)]).tolist() == list(range(LENGTH))
        assert totals(dataset).hits == 2 * LENGTH
    assert not warnings(caplog, "has changed")


def in_its_pool(source: Any, image: torch.Tensor) -> Any:
    return source.pool.submit(source.transform, image).result()


class TransformsInAThread(Reads):
    """Another thread than the one that reads calls the transform."""

    def __init__(self) -> None:
        super().__init__()
        self.transform, self.pool = torch.nn.Sequential(torch.nn.Flatten(0), torch.nn.Dropout(0.5)), None

    def __getitem__(self, index: int) -> Any:
        if self.pool is None:
            self.pool = ThreadPoolExecutor(1)
        return in_its_pool(self, torch.full((4, 4), float(index + 1))), index

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"pool": None}


def test_a_transform_that_another_thread_calls_is_not_cut(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody knows for which sample it is called: the source passes through, with the samples of a plain loop."""
    expected, source = TransformsInAThread(), TransformsInAThread()
    with closing(CachedDataset(source)) as dataset:
        for _ in range(3):
            torch.manual_seed(5)
            plain = [expected[index] for index in range(LENGTH)]
            torch.manual_seed(5)
            assert same([dataset[index] for index in range(LENGTH)], plain)
        assert totals(dataset).fills == 0
    assert not warnings(caplog, "is called 0 times")


# ---- what others reach, and what others change ----


class Counting(Dataset[Any]):
    """Counts its reads where its sampler sees them."""

    def __init__(self, visits: Any) -> None:
        self.visits, self.reads = visits, 0

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        self.visits[index] += 1
        self.reads += 1
        return torch.full((3,), float(index)), index


class LeastSeen(Sampler[int]):
    """Draws what was seen least, of an array, or of a dataset by the name of its attribute."""

    def __init__(self, visits: Any = None, dataset: Any = None) -> None:
        self.visits, self.dataset = visits, dataset

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        visits = self.visits if self.dataset is None else self.dataset.visits
        return iter(sorted(range(LENGTH), key=lambda index: (int(visits[index]), index * 7 % 13))[:24])


@pytest.mark.parametrize("make", [lambda: [0] * LENGTH, lambda: np.zeros(LENGTH), lambda: torch.zeros(LENGTH)])
@pytest.mark.parametrize("by_dataset", [False, True])
@pytest.mark.parametrize("collate", [None, list])
def test_a_read_that_writes_where_the_sampler_reads_passes_through(make: Any, by_dataset: bool, collate: Any) -> None:
    """Its batches, and what it has counted, are as without a cache."""

    def run(kind: Any, wrap: Any) -> Any:
        source = Counting(make())
        dataset = wrap(source)
        sampler = LeastSeen(dataset=dataset) if by_dataset else LeastSeen(source.visits)
        loader = kind(dataset, 8, sampler=sampler, collate_fn=collate)
        got, samples = [list(loader) for _ in range(3)], 0
        if dataset is not source:
            samples = looked(dataset)
            loader.close()
            dataset.close()
        return got, source.reads - samples, list(map(int, source.visits))

    expected, reads, visits = run(DataLoader, lambda source: source)
    assert same(run(CachedLoader, CachedDataset), (expected, reads, visits))


def test_counts_that_nobody_else_reads_do_no_harm() -> None:
    """A sampler that holds the dataset and asks for its length alone leaves it cached."""

    class Backwards(Sampler[int]):
        def __init__(self, dataset: Any) -> None:
            self.dataset = dataset

        def __iter__(self) -> Iterator[int]:
            return iter(range(len(self.dataset) - 1, -1, -1))

    source = Counting([0] * LENGTH)
    with closing(CachedDataset(source)) as dataset:
        for _ in range(3):
            list(CachedLoader(dataset, 8, sampler=Backwards(source)))
        assert totals(dataset).hits >= 2 * LENGTH


class Views(Dataset[Any]):
    """Its samples are its own memory: rows of an array or a tensor, or its dicts."""

    def __init__(self, kind: str) -> None:
        numbers = np.arange(LENGTH * 3, dtype=np.float32).reshape(LENGTH, 3)
        rows: dict[str, Any] = {
            "array": numbers,
            "tensor": torch.from_numpy(numbers),
            "dicts": [{"x": torch.from_numpy(row), "n": 0} for row in numbers],
        }
        self.rows = rows[kind]

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def add_one(sample: Any) -> Any:
    if isinstance(sample, dict):
        sample["n"] += 1
    else:
        sample += 1
    return sample


def collate_in_place(samples: list[Any]) -> Any:
    return default_collate(list(map(add_one, samples)))


@pytest.mark.parametrize("kind", ["array", "tensor", "dicts"])
@pytest.mark.parametrize(
    ("collate", "size", "by_model", "is_kept"),
    [
        (collate_in_place, 8, False, False),
        (add_one, None, False, False),
        (list, 8, True, False),
        (default_collate, 8, False, True),
    ],
)
def test_samples_that_are_changed_in_place_are_a_plain_loaders(
    kind: str, collate: Any, size: int | None, by_model: bool, is_kept: bool
) -> None:
    """By `collate_fn`, or by the model: the next epoch reads them as changed. Where nobody does, they are cached."""

    def run(make: Any, dataset: Any) -> list[str]:
        torch.manual_seed(2)
        loader, seen = make(dataset, size, shuffle=True, collate_fn=collate), []
        for _ in range(3):
            for batch in loader:
                seen.append(repr(batch))
                if by_model:
                    list(map(add_one, batch))
        return seen

    expected = run(DataLoader, Views(kind))
    with closing(CachedDataset(Views(kind))) as dataset:
        assert run(CachedLoader, dataset) == expected
        assert (dataset.cache is not None) == is_kept


@pytest.mark.parametrize("kind", ["array", "tensor", "dicts"])
def test_samples_that_were_lent_are_stored(kind: str) -> None:
    """The first batch, the source's own memory, is stored, and counted as any other: the second epoch is hits alone."""
    with closing(CachedDataset(Views(kind))) as dataset:
        stored = len(dataset.cache.some_stored(LENGTH))  # type: ignore[union-attr]
        loader = DataLoader(dataset, 8)
        list(loader)
        before = totals(dataset)
        assert (before.hits, before.misses, before.bypasses) == (stored, LENGTH - stored, 0)
        list(loader)
        assert totals(dataset).hits - before.hits == LENGTH


@pytest.mark.parametrize("kind", ["array", "tensor", "dicts"])
@pytest.mark.parametrize("first", [2, LENGTH // 8])
def test_samples_that_are_changed_in_place_later_are_seen(kind: str, first: int) -> None:
    """By the model, from the third batch on, or from the second epoch on, which then is a plain loader's."""

    def run(dataset: Any) -> list[str]:
        torch.manual_seed(2)
        loader, seen = DataLoader(dataset, 8, shuffle=True, collate_fn=list), []
        for _ in range(3):
            for batch in loader:
                seen.append(repr(batch))
                if len(seen) > first:
                    list(map(add_one, batch))
        return seen

    expected = run(Views(kind))
    with closing(CachedDataset(Views(kind))) as dataset:
        got = run(dataset)
        assert got[:first] == expected[:first]
        assert dataset.cache is None
        if first == LENGTH // 8:
            assert got == expected


class OpensLate(Dataset[Any]):
    """Opens a file at its first read, in any process, and says where."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path, self.handle = folder, folder / "data", None
        self.path.write_bytes(bytes(range(LENGTH)))

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        if self.handle is None:
            self.handle = self.path.open("rb")
            (self.folder / f"opened-{os.getpid()}").touch()
        self.handle.seek(index)
        return torch.tensor([self.handle.read(1)[0], index])


def test_no_handle_comes_from_one_loader_to_another(tmp_path: Path) -> None:
    """A loader with workers never reads here, also if none runs; one without reads here alone."""
    here = tmp_path / f"opened-{os.getpid()}"
    source = OpensLate(tmp_path)
    with closing(CachedDataset(source)) as dataset:
        val = CachedLoader(dataset, 8, **WORKERS)
        for _ in range(4):
            assert torch.cat(list(val)).tolist() == [[index, index] for index in range(LENGTH)]
        assert not here.exists()
        assert source.handle is None
        assert looked(dataset) >= 2
    others = set(tmp_path.glob("opened-*"))
    with closing(
        CachedDataset(OpensLate(tmp_path), spec=SampleSpec.infer(torch.zeros(2, dtype=torch.int64)))
    ) as dataset:
        train = CachedLoader(dataset, 8, shuffle=True)
        for _ in range(3):
            list(train)
        assert set(tmp_path.glob("opened-*")) - others == {here}


# ---- a sampler that changes the source ----


class Ordered(Dataset[Any]):
    """Samples that depend on what a sampler may set."""

    def __init__(self) -> None:
        self.order, self.epoch, self.size, self.scale = list(range(LENGTH)), 0, 3, np.ones(1)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return torch.full((self.size,), float(self.order[index]) * float(self.scale[0])), self.epoch


def shuffle_order(source: Ordered, epoch: int, batch: int) -> None:
    if batch == 0:
        source.order = torch.randperm(LENGTH).tolist()


def late_epoch(source: Ordered, epoch: int, batch: int) -> None:
    source.epoch = max(epoch - 1, 0)


def other_sizes(source: Ordered, epoch: int, batch: int) -> None:
    source.size = 3 + batch % 3


def scale_in_place(source: Ordered, epoch: int, batch: int) -> None:
    source.scale[0] = 1 + epoch // 2


class Sets(Sampler[Any]):
    """A batch sampler that changes the dataset before each batch that it draws."""

    def __init__(self, source: Ordered, change: Callable[[Ordered, int, int], None]) -> None:
        self.source, self.change, self.epoch = source, change, 0

    def __len__(self) -> int:
        return LENGTH // 8

    def __iter__(self) -> Iterator[list[int]]:
        for batch in range(len(self)):
            self.change(self.source, self.epoch, batch)
            yield list(range(8 * batch, 8 * batch + 8))
        self.epoch += 1


@pytest.mark.parametrize("change", [shuffle_order, late_epoch, other_sizes, scale_in_place])
def test_what_a_sampler_sets_as_it_draws_holds_for_the_batch_that_it_draws(change: Any) -> None:
    """As without a cache, from the first batch on; none is taken for a trace of the read that follows."""

    def run(kind: Any, wrap: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(3)
        source = Ordered()
        dataset = wrap(source)
        loader = kind(dataset, batch_sampler=Sets(source, change))
        got = [[copied(batch) for batch in loader] for _ in range(4)]
        if dataset is not source:
            assert dataset.cache is None
            loader.close()
            dataset.close()
        return got

    assert same(run(CachedLoader, CachedDataset), run(DataLoader, lambda source: source))


# ---- what worker_init_fn writes ----


class ByWorker(Dataset[Any]):
    """Samples that depend on what `worker_init_fn` has written."""

    def __init__(self, place: str) -> None:
        self.place, self.state = place, {"array": np.zeros(1), "dict": {0: 0}}.get(place)
        GLOBAL[0] = 0

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        offset = {"array": lambda: self.state, "dict": lambda: self.state, "global": lambda: GLOBAL}[self.place]()[0]
        return torch.full((3,), float(index)), int(offset)


def write(worker: int) -> None:
    """Write the worker's number where its copy of the dataset reads it."""
    source: Any = get_worker_info().dataset  # type: ignore[union-attr]
    source = getattr(source, "source", source)
    (GLOBAL if source.place == "global" else source.state)[0] = worker


@pytest.mark.parametrize("options", [WORKERS, PERSISTENT])
@pytest.mark.parametrize("place", ["array", "dict", "global"])
def test_what_worker_init_fn_writes_is_seen_in_each_worker(place: str, options: dict[str, Any]) -> None:
    """The first worker may be as the source is, and the others not: no worker is served another one's samples."""

    def run(kind: Any, dataset: Any) -> list[Any]:
        loader = kind(dataset, 8, worker_init_fn=write, **options)
        return [[copied(batch) for batch in loader] for _ in range(3)]

    expected = run(DataLoader, ByWorker(place))
    with closing(CachedDataset(ByWorker(place))) as dataset:
        assert same(run(CachedLoader, dataset), expected)
        assert dataset.cache is None


class Scaled(Dataset[Any]):
    """A large column beside a small one, which a scale changes."""

    def __init__(self, numbers: Any) -> None:
        self.numbers, self.scale = numbers, {"v": np.ones(2)}

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return self.numbers[index] * self.scale["v"]


@pytest.mark.parametrize("large", [1e7, 1.7e9])
def test_a_change_of_the_last_bits_counts_where_something_has_moved(large: float) -> None:
    """In the last bits of the largest number lies all of a small one."""
    numbers = np.random.default_rng(0).random((LENGTH, 2)) + np.array([large, 0])
    source = Scaled(numbers)
    with closing(CachedDataset(source)) as dataset:
        loader = CachedLoader(dataset, 8)
        list(loader)
        list(loader)
        source.scale.update(v=np.array([1, 0.5]))
        assert same(list(loader), list(DataLoader(source, 8)))
