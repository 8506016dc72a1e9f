"""The loader hooks of a user's DataModule, with cached datasets.

The hooks are replaced on the object, not on its class, so that the object stays what it is. Each becomes a partial of a
function of this module: such a thing can be pickled (ddp_spawn), and Lightning looks through it when it asks whether a
hook is overridden. Hooks that the user does not define stay undefined.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_stocache.training.caches import CallCaches, LoaderTap
from lightning_stocache.training.options import STAGES

__all__ = ["CachedHooks"]


class CachedHooks:
    """What `cache_datamodule` puts on a DataModule.

    Args:
        datamodule: the user's object; `install` changes its hooks.
        caches: where the datasets of its loaders are opened.
    """

    def __init__(self, datamodule: Any, caches: CallCaches) -> None:
        self.datamodule = datamodule
        self.caches = caches
        self._functions = {name: value for name, value in vars(datamodule).items() if callable(value)}  # from_datasets
        self._tap: LoaderTap | None = None

    def install(self) -> None:
        """Put the hooks on the object."""
        for stage in filter(self._defines, STAGES):
            setattr(self.datamodule, f"{stage}_dataloader", partial(_give_loaders, self, stage))
        for hook in ("teardown", "on_exception"):
            setattr(self.datamodule, hook, partial(_end_call, self, hook))

    def loaders(self, stage: str) -> Any:
        """The user's loaders of a stage, with cached datasets."""
        if self._tap is None:
            stages = {stage, *self._others(stage)}
            self._tap = LoaderTap(
                self.caches, {one: self._original(f"{one}_dataloader") for one in STAGES if one in stages}
            )
        return self._tap(stage)

    def end_call(self, hook: str, *arguments: Any) -> None:
        """The user's own hook, then the end of the call."""
        try:
            self._original(hook)(*arguments)
        finally:
            self._tap = None
            self.caches.end_call()

    def _others(self, stage: str) -> tuple[str, ...]:
        """The stages of the running call besides this one: `fit` reads train and val, and they share the budget."""
        trainer = getattr(self.datamodule, "trainer", None)
        if trainer is None or trainer.state.fn != "fit":
            return ()
        return ("train", "val") if trainer.enable_validation else ("train",)

    def _defines(self, stage: str) -> bool:
        hook = f"{stage}_dataloader"
        module = str(getattr(type(self.datamodule), hook).__module__)
        return hook in self._functions or module.split(".")[0] not in ("lightning", "pytorch_lightning")

    def _original(self, hook: str) -> Callable[..., Any]:
        own = self._functions.get(hook)
        return own if own is not None else partial(getattr(type(self.datamodule), hook), self.datamodule)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tap": None}


def _give_loaders(hooks: CachedHooks, stage: str) -> Any:
    return hooks.loaders(stage)


def _end_call(hooks: CachedHooks, hook: str, *arguments: Any) -> None:
    hooks.end_call(hook, *arguments)
