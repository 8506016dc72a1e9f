"""How people hold data, and what the callback makes of it: the table that test_table.py trains row by row.

A row is a library (a module of tests/interop/sources), a way of holding data with it (a function there, which makes the
loader) and what becomes of it:

- CACHED: from epoch three on nothing is read from the source.
- ALL_BUT_ONE: the same, but for one odd sample, which is read every time and warned about.
- PASSES: it cannot be cached yet, or by nobody; it trains as without the cache, after one warning.

Batches and random states are those of the run without a cache, always.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["TABLE", "Outcome"]


class Outcome(Enum):
    """What becomes of a source."""

    CACHED = "cached"
    ALL_BUT_ONE = "all but one"
    PASSES = "passes"


CACHED, ALL_BUT_ONE, PASSES = Outcome.CACHED, Outcome.ALL_BUT_ONE, Outcome.PASSES

TABLE: dict[str, dict[str, Outcome]] = {
    "torchvision": {
        "many_sizes_v1": PASSES,
        "many_sizes_v2": PASSES,
        "many_sizes_to_tensor_first": PASSES,
        "one_edge_resized_to_tensor_first": PASSES,
        "eval_v1": CACHED,
        "eval_v2": CACHED,
        "eval_of_weights": CACHED,
        "resized_then_random": CACHED,
        "centre_cropped_then_random": CACHED,
        "resized_then_trivial_augment": CACHED,
        "resized_then_random_erasing": CACHED,
        "cifar_train": PASSES,
        "cifar_eval": CACHED,
        "fake_data": CACHED,
        "random_split_of_a_random_dataset": CACHED,
        "concatenated": CACHED,
        "cutmix_in_collate": CACHED,
        "masks_untransformed": CACHED,
        "masks_with_joint_transforms": CACHED,
        "masks_with_transform_called_on_both": CACHED,
        "masks_flipped_by_hand": PASSES,
        "detection": PASSES,
    },
    "timm": {
        "train": PASSES,
        "eval_": CACHED,
        "loader_that_prefetches": PASSES,
        "loader_without_prefetching": CACHED,
        "mixup_in_collate": CACHED,
    },
    "huggingface": {
        "image_and_label": CACHED,
        "with_a_string": PASSES,
        "fixed_tokens": CACHED,
        "varying_tokens": PASSES,
        "plain_ints": CACHED,
        "numpy_format": CACHED,
        "mapped_and_split": CACHED,
        "from_disk": CACHED,
        "pil_images": PASSES,
        "deterministic_transform": CACHED,
        "random_transform": PASSES,
        "iterable": PASSES,
    },
    "text": {
        "varying_lengths_padded_in_collate": PASSES,
        "padded_to_max_length": CACHED,
        "strings_and_labels": PASSES,
        "masked_in_collate": CACHED,
        "random_windows": PASSES,
        "consecutive_windows": CACHED,
    },
    "audio": {
        "speech_commands": PASSES,
        "speech_commands_of_one_length": PASSES,
        "waveform_and_label": CACHED,
        "spectrogram": CACHED,
        "random_crop_of_long_recordings": PASSES,
    },
    "samples": {
        "image_and_filename": PASSES,
        "one_odd_sample": ALL_BUT_ONE,
        "clips_in_nested_dicts": CACHED,
        "numpy_scalars_and_arrays": CACHED,
        "named_tuples": CACHED,
        "bare_tensors": CACHED,
        "bare_ints": CACHED,
        "booleans_halves_and_complex": CACHED,
        "dataclasses": PASSES,
        "samples_with_none": CACHED,
        "encoded_bytes": PASSES,
    },
    "storage": {
        "h5py_opened_on_first_use": CACHED,
        "h5py_opened_in_init": CACHED,
        "lmdb_opened_on_first_use": CACHED,
        "memmap": CACHED,
        "memmap_as_tensors": CACHED,
        "zarr_array": CACHED,
        "sqlite_opened_on_first_use": CACHED,
        "zip_opened_on_first_use": CACHED,
        "plain_file_opened_on_first_use": CACHED,
    },
    "monai": {
        "deterministic": PASSES,
        "deterministic_in_a_plain_loader": PASSES,
        "deterministic_without_meta": CACHED,
        "random_flip_and_shift": PASSES,
        "random_flip_and_shift_without_meta": CACHED,
        "random_crops": PASSES,
        "random_crops_of_varying_volumes": PASSES,
        "array_transforms_in_a_dataset_of_ones_own": PASSES,
        "monai_cache_dataset": PASSES,
    },
    "pyg": {
        "graphs_of_varying_size": PASSES,
        "graphs_of_equal_size": PASSES,
        "graphs_with_a_random_transform": PASSES,
        "graphs_in_a_plain_loader": PASSES,
        "hetero_graphs": PASSES,
    },
    "tensordict": {
        "samples_stacked_in_collate": PASSES,
        "as_dataset": PASSES,
        "tensor_class": PASSES,
        "turned_into_dicts": CACHED,
    },
    "albumentations": {
        "flip": CACHED,
        "crop_and_flip": CACHED,
        "rare_brightness": CACHED,
        "image_and_mask": CACHED,
        "eval_": CACHED,
        "many_sizes": PASSES,
        "boxes": PASSES,
    },
    "generators": {
        "numpy_in_every_sample": PASSES,
        "numpy_in_one_of_five": PASSES,
        "random_in_every_sample": PASSES,
        "torch_in_every_sample": PASSES,
        "module_global": PASSES,
        "closure": PASSES,
    },
    "streams": {
        "iterable_dataset": PASSES,
        "iterable_dataset_with_length": PASSES,
        "webdataset_in_a_loader": PASSES,
        "web_loader": PASSES,
    },
}
