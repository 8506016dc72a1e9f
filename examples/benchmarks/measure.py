"""Fresh processes, interleaved rounds, spreads, and the report of a benchmark.

Every configuration runs in a process of its own, forked off a server that has imported libraries and done nothing else
(so that a run does not pay for imports, and inherits no thread, no CUDA context, no cache). Rounds run every
configuration once, in an order that changes, so that a machine that slows down does so for all of them. What is shown
of several runs is the median and, in brackets, the lowest and the highest.

A Report prints tables as they are ready and writes `<output>/<name>.json` with every single value and the machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from machine import machine
from tqdm import tqdm

__all__ = ["Job", "Report", "Spread", "epoch_seconds", "fresh", "parser", "rounds", "thousands"]

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch", "torchvision.transforms.v2", "lightning.pytorch"])
_PATIENCE_SECONDS = 900


@dataclass(frozen=True)
class Spread:
    """What several runs of one configuration gave.

    >>> f"{Spread.of([1.0, 3.0, 2.0]):.1f}"
    '2.0 [1.0..3.0]'
    """

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        return cls(tuple(values))

    @classmethod
    def ratio(cls, over: Iterable[float], under: Iterable[float]) -> Spread:
        """Run by run: both are of the same round."""
        return cls(tuple(a / b for a, b in zip(over, under, strict=True)))

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    @property
    def bars(self) -> tuple[float, float]:
        """How far the lowest and the highest are from the median, as error bars have it."""
        return self.median - self.low, self.high - self.median

    def __format__(self, spec: str) -> str:
        if len(self.values) == 1:
            return format(self.median, spec)
        return f"{self.median:{spec}} [{self.low:{spec}}..{self.high:{spec}}]"


class Place(NamedTuple):
    """Where a process stands: its rank among so many (0: no group), and how it is to start processes of its own."""

    meeting: str
    rank: int
    world: int
    start_method: str


class Job:
    """A function running in fresh processes: one, or the ranks of a gloo group.

    Args:
        function: of the script's own top level; it gets `args`, and answers with what pickles.
        args: its arguments.
        world: 0 for one process without a group, else the number of ranks.
        alone: start new interpreters, which share no page with the server: where memory is measured.
    """

    def __init__(self, function: Callable[..., Any], *args: Any, world: int = 0, alone: bool = False) -> None:
        context: Any = multiprocessing.get_context("spawn") if alone else _SERVER
        self._meeting = tempfile.TemporaryDirectory()
        self._children: list[tuple[Any, Connection]] = []
        for rank in range(max(world, 1)):
            ours, theirs = context.Pipe(duplex=False)
            place = Place(f"file://{self._meeting.name}/meeting", rank, world, multiprocessing.get_start_method())
            process = context.Process(target=_run, args=(theirs, place, function, args))
            process.start()
            theirs.close()
            self._children.append((process, ours))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process, _ in self._children]

    def results(self) -> list[Any]:
        """What the function returned, by rank.

        Raises:
            RuntimeError: a process raised, died or did not end; the message holds its traceback.
        """
        try:
            return [self._result(process, pipe) for process, pipe in self._children]
        finally:
            for process, _ in self._children:
                process.join(10)
                if process.is_alive():
                    process.kill()
            self._meeting.cleanup()

    @staticmethod
    def _result(process: Any, pipe: Connection) -> Any:
        wait([pipe, process.sentinel], _PATIENCE_SECONDS)
        if not pipe.poll():
            raise RuntimeError(f"the process gave no answer, its exit code is {process.exitcode}")
        ended_well, value = pipe.recv()
        if not ended_well:
            raise RuntimeError(f"in the fresh process:\n{value}")
        return value


def fresh(function: Callable[..., Any], *args: Any) -> Any:
    """What a function of the script's top level returns in a fresh process."""
    return Job(function, *args).results()[0]


def rounds(arms: Mapping[Any, Callable[[], Any]], count: int) -> dict[Any, list[Any]]:
    """Run every arm once per round; what each returned, round by round."""
    found: dict[Any, list[Any]] = {arm: [] for arm in arms}
    order = random.Random(0)
    with tqdm(total=count * len(arms), unit="run", leave=False, disable=None) as bar:
        for _ in range(count):
            for arm in order.sample(list(arms), len(arms)):
                bar.set_description(" ".join(map(str, arm)) if isinstance(arm, tuple) else str(arm))
                found[arm].append(arms[arm]())
                bar.update()
    return found


def epoch_seconds(loader: Iterable[Any]) -> float:
    """How long it takes to go through a loader once, doing nothing with the batches."""
    start = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - start


def thousands(values: Iterable[float]) -> str:
    """A spread of rates, in thousands."""
    return f"{Spread.of(value / 1000 for value in values):.1f}"


def parser(doc: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """A parser with what all benchmarks have in common; the script's docstring is its help."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", type=Path, default=Path("outputs/benchmarks"), help="folder for JSON and PNG files")
    made.add_argument("--rounds", type=int, help=f"runs of every configuration, interleaved ({rounds}; quick: 2)")
    made.add_argument("--quick", action="store_true", help="a few samples, to see that it works; no figure means much")
    made.set_defaults(usual_rounds=rounds)
    return made


class Report:
    """Tables to stdout; tables, values and machine to `<output>/<name>.json`."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.folder, self.quick = name, options.output, options.quick
        self.rounds = options.rounds or (2 if options.quick else options.usual_rounds)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._written: dict[str, Any] = {"benchmark": name, "quick": self.quick, "rounds": self.rounds}
        self._written["machine"] = machine()
        self._started = time.perf_counter()
        print(self.machine)
        busy = os.getloadavg()[0] / (os.cpu_count() or 1)
        if busy > 0.3:
            print(f"The machine is busy (load {busy:.1f} per core): seconds mean little, ratios somewhat more.")

    @property
    def machine(self) -> str:
        """The machine in one line."""
        facts = self._written["machine"]
        line = "{cpu}, {cores} cores, {memory_gib} GiB, {gpu}, Python {python}, torch {torch}".format(**facts)
        return line + (" | quick run: the figures mean nothing" if self.quick else "")

    def say(self, text: str) -> None:
        """A sentence, printed and kept."""
        print(text)
        self._written.setdefault("remarks", []).append(text)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """A table; spreads as they are, numbers rounded by whoever gives them."""
        cells = [[str(cell) for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        print(f"\n{title}")
        for row in (columns, *cells):
            first, *others = (
                cell.ljust(width) if not at else cell.rjust(width)
                for at, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            print("  ".join([first, *others]).rstrip())
        self._written.setdefault("tables", []).append({"title": title, "columns": list(columns), "rows": cells})

    def markdown(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """A table as Markdown, for a README."""
        cells = [[str(cell) for cell in row] for row in rows]
        lines = [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *cells)]
        print("\n".join(["", f"{title}:", "", *lines]))
        self._written.setdefault("tables", []).append({"title": title, "columns": list(columns), "rows": cells})

    def save(self, **values: Any) -> None:
        """Write the JSON file; Spreads become lists of all their values."""
        self._written["seconds"] = round(time.perf_counter() - self._started, 1)
        path = self.folder / f"{self.name}.json"
        path.write_text(json.dumps(self._written | values, indent=1, default=_plain) + "\n")
        print(f"\n{path}, after {self._written['seconds']:.0f} s")


def _run(pipe: Connection, place: Place, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    # A child of the fork server would ask the same server for its workers, where a user's program has the default.
    multiprocessing.set_start_method(place.start_method, force=True)
    # A second thread of torch's would wait for the cores that workers have, and the limit is that of one thread.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        answer = (True, _in_group(place, function, args))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send(answer)


def _in_group(place: Place, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    if not place.world:
        return function(*args)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", init_method=place.meeting, rank=place.rank, world_size=place.world)
    try:
        return function(*args)
    finally:
        torch.distributed.destroy_process_group()


def _plain(value: Any) -> Any:
    if isinstance(value, Spread):
        return list(value.values)
    raise TypeError(f"{value!r} cannot be written as JSON")
