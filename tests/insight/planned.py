"""Plans of which every pace is given."""

import dataclasses

import torch

from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.insight.measurement import Paces, Spread
from lightning_stocache.insight.plan import Job, Plan, Row, plan

SPEC = SampleSpec.infer(torch.zeros(99, dtype=torch.uint8))  # 100 bytes with its state
JOB = Job(samples=1000, batch_size=10, safe_bytes=10**9)


def spread(value: float | list[float]) -> Spread:
    """What is known exactly, or was measured several times."""
    return Spread.of(value if isinstance(value, list) else [value])


def paces(*, uncached=0.011, missed=0.01, hit=0.001, codec=SPEC, **more) -> Paces:
    """Seconds per sample; a list is what several measurements gave."""
    return Paces(spread(uncached), spread(missed), spread(hit), codec, **more)


def planned(measured: Paces | None = None, step: float | list[float] | None = None, **changes) -> Plan:
    """The plan of a job like `JOB`."""
    return plan(dataclasses.replace(JOB, **changes), measured or paces(), None if step is None else spread(step))


def row(made: Plan, budget: str) -> Row:
    """The row of a budget."""
    return next(row for row in made.rows if row.budget == budget)
