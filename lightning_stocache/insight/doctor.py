"""What this machine allows a cache, and the exact fix where it allows too little.

`examine` looks at everything once and gives findings: a topic, a sentence, and a fix where something should be changed.
It changes nothing. What cannot be known here (no /proc, no cgroup: macOS) is a sentence, not an error.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_stocache.insight.versions import versions
from lightning_stocache.node.budget import format_bytes
from lightning_stocache.node.files import Backend, make_file, memory_directory, reserve
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.holders import Contents, Holder, held
from lightning_stocache.node.named import named_segments

__all__ = ["Finding", "examine", "shared_memory"]

_DOCKER = 64 * 2**20  # bytes of /dev/shm in a container that was not told otherwise
_HOST_PIDS = "pid:[4026531836]"  # PROC_PID_INIT_INO: the machine's own namespace has this number on every Linux


@dataclass(frozen=True)
class Finding:
    """Something that was found.

    Args:
        topic: what it is about.
        words: what it is.
        fix: what to do about it; empty if nothing.
    """

    topic: str
    words: str
    fix: str = ""


def examine(root: Path = Path("/")) -> list[Finding]:
    """Look at this machine.

    Args:
        root: where `proc` and `sys` are found; another one is for tests.

    Raises:
        OSError: there is no shared memory on this system (Windows).
    """
    if sys.platform == "win32":
        raise OSError("Windows has no memory that a cache could share between processes: samples pass through uncached")
    free = FreeMemory.measure(memory_directory(), root)
    return [*_memory(free, root), *_backends(), *_processes(root), *_versions(), *_named(), *_held(root)]


def shared_memory(size: int, free: int, ram: int | None) -> Finding:
    """What to make of /dev/shm.

    Args:
        size: bytes of the filesystem; 0 where it has no limit.
        free: bytes that are free in it.
        ram: bytes of the machine's memory, if known.

    Example:
        >>> print(shared_memory(64 * 2**20, 64 * 2**20, 32 * 2**30).words)
        64 MiB, of which 64 MiB free. That is Docker's default.
    """
    words = f"{format_bytes(size)}, of which {format_bytes(free)} free." if size else "without a limit of its own."
    wanted = f"{max((ram or 2**34) // 2**31, 1)}"  # GiB: half of the memory, as Linux gives outside of containers
    container = (
        f"docker run --shm-size={wanted}g ...; Kubernetes: volumes: [{{name: shm, emptyDir: {{medium: Memory, "
        f"sizeLimit: {wanted}Gi}}}}] and volumeMounts: [{{name: shm, mountPath: /dev/shm}}]. "
        "Until then caches take a memfd, which only RAM and the cgroup limit, but workers' batches need /dev/shm"
    )
    if size == _DOCKER:
        return Finding("/dev/shm", f"{words} That is Docker's default.", container)
    if size and ram is not None and size < ram // 10:
        fix = f"mount -o remount,size={wanted}G /dev/shm (as root); in a container: {container}"
        return Finding("/dev/shm", f"{words} That is little beside {format_bytes(ram)} of RAM.", fix)
    if size and free < size // 10:
        fix = "see below who holds it; python -m lightning_stocache clean removes named caches that nobody uses"
        return Finding("/dev/shm", f"{words} It is nearly full.", fix)
    return Finding("/dev/shm", words)


def _memory(free: FreeMemory, root: Path) -> Iterator[Finding]:
    ram = _meminfo(root, "MemTotal")
    if os.path.isdir("/dev/shm"):
        stats = os.statvfs("/dev/shm")
        yield shared_memory(stats.f_frsize * stats.f_blocks, stats.f_frsize * stats.f_bavail, ram)
    else:
        words = f"there is none ({platform.system()}): a cache is a file in {memory_directory()}, in the page cache"
        yield Finding("/dev/shm", f"{words}; {_size(free.filesystem)} free there.")
    yield Finding("RAM", f"{_size(ram)}, of which {_size(free.available)} available.")
    if free.cgroup is None:
        yield Finding("cgroup", "no memory limit.")
    else:
        room = f"limit {_size(free.cgroup_limit)}, of which {_size(free.cgroup)} may still be taken"
        short = free.available is not None and free.cgroup < free.available // 10
        fix = "docker run --memory=...; Kubernetes: resources.limits.memory; Slurm: --mem=..." if short else ""
        yield Finding("cgroup", f"{room}; above it the kernel kills.", fix)
    yield Finding("a cache", f"may take {format_bytes(free.bytes)} here, limited by {free.limited_by}.")


def _backends() -> Iterator[Finding]:
    """Try each kind of segment with one page."""
    kinds: tuple[Backend, ...] = ("tmpfile", "memfd")
    for kind in kinds:
        try:
            file, _ = make_file(kind)
        except (OSError, AttributeError) as error:
            yield Finding(kind, f"cannot be made ({error}); a named file is taken instead.")
            continue
        try:
            reserve(file, 0, 4096)
            yield Finding(kind, "works.")
        except OSError as error:
            yield Finding(
                kind, f"has no room for a single page ({error.strerror}).", "free memory, see below who holds it"
            )
        finally:
            os.close(file)


def _processes(root: Path) -> Iterator[Finding]:
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    yield Finding("start method", f"{method}; caches reach workers under fork, spawn and forkserver alike.")
    try:
        namespace = os.readlink(root / "proc/self/ns/pid")
    except OSError:
        yield Finding("processes", "there is no /proc here: ranks attach to each other's caches by name.")
    else:
        whose = "the machine's own" if namespace == _HOST_PIDS else "that of a container"
        words = (
            f"{whose} ({namespace}); ranks of a node in different ones share by a named file, if they share /dev/shm."
        )
        yield Finding("pid namespace", words)
    try:
        text = (root / "sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
        memfd = text.partition("[")[2].partition("]")[0] or text.strip()
    except OSError:
        return
    option = next((part[5:] for part in _mount_options(root) if part.startswith("huge=")), "never")
    yield Finding("huge pages", f"{option} for /dev/shm, {memfd} for memfds; either will do (0.06 s per GiB, once).")


def _named() -> Iterator[Finding]:
    """The caches that outlive their jobs."""
    segments = named_segments()
    if not segments:
        yield Finding("named caches", "none.")
    for one in segments:
        words = f"{format_bytes(one.allocated_bytes)}, {'in use' if one.in_use else 'in use by nobody'}."
        fix = "" if one.in_use else f"python -m lightning_stocache clean {one.name}, unless a job is to find it warm"
        yield Finding(f"named cache {one.name}", words, fix)


def _held(root: Path) -> Iterator[Finding]:
    """Which living processes hold memory, of caches and beside them."""
    try:
        files, closed = held(root)
    except OSError:
        yield Finding("held", "there is no /proc here: who holds memory cannot be seen.")
        return
    others: dict[tuple[Holder, ...], int] = {}
    for one in files:
        if one.contents is not None:
            cache = f"{format_bytes(one.allocated_bytes)} of a cache, {one.name}{_what(one.contents)}"
            yield Finding("held", f"{cache}: {_who(one.holders)}")
        else:
            others[one.holders] = others.get(one.holders, 0) + one.allocated_bytes
    for holders, size in others.items():
        yield Finding("held", f"{format_bytes(size)} beside caches (a loader's batches, say): {_who(holders)}")
    if not files:
        yield Finding("held", "no memory by any living process of this user.")
    if closed:
        yield Finding("held", f"{closed} processes of other users cannot be looked into (root can).")


def _what(contents: Contents) -> str:
    """What a cache holds, on which node, and its arc of the ring."""
    its = contents.manifest
    if not its:
        return ""
    arc, known = its["geometry"], its.get("fingerprint")
    dataset = its.get("dataset") or (known.get("dataset", "") if isinstance(known, dict) else "")
    node = f", node {its['node']} of {its['nodes']}" if its.get("nodes", 1) > 1 else ""
    return (
        f" ({dataset}{node}: {contents.filled:,} of {arc['slots']:,} slots filled; its arc begins at position "
        f"{arc['start']:,} of {arc['size']:,})"
    )


def _who(holders: tuple[Holder, ...]) -> str:
    return "; ".join(f"{one.pid} ({one.command})" for one in holders)


def _versions() -> Iterator[Finding]:
    for name, installed, needed in versions():
        if needed:
            yield Finding(name, f"{installed}, but {needed} is needed.", f'pip install "{name}{needed}"')
        else:
            yield Finding(name, installed)


def _meminfo(root: Path, key: str) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def _mount_options(root: Path) -> list[str]:
    for line in _lines(root / "proc/self/mounts"):
        fields = line.split()
        if len(fields) > 3 and fields[1] == "/dev/shm":
            return fields[3].split(",")
    return []


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _size(number: int | None) -> str:
    return "an unknown size" if number is None else format_bytes(number)
