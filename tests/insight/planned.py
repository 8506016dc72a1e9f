"""Planners of which every cost is given."""

import dataclasses

import torch

from lightning_stocache.cache.spec import SampleSpec
from lightning_stocache.insight.planner import Costs, Job, Planner, Reads, Spread, Step

SPEC = SampleSpec.infer(torch.zeros(99, dtype=torch.uint8))  # 100 bytes with its state
JOB = Job(samples=1000, batch_size=10, safe_bytes=10**9, epochs=4, cores=4)


def spread(value: float | list[float]) -> Spread:
    """What is known exactly, or was measured several times."""
    return Spread.of(value if isinstance(value, list) else [value])


def measured(*, uncached=0.011, missed=0.01, hit=0.001, first=0.01, again=0.01, cpu=0.0, **more) -> Costs:
    """Seconds per sample; a list is what several measurements gave."""
    reads = Reads(first, spread(again), cpu)
    return Costs(more.pop("spec", SPEC), reads, 0.0, spread(uncached), spread(missed), spread(hit), 0.5, **more)


def planner(costs: Costs | None = None, step: float | list[float] | None = None, **changes) -> Planner:
    """The planner of a job like `JOB`."""
    timed = None if step is None else Step(spread(step))
    return Planner(dataclasses.replace(JOB, **changes), costs or measured(), timed)
