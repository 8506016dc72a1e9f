"""What it costs to compare the state of a dataset with that of an earlier moment.

    python examples/benchmarks/looks.py                            # a few seconds

Each dataset is one of a kind that people have. Columns, in milliseconds, median [lowest..highest] of the rounds:

open    the walk to everything that the dataset's code can reach, and the copies of it
epoch   the comparison of all of it, once per epoch
batch   the comparison of attributes, before each batch
digest  the digests for other processes and jobs, once at opening and at a reload

There is no gain to be seen here: it is what noticing a change costs.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measure import Report, cell, fresh, parser
from torch.utils.data import Dataset

from lightning_stocache.source.witness import Witness

CALLS = 5  # of each comparison in a round, of which the fastest counts


class Held(Dataset[Any]):
    """A dataset that holds its samples, or what it needs to read them."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


KINDS: dict[str, Callable[[int], Any]] = {
    "1,000 small rows": lambda part: [(torch.rand(3, 4), k % 10) for k in range(1_000 // part)],
    "5,000 small rows": lambda part: [(torch.rand(3, 4), k % 10) for k in range(5_000 // part)],
    "100,000 (path, label)": lambda part: [(f"/data/{k}.jpg", k % 10) for k in range(100_000 // part)],
    "10,000 dicts as of COCO": lambda part: [
        {"file": f"{k}.jpg", "boxes": [[1.0 * k, 2.0, 3.0, 4.0]] * 5, "labels": [1, 2, 3, 4, 5]}
        for k in range(10_000 // part)
    ],
    "a tensor of 48 MB": lambda part: torch.rand(12_000_000 // part),
    "a tensor of 400 MB": lambda part: torch.rand(100_000_000 // part),
}


def milliseconds(work: Callable[[], Any], calls: int = CALLS) -> float:
    """The fastest of several calls."""
    fastest = float("inf")
    for _ in range(calls):
        begin = time.perf_counter()
        work()
        fastest = min(fastest, time.perf_counter() - begin)
    return fastest * 1e3


KEYS = ("open", "epoch", "batch", "digest")


def measured(kind: str, part: int) -> dict[str, float]:
    """The four costs of a dataset, in milliseconds, and whether everything was compared."""
    dataset = Held(KINDS[kind](part))
    opening = milliseconds(lambda: Witness(dataset), 1)
    witness = Witness(dataset)
    costs = [opening, *map(milliseconds, (witness.differences, witness.look, witness.sums))]
    return dict(zip(KEYS, costs, strict=True))


def main() -> None:
    report = Report("looks", parser(__doc__, rounds=5).parse_args())
    part = 100 if report.quick else 1
    runs = report.measure({kind: partial(fresh, measured, kind, part) for kind in KINDS})
    rows = [[kind, *(cell(found, key, ".3f") for key in KEYS)] for kind, found in runs.items()]
    report.table("Milliseconds to compare the state of a dataset", ["dataset", *KEYS], rows)
    report.save(results=runs)


if __name__ == "__main__":
    main()
