"""Subjects of TorchIO: whole volumes, with its transforms, and patches from its Queue, which has its own loader."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.interop.setting import Setting

tio = pytest.importorskip("torchio")

SUBJECTS = 6  # TorchIO takes its time for each


def _subjects(setting: Setting, *steps: Any) -> Any:
    """Volumes in files, with a label beside each."""
    root = setting.folder / "subjects"
    paths = [root / f"{number}.nii" for number in range(SUBJECTS)]
    if not root.exists():
        root.mkdir()
        for number, path in enumerate(paths):
            volume = np.random.default_rng(number).random((1, 12, 12, 12), dtype=np.float32)
            tio.ScalarImage(tensor=torch.from_numpy(volume)).save(path)
    subjects = [tio.Subject(mri=tio.ScalarImage(path), label=number) for number, path in enumerate(paths)]
    return tio.SubjectsDataset(subjects, transform=tio.Compose(steps) if steps else None)


def _volumes(setting: Setting, *steps: Any) -> Any:
    return setting.loader(_subjects(setting, *steps), tio.SubjectsLoader)


def _queue(setting: Setting, workers: int) -> Any:
    """Patches of the subjects. The loader that Lightning sees has no workers: TorchIO asks for that."""
    patches = tio.UniformSampler(4)
    queue = tio.Queue(_subjects(setting, tio.RandomFlip()), 12, 4, patches, num_workers=workers)
    return tio.SubjectsLoader(queue, batch_size=6, num_workers=0)


TORCHIO = {
    "subjects": lambda setting: _volumes(setting, tio.ZNormalization()),
    "random_flips": lambda setting: _volumes(setting, tio.ZNormalization(), tio.RandomFlip()),
    "queue": lambda setting: _queue(setting, 0),
    "queue_with_workers_of_its_own": lambda setting: _queue(setting, 2),
}
