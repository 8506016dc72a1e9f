"""Find the deterministic and the random part of a source.

A cache freezes what it stores, and most random augmentation sits inside the user's dataset. `split` finds it:

1. A few indices are read twice, under different seeds of every process-wide generator. The source is deterministic if
   the bits are equal and no generator has moved, neither these nor one that can be reached from the source
   (RandomErasing(p=0.1) seldom changes bits, but always draws).
2. Otherwise a shallow copy of the dataset notes what its `__getitem__` calls, and runs the steps of transforms one by
   one. The calls that draw are cut, each at its earliest random step over all probed samples; so are the calls that
   work on their results.
3. A second copy runs only the steps before the cuts. Where their output lies in the sample is found by identity; the
   tail applies the other steps there, in the order of the calls. If it does not lie there, the code behind the
   transform may take the result apart (`result_form`).
4. The cut is proved: under one seed, `tail(copy[i])` must give the bits of `source[i]` and leave the generators in the
   same state, and the copy must be deterministic by the test of step 1. The same holds for a batch if the source loads
   batches.

The user's objects are not modified, and the generators end where they began, also when the source raises. A source that
is random in few samples only, and draws from a hidden generator, is not recognised.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_stocache.cache.placement import Domain
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.source.access import batch_reader
from lightning_stocache.source.generators import ASKED, Generators, watch_entropy
from lightning_stocache.source.opaque import LookedAtError, parts_held
from lightning_stocache.source.probe import FEW, MANY, SOME, Probe, Read, attributed, spread, why_random, words_of
from lightning_stocache.source.proof import Proof
from lightning_stocache.source.result_form import LEVELS, ResultForm, form_of
from lightning_stocache.source.samples import Path, bits, walk
from lightning_stocache.source.transform_split import OTHER_FORM, Cut, CutCall, ResultPaths, Tail, format_of
from lightning_stocache.source.transforms import (
    NOT_HELD,
    Head,
    Site,
    UncuttableError,
    Values,
    as_result,
    as_values,
    draws_by_itself,
    has_names,
    reading,
    sites_of,
    steps_of,
    transform_at,
    with_transforms,
)

__all__ = ["Split", "split"]

QUICK_SECONDS = 0.2
_MOST_BYTES = 64 << 20  # of samples of further indices
_ANY_SAMPLE = RecordCodec(0)
_SLOW_SECONDS = 20.0  # after which two indices are enough
_CUT_READS = 6  # of each index: two to find the transform, two to prove the cut, one or two with opaque results
_PATIENCE_SECONDS = 0.5  # that finding a cut may take more than all hits save
_NOT_RANDOM = "no transform that it holds and calls is random"
_OF_A_THREAD = "its transform is called by another thread than the one that reads"
_NAMES = ("transform", "transforms")
_NOT_ALIKE = "its transform is not called in the same way for every sample"
_SMALL = (str, int, float, complex, np.generic, os.PathLike, type(None), dict, UserDict, list, tuple, Dataset)


@dataclass(frozen=True)
class Split:
    """A source and what `split` found in it.

    Args:
        source: the dataset to cache: a shallow copy whose transform ends before its first random step, or the user's
            own object if it is deterministic or cannot be split.
        probed: one read of `source` per probed index, the first index first.
        reads: how many times the user's dataset was read.
        tail: the random rest, applied to a sample after the cache; None if the source was not cut.
        reason: why a random source cannot be cached, else None.
    """

    source: Dataset[Any]
    probed: tuple[Read, ...]
    reads: int
    tail: Tail | None = None
    reason: str | None = None

    @property
    def cut(self) -> Cut | None:
        """Where the source was cut, for other processes; None if it was not cut."""
        return None if self.tail is None else self.tail.cut

    @property
    def indices(self) -> tuple[int, ...]:
        """The probed indices."""
        return tuple(read.index for read in self.probed)

    @property
    def samples(self) -> tuple[Any, ...]:
        """The samples of the probed indices."""
        return tuple(read.sample for read in self.probed)

    @property
    def intact(self) -> dict[int, Any]:
        """The samples by index, without those that a later read has overwritten in place."""
        return {read.index: read.sample for read in self.probed if bits(read.sample) == read.bits}


def split(source: Any, *, quick: int = 0, domain: Domain | None = None, passes: float = math.inf) -> Split:
    """Split a source into what is the same on every read and the random rest.

    Args:
        source: a map-style dataset with at least one sample. Four indices are probed, two if these take 20 s. A
            deterministic source is read twice per index, a random one up to ten times. If all raise, so does this.
        quick: how many more indices to probe within 0.2 s.
        domain: which indices may be read; by default all.
        passes: how often each sample will be read. A random source stays whole if finding its cut costs more than all
            hits save.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> class Pixels(Dataset):
        ...     transform = nn.Sequential(nn.Flatten(0), nn.Dropout(0.5))
        ...
        ...     def __len__(self):
        ...         return 8
        ...
        ...     def __getitem__(self, index):
        ...         return self.transform(torch.full((2, 2), float(index))), index
        >>> parts = split(Pixels())
        >>> parts.source[3]
        (tensor([3., 3., 3., 3.]), 3)
        >>> str(parts.tail)
        'Dropout'
    """
    among = range(len(source)) if domain is None else domain
    indices = spread(among, FEW)
    more = spread(among, quick + 2)[1:-1] if quick else ()
    with Probe(source) as probe, watch_entropy():
        pairs = list(_pairs(source, probe, indices, more))
        originals, again = zip(*pairs, strict=True)
        moved = next(filter(None, map(why_random, originals, again)), None)
        reason = None
        if any(ASKED in read.moved for read in originals):
            reason = f"its reads ask {ASKED}, whose answers may change at any time"
        elif moved is None and probe.always:  # another thread may draw now and then, but not during each read
            reason = f"it is random (each read moves the generator of {' and '.join(sorted(probe.always))})"
        if reason is None and moved is not None:
            reason = _why_not_worth(again, len(among), passes)
        if reason is not None or moved is None:
            return Split(source, again, probe.reads, reason=reason)
        reasons = []
        for named in (True, False):
            try:
                cut = _cut(source, pairs, probe, named)
                if cut is None:
                    return Split(source, again, probe.reads)
                tail = cut.apply(source)
                proof = Proof(source, tail)
                heads = tuple(proof.prove_read(original, probe) for original in originals)
                if batch_reader(source) is not None:
                    proof.prove_read(probe.read(source, [read.index for read in again[:2]], 0), probe)
                if proof.is_blind(heads, probe):
                    cut = replace(cut, is_blind=True)
                elif tail.takes_apart:
                    raise UncuttableError(NOT_HELD)
                else:
                    unproved = proof.prove_others(_others(len(source), domain), SOME - len(originals), probe)
                    cut = replace(cut, unproved=unproved)
                tail = cut.apply(source)
                return Split(tail.head, heads, probe.reads, tail)
            except UncuttableError as error:
                reasons.append(str(error))
            except Exception as error:  # user code on a changed dataset may raise anything; the source itself did not
                reasons.append(words_of(attributed(error), "without its random steps it"))
        # The first way may have found no transform of these names, the second one of another name.
        why = next((reason for reason in reasons if reason != _NOT_RANDOM), _NOT_RANDOM)
        draws = any(read.moved for read in (*originals, *again))
        guess = "" if draws else ", or depends on the time, on earlier reads or on another process"
        reason = f"it is random{guess} ({moved}), and cannot be split: {why}"
        return Split(source, again, probe.reads, reason=reason)


def _why_not_worth(reads: Sequence[Read], samples: int, passes: float) -> str | None:
    """The reason why finding the cut of a random source costs more than all hits save, or None if it does not."""
    read_seconds = statistics.median(read.ns for read in reads) * 1e-9
    cut_reads = _CUT_READS * len(reads)
    saved_reads = (passes - 1) * samples
    if (cut_reads - saved_reads) * read_seconds <= _PATIENCE_SECONDS:
        return None
    words = f"finding its random steps takes {cut_reads} more reads of {read_seconds:.1f} s"
    return f"it is random, and {words}, more than {passes:.0f} epochs of {samples} samples save"


def _others(length: int, domain: Domain | None) -> list[int]:
    """Indices for further proofs, in no regular order; some come twice if there are only a few."""
    among = range(length) if domain is None else domain.among
    count = MANY - FEW
    dice = random.Random(0)  # not a process-wide generator
    chosen = dice.sample(range(len(among)), min(count, len(among)))
    return [int(among[chosen[number % len(chosen)]]) for number in range(count)]


def _pairs(
    source: Dataset[Any], probe: Probe, indices: tuple[int, ...], more: tuple[int, ...]
) -> Iterator[tuple[Read, Read]]:
    """Two reads of each index, and of more as long as that is quick, takes little memory, and nothing is random.

    An index that raises is skipped, unless all raise: no sampler may ever ask for it.
    """
    begin = time.perf_counter()
    seen = 0
    nbytes = 0
    failure = None
    for index in dict.fromkeys((*indices, *more)):
        first = index in indices
        if not (first or seen):
            break
        if seen >= 2 and time.perf_counter() - begin > (_SLOW_SECONDS if first else QUICK_SECONDS):
            break
        if nbytes > _MOST_BYTES and not first:
            break
        try:
            pair = probe.read_twice(source, index)
        except Exception as error:  # the source is the user's, and may raise anything
            failure = error if failure is None else failure
            continue
        seen += 1
        nbytes += _ANY_SAMPLE.least_bytes(pair[1].sample)
        yield pair
        if not first and why_random(*pair) is not None:
            break
    if failure is not None and not seen:
        raise failure


# ---- the cut ----

_Pair: TypeAlias = tuple[Read, Read]


def _cut(source: Any, pairs: Sequence[_Pair], probe: Probe, named: bool) -> Cut | None:
    """The cut before the first random step; None if all steps are deterministic.

    Of two reads in `pairs` the first has the index in `source`, which may be a dataset inside the probed one. If
    `named`, only attributes named `transform` or `transforms` are transforms.

    Raises:
        UncuttableError: the cut would not be sound.
    """
    if type(source) is Subset:
        inside = [(replace(first, index=int(source.indices[first.index])), again) for first, again in pairs]
        return _cut(source.dataset, inside, probe, named)
    if type(source) is not ConcatDataset:
        return Cut() if format_of(source) is not None else _cut_transforms(source, pairs, probe, named)
    cuts: list[Cut | None] = []
    for part, end in zip(cast(Any, source.datasets), source.cumulative_sizes, strict=True):
        shifted = ((replace(first, index=first.index % len(source) - end + len(part)), again) for first, again in pairs)
        inside = [pair for pair in shifted if 0 <= pair[0].index < len(part)] or [probe.read_twice(part, 0)]
        cut = _cut(part, inside, probe, named) if any(why_random(*pair) for pair in inside) else None
        if cut is not None:
            Proof(part, cut.apply(part)).prove_read(inside[0][0], probe)
        cuts.append(cut)
    return Cut(parts=tuple(cuts)) if any(cuts) else None


def _cut_transforms(source: Any, pairs: Sequence[_Pair], probe: Probe, named: bool) -> Cut | None:
    sites = [site for site in sites_of(source) if not named or site[-1] in _NAMES]
    if not sites:
        raise UncuttableError(_NOT_RANDOM)
    samples = [_recorded(source, dict.fromkeys(sites), first, probe)[1] for first, _ in pairs]
    random = {site for calls in samples for site in _random(calls)}
    chains = {tuple(_chain(calls, random, named)) for calls in samples}
    if len(chains) > 1:
        raise UncuttableError(_NOT_ALIKE)
    [chain] = chains
    length = {site: len(steps_of(transform_at(source, site))) for site, _ in chain}
    ends = length | {site: 0 for site, follows in chain if follows}
    for call in (call for calls in samples for call in calls if call.site in ends):
        ends[call.site] = min([ends[call.site], *(step for step, moved in enumerate(call.moved) if moved)])
    if not ends:
        raise UncuttableError(_NOT_RANDOM)
    if any(ends[site] == length[site] and not draws_by_itself(transform_at(source, site)) for site in ends):
        raise UncuttableError("no step of its transform is random by itself")
    cuts = set[Cut]()
    for first, again in pairs:
        try:
            for call in (call for calls in samples for call in calls if call.site in ends):
                as_values(call.result, call.values)
            once, calls = _recorded(source, ends, first, probe)
            if ends != length:
                cuts.add(Cut(tuple(_placed(chain, ends, calls, once.sample))))
        except Exception as error:  # of the user's code, which finds something else than its result
            return _cut_apart(source, chain, ends, samples, pairs, probe, error)
        if ends != length:
            continue
        if found := why_random(once, _recorded(source, ends, replace(again, index=first.index), probe)[0]):
            raise UncuttableError(f"its dataset is random outside the transform ({found})")
        elif once.bits != first.bits:
            raise UncuttableError("its steps do not give its samples again, run one by one")
    if len(cuts) > 1:
        raise UncuttableError(_NOT_ALIKE)
    return next(iter(cuts), None)


def _cut_apart(
    source: Any,
    chain: Sequence[tuple[Site, bool]],
    ends: Mapping[Site, int],
    samples: Sequence[Sequence[_Call]],
    pairs: Sequence[_Pair],
    probe: Probe,
    error: Exception,
) -> Cut:
    """The cut of transforms whose results are taken apart, at as few levels of containers as the code behind needs.

    `ends` says how many steps of each transform stay in the source, `samples` has the calls of whole transforms for the
    probed indices, and `error` is the reason why the results are not whole in the samples.

    Raises:
        UncuttableError: there is none.
    """
    drawn = [(call.site, call.form) for calls in samples for call in calls if call.site in ends and call.form]
    followers = {site for site, follows in chain if follows}
    count = -1
    for levels in range(LEVELS + 1):
        forms = {(site, form.upper(levels)) for site, form in drawn if site not in followers}
        by_site = dict(forms)
        if len(by_site) < len(forms):
            raise UncuttableError(OTHER_FORM)
        before, count = count, sum(len(form.containers) for form in by_site.values())
        if count == before:
            break
        trial = Cut(tuple(CutCall(site, ends[site], (), (), by_site.get(site)) for site, _ in chain))
        tail = trial.apply(source)
        read = partial(probe.sample, tail.head)
        try:
            held = {parts_held(partial(read, first.index, first.seed), first.index, tail) for first, _ in pairs}
        except LookedAtError:
            continue
        if len(held) > 1 or None in held:
            raise UncuttableError(_NOT_ALIKE)
        [calls] = cast("set[Any]", held)
        return Cut(tuple(_placed_parts([site for site, _ in chain], ends, by_site, calls)))
    if isinstance(error, UncuttableError):
        raise error
    words = words_of(attributed(error), "it")
    raise UncuttableError(f"code behind its transform looks at the result ({words} without it)") from error


# ---- the calls of transforms ----


class _Call(NamedTuple):
    """A call of a possible transform, noted at its end.

    Args:
        site: where the dataset holds it.
        function: the transform.
        values: the arguments.
        result: the result.
        moved: whether each of its steps drew.
        before: number of calls that had ended when it began.
        form: the form of its result, which the code behind may take apart in place; None if no step drew.
    """

    site: Site
    function: Any
    values: Values
    result: Any
    moved: list[bool]
    before: int
    form: ResultForm | None


class _Recorder(Head):
    """Stands for a callable of a dataset: runs its first `end` steps, or all, and notes which of them draw."""

    def __init__(
        self, site: Site, function: Any, *, ends: Mapping[Site, int | None], calls: list[_Call], generators: Generators
    ) -> None:
        end = ends[site]
        super().__init__(function, len(steps_of(function)) if end is None else end)
        self._is_single = end is None and self.end == 1  # it may be no transform, and return anything
        self._site = site
        self._noted = calls
        self._generators = generators

    def __call__(self, *values: Any, **named: Any) -> Any:
        if not self.thread.is_reading:
            self.is_strayed = True  # an error would be that thread's
            return self.transform(*values, **named)
        before, moved = len(self._noted), list[bool]()
        given = self.given(values, named)
        if self._is_single:
            with self._generators.watch() as names:
                result = self.transform(*values, **named)
            moved.append(bool(names))
        else:
            stepped = given
            for position in range(self.end):
                with self._generators.watch() as names:
                    stepped = self.run(stepped, position, position + 1)
                moved.append(bool(names))
            result = as_result(stepped, has_names(given))
        form = form_of(result) if any(moved) or draws_by_itself(self.transform) else None
        self._noted.append(_Call(self._site, self.transform, given, result, moved, before, form))
        return result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.transform, name)


def _recorded(source: Any, ends: Mapping[Site, int | None], original: Read, probe: Probe) -> tuple[Read, list[_Call]]:
    """Read a source with only the first steps of its transforms. Returns the read and the calls of the transforms.

    Raises:
        UncuttableError: another thread calls a transform.
    """
    calls, recorders = list[_Call](), list[_Recorder]()

    def make(site: Site, function: Any) -> _Recorder:
        recorders.append(_Recorder(site, function, ends=ends, calls=calls, generators=probe.generators))
        return recorders[-1]

    recorded = with_transforms(source, ends, make)
    with reading(recorders):
        read = probe.read(recorded, original.index, original.seed)
    if any(recorder.is_strayed for recorder in recorders):
        raise UncuttableError(_OF_A_THREAD)
    return read, calls


def _random(calls: list[_Call]) -> Iterator[Site]:
    """The sites of transforms that draw; of nested calls only the innermost."""
    last = -1
    for number, call in enumerate(calls):
        draws = any(call.moved) or draws_by_itself(call.function)
        if draws and last < call.before and (call.site[-1] in _NAMES or _has_data(call.values.values())):
            last = number
            yield call.site


def _chain(calls: list[_Call], random: set[Site], named: bool) -> Iterator[tuple[Site, bool]]:
    """The sites of the calls that are cut, in their order, and whether a call only follows others.

    A random call is cut, and so is each call that works only on its results. Of `crop` (random), `pad(crop(image))` and
    `scale(boxes)` the chain is `crop`, and `pad`, which follows.
    """
    last = -1
    results = list[Any]()
    for number, call in enumerate(calls):
        # A method, or a callable that gets other values too, may make the sample.
        follows = bool(results and call.values) and not (named or isinstance(call.function, MethodType))
        follows = follows and all(any(value is node for node in results) for value in call.values.values())
        if call.site in random or (follows and last < call.before):
            last = number
            results += [node for _, node in walk(call.result) if _has_data([node])]
            yield call.site, follows


def _placed(
    chain: Sequence[tuple[Site, bool]], ends: Mapping[Site, int], calls: Sequence[_Call], sample: Any
) -> Iterator[CutCall]:
    """The calls of a cut, whose results are found in the sample by identity. Two may return the same object.

    A call that follows has its results where an earlier call had its own; any other call has places of its own.
    """
    if [site for site, _ in chain] != [call.site for call in calls]:
        raise UncuttableError(_NOT_ALIKE)
    free = dict(walk(sample))
    used = dict[Path, Any]()
    for (site, follows), call in zip(chain, calls, strict=True):
        paths: list[tuple[int | str, Path]] = []
        for key, value in as_values(call.result, call.values).items():
            path = next((path for path, node in (used if follows else free).items() if node is value), None)
            if path is not None:
                used[path] = free.pop(path, value)
                paths.append((key, path))
            elif isinstance(key, int):
                raise UncuttableError(NOT_HELD)
        if not paths:
            raise UncuttableError(NOT_HELD)
        yield CutCall(site, ends[site], tuple(paths), tuple(paths))


def _placed_parts(
    sites: Sequence[Site],
    ends: Mapping[Site, int],
    forms: Mapping[Site, ResultForm],
    calls: Sequence[tuple[tuple[int | str, ...], ResultPaths]],
) -> Iterator[CutCall]:
    """The calls of a cut, given the keys of their values and the places of their results' parts."""
    held = [{key for key, _ in parts} for _, parts in calls]
    for site, (keys, parts) in zip(sites, calls, strict=True):
        in_all = set.intersection(*(held[number] for number, other in enumerate(sites) if other == site))
        found = next(((key, path) for key, path in parts if key in in_all), None)
        if found is None:
            raise UncuttableError(NOT_HELD)
        if site not in forms:
            yield CutCall(site, ends[site], parts, parts)
            continue
        carrier, path = found
        values = tuple((key, path if keys == (0,) else (*path, key)) for key in keys)
        yield CutCall(site, ends[site], values, parts, replace(forms[site], carrier=cast(Path, carrier)))


def _has_data(values: Iterable[Any]) -> bool:
    """Whether there is more than numbers, names and paths. Caching only these would save nothing."""
    return any(not isinstance(node, _SMALL) for value in values for _, node in walk(value))
