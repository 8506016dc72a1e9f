"""Data without an index: iterable-style datasets and WebDataset's tar files."""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.interop.sources.files import SAMPLES
from tests.interop.training import Setting


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (torch.full((3,), number) for number in range(first, SAMPLES, step))


class _SizedStream(_Stream):
    def __len__(self) -> int:
        return SAMPLES


def _in_order(setting: Setting) -> dict[str, Any]:
    return setting.options | {"shuffle": False}


def iterable_dataset(setting: Setting) -> Any:
    return DataLoader(_Stream(), **_in_order(setting))


def iterable_dataset_with_length(setting: Setting) -> Any:
    return DataLoader(_SizedStream(), **_in_order(setting))


def _shards(folder: Path) -> list[str]:
    paths = [folder / f"shard{number}.tar" for number in range(2)]
    for shard, path in enumerate(paths):
        with tarfile.open(path, "w") as archive:
            for number in range(shard, SAMPLES, len(paths)):
                buffer = io.BytesIO()
                np.save(buffer, np.full((2, 3), number))
                entry = tarfile.TarInfo(f"{number:04}.npy")
                entry.size = buffer.tell()
                archive.addfile(entry, io.BytesIO(buffer.getvalue()))
    return [str(path) for path in paths]


def _webdataset(setting: Setting) -> Any:
    wds = pytest.importorskip("webdataset")
    return wds.WebDataset(_shards(setting.folder), shardshuffle=False).decode().to_tuple("npy")


def webdataset_in_a_loader(setting: Setting) -> Any:
    return DataLoader(_webdataset(setting), **_in_order(setting))


def web_loader(setting: Setting) -> Any:
    dataset = _webdataset(setting).batched(4)
    loader = pytest.importorskip("webdataset").WebLoader(dataset, batch_size=None, num_workers=setting.workers)
    return loader.with_epoch(4)
