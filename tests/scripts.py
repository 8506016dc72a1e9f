"""Scripts, run as `python FILE ARGUMENTS` runs them, but in a fork: what they import has been imported already.

torch and Lightning take four seconds of a processor to import, which is more than most examples take.
"""

import importlib
import logging
import multiprocessing
import os
import runpy
import sys
import tempfile
import traceback
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from tests.processes import call

__all__ = ["run_example"]

ROOT = Path(__file__).parents[1]


def run_example(script: str, folder: Path, *arguments: str) -> str:
    """What a script of `examples` prints, as a user starts it on a machine without a GPU; its files are in a folder."""
    environment = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(folder)}
    importlib.import_module("lightning.pytorch")  # once, for all scripts that follow
    with tempfile.TemporaryDirectory() as said:
        code = call(_run, ROOT / "examples" / script, arguments, folder, environment, Path(said), timeout=550)
        assert code == 0, Path(said, "error").read_text()
        return Path(said, "out").read_text()


def _run(path: Path, arguments: tuple[str, ...], folder: Path, environment: dict[str, str], said: Path) -> int:
    os.environ.update(environment)
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "error")):
        os.dup2(os.open(said / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    logging.getLogger().handlers.clear()  # pytest's
    for neighbour in path.parent.glob("*.py"):
        sys.modules.pop(neighbour.stem, None)
    forkserver.ensure_running.__self__.__init__()  # the one of the test process is no server of this one
    # Benchmarks run each case in a fork of a server that has imported torch and done nothing else: this process is one.
    multiprocessing.get_context = partial(_context, multiprocessing.get_context)  # type: ignore[assignment]
    sys.argv, sys.path = [str(path), *arguments], [str(path.parent), *sys.path]
    try:
        runpy.run_path(str(path), run_name="__main__")
        return 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush(), sys.stderr.flush()


def _context(real: Any, method: str | None = None) -> Any:
    return real("fork" if method == "forkserver" else method)
