"""Libraries that change the environment when they are imported (OpenCV, Lightning) do so before the first test here.

No sooner: MONAI imports MLflow, Optuna and TensorBoard, which takes seconds of each process that collects tests, and
makes each process that runs them twice as large, which takes twice as long to fork.
"""

import os
from contextlib import suppress
from importlib import import_module

import pytest

os.environ |= {"NO_ALBUMENTATIONS_UPDATE": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # as they and Lightning do


@pytest.fixture(scope="session", autouse=True)
def imported() -> None:
    for name in ("albumentations", "monai", "timm", "kornia"):
        with suppress(ImportError):
            import_module(name)
