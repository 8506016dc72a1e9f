"""Plans of which every pace is given."""

import torch

from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.insight.measurement import Data, Paces, Spread
from lightning_stocache.insight.plan import Plan, Row, plan

SPEC = SampleSpec.infer(torch.zeros(99, dtype=torch.uint8))  # 100 bytes with its state


def spread(value: float | list[float]) -> Spread:
    """The spread of one value, or of several measurements."""
    return Spread.of(value if isinstance(value, list) else [value])


def paces(*, uncached=0.011, missed=0.01, hit=0.001, codec=SPEC, safe_bytes=10**9, **more) -> Paces:
    """Paces in seconds per sample; a list is several measurements."""
    return Paces(spread(uncached), spread(missed), spread(hit), codec, safe_bytes=safe_bytes, **more)


def planned(measured: Paces | None = None, step: float | list[float] | None = None, samples=1000, **data) -> Plan:
    """The plan for a dataset of this length."""
    options = {"batch_size": 10, **data}
    return plan(Data(range(samples), **options), measured or paces(), None if step is None else spread(step))


def row(made: Plan, budget: str) -> Row:
    """The row of a budget."""
    return next(row for row in made.rows if row.budget == budget)
