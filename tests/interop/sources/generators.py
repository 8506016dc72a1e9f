"""Datasets that draw from a generator of their own, wherever they keep it."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from tests.interop.sources.files import SAMPLES
from tests.interop.training import Setting

_OF_THE_MODULE = np.random.default_rng(0)


class _Noisy(Dataset[Any]):
    """Numbers with noise, in every sample or in some; the noise is drawn by a function that knows its generator."""

    def __init__(self, draw: Callable[[], float], every: int = 1) -> None:
        self.draw, self.every = draw, every

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), index + (self.draw() if index % self.every == self.every - 1 else 0.0))


class _Owner(_Noisy):
    """Holds its generator as an attribute."""

    def __init__(self, generator: Any, every: int = 1) -> None:
        super().__init__(self.drawn, every)
        self.generator = generator

    def drawn(self) -> float:
        return float(self.generator.random())


class _TorchOwner(_Owner):
    def drawn(self) -> float:
        return float(torch.rand((), generator=self.generator))


def _module_global(setting: Setting) -> Any:
    _OF_THE_MODULE.bit_generator.state = np.random.default_rng(0).bit_generator.state
    return setting.loader(_Noisy(lambda: float(_OF_THE_MODULE.random())))


def _closure(setting: Setting) -> Any:
    generator = np.random.RandomState(0)
    return setting.loader(_Noisy(lambda: float(generator.rand())))


WAYS = {
    "numpy_in_every_sample": lambda setting: setting.loader(_Owner(np.random.default_rng(0))),
    "numpy_in_one_of_five": lambda setting: setting.loader(_Owner(np.random.default_rng(0), every=5)),
    "random_in_every_sample": lambda setting: setting.loader(_Owner(random.Random(0))),
    "torch_in_every_sample": lambda setting: setting.loader(
        _TorchOwner(torch.Generator().manual_seed(0)), persistent_workers=False
    ),
    "module_global": _module_global,
    "closure": _closure,
}
