"""Makes a Python process on Linux, and those that it starts, look like one on macOS; from PYTHONPATH, before all else.

What macOS lacks is taken out of the standard library, /proc and /dev/shm are not there for Python code (torch's own
libraries still see them), processes are spawned, and `flock` and byte locks on one file are in each other's way, as BSD
has it: who holds one of a kind may not get the other, not even in the same process.
"""

import builtins
import errno
import fcntl
import io
import mmap
import os
import select
import signal
import sys
import types

LACKS = {
    os: "memfd_create MFD_CLOEXEC O_TMPFILE O_NOATIME sched_getaffinity sched_setaffinity posix_fallocate "
    "posix_fadvise fdatasync copy_file_range splice eventfd pidfd_open getxattr setxattr listxattr removexattr "
    "pwritev preadv",
    mmap: "MADV_REMOVE MADV_HUGEPAGE MADV_NOHUGEPAGE MADV_DONTFORK MADV_DOFORK MADV_POPULATE_READ MAP_POPULATE",
    fcntl: "F_OFD_GETLK F_OFD_SETLK F_OFD_SETLKW F_ADD_SEALS F_GET_SEALS F_SETPIPE_SZ F_GETPIPE_SZ",
    select: "epoll EPOLLIN EPOLLOUT",
    signal: "sigtimedwait sigwaitinfo pidfd_send_signal SIGRTMIN SIGRTMAX",
}
HIDDEN = ("/proc", "/dev/shm")
AFFECTED = "open stat lstat listdir scandir readlink access mkdir unlink statvfs"

_open = builtins.open
_lockf, _flock = fcntl.lockf, fcntl.flock


def _without(call):
    def hides(path, *args, **more):
        text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        if text in HIDDEN or text.startswith(tuple(f"{place}/" for place in HIDDEN)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), text)
        return call(path, *args, **more)

    return hides


def _is_locked(descriptor, kind):
    """Whether anybody holds a lock of a kind on a file: FLOCK or POSIX."""
    facts = os.fstat(descriptor if isinstance(descriptor, int) else descriptor.fileno())
    file = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}:{facts.st_ino}"
    with _open("/proc/locks") as held:
        locks = [line.split() for line in held if "->" not in line]
    return any(words[1] == kind and words[5] == file for words in locks)


def lockf(descriptor, operation, *place):
    if operation & fcntl.LOCK_EX and _is_locked(descriptor, "FLOCK"):
        raise BlockingIOError(errno.EAGAIN, "locked by flock")
    return _lockf(descriptor, operation, *place)


def flock(descriptor, operation):
    if not operation & fcntl.LOCK_UN and _is_locked(descriptor, "POSIX"):
        raise BlockingIOError(errno.EAGAIN, "locked by fcntl")
    return _flock(descriptor, operation)


def pretend():
    sys.platform = "darwin"
    for module, names in LACKS.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    for name in AFFECTED.split():
        setattr(os, name, _without(getattr(os, name)))
    builtins.open = io.open = _without(_open)
    fcntl.lockf, fcntl.flock = lockf, flock
    proxies = types.ModuleType("_scproxy")  # the standard library's own on macOS
    proxies._get_proxy_settings = proxies._get_proxies = dict
    sys.modules["_scproxy"] = proxies
    sys.modules["triton"] = None  # torch looks whether it is there
    import multiprocessing

    assert multiprocessing.get_start_method() == "spawn"


pretend()
