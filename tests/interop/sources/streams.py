"""Data without an index: iterable-style datasets and WebDataset's tar files."""

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.interop.sources.files import SAMPLES
from tests.interop.training import Setting
from tests.sources import CountedStream


class _SizedStream(CountedStream):
    def __len__(self) -> int:
        return SAMPLES


def _numbers(number: int) -> torch.Tensor:
    return torch.full((3,), number)


def _in_order(setting: Setting, dataset: Any) -> Any:
    return DataLoader(dataset, **setting.options | {"shuffle": False})


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


def _web_loader(setting: Setting) -> Any:
    dataset = _webdataset(setting).batched(4)
    loader = pytest.importorskip("webdataset").WebLoader(dataset, batch_size=None, num_workers=setting.workers)
    return loader.with_epoch(4)


WAYS = {
    "iterable_dataset": lambda setting: _in_order(setting, CountedStream(SAMPLES, _numbers)),
    "iterable_dataset_with_length": lambda setting: _in_order(setting, _SizedStream(SAMPLES, _numbers)),
    "webdataset_in_a_loader": lambda setting: _in_order(setting, _webdataset(setting)),
    "web_loader": _web_loader,
}
