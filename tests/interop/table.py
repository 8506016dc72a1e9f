"""How people hold data, and what the callback makes of it: the table that test_table.py trains row by row.

A row is a library (a module of tests/interop/sources), a way of holding data with it (a key of the module's `WAYS`,
whose function makes the loader) and what becomes of it:

- CACHED: from epoch three on nothing is read from the source.
- PASSES: it cannot be cached yet, or by nobody; it trains as without the cache, after one warning.

Batches and random states are those of the run without a cache, always.
"""

import ast
from enum import Enum
from pathlib import Path

__all__ = ["TABLE", "Outcome"]

SOURCES = Path(__file__).parent / "sources"
LIBRARIES = (
    "torchvision timm huggingface text audio samples storage monai pyg tensordict albumentations generators streams"
)
PASS = {
    "torchvision": ("masks_flipped_by_hand",),
    "huggingface": ("iterable",),
    "text": ("random_windows",),
    "audio": ("random_crop_of_long_recordings",),
    "monai": ("monai_cache_dataset",),
    "tensordict": ("as_dataset",),
    "generators": (
        "numpy_in_every_sample",
        "numpy_in_one_of_five",
        "random_in_every_sample",
        "torch_in_every_sample",
        "module_global",
        "closure",
    ),
    "streams": ("iterable_dataset", "iterable_dataset_with_length", "webdataset_in_a_loader", "web_loader"),
}


class Outcome(Enum):
    """What becomes of a source."""

    CACHED = "cached"
    PASSES = "passes"


def _ways(library: str) -> dict[str, Outcome]:
    """The ways of a library, read from its module without importing it, which takes seconds."""
    statements = ast.parse((SOURCES / f"{library}.py").read_text()).body
    [ways] = [node.value for node in statements if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "WAYS"]
    names = [ast.literal_eval(key) for key in ways.keys]
    passing = PASS.get(library, ())
    assert set(passing) <= set(names)
    return {name: Outcome.PASSES if name in passing else Outcome.CACHED for name in names}


TABLE: dict[str, dict[str, Outcome]] = {library: _ways(library) for library in LIBRARIES.split()}
