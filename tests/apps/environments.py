"""One virtual environment per application, which sees the packages of this one: torch and Lightning are installed once.

The environments lie in the folder of the variable APPS_FOLDER and stay there for the next run.
"""

import fcntl
import hashlib
import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

_FOLDER = Path(os.environ.get("APPS_FOLDER") or Path(tempfile.gettempdir()) / "lightning_stocache_apps")
_AS_HERE = ("torch", "torchvision", "lightning", "pytorch-lightning")


def python_with(*requirements: str) -> Path:
    """The Python of an environment with these requirements, which is made if there is none.

    Raises:
        RuntimeError: they cannot be installed beside this environment's torch and Lightning.
    """
    folder = _FOLDER / hashlib.sha256(repr((sys.prefix, requirements)).encode()).hexdigest()[:12]
    _FOLDER.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process of pytest may make it
        if not (folder / "ready").exists():
            _make(folder, requirements)
    return folder / "bin/python"


def _make(folder: Path, requirements: tuple[str, ...]) -> None:
    venv.create(folder, clear=True, symlinks=True)
    site_packages = sysconfig.get_path("purelib", vars={"base": str(folder)})
    # Searched after the environment's own packages, so an application can have another NumPy, for instance.
    Path(site_packages, "base.pth").write_text(sysconfig.get_path("purelib"))
    here = {found.name: found.version for found in importlib.metadata.distributions() if found.name in _AS_HERE}
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in here.items()))
    install = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--quiet"]
    pip = subprocess.run([*install, "-c", str(constraints), *requirements], capture_output=True, text=True)
    if pip.returncode:
        raise RuntimeError(f"{', '.join(requirements)} cannot be installed:\n{pip.stderr[-2000:]}")
    (folder / "ready").touch()
