"""The sentences about the epochs of a run, and at its end."""

from ast import literal_eval
from contextlib import closing
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lightning_stocache import CachedDataset, CachedLoader, StochasticCache
from lightning_stocache.insight import verdict as module
from lightning_stocache.insight.verdict import Caches, epoch_line, verdict
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.grant import Grant
from tests.sources import Made
from tests.training.tiny import Watcher, data_hooks, make_trainer


def epoch(hits=0, misses=0, bypasses=0, coverage=1.0, wait=1.0, compute=1.0, **more):
    served = hits + misses + bypasses
    counts = {"hits": hits, "misses": misses, "bypasses": bypasses, "hit_rate": hits / served}
    memory = {"coverage": coverage, "fill_fraction": 1.0, "memory_bytes": 2**20, "budget_bytes": 2**20}
    seconds = {"compute_seconds": compute, "epoch_seconds": wait + compute, "data_wait_seconds": wait}
    return counts | memory | seconds | more


TEN, HALF_OF_TEN = Caches(10, stored=10), Caches(10, stored=5, way_out="the way out")
COLD, WARM = epoch(misses=10), epoch(hits=10, wait=0.1)
HALF = epoch(hits=5, bypasses=5, coverage=0.5, wait=0.6)
TIMES = "first epoch 2.0 s (1.0 s waiting), later 1.1 s (100 ms waiting)"
UNHEARD = {name: value for name, value in COLD.items() if name != "data_wait_seconds"}


@pytest.mark.parametrize(
    ("epochs", "caches", "sentence"),
    [
        ([COLD, WARM], TEN, "all 10 samples are cached (1 MiB)"),
        # A cache on a disk takes no memory.
        ([COLD, WARM | {"memory_bytes": 0}], Caches(10, 10, disk_bytes=2**21), "all 10 samples are cached (2 MiB on "),
        ([COLD, HALF], HALF_OF_TEN, "5 of 10 samples are cached (1 MiB)"),
        ([COLD, HALF], Caches(10, stored=2), "2 of 10 samples are cached (1 MiB); there is room for 5"),
        ([COLD, HALF | {"node0/hit_rate": 0.5}], Caches(10), "5 of 10 samples are cached (1 MiB)"),
        ([epoch(bypasses=10, coverage=0.0)] * 2, TEN, "nothing was cached: the warnings above say why"),
        (
            [COLD, WARM, epoch(bypasses=10, coverage=0.0)],  # it has changed, or was replaced too often
            TEN,
            "nothing is cached any more: the warnings above say why",
        ),
        (
            [WARM | {"rolling/resident": 1200, "rolling/times_seen": 2.5}],
            TEN,
            "1,200 samples are in the rolling cache; training read each loaded sample 2.5 times on average",
        ),
    ],
)
def test_the_first_sentence_says_what_is_cached(epochs, caches, sentence):
    """With its bytes, where they lie."""
    assert verdict(epochs, caches)[0].startswith(sentence)


def test_a_rolling_cache_that_has_seen_a_part_of_its_source_says_so():
    """Of a quick training most of the source may not have come in."""
    last = WARM | {"rolling/resident": 83, "rolling/times_seen": 2.5}
    assert verdict([last], Caches(83, pool_reads=(83, 500)))[1].startswith(
        "only 83 of the source's 500 samples came in"
    )
    assert len(verdict([last], Caches(83, pool_reads=(500, 500)))) == 1


def test_seconds_are_those_that_were_measured():
    """Those of the first epoch, and the mean of the later ones, with the waiting where it is known; never a factor."""
    assert verdict([COLD, WARM], TEN) == ["all 10 samples are cached (1 MiB)", TIMES]
    assert verdict([UNHEARD, UNHEARD], TEN)[1] == "first epoch 2.0 s, later 2.0 s"
    assert verdict([COLD], TEN)[1:] == ["first epoch 2.0 s (1.0 s waiting)", NO_SECOND]
    off = [epoch(bypasses=10, coverage=0.0)] * 2
    assert verdict(off, Caches(10, is_off=True)) == [
        "the cache is off (budget=0): first epoch 2.0 s (1.0 s waiting), later 2.0 s (1.0 s waiting)"
    ]


@pytest.mark.parametrize(
    ("metrics", "is_stream", "line"),
    [
        (COLD, False, "epoch 3: 0 % from the cache, 100 % filled, 2.0 s (1.0 s waiting)"),
        (COLD, True, "epoch 3: 0 % from the cache, 2.0 s (1.0 s waiting)"),
        (epoch(bypasses=10, coverage=0.0, wait=0.01), False, "epoch 3: nothing cached, 1.0 s (10 ms waiting)"),
        (epoch(hits=10, wait=900, compute=5000), False, "epoch 3: 100 % from the cache, 100 % filled, 5,900 s (900 s "),
    ],
)
def test_an_epoch_has_one_line(metrics, is_stream, line):
    """What came from the cache, how full it is, and the seconds. Of a stream nobody knows how much there will be."""
    told = epoch_line(3, metrics, is_stream=is_stream)
    assert told.startswith(line)
    assert len("stocache: " + told) <= 79


NO_SECOND = "a cache helps from the second epoch on; this run had one"
HARDLY = "training hardly waited for data in its first epoch: a cache gains little here"
IS_WARM = "the first epoch came from the cache already: compare with a run with budget=0"
START = "later epochs wait 1.0 s, of which 900 ms for their first batch: persistent_workers=True keeps the workers"
AFTER = "later epochs wait for what runs after the cache (Crop): v2 on uint8 tensors is faster, or augment on"
DECODING = (
    'later epochs wait for what runs after the cache (decoding of files): store="decoded" decodes once, and takes'
)
NOTHING = "nothing was gained: batches from the cache take as long as loaded ones"


def test_hits_of_the_first_epoch_that_are_no_earlier_cache_are_not_called_one():
    """A sampler with replacement hits what it has stored itself, and a small set is stored at set-up."""
    drawn_twice = epoch(hits=30, misses=10, fills=10, wait=0.5)
    assert IS_WARM not in verdict([drawn_twice, WARM], TEN)
    from_setup = epoch(hits=10, fills=0, wait=0.5)
    assert IS_WARM not in verdict([from_setup, WARM], Caches(10, 10, setup_fills=10))
    assert IS_WARM in verdict([from_setup, WARM], TEN)


SLOW = epoch(hits=10, start_seconds=0.01)  # waits for a second, as the first epoch does


@pytest.mark.parametrize(
    ("epochs", "caches", "advice"),
    [
        ([COLD, WARM], TEN, None),
        # Loading that workers hide behind the step takes the processor from it: the epochs are shorter by more.
        (
            [epoch(misses=10, wait=0.0, compute=6.8), epoch(hits=10, wait=0.0, compute=2.2)],
            Caches(10, 10, has_workers=True),
            "later steps took 4.6 s less, too: no loading beside them, no warm-up",
        ),
        ([epoch(misses=10, wait=0.0, compute=5.0), epoch(hits=10, wait=0.0, compute=5.0)], TEN, HARDLY),
        ([epoch(misses=10, wait=0.01), WARM | {"data_wait_seconds": 0.01}], TEN, HARDLY),
        ([UNHEARD, COLD], TEN, None),
        ([WARM, WARM], TEN, IS_WARM),  # a cache that was there before
        # More room only where later epochs wait for what has no slot.
        ([COLD, HALF], HALF_OF_TEN, "the way out"),
        ([COLD, HALF | {"data_wait_seconds": 0.01}], HALF_OF_TEN, None),
        ([COLD, SLOW | {"start_seconds": 0.9}], Caches(10, 10, starts_workers=True, has_workers=True), START),
        ([COLD, SLOW | {"start_seconds": 0.9}], Caches(10, 10, has_workers=True), NOTHING),
        ([COLD, SLOW], Caches(10, 10, starts_workers=True, after_cache="Crop"), AFTER),
        ([COLD, SLOW], Caches(10, 10, after_cache="decoding of files"), DECODING),
        ([COLD, SLOW], TEN, NOTHING),
        ([epoch(misses=10, wait=0.09, compute=0.0), epoch(hits=10, wait=0.09, compute=0.0)], TEN, None),
        (
            [COLD, epoch(hits=10, bypasses=20, coverage=1 / 3)],
            TEN,
            "the dataset has grown, and what is new has no slot: for data that grows: RollingCache",
        ),
    ],
)
def test_the_advice_is_about_what_is_waited_for(epochs, caches, advice):
    """A run that was helped gets none. Where several things could be meant, the seconds decide."""
    told = verdict(epochs, caches)[2:]
    assert told == [] if advice is None else told[0].startswith(advice)


# ---- what the caches of a call say themselves ----


def samples(count: int) -> Made:
    """Samples of 1,000 bytes, and of 1,004 in a slot."""
    return Made(lambda index: torch.full((1000,), index % 256, dtype=torch.uint8), count)


@pytest.fixture
def opened(tmp_path):
    """Trains for two epochs, and returns what is known of its caches then, and the slots of all caches."""

    def train(budget, val=0, *, by_hooks=False, **options):
        known = []
        cache = StochasticCache(budget, **options)

        class Asking(Callback):
            def on_train_end(self, trainer, pl_module):
                known.append(Caches.behind(trainer.train_dataloader, trainer.val_dataloaders))
                known.append(sum(opened["slots"] for opened in cache.cache_state()))

        loaders = [DataLoader(samples(100), 10), DataLoader(samples(val), 10) if val else None]
        sanity = 0 if by_hooks else 2
        trainer = make_trainer(tmp_path, [cache, Asking()], epochs=2, logger=False, num_sanity_val_steps=sanity)
        if by_hooks:
            hooks = data_hooks(train=lambda: loaders[0], val=lambda: loaders[1])
            trainer.fit(Watcher(), datamodule=hooks)
        else:
            trainer.fit(Watcher(), *loaders)
        return known

    return train


FILES = 'store="encoded" keeps files, which are smaller'


def bytes_in(text: str) -> str:
    return text.partition("a budget of ")[2].partition(" would")[0]


@pytest.mark.parametrize("val", [0, 20, 150])
def test_the_budget_that_is_advised_holds_every_sample(opened, val):
    """Also of a validation set that shares it, which opens first and takes at most half."""
    short, _ = opened("40KB", val=val)
    assert "would hold every sample" in short.way_out
    assert ("with the other sets" in short.way_out) == bool(val)
    advised = bytes_in(short.way_out)
    assert Budget.parse(advised).amount >= 100_400
    enough, slots = opened(advised, val=val)
    assert (enough.way_out, slots) == ("", 100 + val)


def test_the_budget_that_is_advised_leaves_validation_its_own(opened):
    """Without a sanity check the training set of hooks takes all, and nobody knows how large validation is."""
    short, slots = opened("40KB", val=20, by_hooks=True)
    assert slots < 100
    assert short.way_out.endswith("would hold every sample: val then has a budget of its own")
    advised = literal_eval(short.way_out.partition("budget=")[2].partition(" would")[0])
    enough, slots = opened(advised, val=20, by_hooks=True)
    assert (enough.way_out, slots) == ("", 120)


@pytest.mark.parametrize(
    ("budget", "on_disk", "has_files", "words"),
    [
        ("auto", False, False, "memory is the limit: dir= puts the cache on a disk"),
        ("10TiB", False, False, "memory is the limit: dir= puts the cache on a disk"),
        ("40KB", False, True, f"memory is the limit: dir= puts the cache on a disk, {FILES}"),
        ("auto", True, True, f"the disk is the limit: {FILES}"),
        ("40KB", True, False, "the disk is the limit: nothing more fits"),
    ],
)
def test_where_memory_is_the_limit(opened, monkeypatch, tmp_path, budget, on_disk, has_files, words):
    """A directory on a disk is, or files in place of decoded samples, if the source has files."""
    pytest.importorskip("xxhash")
    monkeypatch.setattr(
        "lightning_stocache.setup.allocation.grant",
        lambda asked, *_: Grant(min(50_000, asked.wanted(100_400, 50_000)), 100_400, "MemAvailable (49 KiB free)"),
    )
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: Mock(free=50_000))
    monkeypatch.setattr(module, "access_to", lambda _: Mock() if has_files else None)
    found, _ = opened(budget, dir=str(tmp_path) if on_disk else None)
    assert found.way_out == words


def test_what_runs_after_the_cache_has_a_name():
    """It is the transform of the dataset. Workers that stay are no workers that start."""
    with closing(CachedDataset(samples(20), "1MiB", transform=torch.neg)) as dataset:
        loader = CachedLoader(dataset, 5, num_workers=1, persistent_workers=True)
        known = Caches.behind(loader)
        assert (known.after_cache, known.starts_workers, known.has_workers) == ("neg", False, True)
        assert Caches.behind(CachedLoader(dataset, 5, num_workers=1)).starts_workers
    with closing(CachedDataset(samples(20), 0)) as dataset:
        assert Caches.behind(CachedLoader(dataset, 5)).is_off
