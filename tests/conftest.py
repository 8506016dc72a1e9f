"""What holds for every test: it leaves no memory, no child process and no environment variable behind.

Set-up's reader is a process of its own, as it is for users. Tests that start others are marked `processes`. With
`--in-process` there are neither, and no slow tests: the loop to keep running.
"""

import faulthandler
import functools
import gc
import importlib.metadata
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Generator, Iterator
from dataclasses import replace
from multiprocessing import process, util
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import numpy.testing  # before 2.0 it runs a command when it is first imported
import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from tqdm import tqdm

from lightning_stocache.node import isolation
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.processes import THREAD_PREFIX, other_threads
from lightning_stocache.setup import find
from lightning_stocache.setup.reader import Reader
from lightning_stocache.source import looks, random_split
from tests.processes import (
    anonymous_memory,
    collapse,
    command_of,
    descendants,
    is_pipe,
    leave_names,
    memory_files,
    names_folder,
    remove_names,
    unused_names,
    use_names,
)

pytest_plugins = ["tests.odds"]
hypothesis.settings.register_profile("any machine", deadline=None)  # an example is not wrong because others are busy
hypothesis.settings.load_profile("any machine")
# Each Trainer would look for callbacks in all installed distributions. Lightning is imported later, and takes this one.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
tqdm.get_lock()  # made with the first bar or line that is written, in memory that is shared, and stays
torch.set_num_threads(1)  # a forked child would wait for the threads of its parent's pool for ever
if multiprocessing.get_start_method() == "forkserver":  # Python 3.14's, by which each worker imports torch anew
    multiprocessing.set_start_method("fork", force=True)  # tests say the method where it matters
if "forkserver" in multiprocessing.get_all_start_methods():  # a rank or a worker would import them anew, for 3 s
    imported = ["lightning.pytorch", "hypothesis", "lightning_stocache.training.datamodule", "tests.processes"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(imported)

resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # some tests crash a child

_TRAINER_BYTES = 128 << 20  # anonymous memory of a small trainer
_PATIENCE_SECONDS = 60.0  # for what ends by itself: a killed worker, a thread that holds a batch
_LAUNCH_VARIABLES = re.compile(
    r"PYTEST_|PL_|KMP_|CUDA_|TORCH|PYTORCH_NVML|(LOCAL_|NODE_|GROUP_)?RANK$|WORLD_SIZE$|MASTER_|OMP_"
)


class _Audit:
    """Notes what this process starts apart from set-up's reader, with the line of a test that has led to it, and how
    many files it has mapped, or opened in /dev/shm, apart from torch's. Python does not tell of what multiprocessing
    spawns: that is wrapped."""

    starts = frozenset({"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"})

    def __init__(self) -> None:
        self.started: list[str] = []
        self.memory = 0
        self._pid, self._folder = os.getpid(), str(Path(__file__).parent)
        self._setup = str(Path(find.__file__).parent)
        sys.addaudithook(self._hear)
        self._wrap(process.BaseProcess, "start")
        self._wrap(util, "spawnv_passfds")

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event in self.starts:
            self._note(event)
        elif event == "mmap.__new__" or (event == "open" and str(args[0]).startswith("/dev/shm")):
            self.memory += 1

    def _wrap(self, owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def noted(*args: Any, **options: Any) -> Any:
            self._note(f"{owner.__name__}.{name}")
            return plain(*args, **options)

        setattr(owner, name, noted)

    def _note(self, event: str) -> None:
        if os.getpid() == self._pid:
            places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None)]
            if any(path.startswith(self._setup) for path, _ in places):
                return  # set-up's reader
            ours = (f" from {path}:{line}" for path, line in places if path.startswith(self._folder))
            self.started.append(event + next((place for place in ours if __file__ not in place), ""))


_audit = _Audit()


@pytest.fixture(autouse=True)
def has_names_and_variables_to_itself(request: pytest.FixtureRequest) -> Iterator[None]:
    """Named caches lie in a folder of this process of pytest. Variables are as before; those that Lightning itself sets
    are put back without a word. A test that starts processes is marked: the loop of the others stays fast."""
    if request.node.get_closest_marker("named"):
        use_names()
    before = dict(os.environ)
    yield
    leave_names()
    after = dict(os.environ)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    changed -= {"PYTEST_CURRENT_TEST"}
    for name in changed & before.keys():
        os.environ[name] = before[name]
    for name in changed - before.keys():
        del os.environ[name]
    ours = {name for name in changed if not _LAUNCH_VARIABLES.match(name)}
    if ours and not _has_failed(request):
        pytest.fail(f"the test left environment variables changed: {sorted(ours)}")
    if _audit.started and not request.node.get_closest_marker("processes"):
        pytest.fail(f"the test starts processes, so mark it with pytest.mark.processes: {_audit.started}")


@pytest.fixture(autouse=True)
def leaves_no_process_and_no_memory_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Children have ended, and no process has a file in memory open that it did not have before: anonymous ones, too.
    Fixtures are set up by name: this one after the first guard, so that names are left last."""
    if not os.path.isdir("/proc/self/fd"):
        yield
        return
    is_quick = request.config.getoption("in_process")  # no process is started: nobody looks for any
    look = set[int] if is_quick else descendants
    unused = unused_names if request.node.get_closest_marker("named") else set[tuple[str, str]]
    children = look()
    memory = _memory_here() | memory_files(children) | unused()
    anew = not is_quick
    yield
    if _has_failed(request):
        return  # the traceback holds on to the test's objects
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        multiprocessing.active_children()  # reaps those that have ended
        left_children = look() - children
        left_memory = (_memory_here(anew=anew) | memory_files(left_children) | unused()) - memory
        if not left_children and not left_memory:
            return
        if time.monotonic() > deadline:
            break
        if left_children:
            _end_plain_loaders()
        gc.collect()  # only where something is left: it takes a while
        anew = True
        time.sleep(0.02)
    if left_children:
        pytest.fail(f"the test left child processes behind: {[command_of(pid) for pid in left_children]}")
    faulthandler.dump_traceback(all_threads=True)  # a thread that waits in a collection keeps all others from theirs
    collected = "" if _is_garbage_collected() else ", while no garbage is collected"
    pytest.fail(f"the test left files in memory behind{collected}: {sorted(left_memory)}")


@pytest.fixture
def monkeypatch(leaves_no_process_and_no_memory_behind: None, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Patches are undone before the guard looks: a patch may hold an error, and with it all that the test has made."""
    return monkeypatch


@pytest.fixture(autouse=True)
def set_up_reads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set-up reads samples in a process of its own, as it does for users; with `--in-process` in that of the test."""
    if request.config.getoption("in_process") or request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(find, "start_method", lambda chosen: None)
    # Pipes, sockets and threads that are there before the test are none of the trainer's: of pytest-xdist, of a fork
    # server, of a logger in an earlier test.
    foreign = {descriptor for descriptor in isolation.descriptors() if is_pipe(descriptor)}
    monkeypatch.setattr(isolation, "STANDARD", isolation.STANDARD | foreign)
    for thread in other_threads():
        thread.name = f"{THREAD_PREFIX}{thread.name}"
    monkeypatch.setattr(Reader, "hung", set())
    if request.node.get_closest_marker("epoch_one_reads_all"):
        monkeypatch.setattr(find, "MOST_BYTES", -1)


@pytest.fixture(autouse=True)
def trainer_has_taken_little(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache leaves as much memory free as its process has taken. The process of the tests has taken what no trainer
    has, the libraries of all tests and what earlier tests have left: 1 GiB. What a test takes itself counts."""
    if request.path.parent.name == "node":  # measuring is tested there
        return
    measure = FreeMemory.measure
    before = anonymous_memory()

    def measured(directory: str | None, *args: Any) -> FreeMemory:
        free = measure(directory, *args)
        return replace(free, own=max(free.own - before, _TRAINER_BYTES))

    monkeypatch.setattr(FreeMemory, "measure", measured)


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set-up reads all that it reads of a quick source, and looks read and compare what they do of a quick one, however
    busy the machine is: their limits are times."""
    monkeypatch.setattr(random_split, "QUICK_SECONDS", math.inf)
    monkeypatch.setattr(looks, "SMALL_COMPARE_NS", 10**15)
    monkeypatch.setattr(looks, "SMALL_READ_NS", 10**15)


@pytest.fixture
def name() -> Iterator[str]:
    """A name for caches; what lies under it, or under longer ones, is removed after the test."""
    name = f"test-{os.getpid()}-{random.getrandbits(32)}"
    yield name
    for path in Path(names_folder()).glob(f"lsc-*-{name}*"):  # what is no segment, too
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@pytest.fixture
def rng() -> random.Random:
    """A random number generator that starts the same in every run."""
    return random.Random(20240229)


@pytest.fixture
def seeded() -> Iterator[None]:
    """All global generators start the same, and are as before afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)  # type: ignore[func-returns-value]
    yield
    random.setstate(states[0]), np.random.set_state(states[1]), torch.set_rng_state(states[2])  # type: ignore[func-returns-value]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C interrupts, also where a shell has started the tests in its background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True, scope="module")
def leaves_modules_out_of_collections() -> None:
    """What has been imported is garbage to nobody: each collection would look through it again, for 0.1 s and more."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "the loop while writing: set-up reads in the process of the test; no slow tests, and none that start others"
    parser.addoption("--in-process", action="store_true", help=words)


def pytest_configure(config: pytest.Config) -> None:
    """Leave tests for the night out, unless the expression of `-m` names them: `-m "not slow"` alone would run them.
    Hide CUDA, which no forked process can use; with `-m gpu` nothing is forked."""
    chosen = config.option.markexpr
    left_out = " and ".join(f"not {mark}" for mark in ("soak", "apps") if mark not in chosen)
    config.option.markexpr = f"({chosen}) and {left_out}" if chosen and left_out else chosen or left_out
    if "gpu" in chosen:
        multiprocessing.set_start_method("forkserver", force=True)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Other people's libraries come last: a process that has imported them all takes twice as long to fork. A case with
    workers starts processes."""
    items.sort(key=lambda item: "interop" in item.path.parts)
    for item in filter(_has_workers, items):
        item.add_marker(pytest.mark.processes)
    marks = ("processes", "slow") if config.getoption("in_process") else ()
    left_out = [item for item in items if any(map(item.get_closest_marker, marks))]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and -m gpu"))


def _has_workers(item: pytest.Item) -> bool:
    """Whether a case is given a number of workers, by itself or among the arguments of a loader."""
    values: dict[str, Any] = getattr(item, "callspec", None).params if hasattr(item, "callspec") else {}
    named = [value for name, value in values.items() if name in ("num_workers", "workers")]
    options = [value.get("num_workers") for value in values.values() if isinstance(value, dict)]
    return any(named) or any(options)


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.getoption("in_process"):
        collapse()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _audit.started.clear()  # the last teardown is no business of this test


_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[_failed] = report.failed
    return report


def pytest_unconfigure() -> None:
    remove_names()
    gc.unfreeze()  # libraries complain of what is not collected at the end


def _has_failed(request: pytest.FixtureRequest) -> bool:
    return bool(request.node.stash.get(_failed, False))


def _is_garbage_collected() -> bool:
    """Whether a collection finds an object that only refers to itself."""

    class Ring:
        def __init__(self) -> None:
            self.itself = self

    ring = weakref.ref(Ring())
    gc.collect()
    return ring() is None


def _end_plain_loaders() -> None:
    """End the workers that a test's DataLoaders have left: the collector would wait 5 s for each of them."""
    for thing in gc.get_objects():
        if type(thing) is _MultiProcessingDataLoaderIter:
            feed: Any = thing._index_sampler
            if not type(feed).__module__.startswith("lightning_stocache"):  # ours are on trial here
                thing._shutdown_workers()  # type: ignore[attr-defined]


_here: tuple[int, set[tuple[str, str]]] = (-1, set())


def _memory_here(*, anew: bool = False) -> set[tuple[str, str]]:
    """The files in memory that this process uses. It takes a while, so without need they are not looked for anew."""
    global _here
    if anew or _here[0] != _audit.memory:
        _here = _audit.memory, memory_files({os.getpid()})
    return _here[1]
