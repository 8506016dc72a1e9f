"""The versions that are installed, beside those that this package allows by its own metadata."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import NamedTuple

__all__ = ["Version", "versions"]

_PACKAGES = (
    *("torch", "torchvision", "numpy", "lightning", "pytorch-lightning", "hydra-core"),
    *("matplotlib", "tensorboard"),
)


class Version(NamedTuple):
    """What is installed of a package, and what is needed if that is something else."""

    name: str
    installed: str
    needed: str = ""


def versions() -> list[Version]:
    """Python and the packages that matter to a cache, as far as they are installed.

    Example:
        >>> [one.name for one in versions()][:2]
        ['Python', 'torch']
    """
    found, bounds = [Version("Python", platform.python_version())], _requirements()
    for name in _PACKAGES:
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        allowed = bounds.get(name, "")
        found.append(Version(name, installed, "" if _fits(installed, allowed) else allowed))
    return found


def _requirements() -> dict[str, str]:
    """What versions this package allows, by name; of the extras too."""
    try:
        from packaging.requirements import Requirement

        lines = metadata.requires("lightning-stocache") or []
    except (ModuleNotFoundError, metadata.PackageNotFoundError):  # run from a checkout that is not installed
        return {}
    return {one.name: str(one.specifier) for one in map(Requirement, lines)}


def _fits(version: str, allowed: str) -> bool:
    if not allowed:
        return True
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(allowed).contains(version, prereleases=True)
