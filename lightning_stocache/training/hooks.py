"""The first door for a DataModule that the user already has: its own loader hooks, with cached datasets.

The hooks are replaced on the object, not on its class, so that the object stays what it is. Each becomes a method of a
`CachedHooks`, or a partial of one: they can be pickled (ddp_spawn), and Lightning looks through them when it asks
whether a hook is overridden. Loader hooks that the user does not define stay undefined. `setup` begins a call,
`teardown` and `on_exception` end it; the user's own run first.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

from lightning.pytorch import LightningDataModule

from lightning_stocache.sampling.locality_sampler import Mode
from lightning_stocache.setup.request import Form
from lightning_stocache.training.caches import CallCaches
from lightning_stocache.training.call_loaders import CallLoaders, begin_call
from lightning_stocache.training.options import STAGES, CacheOptions, with_options

__all__ = ["CachedHooks", "cache_datamodule"]

M = TypeVar("M", bound=LightningDataModule)
_OF_A_CALL = ("setup", "teardown", "on_exception")


@with_options
def cache_datamodule(  # noqa: D417  the options are described in one place
    datamodule: M,
    budget: int | float | str = "auto",
    *,
    stage_budgets: Mapping[str, int | float | str | None] | None = None,
    allow_random: bool = False,
    keep_cache: bool = False,
    sampling: Mode = "locality",
    name: str | None = None,
    fingerprint: str = "",
    strict: bool = False,
    store: Form = "decoded",
    prefill: bool = False,
    dir: str | None = None,
    streams: bool = False,
) -> M:
    """Cache the loaders of a DataModule, and return the same object.

    Its loader hooks give the same loaders with cached datasets; class, hyperparameters, checkpoints and all other hooks
    stay what they are. Each loader stands alone: one that cannot be cached is used as it is, with one warning. A
    dataset should be made once, in `setup` or `__init__`: one that is made anew in every call of a loader hook is
    compared each time, and starts with an empty cache where its samples are others, or random.

    The val set, which Lightning's sanity check asks for first, takes at most half of the budget; without a sanity check
    it gets what the training set leaves. `stage_budgets` says otherwise.

    Args:
        datamodule: the user's own.
        options: those of `CacheOptions`, each an argument.

    Raises:
        TypeError: what is given is no LightningDataModule, or caches already.
        ValueError: an option that cannot be read.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader
        >>> class Numbers(LightningDataModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.numbers = [torch.tensor(i) for i in range(6)]
        ...
        ...     def train_dataloader(self):
        ...         return DataLoader(self.numbers, batch_size=3)
        >>> dm = cache_datamodule(Numbers(), budget="1MiB")
        >>> [batch.tolist() for batch in dm.train_dataloader()]
        [[0, 1, 2], [3, 4, 5]]
        >>> dm.teardown("fit")
    """
    if not any(kind.__name__ == "LightningDataModule" for kind in type(datamodule).__mro__):  # of either package
        raise TypeError(f"datamodule must be a LightningDataModule, got {type(datamodule).__name__}")
    if isinstance(getattr(datamodule, "caches", None), CallCaches):
        raise TypeError(f"datamodule must not be cached yet, got a {type(datamodule).__name__} that is")
    options = CacheOptions.among(locals())
    caches = CallCaches(options)
    datamodule.caches = caches  # type: ignore[attr-defined]
    CachedHooks(datamodule, caches).install()
    return datamodule


# LightningCLI takes this in place of a class, if it finds a class here and not a type variable.
cache_datamodule.__annotations__.update({"datamodule": LightningDataModule, "return": LightningDataModule})


class CachedHooks:
    """What `cache_datamodule` puts on a DataModule.

    Args:
        datamodule: the user's object; `install` changes its hooks.
        caches: where the datasets of its loaders are opened.
    """

    def __init__(self, datamodule: Any, caches: CallCaches) -> None:
        self.datamodule, self.caches = datamodule, caches
        self._loaders: CallLoaders | None = None
        kind = type(datamodule)
        base = next(parent for parent in kind.__mro__ if parent.__name__ == "LightningDataModule")
        hooks = {stage: f"{stage}_dataloader" for stage in STAGES}
        names = (*hooks.values(), *_OF_A_CALL)
        on_object = {name: vars(datamodule)[name] for name in names if name in vars(datamodule)}  # by from_datasets
        self._users = {name: partial(getattr(kind, name), datamodule) for name in names} | on_object
        self._getters = {
            stage: self._users[name]
            for stage, name in hooks.items()
            if name in on_object or getattr(kind, name) is not getattr(base, name)
        }

    def install(self) -> None:
        """Put the hooks on the object."""
        for stage in self._getters:
            setattr(self.datamodule, f"{stage}_dataloader", partial(self.loaders, stage))
        self.datamodule.setup = self.setup
        for hook in ("teardown", "on_exception"):
            setattr(self.datamodule, hook, partial(self.end_call, hook))

    def setup(self, *args: Any, **kwargs: Any) -> None:
        """The user's own `setup`, at the beginning of a call."""
        self._loaders = None
        begin_call(getattr(self.datamodule, "trainer", None))
        self._users["setup"](*args, **kwargs)

    def loaders(self, stage: str) -> Any:
        """The user's loaders of a stage, with cached datasets."""
        if self._loaders is None:
            self._loaders = CallLoaders(self.caches, self._getters, getattr(self.datamodule, "trainer", None))
        return self._loaders(stage)

    def end_call(self, hook: str, *args: Any, **kwargs: Any) -> None:
        """The user's own hook, then the end of the call."""
        try:
            self._users[hook](*args, **kwargs)
        finally:
            self._loaders = None
            self.caches.end_call()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_loaders": None}
