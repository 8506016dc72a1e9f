"""Jobs of several processes: how they start, where they meet, how they end, and where they hang; what they log; memory
cgroups, above whose limit the kernel kills; and commands, with what they print."""

import atexit
import contextlib
import faulthandler
import logging
import multiprocessing
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_stocache.__main__ import main
from lightning_stocache.node.budget import Budget
from tests.processes import context, descendants, is_alive, mount_own_shm, wait_until

ROOT = Path(__file__).parents[1]
OWN_SHM = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh"]
"""A node: what a command begins with that is to have a /dev/shm of its own."""

_LAST_WORDS_SECONDS = 20.0
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")


def skip_without(command: Sequence[str]) -> None:
    """Skip a test where a process may not have the namespaces that a command begins with."""
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no unshare here to make nodes with")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"nodes cannot be made here: {error.stderr.strip()}")


def job_environment() -> dict[str, str]:
    """What the processes of a job need to know; one that is sent SIGABRT says where each of its threads is."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    return {**os.environ, **meeting, **ours}


def start(command: Sequence[str], environment: Mapping[str, str], said: Path) -> BaseProcess:
    """Run a command in a session of its own; what it says is appended to a file."""
    return _started(os.execvpe, command[0], list(command), dict(environment), said=said)


def start_module(
    words: Sequence[str], environments: Sequence[Mapping[str, str]], said: Path, *, shm_mib: int = 0
) -> BaseProcess:
    """Run what `python -m WORDS` would, in a session of its own; what it says is appended to a file. The job has a
    process for each environment, which have imported torch already, and ends when all have, with the first code that is
    not 0. With a `shm_mib` they have a /dev/shm of that size to themselves, as on a node."""
    ranks = [dict(environment) for environment in environments]
    return _started(_run_ranks, list(words), ranks, shm_mib, multiprocessing.get_start_method(), said=said)


def _started(function: Callable[..., Any], *args: Any, said: Path) -> BaseProcess:
    process: BaseProcess = context("forkserver").Process(target=_in_session, args=(said, function, args))
    process.start()
    return process


def _in_session(said: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.setsid()
    os.chdir(ROOT)
    words = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(words, 1), os.dup2(words, 2)
    function(*args)


def _run_ranks(words: list[str], ranks: list[dict[str, str]], shm_mib: int, method: str) -> None:
    multiprocessing.set_start_method(method, force=True)
    faulthandler.enable()
    if shm_mib:
        mount_own_shm(shm_mib)
    pids = []
    for environment in ranks:
        if not (pid := os.fork()):
            _run_module(words, environment)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    os._exit(next((abs(code) for code in codes if code), 0))


def _run_module(words: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Run a module, and end this process as Python would."""
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words
    torch.set_num_threads(1)
    # As when Lightning is imported.
    rank_zero_only.rank = next((int(environment[name]) for name in _RANKS if name in environment), 0)
    code = 0
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


def exit_codes(jobs: Sequence[BaseProcess], said: Path, seconds: float) -> list[int | None]:
    """How jobs end, within so many seconds together; those that hang say in their file where each thread is."""
    deadline = time.monotonic() + seconds
    try:
        for job in jobs:
            job.join(max(deadline - time.monotonic(), 0.1))
        codes = [job.exitcode for job in jobs]
    finally:
        if any(job.is_alive() for job in jobs):
            _end_all()
    if None in codes:
        pytest.fail(f"the job hangs, {seconds:.0f} s after its start:\n{said.read_text()}")
    return codes


def _end_all() -> None:
    """End all children of this process and theirs, which say first where their threads are."""
    pids = descendants()
    for number in (signal.SIGABRT, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while any(map(is_alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.1)


# ---- what processes log ----


class Log(logging.Handler):
    """Collects what the package logs in this process, from a level on, from now on or, as a context, to its end."""

    def __init__(self, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.lines: list[str] = []
        self.package = logging.getLogger("lightning_stocache")
        self.package.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        self.package.removeHandler(self)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings that pytest has heard."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# ---- memory cgroups ----

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_ROOT = _V1 if _V1.is_dir() else _V2
_LIMIT, _USAGE, _EVENTS, _PEAK = {
    _V1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "memory.max_usage_in_bytes"),
    _V2: ("memory.max", "memory.current", "memory.events", "memory.peak"),
}[_ROOT]


def has_killed(folder: Path) -> bool:
    """Whether the kernel has killed a process of the cgroup with this folder."""
    return re.search("^oom_kill [1-9]", (folder / _EVENTS).read_text(), re.MULTILINE) is not None


def peak_of(folder: Path) -> int:
    """The most bytes that were charged at once, droppable page cache included; 0 where the kernel does not say."""
    peak = folder / _PEAK
    return int(peak.read_text()) if peak.exists() else 0


@contextlib.contextmanager
def cgroup(limit: int) -> Iterator[Path]:
    """The folder of a cgroup with that many bytes of memory, which a process enters by its file `cgroup.procs`."""
    folder = _ROOT / f"stocache-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / _LIMIT).write_text(str(limit))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        yield folder
    finally:
        wait_until(lambda: _is_removed(folder))  # a process that was killed is charged for a moment longer


def _is_removed(folder: Path) -> bool:
    """Remove a cgroup. A DataLoader's worker whose trainer was killed while it started would stay in it for ever."""
    with contextlib.suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        folder.rmdir()
    return not folder.exists()


# ---- the command line ----


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write texts under their paths below a folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def said(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """What a command prints on stdout; nothing stands on stderr."""
    main([*map(str, arguments)])
    out, err = capsys.readouterr()
    assert err == ""
    return out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What stands on stderr where a command ends with code 2, without a traceback, and prints nothing else."""
    with pytest.raises(SystemExit) as end:
        main([*arguments])
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert "Traceback" not in err
    return err


def run_short_of_memory(free: int, command: Sequence[str]) -> int:
    """Run a command on a machine that has so many bytes of memory free, however much the command takes itself: in a
    cgroup whose limit follows its usage. Returns the exit code."""
    with cgroup(free) as folder:
        enter = f'echo $$ > {folder / "cgroup.procs"} && exec "$@"'
        process = subprocess.Popen(["sh", "-c", enter, "sh", *command])
        while process.poll() is None:
            usage = int((folder / _USAGE).read_text())
            (folder / _LIMIT).write_text(str(usage + free))
            time.sleep(0.05)
        return process.returncode


if __name__ == "__main__":  # python -m tests.jobs 1GiB pytest -n 3
    sys.exit(run_short_of_memory(int(Budget.parse(sys.argv[1]).amount), sys.argv[2:]))
