"""What the memory of several nodes is worth: hit rate per epoch, simulated, for 1 to 32 nodes.

    python examples/benchmarks/nodes.py [--json nodes.json] [--png nodes.png]

The real sampler of every node deals real epochs to caches that fill lazily and never evict: a sample is stored only
by a node that has its slot and loads it. One rank per node; all nodes together hold the dataset once, 1/K each:

    locality    LocalitySampler: each global batch is DistributedSampler's, dealt to the nodes that have the samples
    global      DistributedSampler's own deal, with the same memory
    own         DistributedSampler's own deal and a cache of the whole dataset on each node: K times the memory

Hit rates in epochs two and three; worst: the largest difference of misses between two ranks in any batch; CPU
milliseconds of one rank per global batch of 4096, median of five runs (lowest-highest). 262144 samples, 256 per node
and step; times on two busy cores of an x86 server:

    nodes  locality: two, three  global: three  own: two, three  worst  ms per 4096
        1         1.000   1.000          1.000   1.000   1.000      0  0.23 (0.23-0.23)
        2         0.965   0.982          0.374   0.502   0.749     32  0.55 (0.54-0.55)
        4         0.957   0.978          0.109   0.252   0.437     39  0.51 (0.50-0.54)
        8         0.954   0.977          0.029   0.126   0.233     50  0.49 (0.47-0.53)
       16         0.954   0.975          0.008   0.063   0.121     54  0.47 (0.47-0.48)
       32         0.952   0.975          0.002   0.031   0.062     45  0.49 (0.48-0.51)

There is no gain on one node, and little where every node has memory for the whole dataset and training lasts many
epochs: there DistributedSampler's own deal ends at the same hit rate. The gain shrinks with the batch per node, since
K nodes with global batches of M move a share of `sqrt((K - 1) / (2 pi M))`: with a few samples per node, see `sticky`.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from lightning_stocache.cache.placement import Ring
from lightning_stocache.sampling.locality_sampler import LocalitySampler, Mode


def job(size: int, nodes: int, slots: int, batch_size: int, mode: Mode) -> tuple[Ring, list[LocalitySampler]]:
    """The ring and the samplers of a job with one rank per node."""
    ring = Ring.cut(size, [1 / nodes] * nodes, [slots] * nodes)
    ranks = tuple((rank,) for rank in range(nodes))
    samplers = [
        LocalitySampler(range(size), nodes, rank, batch_size=batch_size, ring=ring, nodes=ranks, mode=mode)
        for rank in range(nodes)
    ]
    return ring, samplers


def simulate(ring: Ring, samplers: list[LocalitySampler], epochs: int) -> Iterator[float]:
    """The hit rate of each epoch."""
    ready = [np.zeros(arc.slots, dtype=bool) for arc in ring.arcs]
    for epoch in range(epochs):
        hits = served = 0
        for sampler, arc, slots_ready in zip(samplers, ring.arcs, ready, strict=True):
            sampler.set_epoch(epoch)
            slots = arc.slots_of(np.array(list(sampler)))
            here = slots[slots >= 0]
            hits += int(slots_ready[here].sum())
            served += len(slots)
            slots_ready[here] = True
        yield hits / served


def milliseconds_per_batch(nodes: int, slots: int, size: int, total: int = 4096, batches: int = 20) -> list[float]:
    """CPU time that one rank spends on a global batch of `total`, in five runs over some batches."""
    sampler = job(size, nodes, slots, total // nodes, "locality")[1][0]
    runs = []
    for _ in range(5):
        order = iter(sampler)
        start = time.thread_time()
        taken = sum(1 for _ in islice(order, batches * sampler.batch_size))
        runs.append((time.thread_time() - start) * 1e3 * sampler.batch_size / taken)
    return sorted(runs)


def measure(size: int, nodes: int, batch_size: int, epochs: int) -> dict[str, Any]:
    """All that the table and the picture show about one number of nodes."""
    part = -(-size // nodes)
    result: dict[str, Any] = {"nodes": nodes, "simulated": {}}
    modes: list[tuple[str, Mode, int]] = [("locality", "locality", part), ("global", "global", part)]
    for name, mode, slots in [*modes, ("own", "global", size)]:
        ring, samplers = job(size, nodes, slots, batch_size, mode)
        result["simulated"][name] = list(simulate(ring, samplers, epochs))
        if name == "locality":
            result["imbalance"] = samplers[0].imbalance
    result["milliseconds"] = milliseconds_per_batch(nodes, part, size)
    return result


HEADER = "nodes  locality: two, three  global: three  own: two, three  worst  ms per 4096"


def line(result: dict[str, Any]) -> str:
    """One row of the table."""
    rates, runs = result["simulated"], result["milliseconds"]
    two, three = ([rates[name][epoch] for name in ("locality", "own")] for epoch in (1, 2))
    cost = f"{statistics.median(runs):.2f} ({runs[0]:.2f}-{runs[-1]:.2f})"
    return (
        f"{result['nodes']:5d}  {two[0]:12.3f}   {three[0]:.3f}  {rates['global'][2]:13.3f}  {two[1]:6.3f}   "
        f"{three[1]:.3f}  {result['imbalance']:5d}  {cost}"
    )


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Hit rate over the number of nodes."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    nodes = [result["nodes"] for result in results]
    labels = {"locality": "locality, 1/K per node", "own": "own cache of everything", "global": "global, 1/K per node"}
    for colour, (name, label) in enumerate(labels.items()):
        for epoch, style, marker in ((1, "--", "o"), (2, "-", "s")):
            which = f"{label}, epoch {('two', 'three')[epoch - 1]}"
            rates = [result["simulated"][name][epoch] for result in results]
            axes.plot(nodes, rates, style, marker=marker, color=f"C{colour}", lw=1, ms=5, label=which)
    axes.set_xscale("log", base=2)
    axes.set_xticks(nodes, [str(number) for number in nodes])
    axes.set(xlabel="nodes (K)", ylabel="hit rate", ylim=(0, 1.02))
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1 << 18, help="samples in the dataset (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=256, help="samples per node and step (%(default)s)")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="numbers of nodes")
    parser.add_argument("--epochs", type=int, default=4, help="epochs to simulate, at least 3 (%(default)s)")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--png", type=Path, help="draw them into this file (needs matplotlib)")
    options = parser.parse_args()
    if options.epochs < 3:
        parser.error("--epochs must be at least 3")
    print(HEADER)
    results = []
    for nodes in options.nodes:
        results.append(measure(options.size, nodes, options.batch_size, options.epochs))
        print(line(results[-1]), flush=True)
    if options.json:
        settings = {"size": options.size, "batch_size": options.batch_size}
        options.json.write_text(json.dumps({**settings, "results": results}, indent=1))
    if options.png:
        draw(results, options.png)


if __name__ == "__main__":
    main()
