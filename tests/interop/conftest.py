"""Libraries that change the environment when they are imported (OpenCV, Lightning) do so before the first test."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

for name in ("albumentations", "monai", "timm", "kornia"):
    with suppress(ImportError):
        import_module(name)
