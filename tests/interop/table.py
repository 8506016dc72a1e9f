"""How people hold data, and what the callback makes of it: the table that test_table.py trains row by row.

A row is a library (a module of tests/interop/sources), a way of holding data with it (a function there, which makes the
loader) and what becomes of it:

- CACHED: from epoch three on nothing is read from the source.
- ALL_BUT_ONE: the same, but for one odd sample, which is read every time and warned about.
- PASSES: it cannot be cached yet, or by nobody; it trains as without the cache, after one warning.

Batches and random states are those of the run without a cache, always.
"""

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
        "many_sizes_v1": CACHED,
        "many_sizes_v2": CACHED,
        "many_sizes_to_tensor_first": CACHED,
        "one_edge_resized_to_tensor_first": CACHED,
        "eval_v1": CACHED,
        "eval_v2": CACHED,
        "eval_of_weights": CACHED,
        "resized_then_random": CACHED,
        "centre_cropped_then_random": CACHED,
        "resized_then_trivial_augment": CACHED,
        "resized_then_random_erasing": CACHED,
        "cifar_train": CACHED,
        "cifar_eval": CACHED,
        "fake_data": CACHED,
        "random_split_of_a_random_dataset": CACHED,
        "concatenated": CACHED,
        "concatenated_random": CACHED,
        "cutmix_in_collate": CACHED,
        "masks_untransformed": CACHED,
        "masks_with_joint_transforms": CACHED,
        "masks_with_transform_called_on_both": CACHED,
        "transform_of_another_name": CACHED,
        "masks_flipped_by_hand": PASSES,
        "detection": CACHED,
    },
    "timm": {
        "train": CACHED,
        "eval_": CACHED,
        "loader_that_prefetches": CACHED,
        "loader_without_prefetching": CACHED,
        "mixup_in_collate": CACHED,
    },
    "huggingface": {
        "image_and_label": CACHED,
        "with_a_string": CACHED,
        "fixed_tokens": CACHED,
        "varying_tokens": CACHED,
        "plain_ints": CACHED,
        "numpy_format": CACHED,
        "mapped_and_split": CACHED,
        "from_disk": CACHED,
        "pil_images": CACHED,
        "deterministic_transform": CACHED,
        "random_transform": CACHED,
        "random_transform_of_a_column": CACHED,
        "iterable": PASSES,
    },
    "text": {
        "varying_lengths_padded_in_collate": CACHED,
        "padded_to_max_length": CACHED,
        "strings_and_labels": CACHED,
        "masked_in_collate": CACHED,
        "random_windows": PASSES,
        "consecutive_windows": CACHED,
    },
    "audio": {
        "speech_commands": CACHED,
        "speech_commands_of_one_length": CACHED,
        "waveform_and_label": CACHED,
        "spectrogram": CACHED,
        "random_crop_of_long_recordings": PASSES,
    },
    "samples": {
        "image_and_filename": CACHED,
        "one_odd_sample": CACHED,
        "clips_in_nested_dicts": CACHED,
        "numpy_scalars_and_arrays": CACHED,
        "named_tuples": CACHED,
        "bare_tensors": CACHED,
        "bare_ints": CACHED,
        "booleans_halves_and_complex": CACHED,
        "dataclasses": CACHED,
        "samples_with_none": CACHED,
        "encoded_bytes": CACHED,
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
        "deterministic": CACHED,
        "deterministic_in_a_plain_loader": CACHED,
        "deterministic_without_meta": CACHED,
        "random_flip_and_shift": CACHED,
        "random_flip_and_shift_without_meta": CACHED,
        "random_crops": CACHED,
        "random_crops_of_varying_volumes": CACHED,
        "array_transforms_in_a_dataset_of_ones_own": CACHED,
        "monai_cache_dataset": PASSES,
    },
    "pyg": {
        "graphs_of_varying_size": CACHED,
        "graphs_of_equal_size": CACHED,
        "graphs_with_a_random_transform": CACHED,
        "graphs_in_a_plain_loader": CACHED,
        "hetero_graphs": CACHED,
    },
    "tensordict": {
        "samples_stacked_in_collate": CACHED,
        "as_dataset": PASSES,
        "tensor_class": CACHED,
        "turned_into_dicts": CACHED,
    },
    "albumentations": {
        "flip": CACHED,
        "crop_and_flip": CACHED,
        "rare_brightness": CACHED,
        "image_and_mask": CACHED,
        "eval_": CACHED,
        "many_sizes": CACHED,
        "boxes": CACHED,
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
