"""The fence is a call that costs nothing where processors keep the order of stores, and works where they do not."""

from __future__ import annotations

from lightning_stocache.node import fence as module


def test_both_kinds_of_fence_return() -> None:
    """The fence of this machine and the one of others can be called over and over, from anywhere."""
    for fence in (module.fence, module._fence_by_lock, module._fence_by_hardware):
        for _ in range(3):
            assert fence() is None  # type: ignore[func-returns-value]
    assert not module._lock.locked()
