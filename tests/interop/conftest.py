"""Libraries that change the environment when they are imported (OpenCV, Lightning) do so before the first test."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import import_module

os.environ |= {"NO_ALBUMENTATIONS_UPDATE": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # as they and Lightning do
for name in ("albumentations", "monai", "timm", "kornia"):
    with suppress(ImportError):
        import_module(name)
