"""Curves over the number of workers and the batch size, written down: tables, sentences, plain values, panels.

Tables have samples per second, pictures the seconds that a thousand samples take: there a cache, which is some hundred
times as fast as the loader, lies flat at the bottom, and does not hide what is above it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lightning_stocache.insight.breakdown import PARTS
from lightning_stocache.insight.columns import aligned
from lightning_stocache.insight.curves import Curves, Point, Rates
from lightning_stocache.insight.panels import Bars, Lines, Panel, Series
from lightning_stocache.insight.step_table import bars_of

__all__ = ["as_json", "as_text", "panels_of", "sentences"]

_KINDS = {"loader": "Loading", "training": "Training"}
_ARMS = ((False, "the source"), (True, "the cache"))


def as_text(curves: Curves) -> str:
    """The curves as tables, what a step is made of over the batch size, and what follows."""
    blocks = []
    for name, get in _curves(curves):
        if rows := list(_rates(name, get)):
            blocks.append([*rows, "Samples per second; mean +- standard deviation [lowest..highest] of all rounds."])
    for cached, what in _ARMS:
        blocks.append(list(_steps(curves.over_batch_sizes(cached), f"with batches from {what}, ms")))
    blocks += [list(_pinned(curves)), sentences(curves)]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def as_json(curves: Curves) -> dict[str, Any]:
    """The curves as plain values: samples per second in each round, seconds of a step's parts."""
    return {
        "points": [_plain(point) for point in curves.points],
        "workers": list(curves.workers),
        "batch_sizes": list(curves.batch_sizes),
        "left_out": list(curves.left_out),
        "sentences": sentences(curves),
    }


def panels_of(curves: Curves) -> list[Panel]:
    """Seconds over each number, with error bars, by the loader alone and in training; and what a step is made of.

    What was not measured has no panel.
    """
    panels: list[Panel] = []
    for name, get in _curves(curves):
        for kind in _KINDS:
            if series := dict(_series(get, kind)):
                panels.append(_lines(name, kind, series))
    for cached, what in _ARMS:
        points = [point for point in curves.over_batch_sizes(cached) if point.steps.steps]
        if points:
            panels.append(_bars(points, what))
    return panels


def sentences(curves: Curves) -> list[str]:
    """What follows for the number of workers and the batch size; ends of error bars that overlap are no difference."""
    said = list(curves.left_out)
    for cached, what in _ARMS:
        if len(points := curves.over_workers(cached)) > 1:
            rates = [_telling(point) for point in points]
            best = max(rates, key=lambda rate: rate.mean)
            enough = next(point for point, rate in zip(points, rates, strict=True) if rate.high >= best.low)
            told = f"Batches from {what}: num_workers={enough.setting.num_workers} is as fast as any of these"
            said.append(f"{told} ({_telling(enough).mean:,.0f} samples/s).")
    for cached, what in _ARMS:
        if len(points := curves.over_batch_sizes(cached)) > 1:
            small, large = points[0], points[-1]
            sizes = f"from {small.setting.batch_size} to {large.setting.batch_size} samples"
            before, after = _telling(small), _telling(large)
            change = f"{after.mean / before.mean:.1f} times as fast"
            change = "no faster, nor slower," if before.high >= after.low and after.high >= before.low else change
            told = f"Batches from {what}: {sizes} they are {change} per sample"
            if small.steps.steps and large.steps.steps:
                shares = (100 * point.steps.share("wait") for point in (small, large))
                told += "; waiting goes from {:.0f} to {:.0f} % of a step".format(*shares)
            said.append(f"{told}.")
    return said


def _curves(curves: Curves) -> list[tuple[str, Callable[[bool], list[Point]]]]:
    return [("num_workers", curves.over_workers), ("batch_size", curves.over_batch_sizes)]


def _telling(point: Point) -> Rates:
    """Of training, where there is a model."""
    return point.training if point.training.rounds else point.loader


def _x(point: Point, name: str) -> int:
    value: int = getattr(point.setting, name)
    return value


def _series(get: Callable[[bool], list[Point]], kind: str) -> Iterator[tuple[str, list[tuple[Point, Rates]]]]:
    """The lines of a curve, by what the batches come from."""
    for cached, what in _ARMS:
        found = [(point, rates) for point in get(cached) if (rates := getattr(point, kind)).rounds]
        if found:
            yield what.removeprefix("the "), found


def _rates(name: str, get: Callable[[bool], list[Point]]) -> Iterator[str]:
    series = {f"{kind}, {what}": found for kind in _KINDS for what, found in _series(get, kind)}
    numbers = sorted({_x(point, name) for found in series.values() for point, _ in found})
    if not numbers:
        return
    cells = {(label, _x(point, name)): _spread(rates) for label, found in series.items() for point, rates in found}
    rows = [[name, *series]] + [
        [str(number), *(cells.get((label, number), "-") for label in series)] for number in numbers
    ]
    yield from aligned(rows)


def _steps(points: Sequence[Point], what: str) -> Iterator[str]:
    points = [point for point in points if point.steps.steps]
    if not points:
        return
    rows = [["batch_size", "waiting", *PARTS[1:], "step", "waiting %"]]
    for point in points:
        times = [*(point.steps.mean(part) for part in PARTS), point.steps.step_seconds]
        share = f"{100 * point.steps.share('wait'):.0f} %"
        rows.append([str(point.setting.batch_size), *(f"{1000 * seconds:.2f}" for seconds in times), share])
    yield f"What a step is made of, {what}:"
    yield from aligned(rows)


def _pinned(curves: Curves) -> Iterator[str]:
    """Pinned memory against pageable, where both were measured."""
    pairs = [
        (pinned, pageable)
        for pinned in curves.over_batch_sizes(True, pinned=True)
        for pageable in curves.over_batch_sizes(True, pinned=False)
        if pinned.setting.batch_size == pageable.setting.batch_size
    ]
    if not pairs:
        return
    rows = [["batch_size", "pinned", "transfer, ms", "pageable", "transfer, ms"]]
    for pair in pairs:
        cells = [
            cell for each in pair for cell in (_spread(each.training), f"{1000 * each.steps.mean('transfer'):.3f}")
        ]
        rows.append([str(pair[0].setting.batch_size), *cells])
    yield "Training, with batches from the cache in pinned and in pageable memory, samples per second:"
    yield from aligned(rows)


def _lines(name: str, kind: str, found: Mapping[str, list[tuple[Point, Rates]]]) -> Lines:
    numbers = sorted({_x(point, name) for points in found.values() for point, _ in points})
    series = []
    for colour, (label, points) in zip((1, 0), found.items(), strict=False):
        places = [(numbers.index(_x(point, name)), rates) for point, rates in points]
        ends = [(float(x), 1000 / rate) for x, rates in places for rate in (rates.high, rates.low)]
        series.append(Series("", ends, colour, "error"))
        series.append(Series(label, [(float(x), 1000 / rates.mean) for x, rates in places], colour))
    what = "the loader by itself" if kind == "loader" else "training"
    caption = f"Seconds that 1,000 samples take, {what}; error bars from the fastest to the slowest round."
    return Lines(f"{_KINDS[kind]} over {name}", caption, name, "s", series, names=[str(number) for number in numbers])


def _bars(points: Sequence[Point], what: str) -> Bars:
    named = {str(point.setting.batch_size): point.steps for point in points}
    caption = "Mean seconds of a training step, by its parts; above a bar the share of waiting for data."
    return bars_of(named, f"A step, with batches from {what}", caption, "batch_size")


def _plain(point: Point) -> dict[str, Any]:
    parts = {part: point.steps.mean(part) for part in PARTS} if point.steps.steps else {}
    return {**asdict(point.setting), "loader": list(point.loader.rounds), "training": list(point.training.rounds)} | {
        "step_seconds": parts,
        "steps": point.steps.steps,
    }


def _spread(rates: Rates) -> str:
    return f"{rates.mean:,.0f} +- {rates.deviation:,.0f} [{rates.low:,.0f}..{rates.high:,.0f}]"
