"""The first door: a DataModule around datasets, or the one that the user already has.

`StocacheDataModule` makes plain loaders, to which `CallLoaders` does what it does to anybody's. `setup` opens the
caches of a call, on every rank, with the process group up and no worker started. `teardown` closes them; after an
exception Lightning calls `on_exception` instead. Between two Trainer calls nothing is open, unless `keep_cache=True`.

`cache_datamodule` replaces the loader hooks of a DataModule on the object, not on its class, so that the object stays
what it is. Each becomes a method of a `CachedHooks`, or a partial of one: they can be pickled (ddp_spawn), and
Lightning looks through them when it asks whether a hook is overridden. Loader hooks that the user does not define stay
undefined. `setup` begins a call, `teardown` and `on_exception` end it; the user's own run first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_stocache.growing.rolling_cache import RollingCache, share_pools
from lightning_stocache.loading.loader_sampler import locality_sampler
from lightning_stocache.sampling.locality_sampler import Mode
from lightning_stocache.setup.request import Form, check_count
from lightning_stocache.training.caches import CallCaches
from lightning_stocache.training.call_loaders import CallLoaders, begin_call
from lightning_stocache.training.loaders import TrainerLoader, TransformedSet, TransformedStream
from lightning_stocache.training.obstacles import check_sweep
from lightning_stocache.training.options import STAGES, CacheOptions, Source, is_plain, made, with_options
from lightning_stocache.training.sampling import check_sampler, replicas

__all__ = ["CachedHooks", "StocacheDataModule", "cache_datamodule"]

M = TypeVar("M", bound=LightningDataModule)
Transform: TypeAlias = Callable[[Any], Any]

_LOADER_ARGUMENTS = {*inspect.signature(DataLoader).parameters, "gather"} - {"dataset", "batch_size", "num_workers"}

_ORDER = ("shuffle", "sampler", "batch_sampler")
_SAID_BY_BATCH_SAMPLER = ("batch_size", "shuffle", "drop_last", "sampler")
_STAGES_OF_CALL = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}


@with_options
class StocacheDataModule(LightningDataModule):
    """A LightningDataModule around map-style datasets, whose samples are cached once per node.

    Its plain options are in `hparams`, and checkpoints carry them: `StocacheDataModule.load_from_checkpoint(path,
    train=...)` makes it again, with datasets and functions given anew.

    Args:
        train: the training set, or a function without arguments that makes it (called in `setup`, after `prepare`); a
            `RollingCache` is shared by the ranks, and has a budget of its own.
        val: the validation set, or a list of several (of Dataset objects or functions).
        test: the test set, or a list of several.
        predict: the set to predict on, or a list of several.
        batch_size: samples per batch and rank.
        num_workers: worker processes per rank. They load what is not cached, and run `transform`; without one they end
            when all is cached on this node.
        loader: further arguments for every DataLoader, for instance {"pin_memory": True}; `shuffle`, `drop_last` and
            `sampler` are for the training loader alone. None leaves an argument at its default.
        transform: per sample on the CPU, after the cache.
        eval_transform: for val, test and predict: "same", None for nothing, or another one.
        batch_transform: per batch on the device, after transfer; a `torch.nn.Module` is moved there.
        eval_batch_transform: for val, test and predict: "same", None for nothing, or another one.
        prepare: a function without arguments that is called once per node before anything else (download, unpack).
        options: those of `CacheOptions`, each an argument.

    Raises:
        ValueError: no dataset is given, or an option cannot be read; (`setup`, `strict=True`) an empty set, or
            one that is random and cannot be split.
        TypeError: (`setup`) a set that is neither a dataset nor a function that makes one, or (`strict=True`) that is
            iterable-style; a sampler that deals samples to ranks and is no DistributedSampler.
        RuntimeError: (loader hooks) `setup` has not run, or `teardown` has.

    Example:
        >>> pixels = [(torch.full((3, 4, 4), i, dtype=torch.uint8), i % 2) for i in range(8)]
        >>> dm = StocacheDataModule(train=pixels, batch_size=4, budget="1MiB")
        >>> dm.setup("fit")
        >>> [len(labels) for images, labels in dm.train_dataloader()]
        [4, 4]
        >>> dm.teardown("fit")
    """

    def __init__(
        self,
        train: Source | None = None,
        val: Source | Sequence[Source] | None = None,
        test: Source | Sequence[Source] | None = None,
        predict: Source | Sequence[Source] | None = None,
        *,
        batch_size: int = 32,
        num_workers: int = 0,
        loader: Mapping[str, Any] | None = None,
        budget: int | float | str = "auto",
        stage_budgets: Mapping[str, int | float | str | None] | None = None,
        transform: Transform | None = None,
        eval_transform: Transform | Literal["same"] | None = "same",
        batch_transform: Transform | None = None,
        eval_batch_transform: Transform | Literal["same"] | None = "same",
        prepare: Callable[[], None] | None = None,
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
    ) -> None:
        super().__init__()
        for argument, given in (("eval_transform", eval_transform), ("eval_batch_transform", eval_batch_transform)):
            if isinstance(given, str) and given != "same":
                raise ValueError(f"{argument} must be 'same', None or a function, got {given!r}")
        check_count("batch_size", batch_size, 1)
        if wrong := [name for name in loader or () if name not in _LOADER_ARGUMENTS]:
            raise ValueError(f"loader must hold arguments of DataLoader that are not given otherwise, got {wrong}")
        self.train, self.val, self.test, self.predict = train, val, test, predict
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.loader = {name: value for name, value in (loader or {}).items() if value is not None}
        self.transform, self.batch_transform = transform, batch_transform
        self.eval_transform = transform if isinstance(eval_transform, str) else eval_transform
        self.eval_batch_transform = batch_transform if isinstance(eval_batch_transform, str) else eval_batch_transform
        self.prepare = prepare
        options = CacheOptions.among(locals())
        if train is val is test is predict is None and type(self) is StocacheDataModule:
            raise ValueError("StocacheDataModule needs a dataset: give train, val, test or predict")
        self.caches = CallCaches(options)
        # For checkpoints. Not by `save_hyperparameters`, which would keep the arguments of a subclass, datasets too.
        self._plain = options.plain() | {"batch_size": batch_size, "num_workers": num_workers}
        self._plain["loader"] = {name: value for name, value in self.loader.items() if is_plain(value)}
        self.hparams.update(self._plain)
        self._datasets: dict[str, list[Dataset[Any]]] = {}
        self._call_loaders: CallLoaders | None = None
        for hook in (f"{stage}_dataloader" for stage in STAGES if getattr(self, stage) is None):
            # Lightning is to see that it is undefined, unless a subclass defines it.
            if getattr(type(self), hook) is getattr(StocacheDataModule, hook):
                setattr(self, hook, partial(getattr(LightningDataModule, hook), self))
        if self.batch_transform is not None or self.eval_batch_transform is not None:
            # Only then, and on the object: a hook of the DataModule hides that of the user's LightningModule.
            self.on_after_batch_transfer = self._transform_batch  # type: ignore[method-assign]

    @property
    def hparams_initial(self) -> Any:
        """What Lightning logs of a subclass that calls `save_hyperparameters`: its own arguments alone.

        Lightning refuses a name that the module's hyperparameters have with another value, `batch_size` for instance.
        """
        initial = super().hparams_initial
        subclasses = type(self).__mro__[: type(self).__mro__.index(StocacheDataModule)]
        named = {name for kind in subclasses for name in inspect.signature(kind).parameters}
        for name in self._plain.keys() - named:
            initial.pop(name, None)
        return initial

    def prepare_data(self) -> None:
        """Call `prepare`, once per node. Lightning keeps the other ranks waiting meanwhile."""
        check_sweep(self.trainer)  # before anything is prepared that no job will use
        if self.prepare is not None:
            self.prepare()

    def setup(self, stage: str) -> None:
        """Make the datasets of a Trainer call and open their caches. Collective over the ranks."""
        begin_call(self.trainer)
        stages = [name for name in _STAGES_OF_CALL[stage] if getattr(self, name) is not None]
        for name in stages:
            if name not in self._datasets:
                self._datasets[name] = made(name, getattr(self, name))
            share_pools(self._datasets[name])
        getters = {name: partial(self._loaders_of, name) for name in self._datasets}
        self._call_loaders = CallLoaders(self.caches, getters, self.trainer)
        self._call_loaders.open({name: self._loaders_of(name) for name in stages})

    def train_dataloader(self) -> Any:
        """The training loader, shuffled unless `loader` says otherwise."""
        return self._cached("train")[0]

    def val_dataloader(self) -> Any:
        """One loader per set."""
        return self._cached("val")

    def test_dataloader(self) -> Any:
        """One loader per test set."""
        return self._cached("test")

    def predict_dataloader(self) -> Any:
        """One loader per set to predict on."""
        return self._cached("predict")

    def _cached(self, stage: str) -> Any:
        """The loaders of a stage, around cached datasets."""
        if self._call_loaders is None or stage not in self._call_loaders:
            call = next(call for call, stages in _STAGES_OF_CALL.items() if stage in stages)
            raise RuntimeError(f"the {stage} loader needs open caches: call setup({call!r}) first")
        return self._call_loaders(stage)

    def _loaders_of(self, stage: str) -> list[DataLoader[Any]]:
        """Loaders as anybody would make them: they serve the datasets of a stage uncached."""
        transform = self.transform if stage == "train" else self.eval_transform
        loaders: list[DataLoader[Any]] = []
        for source in self._datasets[stage]:
            dataset: Any = source
            if transform is not None and isinstance(source, RollingCache):
                dataset = source.view(transform)
            elif transform is not None:
                kind = TransformedStream if isinstance(source, IterableDataset) else TransformedSet
                dataset = kind(source, transform)
            loaders.append(TrainerLoader(dataset, **self._arguments(stage, source)))
            check_sampler(loaders[-1], replicas(self.trainer)[0])
        return loaders

    def _arguments(self, stage: str, source: Any) -> dict[str, Any]:
        """The arguments of a dataset's loader. Training draws by a LocalitySampler, unless `loader` has a sampler."""
        arguments: dict[str, Any] = {"batch_size": self.batch_size, "num_workers": self.num_workers}
        arguments |= {"shuffle": "sampler" not in self.loader, "persistent_workers": self.num_workers > 0} | self.loader
        if stage != "train":
            arguments |= {"shuffle": False, "drop_last": False, "sampler": None, "batch_sampler": None}
        elif "batch_sampler" in self.loader:  # it says all of this itself
            arguments = {name: value for name, value in arguments.items() if name not in _SAID_BY_BATCH_SAMPLER}
        if isinstance(source, RollingCache):  # its loader makes the sampler
            return arguments
        if isinstance(source, IterableDataset) or not len(source):  # in no order but its own
            return {name: value for name, value in arguments.items() if name not in _ORDER}
        if stage == "train" and not {"sampler", "batch_sampler"} & set(self.loader):
            count, rank = replicas(self.trainer, always=True)
            shuffle, mode = bool(arguments.pop("shuffle")), self.caches.options.sampling
            dataset = self.caches.of(stage, source) if source in self.caches else source
            arguments["sampler"] = locality_sampler(dataset, self.batch_size, shuffle, count, rank, mode=mode)
        return arguments

    def _transform_batch(self, batch: Any, dataloader_idx: int) -> Any:
        """Run the batch transform of the stage, on the device."""
        training = self.trainer is not None and self.trainer.training
        transform = self.batch_transform if training else self.eval_batch_transform
        if transform is None:
            return batch
        if isinstance(transform, torch.nn.Module) and self.trainer is not None:
            transform.to(self.trainer.strategy.root_device)
        return transform(batch)

    def teardown(self, stage: str) -> None:
        """Close the caches of the call, unless they are kept."""
        self._end_call()

    def on_exception(self, exception: BaseException) -> None:
        """Close the caches of the call, unless they are kept; Lightning skips `teardown` after an exception."""
        self._end_call()

    def _end_call(self) -> None:
        if not self.caches.options.keep_cache:
            self._close_pools()
            self._call_loaders = None
        self.caches.end_call()

    def cache_state(self) -> list[dict[str, Any]]:
        """What is held on this node now, one entry for each dataset, as plain values; see `CallCaches.state`."""
        return self.caches.state()

    def close(self) -> None:
        """Close all caches, kept ones too."""
        self.caches.close()
        self._close_pools()
        self._call_loaders = None
        self._datasets.clear()

    def _close_pools(self) -> None:
        for dataset in (dataset for datasets in self._datasets.values() for dataset in datasets):
            if isinstance(dataset, RollingCache):
                dataset.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_call_loaders": None}


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
    caches = CallCaches(CacheOptions.among(locals()))
    datamodule.caches = caches  # type: ignore[attr-defined]
    CachedHooks(datamodule, caches).install()
    return datamodule


# LightningCLI takes this in place of a class, if it finds a class here and not a type variable.
cache_datamodule.__annotations__.update({"datamodule": LightningDataModule, "return": LightningDataModule})


class CachedHooks:
    """What `cache_datamodule` puts on a DataModule: its loader hooks with cached datasets, and a call's two ends.

    Args:
        datamodule: the user's object; `install` changes its hooks.
        caches: where the datasets of its loaders are opened.
    """

    def __init__(self, datamodule: Any, caches: CallCaches) -> None:
        self.datamodule, self.caches = datamodule, caches
        self._loaders: CallLoaders | None = None
        kind, on_object = type(datamodule), vars(datamodule)  # the latter by from_datasets
        base = next(parent for parent in kind.__mro__ if parent.__name__ == "LightningDataModule")
        hooks = {stage: f"{stage}_dataloader" for stage in STAGES}
        # Bound methods would be pickled by their names, under which a copy finds these hooks.
        self._users = {
            name: on_object.get(name, partial(getattr(kind, name), datamodule))
            for name in (*hooks.values(), "setup", "teardown", "on_exception")
        }
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
