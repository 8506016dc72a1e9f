"""What all benchmarks share: fresh processes, rounds, spreads, reports, memory, CPU time, and the gather limit.

Each configuration runs in a process of its own, forked off a server that has imported libraries and nothing else: no
run pays for imports, and none inherits a thread, a CUDA context or a cache. A round runs each configuration once, in a
random order, so a machine that slows down slows all of them. Results are shown as median [lowest..highest].

Memory and CPU time are read from /proc: Linux only.
"""

import argparse
import json
import math
import multiprocessing
import os
import platform
import random
import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

import torch
from tqdm import tqdm

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch", "torchvision.transforms.v2", "lightning.pytorch"])
_PATIENCE_SECONDS = 900
_TICKS = os.sysconf("SC_CLK_TCK")
_COLD_EPOCHS = 2


@dataclass(frozen=True)
class Spread:
    """The results of several runs of one configuration, shown as `median [lowest..highest]`."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        return cls(tuple(values))

    @classmethod
    def ratio(cls, over: Iterable[float], under: Iterable[float]) -> Self:
        """Ratios of runs of the same round."""
        return cls(tuple(a / b for a, b in zip(over, under, strict=True)))

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def bars(self) -> tuple[float, float]:
        """Error bars: the distances from the median to the lowest and to the highest value."""
        return self.median - min(self.values), max(self.values) - self.median

    def __format__(self, spec: str) -> str:
        if len(self.values) == 1:
            return format(self.median, spec)
        return f"{self.median:{spec}} [{min(self.values):{spec}}..{max(self.values):{spec}}]"


# ---- processes ----


class Job:
    """A function that runs in fresh processes: in one, or in the ranks of a gloo group.

    Args:
        function: of the script's top level; its result must pickle.
        args: its arguments.
        world: the number of ranks; 0 for one process without a group.
        alone: start new interpreters, which share no page with the server. For measurements of memory.
    """

    def __init__(self, function: Callable[..., Any], *args: Any, world: int = 0, alone: bool = False) -> None:
        context: Any = multiprocessing.get_context("spawn") if alone else _SERVER
        self._meeting = tempfile.TemporaryDirectory()
        self._children: list[tuple[Any, Connection]] = []
        for rank in range(max(world, 1)):
            ours, theirs = context.Pipe(duplex=False)
            call = partial(function, *args)
            if world:
                call = partial(_in_group, f"file://{self._meeting.name}/meeting", rank, world, call)
            process = context.Process(target=_run, args=(theirs, multiprocessing.get_start_method(), call))
            process.start()
            theirs.close()
            self._children.append((process, ours))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process, _ in self._children]

    def results(self) -> list[Any]:
        """The function's results, by rank.

        Raises:
            RuntimeError: a process raised, died or did not end; the message holds its traceback.
        """
        found = []
        try:
            for process, pipe in self._children:
                wait([pipe, process.sentinel], _PATIENCE_SECONDS)
                if not pipe.poll():
                    raise RuntimeError(f"the process gave no answer, its exit code is {process.exitcode}")
                ended_well, value = pipe.recv()
                if not ended_well:
                    raise RuntimeError(f"in the fresh process:\n{value}")
                found.append(value)
        finally:
            for process, _ in self._children:
                process.join(10)
                if process.is_alive():
                    process.kill()
            self._meeting.cleanup()
        return found


def fresh(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of the script's top level in a fresh process, and return its result."""
    return Job(function, *args).results()[0]


def _run(pipe: Connection, start_method: str, call: Callable[[], Any]) -> None:
    # A child of the fork server would ask the same server for its workers, where a user's program has the default.
    multiprocessing.set_start_method(start_method, force=True)
    # A second thread of torch's would wait for the cores that workers have, and the limit is that of one thread.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        answer = (True, call())
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send(answer)


def _in_group(meeting: str, rank: int, world: int, call: Callable[[], Any]) -> Any:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    try:
        return call()
    finally:
        torch.distributed.destroy_process_group()


# ---- seconds ----


def epoch_seconds(loader: Iterable[Any]) -> float:
    """Seconds to go through a loader once, doing nothing with the batches."""
    start = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - start


def warm_epochs(loader: Iterable[Any], samples: int, cold: int, epochs: int) -> dict[str, float]:
    """Samples/s ("rate", of the median epoch) and CPU microseconds per sample ("cpu"), after some cold epochs."""
    for _ in range(cold):
        epoch_seconds(loader)
    cpu, seconds = cpu_seconds(), [epoch_seconds(loader) for _ in range(epochs)]
    used = 1e6 * (cpu_seconds() - cpu) / (epochs * samples)
    return {"rate": samples / statistics.median(seconds), "cpu": used}


def gather_seconds(samples: int, shape: Sequence[int], batch_size: int, epochs: int = 5) -> list[float]:
    """The limit: seconds per epoch that one thread needs to copy the rows of all batches out of shared memory.

    The rows are uint8 images and int labels; the indices are drawn beforehand. NumPy's `take`, once per field, is the
    fastest way found: torch's `index_select` takes a microsecond more per call. Three buffers take turns, because a
    loader hands out one batch, has one ready and makes one. First epochs are left out: they touch cold pages.
    """
    # Memory that processes share comes in small pages; private memory may come in huge ones, which no loader has.
    images = torch.empty(samples, math.prod(shape), dtype=torch.uint8).share_memory_().random_(256)
    rows = [images.view(samples, -1), torch.arange(samples).share_memory_()]
    # torch's memory is aligned to 64 bytes, NumPy's to 16
    buffers = [[field.new_empty(batch_size, *field.shape[1:]).numpy() for field in rows] for _ in range(3)]
    fields = [field.numpy() for field in rows]
    found = []
    for _ in range(_COLD_EPOCHS + epochs):
        batches = [batch.numpy() for batch in torch.randperm(samples).split(batch_size)]
        start = time.perf_counter()
        for number, indices in enumerate(batches):
            for field, buffer in zip(fields, buffers[number % 3], strict=True):
                field.take(indices, 0, buffer[: len(indices)], "clip")
        found.append(time.perf_counter() - start)
    return found[_COLD_EPOCHS:]


# ---- memory and CPU time of a tree of processes ----


def cpu_seconds() -> float:
    """CPU seconds so far of this process, its descendants, and the children that have ended."""
    return sum(sum(map(int, _stat(str(pid))[11:15])) for pid in _tree([os.getpid()])) / _TICKS


def held_bytes(pids: Iterable[int]) -> int:
    """Memory of processes and their descendants: anonymous PSS and files in memory, without files of programs.

    PSS divides a page by the number of processes that map it. Files in /dev/shm and memfds count with their allocated
    blocks, or with their shared PSS if that is more: a mapping whose descriptor is closed shows no blocks.
    """
    sums, blocks = {"Pss_Anon:": 0, "Pss_Shmem:": 0}, dict[tuple[int, int], int]()
    for pid in _tree(pids):
        for name, kib in (line.split()[:2] for line in _read(f"/proc/{pid}/smaps_rollup").splitlines()[1:]):
            if name in sums:
                sums[name] += int(kib) * 1024
        blocks |= _blocks_in_memory(pid)
    return sums["Pss_Anon:"] + max(sums["Pss_Shmem:"], sum(blocks.values()))


class Peak:
    """The most memory that processes hold while the block runs, in bytes, sampled every 20 ms by a thread.

    A process that forks while it is sampled counts one and a half times, so two samples in a row must confirm a peak.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self.bytes = 0
        self._pids = list(pids)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _sample(self) -> None:
        last = 0
        while not self._end.wait(0.02):
            now = held_bytes(self._pids)
            self.bytes = max(self.bytes, min(last, now))
            last = now


def _tree(pids: Iterable[int]) -> set[int]:
    """Processes and all their descendants."""
    parents = {int(name): stat[1] for name in os.listdir("/proc") if name.isdigit() and (stat := _stat(name))}
    found, generation = set[int](), {int(pid) for pid in pids}
    while generation:
        found |= generation
        generation = {pid for pid, parent in parents.items() if int(parent) in generation} - found
    return found


def _stat(pid: str) -> list[str]:
    """The fields of a process behind its name: state, parent, ...; empty if it has ended."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _blocks_in_memory(pid: int) -> dict[tuple[int, int], int]:
    """Allocated bytes of the files in memory that a process has open, by device and inode."""
    found = {}
    with suppress(OSError):  # the process has ended
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                if os.readlink(descriptor).startswith(("/dev/shm/", "/memfd:")):
                    facts = descriptor.stat()
                    found[facts.st_dev, facts.st_ino] = facts.st_blocks * 512
    return found


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:  # the process has ended, or the system has no such file
        return ""


# ---- reports ----


def parser(doc: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """The options that all benchmarks have; the script's docstring is the help."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", type=Path, default=Path("outputs/benchmarks"), help="folder for the results")
    made.add_argument("--rounds", type=int, help=f"runs of every configuration, interleaved ({rounds}; quick: 2)")
    made.add_argument("--quick", action="store_true", help="a few samples, to see that it works; no figure means much")
    made.set_defaults(usual_rounds=rounds)
    return made


def cell(runs: Iterable[Mapping[str, float]], key: str, spec: str = ".2f", scale: float = 1) -> str:
    """A table's cell: the spread of a value over runs."""
    return f"{Spread.of(scale * run[key] for run in runs):{spec}}"


def thousands(values: Iterable[float]) -> str:
    """A table's cell: a spread of rates, in thousands."""
    return f"{Spread.of(value / 1000 for value in values):.1f}"


def listed(found: Mapping[Any, list[Any]], *names: str) -> list[dict[str, Any]]:
    """The results of `Report.measure` as JSON has them: the parts of each arm by name, and its rounds."""
    return [dict(zip(names, arm, strict=True)) | {"rounds": runs} for arm, runs in found.items()]


class Report:
    """Prints tables, and writes them with the machine and every single value to `<output>/<name>.json`."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.folder, self.quick = name, options.output, options.quick
        self.rounds = options.rounds or (2 if options.quick else options.usual_rounds)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._written: dict[str, Any] = {"benchmark": name, "quick": self.quick, "rounds": self.rounds}
        self._written |= {"machine": machine(), "remarks": [], "tables": []}
        self._started = time.perf_counter()
        print(self.machine)
        busy = self._written["machine"]["load"] / (os.cpu_count() or 1)
        if busy > 0.3:
            print(f"The machine is busy (load {busy:.1f} per core): seconds mean little, ratios somewhat more.")

    @property
    def machine(self) -> str:
        """The machine in one line."""
        line = "{cpu}, {cores} cores, {memory_gib} GiB, {gpu}, Python {python}, torch {torch}"
        line += " | quick run: the figures mean nothing" if self.quick else ""
        return line.format(**self._written["machine"])

    def measure(self, arms: Mapping[Any, Callable[[], Any]], at_most: int = 100) -> dict[Any, list[Any]]:
        """Run every arm once per round, in an order that is drawn; the results of each arm, round by round."""
        found: dict[Any, list[Any]] = {arm: [] for arm in arms}
        order, count = random.Random(0), min(self.rounds, at_most)
        with tqdm(total=count * len(arms), unit="run", leave=False, disable=None) as bar:
            for _ in range(count):
                for arm in order.sample(list(arms), len(arms)):
                    bar.set_description(str(arm))
                    found[arm].append(arms[arm]())
                    bar.update()
        return found

    def say(self, text: str) -> None:
        """Print a sentence, and keep it."""
        print(text)
        self._written["remarks"].append(text)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print a table of Markdown, and keep it."""
        cells = [[str(value) for value in row] for row in rows]
        self._written["tables"].append({"title": title, "columns": list(columns), "rows": cells})
        widths = [max(3, *map(len, column)) for column in zip(columns, *cells, strict=True)]
        print(f"\n{title}:\n")
        for row in (columns, ["-" * width for width in widths], *cells):
            others = [value.rjust(width) for value, width in zip(row[1:], widths[1:], strict=True)]
            print(f"| {' | '.join([row[0].ljust(widths[0]), *others])} |")

    def save(self, **values: Any) -> None:
        """Write the JSON file."""
        self._written["seconds"] = round(time.perf_counter() - self._started, 1)
        path = self.folder / f"{self.name}.json"
        path.write_text(json.dumps(self._written | values, indent=1) + "\n")
        print(f"\n{path}, after {self._written['seconds']:.0f} s")


def machine() -> dict[str, Any]:
    """Processor, memory, accelerator, versions and load."""
    cpu = [line.partition(":")[2] for line in _read("/proc/cpuinfo").splitlines() if line.startswith("model name")]
    return {
        "cpu": cpu[0].strip() if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
        "at": time.strftime("%Y-%m-%d %H:%M"),
    }
