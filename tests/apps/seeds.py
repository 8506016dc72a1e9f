"""Seeds for transforms that take theirs from the machine, so that two trainings without a cache are equal."""

from typing import Any

import albumentations
import numpy as np


def seed_albumentations() -> None:
    """Give each Compose of albumentations a seed, unless its maker does."""
    plain = albumentations.Compose.__init__

    def seeded(self: Any, *args: Any, **options: Any) -> None:
        plain(self, *args, **{"seed": 1} | options)

    albumentations.Compose.__init__ = seeded


def seed_numpy_generators() -> None:
    """Give each generator of NumPy that is made from now on a seed, unless its maker does."""
    plain = np.random.default_rng
    np.random.default_rng = lambda seed=None: plain(1 if seed is None else seed)
