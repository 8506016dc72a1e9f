"""How fast many processes fill one cache at the same time, beside the same stores without any claim.

    python examples/benchmarks/fillers.py                      # about 2 minutes on 2 cores
    python examples/benchmarks/fillers.py --fillers 1 64 --idle 32

Each process stores slots of its own, in random order, a call after the other, and all begin at once. Others have stored
one sample, so they have a seat, and do nothing any more (`--idle`). In turn with that, as many processes write the same
bytes into the same slots without claims. The columns:

fills/s   of all processes together
CPU us    processor time of a fill: what is lost by waiting for another process is not in it
plain us  the same without claims
kept      how much of the pace of the fewest fillers is left: their CPU time of a fill over this one, over the same
          ratio without claims, since many processes on few cores slow each other in any case
unstored  share of the samples that found no claim

There is no gain to be seen here: this is what many workers pay for filling together.
"""

import os
import random
import signal
import time
from functools import partial
from multiprocessing import get_context

import torch
from measure import Report, Spread, fresh, listed, parser

from lightning_stocache.cache.placement import Ring
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.cache.seats import READY
from lightning_stocache.cache.store import Store
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.segment import fence

BYTES = 3072


def put_without_claims(store: Store, indices: list[int], samples: list[list[memoryview]]) -> int:
    slots = [store.arc.slot(index) for index in indices]
    store.layout.write(slots, samples)
    fence()
    for slot in slots:
        store.layout.states[slot] = READY
    return len(slots)


def fill(store: Store, indices: list[int], batch: int, claims: bool, barrier: object, answer: object) -> None:
    samples = [[memoryview(bytes(BYTES))]] * batch
    store.put([], [])
    barrier.wait()
    start, stored = time.process_time(), 0
    for at in range(0, len(indices), batch):
        among = indices[at : at + batch]
        if claims:
            stored += sum(outcome is True for outcome in store.put(among, samples[: len(among)]))
        else:
            stored += put_without_claims(store, among, samples[: len(among)])
    answer.put((stored, len(indices), time.process_time() - start))


def measured(fillers: int, idle: int, batch: int, claims: bool, samples: int) -> dict[str, float]:
    """Fills per second, CPU microseconds of a fill, and the share that was not stored."""
    FreeMemory.now()  # the first look takes a millisecond: set-up has it
    size = samples + idle
    store = Store.create(
        SampleSpec.infer(torch.zeros(BYTES, dtype=torch.uint8)), Ring.cut(size, (1.0,), (size,)).arcs[0]
    )
    waiting = []
    for index in range(samples, size):
        if not (pid := os.fork()):
            store.put([index], [[memoryview(bytes(BYTES))]])
            signal.pause()
        waiting.append(pid)
    while store.filled < idle:
        time.sleep(0.01)
    order, context = random.Random(fillers).sample(range(samples), samples), get_context("fork")
    barrier, answer = context.Barrier(fillers + 1), context.SimpleQueue()
    processes = [
        context.Process(target=fill, args=(store, order[number::fillers], batch, claims, barrier, answer), daemon=True)
        for number in range(fillers)
    ]
    for process in processes:
        process.start()
    barrier.wait()
    start = time.perf_counter()
    found = [answer.get() for _ in processes]
    seconds = time.perf_counter() - start
    for pid in waiting:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    stored, tried, spent = (sum(column) for column in zip(*found, strict=True))
    return {"rate": stored / seconds, "us": spent / max(stored, 1) * 1e6, "unstored": 1 - stored / tried}


def main() -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("--fillers", type=int, nargs="+", default=(1, 2, 8, 32), help="numbers of processes")
    options.add_argument("--idle", type=int, default=0, help="processes that have a seat and do nothing")
    chosen = options.parse_args()
    report = Report("fillers", chosen)
    samples = 2_000 if report.quick else 60_000
    arms = {
        (batch, fillers, claims): partial(fresh, measured, fillers, chosen.idle, batch, claims, samples)
        for batch in (16, 256)
        for fillers in chosen.fillers
        for claims in (True, False)
    }
    found = report.measure(arms)
    lines = []
    least = min(chosen.fillers)
    for batch in (16, 256):
        for fillers in chosen.fillers:
            ours, plain = ([run["us"] for run in found[batch, fillers, claims]] for claims in (True, False))
            base, plain_base = ([run["us"] for run in found[batch, least, claims]] for claims in (True, False))
            kept = Spread.of(b / o * p / q for b, o, p, q in zip(base, ours, plain, plain_base, strict=True))
            runs = found[batch, fillers, True]
            rate, unstored = Spread.of(run["rate"] for run in runs), Spread.of(run["unstored"] for run in runs)
            columns = (
                f"{rate:,.0f}",
                f"{Spread.of(ours):.1f}",
                f"{Spread.of(plain):.1f}",
                f"{kept:.2f}",
                f"{unstored:.4f}",
            )
            lines.append((batch, fillers, *columns))
    report.table("Filling together", ("a call", "fillers", "fills/s", "CPU us", "plain us", "kept", "unstored"), lines)
    report.save(runs=listed(found, "batch", "fillers", "claims"))


if __name__ == "__main__":
    main()
