"""FillProgress, alone or by StochasticCache: fill and hit rate in the Trainer's own bar, and one line when full."""

import re
import time

import pytest
import tqdm
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from lightning_stocache.training.callbacks import FillProgress, StochasticCache
from lightning_stocache.training.datamodule import StocacheDataModule
from tests.sources import Made
from tests.training.tiny import SAMPLES, Data, Model, make_trainer, said, source

pytestmark = [pytest.mark.processes, pytest.mark.epoch_one_reads_all]

tqdm.tqdm.get_lock()  # a semaphore that tqdm makes once and keeps: not this test's to leave behind

FULL = "stocache: the cache is full"


def fit_with_bar(tmp_path, callbacks, data, *, bar=TQDMProgressBar, key="cache", epochs=1):
    """What a bar has shown under a key after each batch, and its last value."""
    shown = []

    class Watching(bar):
        def on_train_batch_end(self, trainer, pl_module, *rest):
            super().on_train_batch_end(trainer, pl_module, *rest)
            shown.append(self.get_metrics(trainer, pl_module).get(key))

    trainer = make_trainer(tmp_path, [*callbacks, Watching()], epochs=epochs, enable_progress_bar=True)
    trainer.fit(Model(), data)
    return shown, trainer.progress_bar_metrics.get(key)


@pytest.mark.parametrize(
    ("ours", "bar"),
    [
        ([FillProgress], RichProgressBar),
        ([StochasticCache], RichProgressBar),
        ([StochasticCache, FillProgress], TQDMProgressBar),
    ],
)
def test_the_bar_shows_the_fill_and_later_the_hit_rate(tmp_path, caplog, ours, bar):
    """The bar's metrics hold the node's fill after each batch of epoch one, and the hit rate after later batches."""
    data = Data(source(tmp_path)) if StochasticCache in ours else StocacheDataModule(source(tmp_path), batch_size=4)
    shown, _ = fit_with_bar(tmp_path, [made() for made in ours], data, bar=bar, epochs=2)
    assert shown == [f"fill {fill} %" for fill in (17, 33, 50, 67, 83, 100)] + ["hit 100 %"] * 6
    assert len(said(caplog, FULL)) == 1


def test_a_half_cached_epoch_shows_its_hit_rate_so_far(tmp_path, caplog):
    """After the first epoch the bar has the hits of the epoch so far over its samples, not those of the whole run. At
    the end of the first epoch one line says how many samples are cached and what that saves."""
    shown, _ = fit_with_bar(tmp_path, [StochasticCache(budget="50%")], Data(source(tmp_path)), epochs=3)
    assert shown[5::6] == ["fill 100 %", "hit 50 %", "hit 50 %"]
    [line] = said(caplog, FULL)
    assert "12 of 24 samples" in line
    assert "will not be repeated" in line


def test_options_of_the_bar(tmp_path, caplog):
    """The key in the bar, how often it is shown, and whether the line is said."""
    progress = FillProgress("photos", every_n_steps=4, verbose=False)
    data = StocacheDataModule(source(tmp_path), batch_size=4)
    assert fit_with_bar(tmp_path, [progress], data, key="photos") == (
        ["fill 17 %"] * 4 + ["fill 83 %"] * 2,
        "fill 100 %",
    )
    assert said(caplog, FULL) == []


def test_the_seconds_are_those_of_the_clock(tmp_path, caplog):
    """The seconds of loading in four workers count as the time that training waited, not as their sum."""

    def load(index):
        time.sleep(0.1)
        return source(tmp_path).expected(index)

    class Clock(Callback):
        def on_train_start(self, trainer, pl_module):
            self.seconds = -time.monotonic()

        def on_train_epoch_end(self, trainer, pl_module):
            self.seconds += time.monotonic()

    clock = Clock()
    trainer = make_trainer(tmp_path, [FillProgress(), clock])
    slow, forked = Made(load, SAMPLES), {"multiprocessing_context": "fork"}  # a local function
    trainer.fit(Model(), StocacheDataModule(slow, batch_size=3, num_workers=4, allow_random=True, loader=forked))
    [line] = said(caplog, FULL)
    assert 0 < float(re.search(r"([\d.]+) s of waiting", line)[1]) <= clock.seconds + 0.05  # rounded; the sum is 2.4 s


@pytest.mark.parametrize(("options", "shown"), [({"keep_cache": True}, "hit 100 %"), ({"budget": 0}, None)])
def test_nothing_is_said_where_nothing_fills(tmp_path, caplog, options, shown):
    """A fit with a full cache shows its hit rate from the start, a fit with the cache off shows nothing."""
    dm = StocacheDataModule(source(tmp_path), batch_size=4, **options)
    make_trainer(tmp_path).fit(Model(), dm)
    assert fit_with_bar(tmp_path, [FillProgress()], dm) == ([shown] * 6, shown)
    dm.close()
    assert said(caplog, FULL) == []
