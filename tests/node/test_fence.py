"""The fence is a call that costs nothing where processors keep the order of stores, and works where they do not."""

from __future__ import annotations

import importlib.util
import platform
import threading
from types import ModuleType

import pytest

from lightning_stocache.node import fence as installed


class Lock:
    """Notes what is done to it."""

    def __init__(self) -> None:
        self.did: list[str] = []

    def __enter__(self) -> None:
        self.did.append("acquire")

    def __exit__(self, *_: object) -> None:
        self.did.append("release")


def module_on(machine: str, lock: Lock, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module as another machine imports it, with this lock for its own."""
    spec = importlib.util.spec_from_file_location("fence_elsewhere", str(installed.__file__))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setattr(platform, "machine", lambda: machine)
        patch.setattr(threading, "Lock", lambda: lock)
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("machine", ["aarch64", "arm64", "riscv64", "ppc64le", "", "x86_64", "AMD64", "i686"])
def test_where_processors_reorder_two_sections_of_a_lock_lie_between(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can pass both the release of the first and the acquire of the second, in either direction. Where
    processors keep the order, neither a lock nor anything else is touched."""
    lock = Lock()
    module = module_on(machine, lock, monkeypatch)
    sections = 0 if machine in ("x86_64", "AMD64", "i686") else 2
    for calls in (1, 2):
        module.fence()
        assert lock.did == ["acquire", "release"] * sections * calls


def test_the_fence_of_this_machine_can_be_called_over_and_over() -> None:
    """It comes back, and leaves nothing locked behind."""
    for _ in range(3):
        installed.fence()
