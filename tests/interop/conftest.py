"""Libraries that change the environment when they are imported (OpenCV, Lightning) do so before the first test here.

No sooner: they take seconds of each process that collects tests, and double what a fork of it takes.
"""

import os
import sys
from contextlib import suppress
from importlib import import_module

import pytest

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # as Lightning does
os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # it asks the network for a later version when it is imported


@pytest.fixture(scope="session", autouse=True)
def imported() -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in {"mlflow", "optuna", "sklearn", "tensorboard", "wandb"} - set(sys.modules):
            patch.setitem(sys.modules, name, None)  # MONAI and timm would import them, for seconds, and use none here
        for name in ("albumentations", "monai", "timm", "kornia"):
            with suppress(ImportError):
                import_module(name)
