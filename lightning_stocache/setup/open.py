"""How caches open: look at the sources, divide the memory, make the segments, attach them on all ranks.

All requests of one call open together, because they share budgets. The steps are collective over the job's ranks. All
ranks must hold the same data: a source whose data differs between ranks (`witness`) passes through. The indices that
they draw may differ: each index that any rank draws gets a slot.

1. The leader of each node looks at every source (`find`): its samples give the codec, and the random part is found. It
   joins the named caches that exist on its node (`named_cache`), and divides the memory among the other requests
   (`allocation`). The granted bytes decide whether samples are stored as their files (`forms`).
2. The other ranks read nothing; they cut their own copy of the source at the same place. Where only settings of the
   source differ between ranks (its rank, a device, a path), every rank reads the same 32 indices, and their samples are
   compared.
3. The leaders exchange their numbers of slots, and every rank lays the same rings: which node stores which index.
4. Each leader makes the segments of its node, and the other ranks attach them (`segments`).
5. The samples that set-up has read are stored, or compared with the samples of a named cache (`same_data`). A named
   cache keeps its arc; the leaders exchange these arcs.

Streams and rolling caches take the same steps. They have no ring, set-up stores none of their samples, and their ranks
may hold different data. A rolling cache opens alone.

An error of one rank is raised on all. A source that cannot be cached passes through, with one warning; only for a
rolling cache this is an error.
"""

from __future__ import annotations

import logging
import math
import random
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import reduce
from typing import TypeVar

from lightning_stocache.cache.checksums import checksum
from lightning_stocache.cache.placement import Arc, Domain, Ring
from lightning_stocache.cache.rolling import RollingStore
from lightning_stocache.cache.store import Store, layout_of
from lightning_stocache.cache.stream import StreamStore
from lightning_stocache.node.budget import Budget, format_bytes
from lightning_stocache.node.disk import check_directory
from lightning_stocache.node.files import Backend, ManifestError, printable
from lightning_stocache.node.grant import Reserve
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.setup.allocation import allocate
from lightning_stocache.setup.find import Finding, SourceReader, parts_of
from lightning_stocache.setup.forms import keeps_files
from lightning_stocache.setup.named_cache import open_named_cache
from lightning_stocache.setup.open_cache import OpenCache
from lightning_stocache.setup.request import BackendChoice, CacheRequest
from lightning_stocache.setup.same_data import FingerprintError, check_pool, sample_digests, store_or_refuse
from lightning_stocache.setup.segments import CacheMemoryError, make_and_attach
from lightning_stocache.source.probe import MANY
from lightning_stocache.source.witness import Sums, Witness, digest_of_state

__all__ = ["drawn_by_any", "open_caches", "united"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_APART = (
    "the ranks hold different data of it under the same index.\nGive every rank the whole dataset, in the same order, "
    "and let a DistributedSampler divide it"
)
_LONGEST = 200  # characters of a source's title in the header of its segment
_LEAST = 1 << 16  # bytes of a stream: less is not worth a segment


@dataclass
class _Opening:
    """A request on its way to an open cache, on one rank.

    Args:
        reader: the request, and what the leader of this node has found about its source.
        witness: of the source's state; None for a stream and a rolling cache.
        state: a digest of each place of that state.
        is_apart: whether the ranks hold different data under one index.
        is_doubtful: whether the settings of the source differ between ranks.
        granted: bytes that the cache may take on this node.
        joined: on a leader, the existing cache of this name.
        slots: on a leader, the expected number of samples with room on this node.
        keep_free: on a leader, the bytes that filling leaves free.
    """

    reader: SourceReader
    witness: Witness | None
    state: Sums
    is_apart: bool = False
    is_doubtful: bool = False
    granted: int = 0
    joined: Store | None = None
    slots: int = 0
    keep_free: int = 0

    @classmethod
    def begin(cls, reader: SourceReader) -> _Opening:
        """Begin to open the cache of a request."""
        witness = Witness(reader.request.source) if reader.request.by_index else None
        return cls(reader, witness, {} if witness is None else witness.sums())

    @property
    def request(self) -> CacheRequest:
        """The request."""
        return self.reader.request

    @property
    def found(self) -> Finding:
        """The finding about its source."""
        return self.reader.found

    @property
    def wanted(self) -> int:
        """How many samples the budget is for."""
        return self.request.budget.part_of(self.request.samples)

    def close(self) -> None:
        """End the reading process, and close a joined cache that nobody has taken."""
        self.reader.close()
        if self.joined is not None:
            self.joined.close()


def open_caches(
    requests: Sequence[CacheRequest],
    budgets: Mapping[str, Budget],
    group: NodeGroup,
    backend: BackendChoice = "auto",
    *,
    later_bytes: int = 0,
    kept_back: int = 0,
) -> list[OpenCache]:
    """Open a cache for every request. Collective: all ranks pass the same requests in the same order.

    Args:
        requests: the requests.
        budgets: the budget of every pot, per node.
        group: which ranks share memory.
        backend: kind of segments, see `allocate`.
        later_bytes: memory that the training of each rank will take later.
        kept_back: bytes of this node's free memory that the caches must not take.

    Raises:
        UnsupportedSampleError: (`strict`) a sample cannot be stored as bytes.
        SampleMismatchError: (`strict`) the samples read at set-up differ in shape, dtype or structure.
        ValueError: the ranks have sources of different lengths; (`strict`) a source is random and cannot be split.
        CacheMemoryError: (`strict`) memory is missing, or a segment could not be made or reached, not even by name; on
            all ranks alike.
        FingerprintError: (`strict`) a named cache has another fingerprint or other data; a RuntimeError on other ranks.
        ManifestError: (`strict`) a named cache is damaged, or of another version; likewise.
        Exception: (`strict`) an error of a source; on the other ranks a RuntimeError that names it.

    A rolling cache raises errors of its source and its memory without `strict`, too, and besides

        FirstSampleError: no sample of its source can be read, or samples cannot be stored.
        CacheInUseError: another job has the cache of this name open.
        ValueError: its budget has no room for the least number of samples.
    """
    if sys.platform == "win32":
        log.warning("Windows has no memory that processes could share: all samples pass through uncached")
        return [OpenCache.without(request, group) for request in requests]
    domains = drawn_by_any([request.domain for request in requests], group)
    requests = [
        replace(request, domain=domain, budget=budgets[request.pot])
        for request, domain in zip(requests, domains, strict=True)
    ]
    must_open = any(request.must_open and not request.budget.off for request in requests)
    is_named = any(request.name is not None for request in requests)
    backend = "tmpfile" if is_named else backend  # named caches lie in the same filesystem
    try:
        requests = group.together(lambda: list(map(_with_directory, requests)))
    except (OSError, ImportError, RuntimeError) as error:
        return _without(requests, group, error, strict=must_open)
    with ExitStack() as stack:
        openings = [stack.enter_context(closing(_Opening.begin(reader))) for reader in SourceReader.for_all(requests)]
        _compare_states(openings, group)
        if not openings:
            return []
        findings = group.lead(lambda: list(map(_look, openings)))
        for opening, found in zip(openings, findings, strict=True):
            opening.reader.found = found
        _compare_samples(openings, group)
        later = Reserve(kept_back, later_bytes * len(group.members))
        plan, kind = group.lead(lambda: _plan(openings, budgets, len(group.members), backend, later))
        for opening, (found, granted, name, directory) in zip(openings, plan, strict=True):
            opening.reader.found, opening.granted = found, granted
            opening.reader.request = replace(opening.request, name=name, dir=directory)
        parts = group.together(lambda: [parts_of(opening.request.source, opening.found) for opening in openings])
        rings = _lay_rings(openings, group)
        caches = [
            OpenCache(
                opening.request,
                source,
                tail,
                ring=ring,
                group=group,
                budget_bytes=opening.granted,
                expected_ring=expected,
                state=opening.state,
                machinery=opening.found.machinery,
                serves_lists=opening.found.serves_lists,
            )
            for opening, (source, tail), (ring, expected) in zip(openings, parts, rings, strict=True)
        ]

        def make(kind: Backend | None) -> list[Store | None]:
            arcs = [ring.arcs[group.node] for ring, _ in rings]
            return [_make(opening, arc, group, kind) for opening, arc in zip(openings, arcs, strict=True)]

        try:
            caches = make_and_attach(caches, make, kind)
        except CacheMemoryError as error:
            return _without(requests, group, error, strict=must_open)
        caches = _store_or_refuse(openings, caches, group)
    return _with_arcs(caches, group) if is_named else caches


def drawn_by_any(domains: Sequence[Domain | None], group: NodeGroup) -> list[Domain | None]:
    """The indices of each dataset that any rank draws, given the indices of this rank; None: all. Collective."""
    digests = [None if domain is None else domain.digest for domain in domains]
    known = group.exchange(digests)
    if all(others == digests for others in known) or any(len(others) != len(digests) for others in known):
        return list(domains)  # `open_caches` refuses other numbers of datasets
    return [united(parts) for parts in zip(*group.exchange(domains), strict=True)]


def united(domains: Sequence[Domain | None]) -> Domain | None:
    """The indices that any of several samplers draws; None: all."""
    known = [domain for domain in domains if domain is not None]
    return reduce(Domain.__or__, known) if len(known) == len(domains) else None


def _with_directory(request: CacheRequest) -> CacheRequest:
    """The request, with the checked path of its directory. A DiskError or ImportError if no cache can lie there."""
    if request.dir is None:
        return request
    checksum()
    return replace(request, dir=check_directory(request.dir))


# ---- looks at the sources, and comparisons between ranks ----


def _compare_states(openings: Sequence[_Opening], group: NodeGroup) -> None:
    """Find out whether the ranks hold different data under one index, and whether their settings differ. Collective.

    One cache serves all ranks of a node, so a rank would get the samples of another rank.

    Raises:
        ValueError: the ranks have sources of different lengths.
    """
    if group.world == 1:
        return
    lengths = [opening.request.length if opening.request.by_index else None for opening in openings]
    digests = [
        (digest_of_state(opening.state, "data"), digest_of_state(opening.state, "setting")) for opening in openings
    ]
    facts = group.exchange((lengths, digests))
    first = facts[0][0]
    for rank, (lengths, _) in enumerate(facts):
        if lengths != first:
            raise ValueError(
                f"all ranks must open the same sources; those of rank 0 have {first} samples, those of rank {rank} "
                f"{lengths}. Give every rank the whole dataset and let a DistributedSampler divide it"
            )
    for opening, of_ranks in zip(openings, zip(*(digests for _, digests in facts), strict=True), strict=True):
        asks = opening.witness is not None and opening.witness.asks_rank
        data, settings = map(set, zip(*of_ranks, strict=True))
        opening.is_apart = len(data) > 1
        opening.is_doubtful = asks or len(settings) > 1


def _look(opening: _Opening) -> Finding:
    """Look at a source, and log the finding."""
    request = opening.request
    if not request.writers and (request.budget.off or not request.length):
        return Finding()
    found = Finding(reason=_APART) if opening.is_apart else opening.reader.look()
    if found.reason is not None:
        request.pass_through(found.reason)
    if found.reads:
        log.info("%s: %d reads at set-up, to learn what the samples are", request.title, found.reads)
    if found.note is not None:
        log.warning("%s: %s", request.title, found.note)
    return found


def _compare_samples(openings: Sequence[_Opening], group: NodeGroup) -> None:
    """Let sources pass through whose samples differ between ranks, where their settings differ. Collective."""
    if not any(opening.is_doubtful for opening in openings):
        return

    def read(opening: _Opening, named: set[int]) -> dict[int, str]:
        request = opening.request
        if not opening.is_doubtful or request.freeze_random:
            return {}
        among = range(request.length) if request.domain is None else request.domain.among
        # Evenly spread indices may all be even, where odd ones differ.
        drawn = random.Random(0).sample(range(len(among)), min(MANY, len(among)))
        indices = {int(among[number]) for number in drawn} | {index for index in named if index in among}
        return sample_digests(opening.reader, sorted(indices))

    named_here = [[] if opening.witness is None else opening.witness.named_indices() for opening in openings]
    named = [set().union(*of_ranks) for of_ranks in zip(*group.exchange(named_here), strict=True)]
    by_rank = group.exchange(group.together(lambda: list(map(read, openings, named))))
    for opening, digests in zip(openings, zip(*by_rank, strict=True), strict=True):
        indices = set.intersection(*map(set, digests))
        request = opening.request
        if any(len({of_rank[index] for of_rank in digests}) > 1 for index in indices):
            opening.reader.found = Finding(reason=_APART)
            if request.strict or group.is_leader:
                request.pass_through(_APART)
        elif opening.is_doubtful and not indices and opening.found.codec is not None and group.rank == 0:
            log.warning(
                "%s has other settings on each rank, and no sample could be compared: it is taken for the same data",
                request.title,
            )


# ---- memory, and the caches in it ----


def _plan(
    openings: Sequence[_Opening],
    budgets: Mapping[str, Budget],
    ranks: int,
    backend: BackendChoice,
    later: Reserve,
) -> tuple[list[tuple[Finding, int, str | None, str | None]], Backend | None]:
    """Join the named caches that exist, and divide the memory of a node among the other requests.

    Returns:
        The finding, the granted bytes, the name and the directory of each request, and the kind of segment; None is
        the system's default.
    """
    for opening in openings:
        if opening.request.name is not None and opening.found.codec is not None:
            opening.joined = _open_by_name(opening)
            later += Reserve(0 if opening.joined is None else opening.joined.promised_bytes)
    requests = [opening.request for opening in openings]
    codecs = [None if opening.joined is not None else opening.found.codec for opening in openings]
    division = allocate(requests, codecs, budgets, ranks, backend, later)
    for number, opening in enumerate(openings):
        opening.slots, opening.granted = division.slots[number], division.granted[number]
        opening.keep_free = division.keep_free[number]
        if opening.request.by_index and opening.found.codec is not None and opening.joined is None:
            _choose_form(opening)
    if any(opening.slots < opening.request.samples for opening in openings):
        if division.warnings and any(request.strict for request in requests):
            raise CacheMemoryError(" ".join(division.warnings))
        for warning in division.warnings:
            log.warning(warning)
    plan = [(opening.found, opening.granted, opening.request.name, opening.request.dir) for opening in openings]
    return plan, division.backend


def _open_by_name(opening: _Opening, arc: Arc | None = None) -> Store | None:
    """Join the cache of the request's name, or make it with an arc. Returns None if there is none to be used.

    A file under the name that cannot be used is left alone, with one warning: the source passes through, or a rolling
    cache lies in memory.

    Raises:
        FingerprintError: (`strict`) it has other data, or another budget made it.
        ManifestError: (`strict`) it is damaged, or has another version.
        PermissionError: (`strict`) it belongs to another user.
        OSError: there is no memory to make it; (`strict`) it cannot be read.
    """
    request = opening.request
    try:
        store = open_named_cache(request, opening.found, digest_of_state(opening.state), arc, opening.granted)
        if isinstance(store, RollingStore):
            check_pool(request, opening.reader, store)
        return store
    except (FingerprintError, ManifestError, OSError) as error:
        is_shortage = arc is not None and isinstance(error, OSError) and not isinstance(error, PermissionError)
        if request.strict or is_shortage:  # without memory all caches are off
            raise
        words = str(error)  # a log record that had the error would keep its frames
        if request.writers:
            log.warning("the rolling cache lies in memory, and ends with this job: %s", words)
            opening.reader.request = replace(request, name=None, dir=None)
            return None
        opening.reader.found = Finding(reason=words)
        request.pass_through(words)
        return None


def _choose_form(opening: _Opening) -> None:
    """Choose between decoded samples and their files by the granted bytes, and pack records if room is short."""
    found, granted, wanted = opening.found, opening.granted, opening.wanted
    codec, as_files = found.codec, found.as_files
    assert codec is not None
    codec = codec.for_bytes(granted, wanted)
    if found.encoded is not None:
        as_files = keeps_files(granted, wanted, codec, found.encoded)
        log.info(
            "%s keeps %s: a sample takes %s decoded and %s as its file",
            opening.request.title,
            "files" if as_files else "samples decoded",
            format_bytes(codec.nbytes),
            format_bytes(found.encoded.codec.nbytes),
        )
        codec = found.encoded.codec if as_files else codec
    if codec is not found.codec:
        seen = found.seen if as_files == found.as_files else ()
        opening.reader.found = replace(found, codec=codec, as_files=as_files, seen=seen)
        opening.slots = min(granted // codec.slot_bytes, wanted)


def _per_node(value: T, group: NodeGroup) -> list[T]:
    """The values of the leaders of all nodes. Collective."""
    values = group.exchange(value)
    return [values[ranks[0]] for ranks in group.nodes]


def _lay_rings(openings: Sequence[_Opening], group: NodeGroup) -> list[tuple[Ring, Ring]]:
    """Lay the rings of all nodes: with all slots, and with the slots for which there will be room. Collective."""
    ours = [
        (opening.slots, _homes(opening, group), None if opening.joined is None else opening.joined.handle.arc)
        for opening in openings
    ]
    rings = []
    for opening, *nodes in zip(openings, *_per_node(ours, group), strict=True):
        domain = opening.request.domain
        samples = opening.request.samples if opening.request.by_index else 0
        slots, homes, arcs = zip(*nodes, strict=True)
        ring = Ring.cut(samples, group.shares, homes, domain).with_arcs(arcs)
        rings.append((ring, Ring.cut(samples, group.shares, slots, domain)))
    return rings


def _homes(opening: _Opening, group: NodeGroup) -> int:
    """The number of indices that get a slot on this node.

    With records, every index of the node's share gets a slot, even if the memory is for fewer samples: the first loaded
    samples get the room, and a wrong estimate of their mean size costs nothing. Beyond its share, an index could be
    stored on two nodes, so there are only as many slots as samples with expected room.
    """
    codec, expected, wanted = opening.found.codec, opening.slots, opening.wanted
    if codec is None or codec.is_fixed or not expected:
        return expected
    share = math.ceil(group.shares[group.node] * wanted)
    return min(max(expected, share), max(layout_of(codec).slots_for(opening.granted, codec, wanted), expected), wanted)


def _make(opening: _Opening, arc: Arc, group: NodeGroup, kind: Backend | None) -> Store | None:
    """Make the store of a cache with this node's arc, or join the named cache."""
    request, codec, granted = opening.request, opening.found.codec, opening.granted
    store, opening.joined = opening.joined, None
    if codec is None:
        return None
    if request.writers:
        arc = Arc(opening.slots, opening.slots)
    whose = {"dataset": printable(request.title, _LONGEST), "node": group.node, "nodes": len(group.nodes)}
    if store is None and request.name is not None:  # another job may have made it since
        store = _open_by_name(opening, arc)
    elif store is None and request.writers:
        store = RollingStore.empty(codec, opening.slots, kind, whose, granted=granted)
    elif store is None and request.as_stream and granted >= _LEAST:
        store = StreamStore.empty(codec, granted, len(group.members), kind)
    elif store is None and request.by_index and arc.slots:
        store = Store.create(codec, arc, None if request.dir else kind, whose, granted=granted, directory=request.dir)
    if store is not None and opening.keep_free:
        store.keep_free(opening.keep_free)
    return store


def _store_or_refuse(openings: Sequence[_Opening], caches: Sequence[OpenCache], group: NodeGroup) -> list[OpenCache]:
    """Store the samples that set-up has read, and close named caches with other data. Collective.

    Raises:
        FingerprintError: (`strict`) a named cache has other data; on the other ranks a RuntimeError. All caches are
            closed then.
    """
    readers = [opening.reader for opening in openings]
    try:
        usable = group.lead(lambda: list(map(store_or_refuse, caches, readers)))
    except BaseException:
        for opened in caches:
            opened.close()
        raise
    served = []
    for opened, is_usable in zip(caches, usable, strict=True):
        if opened.cache is not None and not is_usable:
            opened.cache.close()
            opened = replace(opened, cache=None, budget_bytes=0)
        served.append(opened)
    return served


def _with_arcs(caches: Sequence[OpenCache], group: NodeGroup) -> list[OpenCache]:
    """Give the named caches the arcs that they have, which another job may have chosen. Collective."""
    arcs = _per_node([None if opened.cache is None else opened.cache.handle.arc for opened in caches], group)
    complete = []
    for opened, *nodes in zip(caches, *arcs, strict=True):
        if opened.request.name is not None and opened.ring is not None:
            ring = Ring(tuple(arc or replace(cut, slots=0) for arc, cut in zip(nodes, opened.ring.arcs, strict=True)))
            granted = 0 if opened.cache is None else opened.cache.granted_bytes
            opened = replace(opened, ring=ring, expected_ring=ring, budget_bytes=granted)
        complete.append(opened)
    return complete


def _without(requests: Sequence[CacheRequest], group: NodeGroup, error: Exception, *, strict: bool) -> list[OpenCache]:
    """Continue without caches after an error of memory or disk, with one warning; an error if strict."""
    if strict:
        raise error
    if group.rank == 0:
        log.warning("the cache is off, all samples are loaded from their source, uncounted: %s", error)
    return [OpenCache.without(request, group) for request in requests]
