"""Stochastic caching for PyTorch Lightning: one cache per node, in memory, shared by all ranks and workers.

The public names are resolved on first use (PEP 562), so importing the package imports neither torch nor Lightning.
"""

from importlib import import_module
from logging import getLogger
from typing import TYPE_CHECKING, Any

from lightning_stocache.console import Console

if TYPE_CHECKING:  # the aliases tell type checkers that the names are public
    from lightning_stocache.cache.compat import SharedCache as SharedCache
    from lightning_stocache.growing.rolling_cache import RollingCache as RollingCache
    from lightning_stocache.growing.rolling_writer import RollingWriter as RollingWriter
    from lightning_stocache.growing.stream import CachedStream as CachedStream
    from lightning_stocache.insight.meter import CacheMeter as CacheMeter
    from lightning_stocache.loading.dataset import CachedDataset as CachedDataset
    from lightning_stocache.loading.loader import CachedLoader as CachedLoader
    from lightning_stocache.loading.loader_copy import cache_loader as cache_loader
    from lightning_stocache.node.files import get_shm_size as get_shm_size
    from lightning_stocache.setup.options import CacheOptions as CacheOptions
    from lightning_stocache.source.lmdb_source import LMDBSource as LMDBSource
    from lightning_stocache.training.callbacks import StochasticCache as StochasticCache
    from lightning_stocache.training.datamodule import StocacheDataModule as StocacheDataModule
    from lightning_stocache.training.datamodule import cache_datamodule as cache_datamodule
    from lightning_stocache.training.monitor import CacheMonitor as CacheMonitor
    from lightning_stocache.training.step_timer import StepTimer as StepTimer

    __version__: str

getLogger(__name__).addHandler(Console())

_HOMES = {
    "CacheMeter": "insight.meter",
    "CacheMonitor": "training.monitor",
    "CacheOptions": "setup.options",
    "CachedDataset": "loading.dataset",
    "CachedLoader": "loading.loader",
    "CachedStream": "growing.stream",
    "LMDBSource": "source.lmdb_source",
    "RollingCache": "growing.rolling_cache",
    "RollingWriter": "growing.rolling_writer",
    "SharedCache": "cache.compat",
    "StepTimer": "training.step_timer",
    "StocacheDataModule": "training.datamodule",
    "StochasticCache": "training.callbacks",
    "cache_datamodule": "training.datamodule",
    "cache_loader": "loading.loader_copy",
    "get_shm_size": "node.files",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    value: Any
    if name == "__version__":
        from importlib.metadata import version

        value = version("lightning-stocache")
    elif name in _HOMES:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
