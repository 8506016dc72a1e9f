"""CacheMeter: a loop of one's own has the numbers of the monitor, under its keys. The tallies behind both."""

import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from torch.utils.data import DataLoader, DistributedSampler, Subset, SubsetRandomSampler

from lightning_stocache import (
    CachedDataset,
    CachedLoader,
    CachedStream,
    CacheMeter,
    CacheMonitor,
    RollingCache,
    RollingWriter,
)
from lightning_stocache.cache.counters import Counts
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.insight.expectation import Expectation
from lightning_stocache.insight.metrics import LIVE, LIVE_METRICS
from lightning_stocache.insight.tallies import Tallies, coverage, samples_of
from lightning_stocache.node.group import NodeGroup
from tests.processes import run_ranks
from tests.sources import CountedSource
from tests.training.tiny import SAMPLES, Model, logged, make_trainer

SECONDS = {"data_wait_seconds", "compute_seconds", "epoch_seconds", "samples_per_second"}


@pytest.fixture
def dataset():
    with closing(CachedDataset(CountedSource(SAMPLES), budget="50%", freeze_random=True)) as made:
        yield made


def numbers(length, **arguments):
    """A cached dataset of floats, of which set-up has read none; a context that closes it."""
    return closing(CachedDataset([*map(float, range(length))], spec=SampleSpec.infer(0.0), **arguments))


def counts(metrics: dict[str, float], stage: str = "") -> dict[str, float]:
    """The metrics that do not depend on clocks, by their names."""
    named = {name.removeprefix(f"stocache/{stage}"): value for name, value in metrics.items()}
    return {name: value for name, value in named.items() if not name.endswith("_seconds") and "per_second" not in name}


def test_a_plain_loop_has_the_monitors_values(tmp_path, dataset):
    """Each epoch has the keys and counts that a Trainer logs, and between its steps there are live values."""
    loader = CachedLoader(dataset, batch_size=4)
    trainer = make_trainer(tmp_path, [CacheMonitor()], epochs=2)
    trainer.fit(Model(), loader)
    keys = {key for key in trainer.callback_metrics if key.startswith("stocache/")}
    assert "stocache/epoch_seconds" in keys
    dataset.share()
    logger = CSVLogger(tmp_path, name="", flush_logs_every_n_steps=1)
    fabric = Fabric(accelerator="cpu", devices=1, loggers=logger)
    meter, found, seen = CacheMeter(fabric.setup_dataloaders(loader)), [], []
    for _ in range(2):
        for step, (_, labels) in enumerate(meter):
            assert len(labels) == 4
            if step in (0, 5):
                seen.append(meter.live())
        found.append(meter.epoch())
        fabric.log_dict(found[-1], step=len(found))
    assert set(found[0]) == set(found[1]) == keys
    assert "stocache/hit_rate" in (Path(logger.log_dir) / "metrics.csv").read_text()
    for key in counts(found[0]):
        assert [epoch[f"stocache/{key}"] for epoch in found] == logged(trainer, f"stocache/{key}"), key
    assert all(epoch["stocache/data_wait_seconds"] > 0 < epoch["stocache/compute_seconds"] for epoch in found)
    assert all(set(live) == {LIVE + name for name in LIVE_METRICS} for live in seen)
    # Half of the samples have a slot, and which of them is the ring's.
    assert [round(live["stocache/live/hit_rate"] * SAMPLES) for live in seen[1::2]] == [0, SAMPLES // 2]
    assert seen[0]["stocache/live/fill_fraction"] < seen[1]["stocache/live/fill_fraction"] == 1
    assert seen[3]["stocache/live/data_wait_seconds"] > seen[2]["stocache/live/data_wait_seconds"] > 0
    assert meter.live()["stocache/live/compute_seconds"] == 0
    granted = meter.hyperparameters()["stocache"]
    assert granted["slots"] == SAMPLES // 2
    assert CacheMeter(loader, "val").live() == {}


def test_loaders_of_other_classes_have_no_seconds(dataset):
    """A meter of a plain DataLoader has counts alone; wrong arguments are named."""
    half = DataLoader(Subset(dataset, range(8)), batch_size=4)
    meter = CacheMeter(half, stage="val")
    for _ in half:
        pass
    metrics = meter.epoch()
    assert not SECONDS & {name.rpartition("/")[2] for name in metrics}
    found = counts(metrics, "val/")
    assert found["misses"] + found["bypasses"] == 8
    assert meter.epoch()["stocache/val/hit_rate"] == 0
    for several in ([half, half], (half,), {"a": half}):
        with pytest.raises(TypeError, match=f"one loader, got a {type(several).__name__}: make a CacheMeter of each"):
            CacheMeter(several)
    with pytest.raises(ValueError, match="stage must be one of train, val, test, predict, got 'eval'"):
        CacheMeter(half, stage="eval")
    with pytest.raises(TypeError, match="no cached dataset behind DataLoader: make its dataset a CachedDataset"):
        CacheMeter(DataLoader([1.0]))


def test_an_epoch_that_is_left_counts_what_was_served(dataset, monkeypatch):
    """After `break`, time before the next epoch is not computing, and the next epoch starts from zero."""
    meter, clock, hours = CacheMeter(CachedLoader(dataset, batch_size=4)), time.perf_counter_ns, 0
    monkeypatch.setattr(time, "perf_counter_ns", lambda: clock() + hours * 3600 * 10**9)
    for _ in range(2):
        for _ in meter:
            break
        hours += 1
        metrics = meter.epoch()
        assert metrics["stocache/data_wait_seconds"] > 0
        assert metrics["stocache/compute_seconds"] < 3600
    assert sum(metrics[f"stocache/{key}"] for key in ("hits", "misses", "bypasses")) == 4
    assert meter.epoch()["stocache/misses"] == 0
    assert len(meter) == 6


def test_a_stream_is_counted():
    """The first epoch of a CachedStream has no hits, and the second has only hits. All that is stored is covered."""
    with closing(CachedStream(lambda: iter([torch.tensor(value) for value in range(6)]), budget="1MiB")) as stream:
        meter = CacheMeter(CachedLoader(stream, batch_size=3))
        for hits in (0, 6):
            list(meter)
            metrics = meter.epoch()
            assert (metrics["stocache/hits"], metrics["stocache/coverage"]) == (hits, 1)
        granted = meter.hyperparameters()["stocache"]
        assert (granted["layout"], granted["samples"]) == ("stream", 6)


def test_a_pool_has_rates_of_the_time_between_two_epochs():
    """What came and went is per second, and levels are those of the moment."""
    begin = time.monotonic()
    pool = RollingCache(budget=200, spec=SampleSpec.infer(torch.zeros(3)), minimum=1)
    with closing(pool), RollingWriter.attach(pool.handle) as writer:
        writer.append(torch.zeros(3))
        loader, slots = CachedLoader(pool, batch_size=1), pool.stats().capacity  # waits for a sample
        meter = CacheMeter(loader)
        for _ in range(slots + 1):
            writer.append(torch.zeros(3))
        metrics = meter.epoch()
        appended = metrics["stocache/rolling/appended_per_second"]
        assert metrics["stocache/rolling/resident"] == slots
        assert appended >= (slots + 1) / (time.monotonic() - begin)
        assert metrics["stocache/rolling/evicted_per_second"] == pytest.approx(appended * 2 / (slots + 1))


def on_two_nodes(rank: int) -> Any:
    """The metrics of three epochs for each deal, on nodes whose memory holds a quarter and all of the dataset."""
    dataset = CachedDataset(CountedSource(SAMPLES), budget=("25%", "100%")[rank], defer=True)
    dataset.share(NodeGroup.discover(key=rank))
    found = []
    for draws in ({"shuffle": True, "locality": True}, {"sampler": DistributedSampler(dataset)}):
        loader = CachedLoader(dataset, batch_size=4, **draws)
        meter = CacheMeter(loader)
        for epoch in range(3):
            loader.set_epoch(epoch)
            list(meter)
            found.append(meter.epoch())
    granted = meter.hyperparameters()["stocache"]
    dataset.close()
    return found, granted["ranks"], granted["nodes"]


@pytest.mark.epoch_one_reads_all
@pytest.mark.processes
def test_ranks_and_nodes_sum_up():
    """Ranks get the same metrics, over all."""
    first, second = run_ranks(on_two_nodes, 2)
    assert first == second
    epochs, *counts = first
    assert counts == [2, 2]
    served = [sum(epoch[f"stocache/{name}"] for name in ("hits", "misses", "bypasses")) for epoch in epochs]
    assert served == [SAMPLES] * 6


def test_what_was_ready_before_the_first_epoch_is_expected():
    """The first epoch of a fold hits the samples of the fold that the cache holds already, and nobody warns."""
    with numbers(SAMPLES) as dataset:
        for index in (0, 1, 2, 20):
            dataset[index]
        meter = CacheMeter(CachedLoader(dataset, batch_size=2, sampler=SubsetRandomSampler(range(12))))
        for expected in (0.25, 1):
            list(meter)
            metrics = meter.epoch()
            assert metrics["stocache/hit_rate"] == expected


# ---- tallies ----


def end_epoch(tallies, stage, loader):
    """The samples that were served in an epoch that ends on the only rank."""
    tallies.post(stage, loader)
    metrics = tallies.metrics(stage, loader, patience=1)
    return sum(metrics[name] for name in ("hits", "misses", "bypasses"))


@settings(max_examples=30)
@given(steps=st.lists(st.sampled_from(["read", "read", "put aside", "train", "val", "skip"]), max_size=30))
@example(steps=["read", "put aside", "read", "val", "read", "put aside", "skip", "read", "train", "train"])
def test_every_sample_is_in_one_tally(steps):
    """An epoch of training counts all samples since its last end that no other stage has counted."""
    expected = Counter()
    with numbers(3) as dataset:
        tallies, loader = Tallies(), DataLoader(dataset)
        for step in [*steps, "train"]:
            if step == "read":
                assert dataset[1] == 1.0
                expected["new"] += 1
            elif step == "put aside":
                tallies.count("train", loader)
                expected["aside"] += expected.pop("new", 0)
            elif step == "skip":
                tallies.count("sanity check", loader)
                del expected["new"]
            else:
                due = expected.pop("new", 0) + (expected.pop("aside", 0) if step == "train" else 0)
                assert end_epoch(tallies, step, loader) == due


def test_an_epoch_is_posted_once():
    """What comes after the post belongs to the next epoch; a stage without a post or a cache has no metrics."""
    with numbers(3) as dataset:
        tallies, loader = Tallies(), DataLoader(dataset)
        assert tallies.metrics("val", loader, patience=1) == {}
        tallies.post("test", [])
        assert tallies.metrics("test", [], patience=1) == tallies.live([]) == {}
        for expected in (1, 2):
            dataset[0]
            tallies.post("val", loader)
            dataset[expected]
            assert end_epoch(tallies, "val", loader) == expected
        tallies.end()
        dataset[1]
        assert end_epoch(Tallies(), "train", loader) == 1


def test_a_rank_that_stored_nothing_expects_what_the_others_do():
    """The fills of all ranks are subtracted from what is ready, whichever of them stored the samples."""
    with numbers(8) as dataset:
        assert list(dataset) == list(range(8))
        metrics = {"hits": 0.0, "misses": 8.0, "bypasses": 0.0, "fills": 8.0, "fill_fraction": 1.0, "hit_rate": 0.0}
        of_rank = {dataset.counters: Counts(misses=4)}
        assert Expectation().compare(metrics, of_rank, [dataset], DataLoader(dataset)) is None
        assert Expectation().compare(metrics | {"fills": 4.0}, of_rank, [dataset], DataLoader(dataset)) is not None


def test_coverage_counts_samples_that_are_drawn():
    """Coverage is the share of the drawn samples of all datasets that have a slot."""
    with numbers(6) as whole, numbers(8, indices=[1, 3]) as part, numbers(4, budget=0) as none:
        assert [samples_of(dataset) for dataset in (whole, part, none)] == [6, 2, 4]
        assert coverage([whole, part]) == 1.0
        assert coverage([whole, part, none]) == 8 / 12
        assert coverage([]) == 0.0


def test_the_way_out_for_other_samples_is_an_option_of_the_dataset(caplog):
    """Without a Trainer slots are for the samples that `indices` names."""
    with closing(CachedDataset(CountedSource(16), indices=range(8))) as dataset:
        sampler = SubsetRandomSampler(range(8))
        loader = CachedLoader(dataset, batch_size=4, sampler=sampler)
        meter = CacheMeter(loader)
        for drawn in (range(8), range(8, 16)):
            sampler.indices = drawn
            assert sum(len(labels) for _, labels in loader) == 8
            meter.epoch()
    [complaint] = [text for text in caplog.messages if "draws other samples than when the cache opened" in text]
    assert complaint.endswith("\nGive indices= all of them")
