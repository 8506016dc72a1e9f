"""How people hold data, and what the callback makes of it: the table that test_table.py trains row by row.

A row is a library, a way of holding data with it, whose function makes the loader, and whether it is cached: from
epoch three on nothing is read from the source. If not, it cannot be cached yet, or by nobody: it trains as without the
cache, after one warning. Batches and random states are those of the run without a cache, always.

A module of tests/interop/sources has the ways of a library in a dict with the library's name.
"""

import ast
from pathlib import Path

LIBRARIES = (
    "torchvision timm huggingface text audio plain storage monai pyg tensordict albumentations generators streams "
    "polars arrow torchio forecasting threads"
)
PASSING = (
    "masks_flipped_by_hand iterable random_windows random_crop_of_long_recordings monai_cache_dataset as_dataset "
    "numpy_in_every_sample numpy_in_one_of_five random_in_every_sample torch_in_every_sample module_global closure "
    "iterable_dataset iterable_dataset_with_length webdataset_in_a_loader web_loader random_events "
    "record_batches_as_samples slices_of_a_table datasets_in_arrow_format queue queue_with_workers_of_its_own "
    "random_lengths pool_that_draws"
)

MODULES: dict[str, str] = {}
"""The module of each library. It is read, not imported, which would take seconds."""
TABLE: dict[str, dict[str, bool]] = {library: {} for library in LIBRARIES.split()}
"""By library and way: whether it is cached."""

for path in (Path(__file__).parent / "sources").glob("*.py"):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            library = ast.unparse(node.targets).lower()
            MODULES[library] = f"tests.interop.sources.{path.stem}"
            TABLE[library] = {way: way not in PASSING.split() for way in map(ast.literal_eval, node.value.keys)}
