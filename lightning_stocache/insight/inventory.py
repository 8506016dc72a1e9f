"""The caches in this machine's memory as lines of text: by job, with the processes that use them.

A job with `name="photos"` has caches such as `photos-train0` and `photos-val1`. The lines group them under `photos`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import groupby
from pathlib import Path
from textwrap import shorten

from lightning_stocache.cache.contents import Contents, contents_of
from lightning_stocache.console import wrapped
from lightning_stocache.node.budget import format_bytes
from lightning_stocache.node.files import printable
from lightning_stocache.node.named import NamedSegment, clean_command, named_segments
from lightning_stocache.node.open_files import Process, open_files

__all__ = ["caches_in", "count", "describe", "held_lines", "named_lines", "of_jobs"]

_PIDS = 8  # the most processes with one command line whose ids are listed


def caches_in(directory: str | None = None) -> list[NamedSegment]:
    """The named caches in this machine's memory, or in a directory on a disk."""
    return named_segments(contents_of, directory)


def of_jobs(names: Sequence[str], segments: Iterable[NamedSegment]) -> list[NamedSegment]:
    """The segments with these names, and the segments of the jobs with these names; without a name, all."""
    return [each for each in segments if not names or {each.name, _job(each)} & set(names)]


def count(segments: Sequence[NamedSegment]) -> str:
    """The number of these caches and their memory, in words."""
    size = format_bytes(sum(segment.allocated_bytes for segment in segments))
    return f"{len(segments)} cache{'s' * (len(segments) != 1)} ({size})"


def named_lines(names: Sequence[str] = (), directory: str | None = None) -> Iterator[str]:
    """Lines about the named caches in memory, or in a directory on a disk, job by job."""
    segments = of_jobs(names, caches_in(directory))
    where = "this machine's memory" if directory is None else printable(directory)
    if directory is not None and segments:
        yield f"in {where}"
    users = {}
    with suppress(OSError):  # there is no /proc
        users = {file.key: file.processes for file in open_files()[0]}
    for job, members in groupby(sorted(segments, key=lambda segment: (_job(segment), segment.name)), _job):
        caches = list(members)
        alone = [job] == [cache.name for cache in caches]
        if not alone:
            yield f"{job}: {count(caches)}"
        for cache in caches:
            yield wrapped(describe(cache, users.get(cache.key, ())), 0 if alone else 4)
    if unused := [segment for segment in segments if not segment.in_use]:
        command = clean_command(directory=directory)
        yield wrapped(f"unused: {count(unused)}; {command} removes unused caches")
    if not segments:
        yield f"there are no named caches{' of these names' if names else ''} in {where}"


def held_lines(root: Path = Path("/")) -> Iterator[str]:
    """Lines about the memory of caches and of other files that living processes have open.

    Args:
        root: the folder with `proc`; tests have another one.
    """
    try:
        files, closed = open_files(root, contents_of)
    except OSError:
        yield "there is no /proc here: the processes that hold memory cannot be seen."
        return
    sizes, holders = Counter[str](), dict[str, list[Process]]()
    for file in files:
        where = " on a disk" if file.on_disk else ""
        if file.contents is None:
            kind = "other files, such as a loader's batches"
        elif file.contents.manifest is None:
            kind = "counters or batches of a cache"
        else:
            kind = f"{_dataset_and_fill(file.contents)}{where}"
        sizes[kind] += file.allocated_bytes
        holders.setdefault(kind, []).extend(file.processes)
    for kind, size in sizes.items():
        yield f"{format_bytes(size)} of {kind}: {_pids_by_command(dict.fromkeys(holders[kind]))}"
    if not files:
        yield "no memory by any living process of this user."
    if closed:
        yield f"{closed} processes of other users cannot be examined (root can do so)."


def describe(segment: NamedSegment, processes: Sequence[Process] = ()) -> str:
    """A named cache: its name, dataset, fill, memory, time of creation, and the processes that use it."""
    manifest = segment.contents.manifest
    since = "" if manifest is None else f", since {datetime.fromtimestamp(manifest.created):%Y-%m-%d %H:%M}"
    user = "nobody" if not segment.in_use else _pids_by_command(processes) or "a process that cannot be seen from here"
    size = format_bytes(segment.allocated_bytes)
    return f"{segment.name}: {_dataset_and_fill(segment.contents)}, {size}{since}, used by {user}"


def _dataset_and_fill(contents: Contents) -> str:
    """The dataset of a cache, and the share of its slots that are filled."""
    manifest = contents.manifest
    if manifest is None:
        return f"a cache that {contents.damage}"
    node = f" (node {manifest.node} of {manifest.nodes})" if manifest.nodes > 1 else ""
    slots = f"{contents.filled:,} of {manifest.geometry.slots:,} slots filled"
    return f"{manifest.dataset or 'a dataset without a name'}, {slots}{node}"


def _pids_by_command(processes: Iterable[Process]) -> str:
    """The ids of processes, grouped by their command line."""
    pids: dict[str, list[str]] = {}
    for process in processes:
        pids.setdefault(shorten(process.command, 60, placeholder="..."), []).append(str(process.pid))
    more = {command: f" and {len(ids) - _PIDS} more" if len(ids) > _PIDS else "" for command, ids in pids.items()}
    return "; ".join(f"{', '.join(ids[:_PIDS])}{more[command]} ({command})" for command, ids in pids.items())


def _job(segment: NamedSegment) -> str:
    part = re.fullmatch(r"(.+)-(?:train|val|test|predict)[0-9]+", segment.name)
    return segment.name if part is None else part[1]
