"""The first door: a DataModule around datasets. For a DataModule that the user already has, see `hooks`.

`setup` opens the caches of a call, on every rank, with the process group up and no worker started. `teardown` closes
them; after an exception Lightning calls `on_exception` instead. Between two Trainer calls nothing is open, unless
`keep_cache=True`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, cast

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler

from lightning_stocache.cache.placement import Domain
from lightning_stocache.growing.rolling_cache import RollingCache, share_pools
from lightning_stocache.growing.stream import stream_with
from lightning_stocache.loading.dataset import CachedDataset, cached_source, dataset_over
from lightning_stocache.loading.locality import locality_sampler
from lightning_stocache.sampling.locality_sampler import Mode
from lightning_stocache.setup.option import check_count
from lightning_stocache.setup.request import Form, LoaderSettings
from lightning_stocache.training.caches import CallCaches
from lightning_stocache.training.loaders import TrainerLoader
from lightning_stocache.training.model_memory import training_bytes
from lightning_stocache.training.obstacles import check_sweep, is_cacheable
from lightning_stocache.training.options import STAGES, CacheOptions, Source, Stream, is_plain, made, with_options
from lightning_stocache.training.resume import ResumePoint
from lightning_stocache.training.sampling import check_sampler, follow_pools, locality_for, replicas
from lightning_stocache.training.wanted import Wanted, drawn_by

__all__ = ["StocacheDataModule"]

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
            iterable-style; (loader hooks) a sampler that deals samples to ranks and is no DistributedSampler.
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
        check_sweep(self.trainer)
        if self.prepare is not None:
            self.prepare()

    def setup(self, stage: str) -> None:
        """Make the datasets of a Trainer call and open their caches. Collective over the ranks."""
        if self.trainer is not None:
            ResumePoint.of(self.trainer)
        stages = [name for name in _STAGES_OF_CALL[stage] if getattr(self, name) is not None]
        for name in stages:
            if name not in self._datasets:
                self._datasets[name] = made(getattr(self, name), several=name != "train")
        more = ("prefetch_factor", "multiprocessing_context", "worker_init_fn")
        reader = LoaderSettings(self.batch_size, self.num_workers, *map(cast(Any, self.loader.get), more))
        sets = [(name, dataset) for name in stages for dataset in self._datasets[name]]
        share_pools(dataset for _, dataset in sets)
        sets = [(name, dataset) for name, dataset in sets if not isinstance(dataset, RollingCache)]
        wanted = [(name, dataset) for name, dataset in sets if is_cacheable(dataset, name, self.caches)]
        self.caches.open(
            [Wanted(dataset, name, reader, self._domain(name, dataset)) for name, dataset in wanted],
            later_bytes=training_bytes(self.trainer),
        )

    def _domain(self, stage: str, dataset: Any) -> Domain | None:
        """What the loaders of a stage will draw of a dataset; None for all of it, or where it is not known."""
        if isinstance(dataset, IterableDataset):
            return None
        given = self.loader if stage == "train" else {"sampler": SequentialSampler(dataset)}
        orders = given.get("sampler"), given.get("batch_sampler")
        return drawn_by(self.trainer, stage, len(dataset), self.batch_size, *orders)

    def train_dataloader(self) -> Any:
        """The training loader, shuffled unless `loader` says otherwise."""
        return self._loaders("train")[0]

    def val_dataloader(self) -> Any:
        """One loader per set."""
        return self._loaders("val")

    def test_dataloader(self) -> Any:
        """One loader per test set."""
        return self._loaders("test")

    def predict_dataloader(self) -> Any:
        """One loader per set to predict on."""
        return self._loaders("predict")

    def _loaders(self, stage: str) -> list[DataLoader[Any]]:
        arguments: dict[str, Any] = {"batch_size": self.batch_size, "num_workers": self.num_workers}
        arguments |= {"shuffle": "sampler" not in self.loader, "persistent_workers": self.num_workers > 0} | self.loader
        if stage != "train":
            arguments |= {"shuffle": False, "drop_last": False, "sampler": None, "batch_sampler": None}
        elif "batch_sampler" in self.loader:  # it says all of this itself
            arguments = {name: value for name, value in arguments.items() if name not in _SAID_BY_BATCH_SAMPLER}
        views = self._views(stage)
        if any(isinstance(view, RollingCache) for view in views):  # its loader makes the sampler
            pass
        elif any(not isinstance(view, CachedDataset) for view in views):  # empty or a stream: in no order but its own
            arguments = {name: value for name, value in arguments.items() if name not in _ORDER}
        elif stage == "train" and not {"sampler", "batch_sampler"} & set(self.loader):
            count, rank = replicas(self.trainer, always=True)
            shuffle, mode = bool(arguments.pop("shuffle")), self.caches.options.sampling
            arguments["sampler"] = locality_sampler(views[0], self.batch_size, shuffle, count, rank, mode=mode)
        elif stage == "train" and (own := self.loader.get("sampler")) is not None and self.trainer is not None:
            mode = self.caches.options.sampling
            arguments["sampler"] = locality_for(self.trainer, views[0], own, self.batch_size, mode) or own
        loaders: list[DataLoader[Any]] = [TrainerLoader(dataset, **arguments) for dataset in views]
        if stage == "train" and self.trainer is not None:
            follow_pools(self.trainer, loaders)
            ResumePoint.of(self.trainer).go_on(loaders)
        for loader in loaders:
            check_sampler(loader, replicas(self.trainer)[0])
        return loaders

    def _views(self, stage: str) -> list[Any]:
        """The cached datasets of a stage with its transform: a dataset may be in several stages."""
        transform = self.transform if stage == "train" else self.eval_transform
        views: list[Any] = []
        for dataset in self._datasets.get(stage, [getattr(self, stage)]):
            if isinstance(dataset, RollingCache):
                views.append(dataset if transform is None else dataset.view(transform))
            elif dataset in self.caches and isinstance(dataset, IterableDataset):
                views.append(stream_with(self.caches.of(stage, dataset), transform))
            elif dataset in self.caches:
                views.append(dataset_over(cached_source(self.caches.of(stage, dataset)).view(transform)))
            elif stage in self._datasets and not is_cacheable(dataset, stage, self.caches):
                transformed = transform is not None and isinstance(dataset, IterableDataset)
                views.append(Stream(dataset, cast(Transform, transform)) if transformed else dataset)
            else:
                call = next(call for call, stages in _STAGES_OF_CALL.items() if stage in stages)
                raise RuntimeError(f"the {stage} loader needs open caches: call setup({call!r}) first")
        return views

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
        self.caches.end_call()

    def cache_state(self) -> list[dict[str, Any]]:
        """What is held on this node now, one entry for each dataset, as plain values; see `CallCaches.state`."""
        return self.caches.state()

    def close(self) -> None:
        """Close all caches, kept ones too."""
        self.caches.close()
        self._close_pools()
        self._datasets.clear()

    def _close_pools(self) -> None:
        for dataset in (dataset for datasets in self._datasets.values() for dataset in datasets):
            if isinstance(dataset, RollingCache):
                dataset.close()
