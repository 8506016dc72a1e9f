"""CacheMeter: a loop of one's own has the numbers of the monitor, under its keys."""

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler

from lightning_stocache import CachedDataset, CachedLoader, CachedStream, CacheMeter, CacheMonitor, SampleSpec
from lightning_stocache.insight.metrics import LIVE, LIVE_METRICS
from lightning_stocache.node.group import NodeGroup
from tests.ranks import run_ranks
from tests.sources import CountedSource
from tests.training.tiny import SAMPLES, Model, logged, make_trainer

pytestmark = pytest.mark.epoch_one_reads_all

SECONDS = {"data_wait_seconds", "compute_seconds", "samples_per_second"}


@pytest.fixture
def dataset():
    with closing(CachedDataset(CountedSource(SAMPLES), budget="50%", allow_random=True)) as made:
        yield made


def counts(metrics: dict[str, float], stage: str = "") -> dict[str, float]:
    """The metrics that do not depend on clocks, by their names."""
    named = {name.removeprefix(f"stocache/{stage}"): value for name, value in metrics.items()}
    return {name: value for name, value in named.items() if not name.endswith("_seconds") and "per_second" not in name}


@pytest.mark.processes
def test_a_plain_loop_has_the_monitors_values(tmp_path, dataset):
    """Each epoch has the keys and counts that a Trainer logs for the same dataset, with the expected hit rate. Live
    values are those of the epoch so far, under different keys; validation has none."""
    loader = CachedLoader(dataset, batch_size=4)
    trainer = make_trainer(tmp_path, [CacheMonitor()], epochs=2)
    trainer.fit(Model(), loader)
    keys = {key for key in trainer.callback_metrics if key.startswith("stocache/")}
    assert "stocache/hit_rate_expected" in keys
    dataset.share()
    meter, found, seen = CacheMeter(loader), [], []
    for _ in range(2):
        for step, (_, labels) in enumerate(meter):
            assert len(labels) == 4
            if step in (0, 5):
                seen.append(meter.live())
        found.append(meter.epoch())
    assert set(found[0]) == set(found[1]) == keys
    for key in counts(found[0]):
        assert [epoch[f"stocache/{key}"] for epoch in found] == logged(trainer, f"stocache/{key}"), key
    assert all(epoch["stocache/data_wait_seconds"] > 0 < epoch["stocache/compute_seconds"] for epoch in found)
    assert all(set(live) == {LIVE + name for name in LIVE_METRICS} for live in seen)
    # Half of the samples have a slot, and which of them is the ring's.
    assert [round(live["stocache/live/hit_rate"] * SAMPLES) for live in seen[1::2]] == [0, SAMPLES // 2]
    assert seen[0]["stocache/live/fill_fraction"] < seen[1]["stocache/live/fill_fraction"] == 1
    assert seen[3]["stocache/live/data_wait_seconds"] > seen[2]["stocache/live/data_wait_seconds"] > 0
    assert meter.live()["stocache/live/compute_seconds"] == 0
    assert CacheMeter(loader, "val").live() == {}


@pytest.mark.processes
def test_loaders_of_other_classes_have_no_seconds(dataset):
    """A meter of plain DataLoaders, which are read without it, has counts without seconds, also over a Subset and for a
    list of loaders. An unknown stage, and a loader without a cache, raise errors that say what to do."""
    half = DataLoader(Subset(dataset, range(8)), batch_size=4)
    meter = CacheMeter([half, half], stage="val")
    for _ in half:
        pass
    metrics = meter.epoch()
    assert not SECONDS & {name.rpartition("/")[2] for name in metrics}
    found = counts(metrics, "val/")
    assert found["misses"] + found["bypasses"] == 8
    assert meter.epoch()["stocache/val/hit_rate"] == 0
    with pytest.raises(TypeError, match="only a CacheMeter of one loader can be iterated over, this one has a list"):
        next(iter(meter))
    with pytest.raises(ValueError, match="stage must be one of train, val, test, predict, got 'eval'"):
        CacheMeter(half, stage="eval")
    with pytest.raises(TypeError, match="no cached dataset behind DataLoader: make its dataset a CachedDataset"):
        CacheMeter(DataLoader([1.0]))


@pytest.mark.processes
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


@pytest.mark.processes
def test_a_fabric_loop_logs_it(tmp_path, dataset):
    """`fabric.log_dict` accepts the metrics of a loader that Fabric has set up."""
    logger = CSVLogger(tmp_path, name="", flush_logs_every_n_steps=1)
    fabric = Fabric(accelerator="cpu", devices=1, loggers=logger)
    meter = CacheMeter(fabric.setup_dataloaders(CachedLoader(dataset, batch_size=4, shuffle=True)))
    granted, found = meter.hyperparameters()["stocache"], []
    for epoch in range(3):
        assert sum(len(labels) for _, labels in meter) == SAMPLES
        found.append(meter.epoch())
        fabric.log_dict(found[-1], step=epoch)
    assert [epoch["stocache/hits"] for epoch in found] == [0, SAMPLES // 2, SAMPLES // 2]
    assert [epoch["stocache/hit_rate_expected"] for epoch in found] == [0, 0.5, 0.5]
    assert granted["sampling"] == "RandomSampler"
    assert granted["slots"] == SAMPLES // 2
    assert "stocache/hit_rate" in (Path(logger.log_dir) / "metrics.csv").read_text()


def on_two_nodes(rank: int) -> Any:
    """The metrics of three epochs for each deal, on nodes whose memory holds a quarter and all of the dataset."""
    dataset = CachedDataset(CountedSource(SAMPLES), budget=("25%", "100%")[rank], defer=True)
    dataset.share(NodeGroup.discover(key=rank))
    found = []
    for sampling in ("locality", "global"):
        loader = CachedLoader(dataset, batch_size=4, shuffle=True, sampling=sampling)
        meter = CacheMeter(loader)
        for epoch in range(3):
            loader.set_epoch(epoch)
            list(meter)
            found.append(meter.epoch())
    granted = meter.hyperparameters()["stocache"]
    dataset.close()
    return found, granted["ranks"], granted["nodes"]


@pytest.mark.processes
def test_ranks_and_nodes_sum_up():
    """Two ranks get the same metrics, over both. Each of two nodes is expected to hit the smaller of its share of the
    batches and its slots; for a random deal nothing is expected."""
    first, second = run_ranks(on_two_nodes, 2)
    assert first == second
    epochs, *counts = first
    assert counts == [2, 2]
    served = [sum(epoch[f"stocache/{name}"] for name in ("hits", "misses", "bypasses")) for epoch in epochs]
    assert served == [SAMPLES] * 6
    expected = [epoch.get("stocache/hit_rate_expected") for epoch in epochs]
    assert expected == [0, 0.75, 0.75, None, None, None]


def test_what_was_ready_before_the_first_epoch_is_expected():
    """The first epoch of a fold is expected to hit the samples of the fold that the cache holds already."""
    with closing(CachedDataset(CountedSource(SAMPLES), spec=SampleSpec.infer(CountedSource(1)[0]))) as dataset:
        for index in (0, 1, 2, 20):
            dataset[index]
        meter = CacheMeter(CachedLoader(dataset, batch_size=2, sampler=SubsetRandomSampler(range(12))))
        for expected in (0.25, 1):
            list(meter)
            metrics = meter.epoch()
            assert metrics["stocache/hit_rate"] == metrics["stocache/hit_rate_expected"] == expected
