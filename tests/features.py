"""What each door can do: the table in README.md and docs/doors.md, and the test that stands behind each cell.

A cell is what the table says (how it is done, or "yes"), and the test that would fail if it were not so; a door that
does not have it, or in which it was not tried, has `-`. `python -m tests.features` writes the table into both pages;
`test_docs.py` compares them with it, and looks for the tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

__all__ = ["DOORS", "FEATURES", "Cell", "table"]

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/doors.md")
BEGIN, END = "<!-- features -->\n", "<!-- /features -->"

DOORS = ("`StocacheDataModule`", "`cache_datamodule`", "`StochasticCache`", "Fabric", "plain PyTorch")
"""Fabric and plain PyTorch: `CachedDataset` in a `CachedLoader`."""


class Cell(NamedTuple):
    """What a door has of a feature."""

    how: str
    test: str


NO = Cell("-", "")


def _all(how: str, test: str) -> tuple[Cell, ...]:
    """The same in every door, and a test of every door."""
    return (Cell(how, test),) * len(DOORS)


def _loops(how: str, test: str) -> tuple[Cell, ...]:
    """The same in Fabric and in a plain loop."""
    return (Cell(how, test),) * 2


_DOORS = "training/test_doors.py::"
_WANTED = "training/test_wanted.py::"

FEATURES: dict[str, tuple[Cell, ...]] = {
    "each sample is loaded once": _all("yes", f"{_DOORS}test_each_sample_is_loaded_once"),
    "batches and draws of a training without": (
        Cell("yes", "training/test_randomness.py::test_weights_are_the_same_with_and_without_a_cache"),
        Cell("yes", "training/test_randomness.py::test_weights_are_the_same_with_and_without_a_cache"),
        Cell("yes", "interop/test_table.py::test_training_is_the_same_and_ends_as_the_table_says"),
        *_loops("yes", "loading/test_loader.py::test_with_workers_batches_and_draws_are_those_of_dataloader"),
    ),
    "one cache for the ranks of a node": (
        Cell("yes", "training/test_ddp.py::test_ranks_share_one_cache"),
        Cell("yes", "training/test_ddp.py::test_ranks_share_one_cache"),
        Cell("yes", "training/test_ddp.py::test_ranks_share_one_cache"),
        *_loops("`share()`", "setup/test_open_together.py::test_two_ranks_load_every_sample_once"),
    ),
    "a share of the batches for each rank": (
        Cell("yes", "training/test_ddp.py::test_ranks_share_one_cache"),
        Cell("yes", "training/test_ddp.py::test_ranks_share_one_cache"),
        Cell("yes", "training/test_ddp.py::test_ranks_share_one_cache"),
        Cell("yes", "loading/test_loader_lightning.py::test_fabric_gives_every_rank_its_share_of_the_batches"),
        Cell("`sampling`", "loading/test_fabric.py::test_one_argument_adds_the_memory_of_nodes_up"),
    ),
    "the memory of several nodes adds up": (
        Cell("yes", "training/test_nodes.py::test_the_memory_of_two_nodes_adds_up"),
        Cell("yes", "training/test_nodes.py::test_the_memory_of_two_nodes_adds_up"),
        Cell("yes", "training/test_nodes.py::test_the_memory_of_two_nodes_adds_up"),
        *_loops("`sampling`", "loading/test_fabric.py::test_one_argument_adds_the_memory_of_nodes_up"),
    ),
    "meshes with fewer replicas than ranks": (
        Cell("yes", "training/test_cluster.py::test_the_ranks_of_a_replica_see_the_same_batches"),
        Cell("yes", "training/test_cluster.py::test_the_ranks_of_a_replica_see_the_same_batches"),
        Cell("yes", "training/test_cluster.py::test_the_ranks_of_a_replica_see_the_same_batches"),
        *_loops("`num_replicas`", "loading/test_fabric.py::test_a_mesh_has_fewer_replicas_than_ranks"),
    ),
    "slots only for what a sampler draws": (
        Cell("yes", f"{_WANTED}test_a_tenth_of_the_budget_is_enough_for_a_tenth_of_the_samples"),
        Cell("yes", f"{_WANTED}test_a_tenth_of_the_budget_is_enough_for_a_tenth_of_the_samples"),
        Cell("yes", f"{_WANTED}test_a_tenth_of_the_budget_is_enough_for_a_tenth_of_the_samples"),
        *_loops("`indices`", f"{_WANTED}test_a_tenth_of_the_budget_is_enough_for_a_tenth_of_the_samples"),
    ),
    "val, test and predict": (
        Cell("yes", f"{_DOORS}test_all_calls_are_cached_and_counted"),
        Cell("yes", f"{_DOORS}test_all_calls_are_cached_and_counted"),
        Cell("yes", f"{_DOORS}test_all_calls_are_cached_and_counted"),
        *_loops("a dataset each", "setup/test_open_together.py::test_datasets_open_together"),
    ),
    "a budget for a stage": (
        Cell("`stage_budgets`", f"{_DOORS}test_all_calls_are_cached_and_counted"),
        Cell("`stage_budgets`", f"{_DOORS}test_all_calls_are_cached_and_counted"),
        Cell("`stage_budgets`", f"{_DOORS}test_all_calls_are_cached_and_counted"),
        *_loops("`budget` of each", "loading/test_dataset.py::test_a_budget_is_that_many_slots"),
    ),
    "random transforms are split by themselves": _all("yes", f"{_DOORS}test_a_random_transform_is_split"),
    "a transform of samples, after the cache": (
        Cell("`transform`, `eval_transform`", "training/test_datamodule.py::test_transforms_run_after_the_cache"),
        NO,
        NO,
        *_loops("`transform`", "loading/test_dataset.py::test_batches_are_those_without_a_cache"),
    ),
    "a transform of batches, on the device": (
        Cell("`batch_transform`", "training/test_datamodule.py::test_batch_transforms_run_on_transferred_batches"),
        NO,
        NO,
        NO,
        NO,
    ),
    "samples of any kind": _all("yes", f"{_DOORS}test_samples_of_any_kind_are_kept"),
    "files instead of decoded samples": _all("`store`", f"{_DOORS}test_files_may_be_kept_instead"),
    "streams": (
        Cell("`streams=True`", f"{_DOORS}test_streams_are_kept_as_they_pass"),
        Cell("`streams=True`", f"{_DOORS}test_streams_are_kept_as_they_pass"),
        Cell("`streams=True`", f"{_DOORS}test_streams_are_kept_as_they_pass"),
        *_loops("`CachedStream`", f"{_DOORS}test_streams_are_kept_as_they_pass"),
    ),
    "growing datasets (`RollingCache`)": (
        Cell("`train=pool`", "training/test_rolling.py::test_the_datamodule_trains_on_what_is_resident"),
        Cell("a loader of it", "training/test_rolling.py::test_a_pool_is_left_as_it_is"),
        Cell("a loader of it", "training/test_rolling.py::test_a_pool_is_left_as_it_is"),
        Cell("`share()`", "loading/test_rolling_cache.py::test_ranks_share_a_pool_and_run_the_same_number_of_batches"),
        Cell("yes", "loading/test_rolling_cache.py::test_an_epoch_is_what_is_resident_when_it_begins"),
    ),
    "a cache that outlives its job": _all("`name`", f"{_DOORS}test_a_name_outlives_the_training"),
    "on a disk": _all("`dir`", f"{_DOORS}test_a_name_outlives_the_training"),
    "kept between Trainer calls": (
        Cell("`keep_cache`", f"{_DOORS}test_all_calls_are_cached_and_counted"),
        Cell("`keep_cache`", f"{_DOORS}test_all_calls_are_cached_and_counted"),
        Cell("`keep_cache`", f"{_DOORS}test_all_calls_are_cached_and_counted"),
        *_loops("until `close()`", "loading/test_dataset.py::test_a_closed_dataset_passes_through"),
    ),
    "errors instead of warnings": _all("`strict`", f"{_DOORS}test_strict_makes_errors"),
    "off": _all("`budget=0`", f"{_DOORS}test_off_is_off"),
    "hit rate and its relatives": (
        Cell("`CacheMonitor`", f"{_DOORS}test_all_calls_are_cached_and_counted"),
        Cell("`CacheMonitor`", f"{_DOORS}test_all_calls_are_cached_and_counted"),
        Cell("by itself", f"{_DOORS}test_all_calls_are_cached_and_counted"),
        Cell("`CacheMeter`", "insight/test_meter.py::test_a_fabric_loop_logs_it"),
        Cell("`CacheMeter`", "insight/test_meter.py::test_a_plain_loop_has_the_monitors_values"),
    ),
    "the same while an epoch runs": (
        Cell("`live`", "training/test_monitor.py::test_live_values_come_at_the_trainers_cadence"),
        Cell("`live`", "training/test_monitor.py::test_live_values_come_at_the_trainers_cadence"),
        Cell("`live`", "training/test_monitor.py::test_live_values_are_off_by_one_option"),
        NO,
        NO,
    ),
    "what steps are made of": (
        Cell("`StepTimer`", f"{_DOORS}test_all_calls_are_cached_and_counted"),
        Cell("`StepTimer`", f"{_DOORS}test_all_calls_are_cached_and_counted"),
        Cell("`StepTimer`", f"{_DOORS}test_all_calls_are_cached_and_counted"),
        *_loops("`StepClock`", "insight/test_step_clock.py::test_a_loop_of_ones_own"),
    ),
    "what was granted, as hyperparameters": (
        Cell("yes", "training/test_hyperparameters.py::test_what_was_granted_goes_to_the_logger"),
        Cell("yes", "training/test_hyperparameters.py::test_what_was_granted_goes_to_the_logger"),
        Cell("yes", "training/test_hyperparameters.py::test_what_was_granted_goes_to_the_logger"),
        *_loops("`hyperparameters()`", "insight/test_meter.py::test_a_fabric_loop_logs_it"),
    ),
    "Lightning's Tuner builds nothing twice": (
        Cell("yes", "training/test_sweeps.py::test_lightnings_tuner_builds_no_cache_twice"),
        Cell("yes", "training/test_sweeps.py::test_lightnings_tuner_builds_no_cache_twice"),
        Cell("yes", "training/test_sweeps.py::test_lightnings_tuner_builds_no_cache_twice"),
        NO,
        NO,
    ),
    "Hydra": (
        Cell("`data: stocache`", "test_configs.py::test_shipped_data_takes_partial_sources"),
        Cell("`data: stocache_wrapped`", "test_configs.py::test_shipped_wrapper_instantiates"),
        Cell("`callbacks: stochastic_cache`", "test_configs.py::test_an_app_with_callbacks_of_its_own_needs_one_group"),
        *_loops("`data: stocache_dataset`", "test_configs.py::test_shipped_dataset_instantiates"),
    ),
    "LightningCLI": (
        Cell("yes", "training/test_cli.py::test_our_datamodule"),
        Cell("yes", "training/test_cli.py::test_cached_datamodule"),
        Cell("yes", "training/test_cli.py::test_the_callback"),
        NO,
        NO,
    ),
    "`plan` reads it": (
        Cell("yes", "training/test_plan_inputs.py::test_the_datamodule_of_the_first_door"),
        Cell("yes", "training/test_plan_inputs.py::test_a_datamodule_of_the_users"),
        Cell("your DataModule", "training/test_plan_inputs.py::test_a_datamodule_of_the_users"),
        *_loops("your DataLoader", "training/test_plan_inputs.py::test_a_loader_alone"),
    ),
    "resume in the middle of an epoch, with exactly the batches left": (
        Cell("yes", "training/test_resume.py::test_what_remains_is_what_would_have_come"),
        Cell("yes", "training/test_resume.py::test_what_remains_is_what_would_have_come"),
        Cell("yes", "training/test_resume.py::test_what_remains_is_what_would_have_come"),
        Cell("`fabric.save`", "loading/test_fabric.py::test_fabric_saves_and_loads_a_loader"),
        Cell("`state_dict`", "loading/test_loader_state.py::test_the_rest_comes_from_any_moment"),
    ),
    "the same with another batch size or number of ranks": (
        Cell("yes", "training/test_resume.py::test_another_batch_size_goes_on_after_the_same_samples"),
        Cell("yes", "training/test_resume.py::test_another_batch_size_goes_on_after_the_same_samples"),
        Cell("yes", "training/test_resume.py::test_another_batch_size_goes_on_after_the_same_samples"),
        *_loops("yes", "loading/test_loader_state.py::test_another_size_goes_on_after_the_same_samples"),
    ),
}


def table() -> str:
    """The table, as Markdown."""
    rows = [f"| | {' | '.join(DOORS)} |", f"|---|{'---|' * len(DOORS)}"]
    rows += [f"| {feature} | {' | '.join(cell.how for cell in cells)} |" for feature, cells in FEATURES.items()]
    return "\n".join(rows) + "\n"


def main() -> None:
    """Write the table into the pages."""
    for page in PAGES:
        text = (ROOT / page).read_text()
        before, _, rest = text.partition(BEGIN)
        (ROOT / page).write_text(f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
