"""Small JPEG and PNG files of noise."""

from pathlib import Path

import numpy as np
from PIL import Image


def write_images(folder: Path, count: int, *, size: int = 64, name: str = "{:03}.png", seed: int = 0) -> list[Path]:
    """Write square images into a folder, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    paths = [folder / name.format(number) for number in range(count)]
    for path in paths:
        Image.fromarray(random.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(path)
    return paths
