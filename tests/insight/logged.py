"""Run folders as the loggers leave them, without the training."""

import csv
import json
from pathlib import Path

from lightning_stocache.insight.steps import PARTS


def rows_of_a_run(share: float = 0.5, epochs: int = 3, *, without: tuple[str, ...] = (), nodes: int = 1):
    """The rows of CacheMonitor for 100 samples in 10 steps per epoch: (step, epoch or None, metrics) in its order."""
    for epoch in range(epochs):
        hits = round(100 * share) if epoch else 0
        for step in (5, 10):
            fill = 1.0 if epoch else {5: 0.5, 10: 0.9}[step]
            now = {"hit_rate": hits / 100, "fill_fraction": fill, "memory_bytes": fill * share * 2**20}
            yield 10 * epoch + step - 1, None, {f"stocache/live/{name}": value for name, value in now.items()}
        counts = {"hits": hits, "misses": 100 - hits, "bypasses": 0, "fills": 0 if epoch else round(100 * share)}
        rates = {"hit_rate": hits / 100, "fill_fraction": 1.0, "coverage": share, "source_seconds": (100 - hits) / 10}
        sizes = {"bytes_from_cache": hits * 2**20 / 100, "bytes_from_source": (100 - hits) * 2**20 / 100}
        memory = {"memory_bytes": share * 2**20, "budget_bytes": share * 2**20}
        stall = {"data_wait_seconds": (100 - hits) / 20, "compute_seconds": 2.0, "samples_per_second": 50.0 + hits}
        values = {**counts, **rates, **sizes, **memory, **stall, "hit_rate_expected": share if epoch else 0.0}
        if nodes > 1:
            values |= {f"node{node}/hit_rate": hits / 100 for node in range(nodes)}
            values |= {f"node{node}/memory_bytes": share * 2**20 / nodes for node in range(nodes)}
        validation = {f"stocache/val/{name}": values[name] for name in (*counts, *rates, *memory)}
        yield 10 * epoch + 9, epoch, {"val/loss": 0.1} | validation
        yield 10 * epoch + 9, epoch, {f"stocache/{name}": it for name, it in values.items() if name not in without}


def step_rows(rows):
    """Add the values of StepTimer: waiting of 0.03 s a step in the first epoch, and 0.01 s less in each later epoch."""
    for step, epoch, values in rows:
        if "stocache/hits" in values:
            seconds = {"wait": 0.03 - 0.01 * epoch, "forward": 0.01}
            values |= {f"stocache/step/{part}_seconds": seconds.get(part, 0.0) for part in PARTS}
        yield step, epoch, values


def write_csv(folder: Path, rows) -> Path:
    """Write a CSV like CSVLogger: one line per call, one column per key."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{"step": step, "epoch": "" if epoch is None else epoch, **values} for step, epoch, values in rows]
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, sorted({name for line in lines for name in line}))
        writer.writeheader()
        writer.writerows(lines)
    return folder


def write_hydra(folder: Path, overrides: list[str], rows) -> Path:
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps(overrides))  # JSON is YAML
    write_csv(folder / "csv", rows)
    return folder


def write_multirun(folder: Path) -> Path:
    """Three jobs of a Hydra sweep over the budget."""
    for number, share in enumerate((0.0, 0.5, 1.0)):
        write_hydra(folder / str(number), ["seed=1", f"cache.budget={share:.0%}"], rows_of_a_run(share))
    return folder
