"""Epoch one and epoch two over the cached share of the dataset, beside the linear law.

    python examples/benchmarks/epochs.py                       # about 5 minutes on 2 cores
    python examples/benchmarks/epochs.py --latency 0 20        # a slower network drive

JPEG files (320x320, decoded and resized to 96x96) through a CachedLoader with 0 and with 2 persistent workers, with no
model behind it. Share 0 is a plain DataLoader around the source. `--latency` adds milliseconds to each read, as a
network drive does: the CPU is free meanwhile.

The law: with a share f in memory, later epochs take `(1-f) * uncached + f * gather`, where `uncached` is epoch two of
the plain DataLoader and `gather` is what one thread needs to copy the samples out of memory. The table
gives epoch one over uncached epoch one (1.02: filling costs 2 %) and epochs two and three over the law (1.00: as fast
as it can be; less is possible with workers, because the plain DataLoader pays for the transport of whole batches). At
100 % an epoch of this small dataset takes milliseconds, and in epoch two there is what happens once: touching cold
pages, ending workers that are no longer needed. Files are read once beforehand, so a local "disk" is the page cache:
what is saved here is decoding and resizing.

There is no gain in epoch one, whatever the share, and none at all where one epoch is all there is. The gain of a small
share is small: a quarter in memory saves a quarter.
"""

from functools import partial
from typing import Any

from measure import Report, Spread, cell, epoch_seconds, fresh, gather_seconds, listed, parser
from sources import Late, jpegs
from torch.utils.data import DataLoader

from lightning_stocache import CachedDataset, CachedLoader

BATCH_SIZE = 64
SHAPE = (3, 96, 96)


def three_epochs(share: float, workers: int, samples: int, latency: float) -> dict[str, float]:
    """Seconds of epochs one to three, and the share that is cached indeed. Uncached, epoch three is as epoch two."""
    source = Late(jpegs(samples), latency) if latency else jpegs(samples)
    settings: dict[str, Any] = {"shuffle": True, "num_workers": workers, "persistent_workers": workers > 0}
    if not share:
        loader = DataLoader(source, BATCH_SIZE, **settings)
        return {"one": epoch_seconds(loader), "two": (two := epoch_seconds(loader)), "three": two, "cached": 0.0}
    dataset = CachedDataset(source, f"{100 * share:g}%")
    loader = CachedLoader(dataset, BATCH_SIZE, **settings)
    cache = dataset.cache
    assert cache is not None
    return {name: epoch_seconds(loader) for name in ("one", "two", "three")} | {"cached": len(cache) / samples}


def draw(report: Report, found: dict[Any, list[dict[str, float]]], gather: list[float], samples: int) -> None:
    import matplotlib  # here: a process that measures does not need it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {"axes.grid": True, "axes.axisbelow": True, "grid.color": "#dddddd", "grid.linewidth": 0.7}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "errorbar.capsize": 3, "legend.frameon": False}
    pyplot.rcParams.update(style | {"axes.titlesize": 10.5, "legend.fontsize": 9})
    latencies, workers, shares = (sorted({key[place] for key in found}) for place in range(3))
    size, shared = (4.8 * len(workers), 3.3 * len(latencies) + 0.6), {"squeeze": False, "sharex": True, "sharey": "row"}
    made, axes = pyplot.subplots(len(latencies), len(workers), figsize=size, layout="constrained", **shared)
    for row, latency in zip(axes, latencies, strict=True):
        for axis, number in zip(row, workers, strict=True):
            uncached = found[latency, number, 0.0]
            ends = [Spread.of(run["two"] for run in uncached).median, Spread.of(gather).median]
            axis.plot([0, 100], ends, "--", color="black", linewidth=1.3, zorder=3, label="linear law")
            for key, name, marker, colour, line in (
                ("one", "epoch one (fills)", "o", "#D55E00", "-"),
                ("two", "epoch two", "s", "#0072B2", "none"),
            ):
                spreads = [Spread.of(run[key] for run in found[latency, number, share]) for share in shares]
                bars = list(zip(*(spread.bars for spread in spreads), strict=True))
                look = {"fmt": marker, "color": colour, "linestyle": line, "markersize": 6, "label": name}
                axis.errorbar([100 * share for share in shares], [s.median for s in spreads], yerr=bars, **look)
            where = f"{latency:g} ms of latency per read" if latency else "local files"
            axis.set_title(f"{where}, {number} workers", loc="left")
            axis.set_xticks([0, 25, 50, 75, 100])
        row[0].set_ylabel(f"seconds per epoch of {samples} JPEGs")
        row[0].set_ylim(bottom=0)  # shared, and only now: it ends the scaling to what is drawn
    for axis in axes[-1]:
        axis.set_xlabel("share of the dataset in memory, %")
    axes[0, 0].legend(loc="lower left")
    title = f"Epoch one fills, epoch two gains in proportion (medians of {report.rounds} runs, bars: lowest to highest)"
    made.suptitle(title, size=12, weight="bold")
    made.supxlabel(report.machine, fontsize=7.5, color="#666666")
    made.savefig(path := report.folder / "epochs.png", dpi=140)
    print(path)


def main() -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("--latency", type=float, nargs="+", default=[0.0, 4.0], help="ms added to each read (0 4)")
    options.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5, 0.75, 0.9, 1.0], help="cached shares")
    options.add_argument("--workers", type=int, nargs="+", default=[0, 2], help="num_workers (0 2)")
    options.add_argument("--samples", type=int, help="JPEG files (1000; quick: 128)")
    chosen = options.parse_args()
    report = Report("epochs", chosen)
    samples = chosen.samples or (128 if report.quick else 1000)
    epoch_seconds(DataLoader(jpegs(samples), batch_size=64))  # into the page cache, for all runs alike
    arms = {
        (latency, workers, share): partial(fresh, three_epochs, share, workers, samples, latency)
        for latency in chosen.latency
        for workers in chosen.workers
        for share in sorted({0.0, *chosen.shares})
    }
    found = report.measure(arms)
    gather = fresh(gather_seconds, samples, SHAPE, BATCH_SIZE, report.rounds)
    rows = []
    for (latency, workers, share), runs in found.items():
        cells = [f"{latency:g} ms, {workers} workers, {100 * share:g} %", cell(runs, "one"), cell(runs, "two")]
        if share:
            plain = found[latency, workers, 0.0]
            law = [  # what a later epoch of each round should take, by the uncached epoch two of that round
                (1 - run["cached"]) * uncached["two"] + run["cached"] * full
                for run, uncached, full in zip(runs, plain, gather, strict=True)
            ]
            cells.append(f"{Spread.ratio((run['one'] for run in runs), (run['one'] for run in plain)):.2f}")
            cells += [f"{Spread.ratio((run[later] for run in runs), law):.2f}" for later in ("two", "three")]
        rows.append(cells + [""] * (6 - len(cells)))
    columns = ("latency, workers, share", "epoch one, s", "epoch two, s", "one / uncached", "two / law", "three / law")
    report.table(f"{samples} JPEG files, batches of {BATCH_SIZE}", columns, rows)
    report.say(f"One thread gathers all {samples} samples from memory in {Spread.of(1000 * x for x in gather):.1f} ms.")
    draw(report, found, gather, samples)
    report.save(gather_seconds=gather, runs=listed(found, "latency_ms", "workers", "share"))


if __name__ == "__main__":
    main()
