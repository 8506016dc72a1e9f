"""Headless Chromium, where there is one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

__all__ = ["browse", "needs_a_browser"]

_BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")

needs_a_browser = pytest.mark.skipif(_BROWSER is None, reason="needs Chromium")


def browse(folder: Path, *arguments: str) -> str:
    """What Chromium prints; it keeps its files in a folder."""
    command = [str(_BROWSER), "--headless", "--no-sandbox", "--disable-gpu", *_QUIET, f"--user-data-dir={folder}"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=280, check=True).stdout
