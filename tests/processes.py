"""Functions run in processes of their own, under every start method, with results, readable failures and a time-out;
what /proc says of these processes; and the folder in memory in which their caches have names.

A child writes what it returns into a file: a pipe would be held open by the children of a child that was killed.
"""

from __future__ import annotations

import ctypes
import glob
import linecache
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import lightning_stocache
from lightning_stocache.node import files, locks, named
from lightning_stocache.setup import find
from lightning_stocache.source import random_split

_SECONDS = 400
_NEW_USERS, _NEW_MOUNTS, _NEW_PIDS = 0x10000000, 0x00020000, 0x20000000
_PRIVATE = (1 << 18) | (1 << 14)
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class ChildError(AssertionError):
    """A child process raised, died or did not end; the message holds its traceback."""


context: Any = multiprocessing.get_context
"""The start method; the fork server has imported already what children import, so they start in no time."""


class Child:
    """A function that runs in a process of its own: importable by name, unless the start method is fork."""

    def __init__(self, function: Callable[..., Any], *args: Any, method: str = "fork") -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._answer = Path(self._folder.name) / "answer"
        # A child that was not forked would start its own children as it was started itself, with all imports anew.
        default = multiprocessing.get_start_method()
        settings = lightning_stocache.__file__, names_folder(), default, _bounds()
        arguments = (str(self._answer), *settings, function, args)
        self.process: BaseProcess = context(method).Process(target=_run, args=arguments)
        self.process.start()

    def result(self) -> Any:
        """What the function returned; a ChildError if it raised, died, or did not end in time (and is killed)."""
        try:
            self.process.join(_SECONDS)
        except BaseException:  # Ctrl-C, or the end of pytest's patience
            self.kill()
            raise
        code = self.process.exitcode
        if code is None:
            self.kill()
            raise ChildError(f"the child did not end in {_SECONDS} s")
        answer = self._answer.read_bytes() if self._answer.exists() else None
        self._folder.cleanup()
        self.process.close()
        if answer is None:
            died = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise ChildError(f"the child died of {died}")
        ended_well, value = pickle.loads(answer)
        if not ended_well:
            raise ChildError(f"in the child:\n{value}")
        return value

    def is_running(self) -> bool:
        """Whether it has not ended; False once it has given its result."""
        with suppress(ValueError):
            return self.process.exitcode is None
        return False

    def kill(self) -> None:
        """SIGKILL it, and wait until it is gone."""
        with suppress(ValueError):  # it has given its result
            self.process.kill()
            self.process.join()
        self._folder.cleanup()


def call(function: Callable[..., Any], *args: Any, method: str = "fork") -> Any:
    """What a function returns in a process of its own."""
    return Child(function, *args, method=method).result()


@contextmanager
def hanging(
    function: Callable[..., Any], *args: Any, method: str = "fork", own_session: bool = False
) -> Iterator[Child]:
    """A process in which a function has returned, and which does nothing from then on until it is killed."""
    with tempfile.TemporaryDirectory() as folder:
        returned = Path(folder, "returned")
        child = Child(_hang, returned, own_session, function, args, method=method)
        try:
            wait_until(lambda: returned.exists() or child.process.exitcode is not None)
            if not returned.exists():
                child.result()
            yield child
        finally:
            child.kill()


def _hang(returned: Path, own_session: bool, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if own_session:
        os.setsid()
        die_with_parent()
    held = [function(*args)]
    returned.touch()
    while held:  # a pause ends with each signal that has a handler, such as torch's for children that end
        signal.pause()


def die_with_parent() -> None:
    """Have this process of multiprocessing killed when its creator has ended: also when pytest itself is killed."""
    creator = multiprocessing.parent_process()
    if creator is not None and creator.pid != os.getppid():  # the fork server lives as long as what it has forked
        threading.Thread(target=_die_after, args=(creator.sentinel,), daemon=True).start()
        return
    with suppress(AttributeError):  # elsewhere than on Linux
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _die_after(sentinel: int) -> None:
    connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def idle_worker() -> int:
    """Fork a worker that has what this process has, and does nothing until it is killed."""
    pid = os.fork()
    if not pid:
        signal.pause()
    return pid


def call_many(
    function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], *, method: str = "fork", all_end: bool = False
) -> list[Any]:
    """What a function returns in several processes at the same time, one per tuple of arguments; or the first error,
    after which the others are killed, unless `all_end` by themselves before it is raised."""
    children = list[Child]()
    results = dict[int, Any]()
    try:
        for args in arguments:
            children.append(Child(function, *args, method=method))
        deadline = time.monotonic() + _SECONDS
        while len(results) < len(children):
            assert time.monotonic() < deadline, f"not all children have ended in {_SECONDS} s"
            time.sleep(0.002)
            if all_end and any(child.is_running() for child in children):
                continue
            for number, child in enumerate(children):
                if number not in results and not child.is_running():
                    results[number] = child.result()  # the first error is raised while others still wait for that one
        return [results[number] for number in range(len(children))]
    finally:
        for child in children:
            child.kill()


def run_ranks(function: Callable[..., Any], world: int, *args: Any, all_end: bool = False) -> list[Any]:
    """What `function(rank, *args)`, importable by name, returns on each rank of a job with a process group on gloo."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(f"file://{folder}/meeting", rank, world, function, args) for rank in range(world)]
        return call_many(_rank, arguments, method="forkserver", all_end=all_end)


def _rank(meeting: str, rank: int, world: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    try:
        return function(rank, *args)
    finally:
        dist.destroy_process_group()  # without it a gloo rank aborts at exit, in one run of six


def take_all_of(directory: str | Path) -> None:
    """Have a file named `other` take what is left of a filesystem."""
    with open(Path(directory, "other"), "ab", buffering=0) as other, suppress(OSError):
        while True:
            other.write(bytes(65536))


def wait_until(happens: Callable[[], bool], seconds: float = 300) -> None:
    """Wait for something that another process or thread is to do; an AssertionError if it does not."""
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.005)


def mount_own_shm(mib: int) -> None:
    """Give this process a /dev/shm of its own; an OSError where the system does not let it have that."""
    have_own_mounts()
    mount_tmpfs("/dev/shm", mib)
    leave_names()  # the folder for names is not there


def have_own_mounts() -> None:
    """Let nobody else see what this process and its children mount, and have it end with them; or an OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    if uid == 0:
        _check(libc.unshare(_NEW_MOUNTS))
    else:
        _check(libc.unshare(_NEW_MOUNTS | _NEW_USERS))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _check(libc.mount(b"none", b"/", None, _PRIVATE, None))


def enter_container() -> None:
    """Go on in a process that has process numbers, /proc and mounts of its own, as in a container; or an OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    have_own_mounts()
    _check(libc.unshare(_NEW_PIDS))
    if pid := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
    libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    _check(libc.mount(b"proc", b"/proc", b"proc", 0, None))


def mount_tmpfs(directory: str, mib: int) -> None:
    """Mount a filesystem in memory, of this size."""
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.mount(b"tmpfs", os.fsencode(directory), b"tmpfs", 0, b"size=%dm" % mib))


def _check(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _bounds(*values: float) -> tuple[float, ...]:
    """How much set-up reads and stores, which a fixture has decided: this, or from now on what is given."""
    find.MOST_BYTES, random_split.QUICK_SECONDS = values or (find.MOST_BYTES, random_split.QUICK_SECONDS)
    return find.MOST_BYTES, random_split.QUICK_SECONDS


def _run(
    answer: str,
    package: str,
    folder_of_names: str,
    method: str,
    bounds: tuple[float, ...],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    use_names(folder_of_names)
    multiprocessing.set_start_method(method, force=True)
    _bounds(*bounds)
    try:
        assert lightning_stocache.__file__ == package, "the fork server has started where another package lies"
        outcome = pickle.dumps((True, function(*args)))
    except BaseException:
        outcome = pickle.dumps((False, traceback.format_exc()))
    Path(answer + ".part").write_bytes(outcome)
    os.rename(answer + ".part", answer)


def ends_alive(function: Callable[..., Any], *args: Any) -> bool:
    """Whether a function ends in a forked process, which is not killed before. A `Child` takes three times as long."""
    child = os.fork()
    if not child:
        code = 1
        try:
            function(*args)
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), f"the process has ended with {code}"
    return code == 0


@contextmanager
def signal_at_line(
    number: int, rooms: Sequence[str], counts: Callable[[], bool], *, sent: signal.Signals = signal.SIGKILL
) -> Iterator[None]:
    """Kill, stop or interrupt (SIGINT) this process at the given line that it runs of these rooms of the package, of
    those before which one counts. Python handles no signal at `try`, nor between the body of a `with` and its exit."""
    parent, lines = Path(lightning_stocache.__file__).parent, 0
    last = dict[FrameType, int]()
    directories = tuple(f"{parent / room}{os.sep}" for room in rooms)

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(directories):
            return None
        if event == "line" and counts():
            lines += 1
            if lines == number if sent != signal.SIGINT else lines >= number and may_come(frame):
                if sent == signal.SIGINT:
                    raise KeyboardInterrupt  # a signal would come a few lines later
                os.kill(os.getpid(), sent)
        last[frame] = frame.f_lineno
        return trace

    def may_come(frame: FrameType) -> bool:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).partition("#")[0].strip()
        return line != "try:" and not (line.startswith("with ") and last.get(frame, 0) > frame.f_lineno)

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


# ---- named caches of these tests ----

_plain = files.memory_directory
_made: list[str] = []


def names_folder() -> str:
    """Where named segments lie now."""
    return files.memory_directory()


def path_of(name: str) -> Path:
    """The file of a name."""
    return Path(names_folder(), f"lsc-{os.getuid()}-{name}")


def use_names(path: str | None = None) -> None:
    """Have named segments lie in a folder from now on, by default the one of this process."""
    if path is None:
        if not _made:
            _made.append(tempfile.mkdtemp(prefix="stocache-tests-", dir=_plain()))
            os.chmod(_made[0], 0o1777)  # as /dev/shm is: other users may put files there
        path = _made[0]
    for module in (files, named):
        module.memory_directory = _plain if path == _plain() else lambda: path  # type: ignore[attr-defined]


def leave_names() -> None:
    """Have named segments lie where users have them."""
    use_names(_plain())


def remove_names() -> None:
    """Remove the folder of this process."""
    while _made:
        shutil.rmtree(_made.pop())


# ---- what /proc says ----

_MEMORY_FILES = ("/dev/shm/", "/memfd:lightning_stocache", "/lsc-")
_COLLAPSE, _HUGE = 25, 2 << 20  # MADV_COLLAPSE


def descendants() -> set[int]:
    """The children of this process and theirs, without the servants that multiprocessing keeps until the end."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := _read(f"/proc/{entry}/stat")):
            parents[int(entry)] = int(stat.rpartition(")")[2].split()[1])
    found, generation = set[int](), {os.getpid()}
    while generation:
        generation = {pid for pid, parent in parents.items() if parent in generation}
        found |= generation
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    tracker: Any = resource_tracker._resource_tracker  # type: ignore[attr-defined]
    return found - {getattr(server, "_forkserver_pid", None), getattr(tracker, "_pid", None)}


def memory_files(pids: set[int]) -> set[tuple[str, str]]:
    """Files in memory that one of these processes has open or mapped. 2 to 8 ms for a process that knows torch."""
    found: set[tuple[str, str]] = set()
    for pid in pids:
        maps = _read(f"/proc/{pid}/maps")
        for line in maps.splitlines() if _is_memory(maps) else ():
            if _is_memory(line):
                inode, _, path = line.split(None, 4)[4].partition(" ")
                found.add((path.strip(), inode))
        for descriptor in glob.iglob(f"/proc/{pid}/fd/*"):
            try:
                target = os.readlink(descriptor)
                if _is_memory(target):
                    found.add((target, str(os.stat(descriptor).st_ino)))
            except OSError:
                continue
    return found


def unused_names() -> set[tuple[str, str]]:
    """Named files in memory that nobody uses, in the folder of this process of tests."""
    return {("unused", path) for path in glob.glob(f"{names_folder()}/lsc-*") if not _in_use(path)}


def _in_use(path: str) -> bool:
    """Whether somebody holds the lock that says so."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        return locks.is_used(descriptor)
    finally:
        os.close(descriptor)


def command_of(pid: int) -> str:
    """What a process was started as."""
    return f"{pid}: " + _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()


def is_pipe(descriptor: int) -> bool:
    """Whether an open descriptor of this process is a pipe or a socket."""
    try:
        mode = os.fstat(descriptor).st_mode
        return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
    except OSError:
        return False


def anonymous_memory() -> int:
    """Bytes of anonymous memory that this process has; 0 where the system does not say."""
    line = re.search(r"^RssAnon:\s*(\d+) kB", _read("/proc/self/status"), re.MULTILINE)
    return int(line[1]) << 10 if line else 0


def is_alive(pid: int) -> bool:
    stat = _read(f"/proc/{pid}/stat")
    return bool(stat) and stat.rpartition(")")[2].split()[0] != "Z"


def collapse() -> None:
    """Make huge pages of this process's heap and anonymous memory, which takes a second; Linux 6.1 and later. A fork
    copies the page tables: 150 tests that fork much took 55 s instead of 72 s."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in _read("/proc/self/maps").splitlines():  # elsewhere than on Linux there are none
        bounds, access, _, _, _, *path = line.split(None, 5)
        if access == "rw-p" and path in ([], ["[heap]"]):
            first, last = (int(bound, 16) for bound in bounds.split("-"))
            for begin in range(-(-first // _HUGE) * _HUGE, last // _HUGE * _HUGE, _HUGE):
                madvise(begin, _HUGE, _COLLAPSE)  # where it is refused, the pages stay as they are


def _is_memory(text: str) -> bool:
    return any(word in text for word in _MEMORY_FILES)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:  # the process has ended
        return ""
