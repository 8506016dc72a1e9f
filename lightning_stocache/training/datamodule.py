"""A DataModule around datasets, or the user's own DataModule, whose loaders are cached.

Under a Trainer both are plain DataModules whose `setup` adds a `StochasticCache` to the callbacks of the Trainer call.
That caches the loaders, and takes itself out when the call ends. Between two calls no cache is open, unless
`keep_cache=True`. A StocacheDataModule without a Trainer caches the loaders of its hooks itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any, Literal, Self, TypeAlias, TypeVar

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_stocache.growing.rolling_cache import RollingCache, share_pools
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.loading.loader_sampler import locality_sampler
from lightning_stocache.setup.options import STAGES, Budgets, CacheOptions, known_options, nearest
from lightning_stocache.setup.request import Form, check_count
from lightning_stocache.training.caches import CallCaches
from lightning_stocache.training.call_loaders import CallLoaders
from lightning_stocache.training.callbacks import StochasticCache
from lightning_stocache.training.lightning_internals import say
from lightning_stocache.training.loaders import Source, TrainerLoader, TransformedSet, TransformedStream
from lightning_stocache.training.sampling import replicas

__all__ = ["StocacheDataModule", "cache_datamodule"]

M = TypeVar("M", bound=LightningDataModule)
Transform: TypeAlias = Callable[[Any], Any]

_ORDER = ("shuffle", "sampler", "batch_sampler")
_SET_BY_BATCH_SAMPLER = ("batch_size", "shuffle", "drop_last", "sampler")
_STAGES_OF_CALL = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}


class StocacheDataModule(LightningDataModule):
    """A LightningDataModule around map-style datasets, whose samples are cached once per node.

    Its plain options are in `hparams` and in checkpoints: `StocacheDataModule.load_from_checkpoint(path, train=...)`
    creates it again, with new datasets and functions. A subclass saves its own arguments, by `save_hyperparameters`.

    The arguments are the options of `CacheOptions`, and

    Args:
        train: the training set, or a function without arguments that makes it (called in `setup`, after `prepare`). A
            `RollingCache` is shared by all ranks, and has its own budget.
        val: the validation set, or a list of several (of Dataset objects or functions).
        test: the test set, or a list of several.
        predict: the set to predict on, or a list of several.
        batch_size: samples per batch and rank.
        num_workers: worker processes per rank. They load samples that are not cached, and run `transform`. Without a
            `transform` they end when all samples are cached on this node.
        loader: further arguments for every DataLoader, for instance {"pin_memory": True}. Only the training loader gets
            `shuffle`, `drop_last` and `sampler`. An argument that is None keeps its default.
        transform: per sample on the CPU, after the cache.
        eval_transform: for val, test and predict: "same", None for no transform, or another function.
        batch_transform: per batch on the device, after transfer. A `torch.nn.Module` is moved to the device.
        eval_batch_transform: for val, test and predict: "same", None for no transform, or another function.
        prepare: a function without arguments that is called once per node before anything else (download, unpack).

    Raises:
        ValueError: no dataset is given, or an option cannot be read; (`setup`, `strict=True`) a set is empty, or is
            random and cannot be split.
        TypeError: (`setup`) a set is neither a dataset nor a function that makes a dataset, or (`strict=True`) a set is
            iterable-style.
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
        transform: Transform | None = None,
        eval_transform: Transform | Literal["same"] | None = "same",
        batch_transform: Transform | None = None,
        eval_batch_transform: Transform | Literal["same"] | None = "same",
        prepare: Callable[[], None] | None = None,
        budget: Budgets = "auto",
        freeze_random: bool = False,
        keep_cache: bool = False,
        name: str | None = None,
        fingerprint: str = "",
        strict: bool = False,
        store: Form = "decoded",
        prefill: bool = False,
        dir: str | None = None,
        streams: bool = False,
    ) -> None:
        super().__init__()
        check_count("batch_size", batch_size, 1)
        check_count("num_workers", num_workers, 0)
        _check_loader_arguments(loader)
        _check_function("transform", transform)
        _check_function("batch_transform", batch_transform)
        _check_function("eval_transform", eval_transform, "'same', ")
        _check_function("eval_batch_transform", eval_batch_transform, "'same', ")
        _check_function("prepare", prepare)
        self.train = train
        self.val = val
        self.test = test
        self.predict = predict
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.loader = {name: value for name, value in (loader or {}).items() if value is not None}
        self.transform = transform
        self.batch_transform = batch_transform
        self.eval_transform = transform if eval_transform == "same" else eval_transform
        self.eval_batch_transform = batch_transform if eval_batch_transform == "same" else eval_batch_transform
        self.prepare = prepare
        self._cache = StochasticCache(
            budget,
            freeze_random=freeze_random,
            keep_cache=keep_cache,
            name=name,
            fingerprint=fingerprint,
            strict=strict,
            store=store,
            prefill=prefill,
            dir=dir,
            streams=streams,
        )
        self.caches = self._cache.caches
        self._by_hand: CallLoaders | None = None  # the loaders of a call without a Trainer
        if train is val is test is predict is None and type(self) is StocacheDataModule:
            raise ValueError("StocacheDataModule needs a dataset: give train, val, test or predict")
        if type(self) is StocacheDataModule:  # a subclass saves its own arguments
            # For checkpoints. Not by `save_hyperparameters`, which would save the datasets, too.
            plain = {name: value for name, value in self.loader.items() if isinstance(value, bool | int | float | str)}
            self.hparams.update(batch_size=batch_size, num_workers=num_workers, loader=plain)
            self.hparams.update(self.caches.options.plain())
        self._datasets: dict[str, list[Dataset[Any]]] = {}
        self._ready: set[str] = set()  # stages that have been set up
        for hook in (f"{stage}_dataloader" for stage in STAGES if getattr(self, stage) is None):
            # Lightning's `is_overridden` must find the code of its own hook, unless a subclass defines the hook.
            if getattr(type(self), hook) is getattr(StocacheDataModule, hook):
                setattr(self, hook, partial(getattr(LightningDataModule, hook), self))
        if self.batch_transform is not None or self.eval_batch_transform is not None:
            # Only with a batch transform: this hook of the DataModule hides the hook of the user's LightningModule.
            self.on_after_batch_transfer = self._transform_batch  # type: ignore[method-assign]

    __init__.__doc__ = CacheOptions.__doc__  # for `help`, and the `--help` of LightningCLI

    @classmethod
    def from_options(cls, cache: Mapping[str, Any] | None = None, **arguments: Any) -> Self:
        """Create one from the `cache` node of a Hydra config. A key that is no option is a ValueError."""
        return cls(**known_options(cache), **arguments)

    def prepare_data(self) -> None:
        """Call `prepare`, once per node. Lightning keeps the other ranks waiting meanwhile."""
        if self.prepare is not None:
            self.prepare()

    def setup(self, stage: str | None = None) -> None:
        """Make the datasets of a Trainer call ("fit", "validate", "test" or "predict"; None: of all), and cache them.

        Collective over the ranks.

        Raises:
            ValueError: there is no such call.
            Exception: what a function that makes a dataset raises; and see the class.
        """
        if stage not in (None, *_STAGES_OF_CALL):
            raise ValueError(f"stage must be one of {', '.join(_STAGES_OF_CALL)}, got {stage!r}")
        if is_under_trainer(self):
            self._cache.bring(self.trainer)
        for name in STAGES if stage is None else _STAGES_OF_CALL[stage]:
            given = getattr(self, name)
            if given is not None:
                if name not in self._datasets:
                    self._datasets[name] = _datasets_of(name, given)
                share_pools(self._datasets[name])
                self._ready.add(name)
        if not is_under_trainer(self):
            self._by_hand = CallLoaders(self.caches, {name: partial(self._loaders, name) for name in STAGES})
            self._by_hand.open({name: self._loaders(name) for name in STAGES if name in self._ready})

    def loaders_at_hand(self, stage: str) -> dict[str, Any]:
        """The plain loaders of a stage, by its name, if they are known without running a hook."""
        is_own = getattr(type(self), f"{stage}_dataloader") is getattr(StocacheDataModule, f"{stage}_dataloader")
        return {stage: self._loaders(stage)} if is_own and stage in self._ready else {}

    def train_dataloader(self) -> Any:
        """The training loader, shuffled unless `loader` says otherwise."""
        return self._of_call("train")[0]

    def val_dataloader(self) -> Any:
        """One loader per set."""
        return self._of_call("val")

    def test_dataloader(self) -> Any:
        """One loader per test set."""
        return self._of_call("test")

    def predict_dataloader(self) -> Any:
        """One loader per set to predict on."""
        return self._of_call("predict")

    def _of_call(self, stage: str) -> list[DataLoader[Any]]:
        """The loaders of a stage: cached ones without a Trainer, which caches plain ones itself."""
        if self._by_hand is None or stage not in self._ready or is_under_trainer(self):
            return self._loaders(stage)
        loaders: list[DataLoader[Any]] = self._by_hand(stage)
        return loaders

    def _loaders(self, stage: str) -> list[DataLoader[Any]]:
        """Plain loaders of a stage, which read its datasets uncached."""
        if stage not in self._ready:
            call = next(call for call, stages in _STAGES_OF_CALL.items() if stage in stages)
            raise RuntimeError(f"the {stage} loader needs open caches: call setup({call!r}) first")
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
        return loaders

    def _arguments(self, stage: str, source: Any) -> dict[str, Any]:
        """The arguments of a dataset's loader. Training uses a LocalitySampler, unless `loader` has a sampler."""
        arguments: dict[str, Any] = {"batch_size": self.batch_size, "num_workers": self.num_workers}
        arguments |= {"shuffle": "sampler" not in self.loader, "persistent_workers": self.num_workers > 0} | self.loader
        if stage != "train":
            arguments |= {"shuffle": False, "drop_last": False, "sampler": None, "batch_sampler": None}
        elif "batch_sampler" in self.loader:  # which determines the others
            arguments = {name: value for name, value in arguments.items() if name not in _SET_BY_BATCH_SAMPLER}
        if isinstance(source, RollingCache):  # its loader makes the sampler
            return arguments
        if isinstance(source, IterableDataset) or not len(source):  # a stream or an empty set has one order
            return {name: value for name, value in arguments.items() if name not in _ORDER}
        if stage == "train" and not {"sampler", "batch_sampler"} & set(self.loader):
            count, rank = replicas(self.trainer, always=True)
            shuffle = bool(arguments.pop("shuffle"))
            arguments["sampler"] = locality_sampler(source, arguments["batch_size"], shuffle, count, rank)
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
        if self._by_hand is not None:
            self._by_hand.end()
            self.caches.end_call()
        self._by_hand = None
        if not self.caches.options.keep_cache:
            self._release()

    def on_exception(self, exception: BaseException) -> None:
        """Close the caches of the call, unless they are kept; Lightning skips `teardown` after an exception."""
        self.teardown("")

    def cache_state(self) -> list[dict[str, Any]]:
        """The open caches on this node, one entry for each dataset, as plain values; see `CallCaches.state`."""
        return self.caches.state()

    def close(self) -> None:
        """Close all caches, also kept ones."""
        self.caches.close()
        self._release()
        self._datasets.clear()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_by_hand": None}

    def _release(self) -> None:
        self._ready.clear()
        for dataset in (dataset for datasets in self._datasets.values() for dataset in datasets):
            if isinstance(dataset, RollingCache):
                dataset.close()


def cache_datamodule(
    datamodule: M,
    budget: Budgets = "auto",
    *,
    freeze_random: bool = False,
    keep_cache: bool = False,
    name: str | None = None,
    fingerprint: str = "",
    strict: bool = False,
    store: Form = "decoded",
    prefill: bool = False,
    dir: str | None = None,
    streams: bool = False,
) -> M:
    """Cache the loaders of a LightningDataModule, and return the same object.

    Under a Trainer its loaders are cached: `setup` adds a `StochasticCache` to the callbacks of each call. Without a
    Trainer they are plain. Class, hyperparameters, checkpoints and all other hooks do not change. A loader that cannot
    be cached is used as it is, with one warning. Make each dataset once, in `setup` or `__init__`: a new dataset in
    each run of a loader hook is compared each time, and starts with an empty cache if its samples differ or are random.

    The arguments after `datamodule` are the options of `CacheOptions`.

    Raises:
        TypeError: the argument is no LightningDataModule, or is cached already.
        ValueError: an option cannot be read.

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
        >>> datamodule = cache_datamodule(Numbers(), budget="1MiB")  # trainer.fit(model, datamodule)
    """
    if not any(kind.__name__ == "LightningDataModule" for kind in type(datamodule).__mro__):  # of either package
        raise TypeError(f"datamodule must be a LightningDataModule, got {type(datamodule).__name__}")
    if isinstance(getattr(datamodule, "caches", None), CallCaches):
        raise TypeError(f"datamodule must not be cached yet, got a {type(datamodule).__name__} that is")
    kind: type[StochasticCache] = StochasticCache
    if not issubclass(type(datamodule), LightningDataModule):
        from lightning_stocache.training.other_package import StochasticCacheOfOther

        kind = StochasticCacheOfOther
    cache = kind(
        budget,
        freeze_random=freeze_random,
        keep_cache=keep_cache,
        name=name,
        fingerprint=fingerprint,
        strict=strict,
        store=store,
        prefill=prefill,
        dir=dir,
        streams=streams,
    )
    vars(datamodule).update(caches=cache.caches, setup=_Setup(datamodule, cache))
    return datamodule


class _Setup:
    """Takes the place of a DataModule's `setup`, which runs after the cache has joined the Trainer's callbacks.

    It is set on the object, not on its class, and can be pickled (ddp_spawn).
    """

    def __init__(self, datamodule: Any, cache: StochasticCache) -> None:
        self._datamodule = datamodule
        self._cache = cache
        # `from_datasets` sets hooks on the object. A bound method would be pickled by a name that is now this one's.
        self._setup = vars(datamodule).get("setup", partial(type(datamodule).setup, datamodule))

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if is_under_trainer(self._datamodule):
            self._cache.bring(self._datamodule.trainer)
        elif not all(map(self._cache.caches.options.is_off, STAGES)):
            say(f"{type(self._datamodule).__name__}: its loaders are cached under a Trainer, and are plain without one")
        self._setup(*args, **kwargs)


def is_under_trainer(datamodule: Any) -> bool:
    """Whether a Trainer's call uses a DataModule now."""
    trainer = getattr(datamodule, "trainer", None)
    return trainer is not None and trainer.state.status == "running"


# LightningCLI accepts a function in place of a class if the annotations are classes, not type variables.
cache_datamodule.__annotations__.update({"datamodule": LightningDataModule, "return": LightningDataModule})


def _from_options(datamodule: M, cache: Mapping[str, Any] | None = None) -> M:
    """Cache the loaders of a DataModule with the options in the `cache` node of a Hydra config."""
    return cache_datamodule(datamodule, **known_options(cache))


vars(cache_datamodule)["from_options"] = _from_options  # as the classes have it


def _check_loader_arguments(loader: Any) -> None:
    """Refuse what cannot be further arguments of each DataLoader."""
    if loader is None:
        return
    if not isinstance(loader, Mapping):
        raise TypeError(f"loader must be a mapping from arguments of DataLoader to values, got {loader!r}")
    parameters = signature(DataLoader).parameters.keys() | signature(CachedLoader).parameters.keys()
    known = parameters - {"dataset", "positional", "arguments"}
    for name in loader:
        if name not in known:
            raise ValueError(f"loader has no argument {name!r}. Did you mean {nearest(name, known)!r}?")


def _check_function(name: str, value: Any, others: str = "") -> None:
    """Refuse an argument that is neither None, nor a function, nor among the other values."""
    if not (value is None or callable(value) or (others and value == "same")):
        raise ValueError(f"{name} must be {others}None or a function, got {value!r}")


def _is_made_by_call(source: Any) -> bool:
    """Whether a call gives the dataset: it is a class, or a function, or a partial of one."""
    return isinstance(source, type) or (callable(source) and not hasattr(source, "__getitem__"))


def _datasets_of(stage: str, sources: Source | Sequence[Source]) -> list[Dataset[Any]]:
    """The datasets of a stage; functions are called. A list of samples is one dataset.

    Raises:
        TypeError: a source is no dataset, or there are several training sets.

    Example:
        >>> samples = [(0.5, 1), (0.25, 0)]
        >>> (
        ...     _datasets_of("val", samples) == [samples],
        ...     _datasets_of("val", [lambda: samples, lambda: samples]) == [samples] * 2,
        ... )
        (True, True)
    """
    given: list[Any] = [sources]
    if isinstance(sources, list | tuple) and sources and all(isinstance(s, Dataset) or callable(s) for s in sources):
        given = list(sources)
    if stage == "train" and len(given) > 1:
        raise TypeError(f"train must be one dataset, got {len(given)}: join them with torch's ConcatDataset")
    datasets = [source() if _is_made_by_call(source) else source for source in given]
    for dataset in datasets:
        sized = hasattr(dataset, "__len__") and not isinstance(dataset, str | bytes)
        if not sized and not isinstance(dataset, IterableDataset):
            raise TypeError(
                f"{stage} must be a dataset with __getitem__ and __len__, an IterableDataset, or a function that makes "
                f"one, got {dataset!r}"
            )
    return datasets
