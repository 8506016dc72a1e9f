"""A cache that never evicts, draw by draw: what predicted hit rates are compared with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np


def simulated(has_slot: np.ndarray, epochs: Iterable[Any]) -> list[float]:
    """The hit rate of each epoch of draws (arrays or tensors of indices), on one node."""
    met, rates = set[int](), []
    for epoch in epochs:
        hits = 0
        for index in epoch.tolist():
            hits += index in met
            if has_slot[index]:
                met.add(index)
        rates.append(hits / len(epoch))
    return rates
