"""Small files that the ways share: made once, the same in every run."""

from pathlib import Path

import numpy as np
from PIL import Image

__all__ = ["SAMPLES", "images", "pictures"]

SAMPLES = 24


def pictures(count: int = SAMPLES, height: int = 16, width: int = 16) -> np.ndarray:
    """Images of bytes, height x width x 3, that differ from each other."""
    return np.random.default_rng(3).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def images(folder: Path, *, of_one_size: bool = False) -> Path:
    """A folder of two classes with JPEG files, of many sizes or of one."""
    root = folder / ("one_size" if of_one_size else "many_sizes")
    if not root.exists():
        for number in range(SAMPLES):
            size = (16, 16) if of_one_size else (18 + number % 5, 20 + number % 3)
            path = root / f"class{number % 2}" / f"{number:02}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pictures(1 + number, size[1], size[0])[number]).save(path, quality=90)
    return root
