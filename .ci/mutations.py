"""Change the package in one place at a time and see a test fail: `python .ci/mutations.py [--only TEXT] [--jobs N]`.

`mutations.toml` beside this file has the table: each entry names a behaviour, a place in the code that is changed so
that the behaviour is lost, and the tests that must notice. A mutation that survives is a behaviour that no test
protects. Code moves, and behaviours stay: if the place of an entry is no longer found (`--list`), give it the new
place.

The tests run in copies of the checkout. Each run is forked from this process, which has imported torch and Lightning,
so that it takes as long as its tests. The tests run without any mutation first, and must pass.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".toml")
IMPORTED = ("numpy.testing", "torch.utils.data", "torchvision.transforms.v2", "lightning.pytorch", "hypothesis")
IGNORED = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info", "site", "build")
PASSED, FAILED = 0, 1  # of pytest's exit codes; the others say that it could not run these tests


@dataclass(frozen=True)
class Mutation:
    """One change of one place.

    Args:
        area: the part of the product that it concerns.
        name: the behaviour that is lost, in plain words.
        file: where the place is.
        old: the text of the place, which occurs once in the file.
        new: the text that replaces it.
        tests: their ids for pytest, `file::test` or `file::test[parameters]`.
        hangs: whether the mutation counts as killed if the tests do not end.
        survives: why no test can notice; None if one must.
    """

    area: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    hangs: bool = False
    survives: str | None = None

    def lost(self) -> str:
        """The part of the entry that is not found, in words; "" if all is found."""
        path = ROOT / self.file
        times = path.read_text().count(self.old) if path.exists() else 0
        if times != 1:
            return f"found {times} times" if times else "place not found"
        tests = [test.partition("[")[0].partition("::") for test in self.tests]
        there = ((ROOT / file).exists() and f"def {name}(" in (ROOT / file).read_text() for file, _, name in tests)
        return "" if all(there) else "tests not found"


@dataclass(frozen=True)
class Run:
    """Tests that run in a process of their own, in one of the copies."""

    mutation: Mutation | None
    copy: Path
    log: Path
    pid: int
    started: float


def read_table() -> list[Mutation]:
    table = tomllib.loads(TABLE.read_text())["mutation"]
    mutations = [Mutation(**entry | {"tests": tuple(entry["tests"])}) for entry in table]
    twice = [name for name, count in Counter(mutation.name for mutation in mutations).items() if count > 1]
    if twice:
        raise SystemExit(f"names that stand twice in the table: {twice}")
    return mutations


def write(path: Path, text: str) -> None:
    """Write a module with a new time each time, or Python would use the code that it compiled before."""
    path.write_text(text)
    seconds = next(_times)
    os.utime(path, (seconds, seconds))


_times = itertools.count(1)


def start(tests: Sequence[str], mutation: Mutation | None, copy: Path, log: Path) -> Run:
    """Run tests in a fork of this process."""
    pid = os.fork()
    if pid:
        return Run(mutation, copy, log, pid, time.monotonic())
    code = 70
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(output, number)
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)
        sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT), str(ROOT / ".ci")))]
        sys.modules["__main__"] = types.ModuleType("__main__")  # processes that are spawned import it again
        import pytest

        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--tb=short", "-rf", *tests]))
    finally:
        os._exit(code)


def killer(log: Path) -> str:
    """The test that failed."""
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", log.read_text(errors="replace"), re.MULTILINE)
    return found[1] if found else "a crash"


def end(run: Run, *, reap: bool) -> None:
    """End tests that take too long, and processes that tests have left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)
    if reap:
        os.waitpid(run.pid, 0)


def outcome(run: Run, status: int | None) -> str:
    """The outcome of a mutation, from the exit status of its tests; None: they did not end in time."""
    assert run.mutation is not None
    if status is None:
        return "killed (hangs)" if run.mutation.hangs else "timed out"
    code = os.waitstatus_to_exitcode(status)
    if code == FAILED or code < 0:  # a signal such as SIGBUS ends pytest itself
        return "killed"
    if code == PASSED:
        return "SURVIVED" if run.mutation.survives is None else "survived, as known"
    return f"tests did not run (exit code {code})"


def finished(runs: list[Run], seconds: float) -> Iterator[tuple[Run, int | None]]:
    """Runs that have ended, with their exit statuses, or have taken too long."""
    for run in list(runs):
        pid, status = os.waitpid(run.pid, os.WNOHANG)
        late = time.monotonic() > run.started + seconds
        if pid or late:
            end(run, reap=not pid)
            runs.remove(run)
            yield run, status if pid else None


def pass_unchanged(mutations: Sequence[Mutation], copy: Path, log: Path, seconds: float) -> bool:
    """Whether all tests of these mutations pass as long as nothing is changed."""
    runs = [start(sorted({test for mutation in mutations for test in mutation.tests}), None, copy, log)]
    while runs:
        time.sleep(0.05)
        for _, status in finished(runs, seconds):
            if status != PASSED:
                print(f"tests fail without any mutation:\n{log.read_text(errors='replace')[-3000:]}")
                return False
    return True


def run_all(mutations: Sequence[Mutation], copies: list[Path], logs: Path, seconds: float) -> Counter[str]:
    """Run each mutation's tests, as many at a time as there are copies, and print the outcomes."""
    counts: Counter[str] = Counter()
    waiting, runs, before, number = list(mutations), list[Run](), dict[Path, str](), 0
    while waiting or runs:
        while waiting and copies:
            mutation, copy, number = waiting.pop(0), copies.pop(), number + 1
            path = copy / mutation.file
            before[copy] = path.read_text()
            write(path, before[copy].replace(mutation.old, mutation.new))
            runs.append(start(mutation.tests, mutation, copy, logs / f"{number}.txt"))
        time.sleep(0.05)
        for run, status in finished(runs, seconds):
            assert run.mutation is not None
            write(run.copy / run.mutation.file, before[run.copy])
            copies.append(run.copy)
            what = outcome(run, status)
            counts[what] += 1
            by = f" by {killer(run.log)}" if what == "killed" else ""
            took = time.monotonic() - run.started
            print(f"{what:10} {run.mutation.area}: {run.mutation.name} ({took:.0f} s{by})", flush=True)
            if what not in ("killed", "survived, as known"):
                print(run.log.read_text(errors="replace")[-1500:], flush=True)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description="Change the package in one place at a time and see a test fail.")
    parser.add_argument("--only", metavar="TEXT", action="append", help="mutations whose area or name contains this")
    parser.add_argument("--jobs", type=int, default=1, help="tests of so many mutations at a time")
    parser.add_argument("--list", action="store_true", help="only say whether all places are found")
    parser.add_argument("--seconds", type=float, default=120, help="time limit of each mutation's tests")
    parser.add_argument("--unchecked", action="store_true", help="leave out the run without any mutation")
    options = parser.parse_args()
    wanted = options.only or [""]
    table = [entry for entry in read_table() if any(text in f"{entry.area}: {entry.name}" for text in wanted)]
    lost = [mutation for mutation in table if mutation.lost()]
    for mutation in table if options.list else lost:
        print(f"{mutation.lost() or 'found':10} {mutation.area}: {mutation.name} ({mutation.file})")
    if options.list:
        print(f"{len(table)} mutations, {len(lost)} of them without their place or tests")
        return bool(lost)
    found = [mutation for mutation in table if mutation not in lost]
    for name in IMPORTED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copies = [Path(folder, f"copy-{number}") for number in range(options.jobs)]
        for copy in copies:
            shutil.copytree(ROOT, copy, ignore=IGNORED, symlinks=True)
        begun = time.monotonic()
        if not options.unchecked and not pass_unchanged(found, copies[0], Path(folder, "log"), 20 * options.seconds):
            return 1
        counts = run_all(found, copies, Path(folder), options.seconds)
    counts["not found"] = len(lost)
    said = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    print(f"{len(table)} mutations in {time.monotonic() - begun:.0f} s: {said}")
    return int(set(+counts) > {"killed", "killed (hangs)", "survived, as known"})


if __name__ == "__main__":
    sys.exit(main())
