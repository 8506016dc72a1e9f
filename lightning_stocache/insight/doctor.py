"""A report on this machine: how much memory a cache may take, which processes hold memory, and how to get more of it.

`examine` gives findings: a topic, a sentence, and a fix if something should be changed. The first finding is the
verdict: the memory that a cache would get now. Where the system hides a fact (macOS has no /proc and no cgroup), a
sentence says so; it is no error.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

from lightning_stocache.cache.checksums import checksum
from lightning_stocache.cache.contents import contents_of
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.console import wrapped
from lightning_stocache.insight.inventory import count, held_lines
from lightning_stocache.node.budget import format_bytes
from lightning_stocache.node.disk import check_directory
from lightning_stocache.node.files import memory_directory
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.named import named_segments
from lightning_stocache.setup.allocation import largest_grant

__all__ = ["Finding", "as_text", "examine", "shared_memory"]

_DOCKER = 64 * 2**20  # bytes of /dev/shm in a container of Docker's without `--shm-size`
_PACKAGES = "torch torchvision numpy lightning pytorch-lightning hydra-core matplotlib tensorboard"


class Finding(NamedTuple):
    """A fact about this machine."""

    topic: str
    words: str
    fix: str = ""  # the change to make; empty if there is nothing to change


def examine(root: Path = Path("/"), directories: Sequence[str] = ()) -> list[Finding]:
    """Examine this machine, and directories on disks that will hold caches.

    Args:
        root: the folder with `proc` and `sys`; tests have another one.
        directories: the directories on disks.

    Raises:
        OSError: there is no shared memory on this system (Windows).
    """
    if sys.platform == "win32":
        raise OSError("Windows has no memory that a cache could share between processes: samples pass through uncached")
    return [
        _verdict(),
        *_memory(root),
        *map(_disk, directories),
        _named(),
        *(Finding("held", line) for line in held_lines(root)),
        _versions(),
    ]


def as_text(findings: Sequence[Finding]) -> str:
    """The findings in lines of 80 columns: the verdict, the findings with a fix, and the others."""
    verdict, *rest = findings
    to_mend = [finding for finding in rest if finding.fix]
    lines = [wrapped(f"{verdict.topic}: {verdict.words}"), "", f"{len(to_mend) or 'nothing'} to mend"]
    for finding in to_mend:
        lines += [wrapped(f"{finding.topic}: {finding.words}", 2), wrapped(f"fix: {finding.fix}", 6)]
    lines += ["", "details"]
    lines += [wrapped(f"{finding.topic}: {finding.words}", 2) for finding in rest if not finding.fix]
    return "\n".join(lines)


def shared_memory(size: int, free: int, ram: int) -> Finding:
    """The finding about /dev/shm, from its size (0: no limit) and free bytes, and the machine's memory in bytes."""
    words = f"{format_bytes(size)}, of which {format_bytes(free)} free." if size else "without a limit of its own."
    advised = max(ram // 2**31, 1)  # GiB: half of the memory, Linux's default outside of containers
    container = (
        f"docker run --shm-size={advised}g ...; Kubernetes: volumes: [{{name: shm, emptyDir: {{medium: Memory, "
        f"sizeLimit: {advised}Gi}}}}] and volumeMounts: [{{name: shm, mountPath: /dev/shm}}]. "
        "Until then caches take a memfd, which only RAM and the cgroup limit, but workers' batches need /dev/shm"
    )
    fix = ""
    if size == _DOCKER:
        words, fix = f"{words} That is Docker's default.", container
    elif size and size < ram // 10:
        words = f"{words} That is little beside {format_bytes(ram)} of RAM."
        fix = f"mount -o remount,size={advised}G /dev/shm (as root); in a container: {container}"
    elif size and free < size // 10:
        words = f"{words} It is nearly full."
        fix = "see the lines `held` below; stocache clean removes unused named caches"
    return Finding("/dev/shm", words, fix)


def _verdict() -> Finding:
    """The bytes that a cache would be granted now, what limits them, and the place where it would lie."""
    sample = SampleSpec.infer(torch.zeros(1023, dtype=torch.uint8))
    size, backend = largest_grant(sample)
    directory = memory_directory()
    free = FreeMemory.measure(directory)
    anywhere = replace(free, filesystem=None, directory=None)
    words = f"{format_bytes(size)} (limit: {_limit(anywhere if backend == 'memfd' else free)}), less what its "
    words += "loader needs."
    if backend == "memfd":
        named, _ = largest_grant(sample, choice="tmpfile")
        words += (
            f" It lies in a memfd, because {directory} has less room: a cache with a name, which lies there, may take "
            f"{format_bytes(named)} (limit: {_limit(free)})."
        )
    return Finding("Room for a cache", words)


def _limit(free: FreeMemory) -> str:
    """The tightest limit, and what caches of other jobs may still take of it."""
    limits = [(size - promised, name, promised) for size, name, promised in free.limits_of_memory]
    if free.filesystem is not None:
        promised = free.promised.in_directory
        limits.append((free.filesystem - promised, str(free.directory), promised))
    if not limits:
        return free.limited_by
    _, name, promised = min(limits)
    others = f", of which caches of other jobs may take {format_bytes(promised)}" if promised else ""
    return f"{'free RAM' if name == 'MemAvailable' else name}{others}"


def _memory(root: Path) -> Iterator[Finding]:
    free = FreeMemory.measure(memory_directory(), root)
    ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if os.path.isdir("/dev/shm"):
        stats = os.statvfs("/dev/shm")
        yield shared_memory(stats.f_frsize * stats.f_blocks, stats.f_frsize * stats.f_bavail, ram)
    else:
        words = f"there is none ({platform.system()}): a cache is a file in {memory_directory()}, in the page cache"
        yield Finding("/dev/shm", f"{words}; {_size(free.filesystem)} free there.")
    yield Finding("RAM", f"{_size(ram)}, of which {_size(free.available)} available.")
    if free.cgroup is None:
        yield Finding("cgroup", "no memory limit.")
        return
    room = f"limit {_size(free.cgroup_limit)}, of which {_size(free.cgroup)} may still be taken"
    short = free.available is not None and free.cgroup < free.available // 10
    fix = "docker run --memory=...; Kubernetes: resources.limits.memory; Slurm: --mem=..." if short else ""
    yield Finding("cgroup", f"{room}; above it the kernel kills processes.", fix)


def _named() -> Finding:
    """The finding about the caches that outlive their jobs."""
    named = named_segments(contents_of)
    unused = [segment for segment in named if not segment.in_use]
    words = f"{count(named)}, {len(unused)} unused: stocache list." if named else "none."
    return Finding("named caches", words)


def _disk(directory: str) -> Finding:
    """The finding about a directory that will hold caches."""
    topic, another = f"disk {directory!r}", "give a directory on a disk of this machine"
    if not os.path.isdir(directory):
        if not directory or os.path.exists(directory):
            return Finding(topic, "is no directory.", another)
        return Finding(topic, "does not exist.", f"mkdir -p {shlex.quote(directory)}")
    try:
        path = check_directory(directory)
    except OSError as error:
        return Finding(topic, f"cannot hold a cache: {error.__cause__ or error}.", another)
    try:
        checksum()
    except ImportError as error:
        return Finding(topic, "cannot hold a cache yet.", str(error))
    named = named_segments(contents_of, path)
    words = f"{_size(shutil.disk_usage(path).free)} free" + (f"; it holds {count(named)} with a name" if named else "")
    return Finding(topic, f"{words}. No budget includes the system's page cache of these files.")


def _versions() -> Finding:
    """The installed versions of `_PACKAGES`."""
    found = [f"Python {platform.python_version()}"]
    for name in _PACKAGES.split():
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return Finding("versions", f"{', '.join(found)}.")


def _size(number: int | None) -> str:
    return "an unknown size" if number is None else format_bytes(number)
