"""What holds for every test: it leaves no memory, no child process and no environment variable behind.

Only tests that are marked `processes` start any; the others, `-m "not processes"`, are the loop to keep running.
"""

from __future__ import annotations

import fcntl
import gc
import glob
import multiprocessing
import os
import random
import re
import time
from collections.abc import Generator, Iterator
from multiprocessing import forkserver, resource_tracker
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from tests.starts import Starts

torch.set_num_threads(1)  # a forked child would wait for the threads of its parent's pool for ever

_MEMORY_FILES = ("/dev/shm/", "/memfd:lightning_stocache", "/lsc-")
_PATIENCE_SECONDS = 3.0  # for what ends by itself: a killed worker, a thread that holds a batch
_LAUNCH_VARIABLES = re.compile(r"PYTEST_|PL_|KMP_|CUDA_|TORCH|(LOCAL_|NODE_|GROUP_)?RANK$|WORLD_SIZE$|MASTER_|OMP_")

_starts = Starts()


@pytest.fixture(autouse=True)
def starts_processes_only_if_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """The loop of tests that start nothing stays fast, and runs where nothing can be forked."""
    yield
    started = _starts.take()
    if started and not _may_start_processes(request):
        pytest.fail(f"the test starts processes, so mark it with pytest.mark.processes: {started}")


@pytest.fixture(autouse=True)
def leaves_no_environment_variable_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Variables are as before; those that Lightning itself sets are put back without a word."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    for name in changed - {"PYTEST_CURRENT_TEST"}:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    ours = {name for name in changed if not _LAUNCH_VARIABLES.match(name)}
    if ours and not _has_failed(request):
        pytest.fail(f"the test left environment variables changed: {sorted(ours)}")


@pytest.fixture(autouse=True)
def leaves_no_process_and_no_memory_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Children have ended, and no process of this test run has a file in memory open that it did not have before.

    Listing /dev/shm does not show anonymous files, so descriptors and mappings are looked at. The free bytes of the
    filesystem would say the same, but other programs on the machine change them too.
    """
    if not os.path.isdir("/proc/self/fd"):
        yield
        return
    look = _descendants if _may_start_processes(request) else set[int]  # looking for them takes longer than most tests
    children = look()
    memory = _memory_files(children)
    yield
    if _has_failed(request):
        return  # the traceback holds on to the test's objects
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        multiprocessing.active_children()  # reaps those that have ended
        found = look()
        left_children, left_memory = found - children, _memory_files(found) - memory
        if not left_children and not left_memory:
            return
        if time.monotonic() > deadline:
            break
        if left_children:
            _end_plain_loaders()
        gc.collect()  # only where something is left: it takes a while
        time.sleep(0.02)
    if left_children:
        pytest.fail(f"the test left child processes behind: {[_command_of(pid) for pid in left_children]}")
    pytest.fail(f"the test left files in memory behind: {sorted(left_memory)}")


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


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _starts.take()  # the last teardown is no business of this test


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[_outcome] = report.failed
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Other people's libraries come last: a process that has imported them all takes twice as long to fork."""
    items.sort(key=lambda item: "interop" in item.path.parts)


@pytest.fixture(autouse=True, scope="module")
def leaves_modules_out_of_collections() -> None:
    """What has been imported is garbage to nobody: each collection would look through it again, for 0.1 s and more."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries complain of what is not collected at the end


_outcome = pytest.StashKey[bool]()


def _may_start_processes(request: pytest.FixtureRequest) -> bool:
    return request.node.get_closest_marker("processes") is not None


def _has_failed(request: pytest.FixtureRequest) -> bool:
    return bool(request.node.stash.get(_outcome, False))


def _end_plain_loaders() -> None:
    """End the workers that a test's DataLoaders have left: the collector would wait 5 s for each of them."""
    for thing in gc.get_objects():
        if type(thing) is _MultiProcessingDataLoaderIter:
            feed: Any = thing._index_sampler
            if not type(feed).__module__.startswith("lightning_stocache"):  # ours are on trial here
                thing._shutdown_workers()  # type: ignore[attr-defined]


def _descendants() -> set[int]:
    """The children of this process and theirs, without the servants that multiprocessing keeps until the end."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := _read(f"/proc/{entry}/stat")):
            parents[int(entry)] = int(stat.rpartition(")")[2].split()[1])
    found, generation = set[int](), {os.getpid()}
    while generation:
        generation = {pid for pid, parent in parents.items() if parent in generation}
        found |= generation
    return found - _servants()


def _servants() -> set[int]:
    pids: list[Any] = [
        getattr(forkserver._forkserver, "_forkserver_pid", None),  # type: ignore[attr-defined]
        getattr(resource_tracker._resource_tracker, "_pid", None),  # type: ignore[attr-defined]
    ]
    return {pid for pid in pids if pid is not None}


def _memory_files(descendants: set[int]) -> set[tuple[str, str]]:
    """Files in memory that this process or a descendant has open or mapped, and named ones that nobody uses."""
    found = {("unused", path) for path in glob.glob("/dev/shm/lsc-*") if not _in_use(path)}
    for pid in {os.getpid()} | descendants:
        maps = _read(f"/proc/{pid}/maps")
        for line in maps.splitlines() if _is_memory(maps) else ():
            if _is_memory(line):
                inode, _, path = line.split(None, 4)[4].partition(" ")
                found.add((path.strip(), inode))
        try:
            descriptors = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for number in descriptors:
            try:
                target = os.readlink(f"/proc/{pid}/fd/{number}")
                if _is_memory(target):
                    found.add((target, str(os.stat(f"/proc/{pid}/fd/{number}").st_ino)))
            except OSError:
                continue
    return found


def _is_memory(text: str) -> bool:
    return any(word in text for word in _MEMORY_FILES)


def _in_use(path: str) -> bool:
    """Whether somebody holds the lock that says so: other programs on this machine may be using caches, too."""
    try:
        descriptor = os.open(path.removesuffix(".locks"), os.O_RDONLY)
    except FileNotFoundError:
        return not os.path.exists(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:  # the process has ended
        return ""


def _command_of(pid: int) -> str:
    return f"{pid}: " + _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
