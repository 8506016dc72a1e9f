"""Trains on a system that has what Windows has: `windows FOLDER`; it prints what came of it, and every warning.

torch and Lightning are imported before, because a sys.platform of win32 has the standard library look for modules that
are nowhere else. What Windows lacks is gone when the package is imported.
"""

import contextlib
import importlib
import io
import json
import logging
import mmap
import os
import pkgutil
import sys
from pathlib import Path

import lightning.pytorch  # noqa: F401
import torch  # noqa: F401

from tests.platforms.job import doors

LACKS = {
    os: "fork forkpty getuid geteuid getgid O_CLOEXEC O_NOFOLLOW O_NONBLOCK O_DIRECTORY O_TMPFILE memfd_create "
    "MFD_CLOEXEC pread pwrite preadv pwritev posix_fallocate fdatasync statvfs fstatvfs sysconf sched_getaffinity "
    "register_at_fork SEEK_HOLE SEEK_DATA killpg getpgid setsid mkfifo",
    mmap: "MADV_REMOVE MADV_DONTFORK PROT_READ PROT_WRITE MAP_SHARED MAP_PRIVATE",
}


def pretend() -> None:
    for module, names in LACKS.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    for name in ("fcntl", "pwd", "grp", "resource"):
        sys.modules[name] = None  # type: ignore[assignment]
    sys.platform = "win32"


if __name__ == "__main__":
    place = Path(sys.argv[1])
    (place / "log").touch()
    logging.basicConfig(level=logging.WARNING, filename=place / "log", format="%(name)s %(message)s", force=True)
    pretend()
    package = importlib.import_module("lightning_stocache")
    modules = [found.name for found in pkgutil.walk_packages(package.__path__, "lightning_stocache.")]
    for module in modules:
        importlib.import_module(module)
    came, refused = doors(place) | {"modules": len(modules)}, list[str]()
    for words in ("doctor", "list", "clean --yes"):
        with contextlib.redirect_stderr(io.StringIO()) as heard, contextlib.suppress(SystemExit):
            importlib.import_module("lightning_stocache.__main__").main(words.split())
        refused.append(heard.getvalue())
    print(json.dumps(came | {"refused": refused} | {"warnings": (place / "log").read_text().splitlines()}))
