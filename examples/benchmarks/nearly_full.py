"""Small batches of a cache that lacks a few samples: how long is the epoch that loads them?

    python examples/benchmarks/nearly_full.py                  # about 2 minutes on 2 cores
    python examples/benchmarks/nearly_full.py --shares 0.5 0.9

Batches of 8 images of 3x32x32, with 2 workers and no model. A share of the samples is READY before the epoch: 97 %
leave a miss in every fifth batch, 99.6 % in every thirtieth. Workers are asked for the batches with a miss, and the
main process gathers the others. The rows, each beside a DataLoader without a cache:

shuffled  an epoch of `shuffle=True`
prefill   the same with `prefill=True`: workers that wait load what nobody has asked for yet
endless   as many batches as three epochs have, of a sampler that never ends and draws from torch's generator. Others
          could notice such draws, so they are made at DataLoader's moments, and workers make all batches until the
          cache is full

The columns: seconds of the epoch, and how many times as fast it is as the DataLoader of the same round.
There is no gain where the misses alone take as long as an epoch: workers start for them.
"""

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from measure import Report, Spread, cell, epoch_seconds, fresh, listed, parser
from sources import Pool
from torch.utils.data import DataLoader, Sampler

from lightning_stocache import CachedDataset, CachedLoader

BATCH_SIZE = 8
SHAPE = (3, 32, 32)
EPOCHS = {"shuffled": 1, "prefill": 1, "endless": 3}


class Endless(Sampler[int]):
    """Permutations of the indices, one after the other."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(self.samples).tolist()


def epoch(way: str, share: float, samples: int) -> dict[str, float]:
    """Seconds of an epoch of which so large a share is READY before; share 0 is a DataLoader without a cache."""
    source = Pool(samples, SHAPE)
    settings: dict[str, Any] = {"batch_size": BATCH_SIZE, "num_workers": 2}
    settings |= {"sampler": Endless(samples)} if way == "endless" else {"shuffle": True}
    batches = EPOCHS[way] * -(-samples // BATCH_SIZE)
    if not share:
        return {"seconds": epoch_seconds(islice(DataLoader(source, **settings), batches))}
    dataset = CachedDataset(source, prefill=way == "prefill")
    ready = torch.randperm(samples)[: round(share * samples)]
    for indices in ready.split(64):
        dataset.__getitems__(indices.tolist())
    return {"seconds": epoch_seconds(islice(CachedLoader(dataset, **settings), batches))}


def main() -> None:
    options = parser(__doc__, rounds=5)
    options.add_argument("--shares", type=float, nargs="+", default=[0.97, 0.996, 1.0], help="READY (0.97 0.996 1)")
    options.add_argument("--samples", type=int, help="images (20000; quick: 1000)")
    chosen = options.parse_args()
    report = Report("nearly_full", chosen)
    samples = chosen.samples or (1000 if report.quick else 20_000)
    arms = {
        (way, share): partial(fresh, epoch, way, share, samples)
        for way in EPOCHS
        for share in sorted({0.0, *chosen.shares})
    }
    found = report.measure(arms)
    rows = []
    for (way, share), runs in found.items():
        gain = Spread.ratio((run["seconds"] for run in found[way, 0.0]), (run["seconds"] for run in runs))
        name = f"{way}, {100 * share:g} % READY" if share else f"{way}, DataLoader"
        rows.append((name, cell(runs, "seconds"), f"{gain:.1f}"))
    report.table(f"{samples} images, batches of {BATCH_SIZE}", ("epoch", "seconds", "of DataLoader"), rows)
    report.save(runs=listed(found, "way", "share"))


if __name__ == "__main__":
    main()
