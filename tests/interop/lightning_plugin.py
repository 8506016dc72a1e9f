"""A pytest plugin that puts a StochasticCache into every Trainer, to run Lightning's own tests with it.

The tests are not ours and not in this repository: take `tests/tests_pytorch` of a Lightning release. Run its files with
the plugin and without it, and compare the outcomes test by test:

    cd PATH; PYTHONPATH=THIS_REPOSITORY:. python -m pytest -c /dev/null --rootdir=. -rA --timeout=60 \\
        -p tests.interop.lightning_plugin tests_pytorch/trainer/test_dataloaders.py

Only tests that look at the identity of their loader or dataset, or at the exact list of callbacks, may differ.
"""

import functools
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer

from lightning_stocache import StochasticCache


def pytest_configure(config: pytest.Config) -> None:
    plain_init = Trainer.__init__

    @functools.wraps(plain_init)
    def with_cache(self: Trainer, *, callbacks: list[Callback] | Callback | None = None, **options: Any) -> None:
        callbacks = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or ())
        plain_init(self, callbacks=[*callbacks, StochasticCache()], **options)

    Trainer.__init__ = with_cache  # type: ignore[method-assign]
