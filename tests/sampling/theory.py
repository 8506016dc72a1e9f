"""What LocalitySampler should reach on several nodes: the rates that real processes are compared with."""

import math
from collections.abc import Sequence
from typing import Any


def moved_share(ring: Any, nodes: Sequence[Sequence[int]], batch_size: int) -> float:
    """The share of samples that levelling takes from nodes that have them, in random global batches.

    It is that of K equal nodes that hold the dataset once between them, and batches of M: `sqrt((K - 1) / (2 pi M))`.
    """
    return math.sqrt((len(nodes) - 1) / (2 * math.pi * batch_size * sum(map(len, nodes))))
