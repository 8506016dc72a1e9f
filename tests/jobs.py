"""Jobs of several processes as their users start them: where they meet, how they end, and where they hang."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.proc import descendants, is_alive

__all__ = ["OWN_SHM", "ROOT", "exit_codes", "free_port", "job_environment", "say_where", "start"]

ROOT = Path(__file__).parents[1]
OWN_SHM = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh"]
"""A node: what a command begins with that is to have a /dev/shm of its own."""

_LAST_WORDS_SECONDS = 20.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def job_environment(port: int | None = None) -> dict[str, str]:
    """What a job needs to know; a process of it that is sent SIGABRT says where each of its threads is.

    Args:
        port: where ranks meet that are started one by one. None: their launcher says so.
    """
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    return {**os.environ, **({} if port is None else meeting), **ours}


def start(command: Sequence[str], environment: Mapping[str, str], said: Path) -> subprocess.Popen[bytes]:
    """Run a command in a session of its own; what it says is appended to a file."""
    with open(said, "ab") as words:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=words, stderr=words, start_new_session=True)


def exit_codes(jobs: Sequence[subprocess.Popen[Any]], said: Path, seconds: float) -> list[int]:
    """How jobs with sessions of their own end; nothing of them is left.

    Args:
        jobs: their first processes.
        said: where their errors go. Jobs that hang say there where each of their threads is.
        seconds: which they may take together.
    """
    deadline = time.monotonic() + seconds
    try:
        return [job.wait(max(deadline - time.monotonic(), 0.1)) for job in jobs]
    except subprocess.TimeoutExpired:
        say_where()
        pytest.fail(f"the job hangs, {seconds:.0f} s after its start:\n{said.read_text()}")
    finally:
        for job in jobs:
            if job.poll() is None:  # torchrun ends its ranks, which have sessions of their own
                job.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.wait(_LAST_WORDS_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def say_where() -> None:
    """End all children of this process and theirs; with our environment, each says first where its threads are."""
    pids = descendants()
    _send(signal.SIGABRT, pids)
    deadline = time.monotonic() + _LAST_WORDS_SECONDS
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    _send(signal.SIGKILL, pids)


def _send(number: int, pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
