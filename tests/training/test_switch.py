"""`STOCACHE=...` caches a training that nobody edits, and leaves nothing of it in what the application reads."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DataLoader

from lightning_stocache import (
    CachedDataset,
    CachedLoader,
    CacheMonitor,
    StocacheDataModule,
    StochasticCache,
    cache_datamodule,
)
from lightning_stocache.switch import callbacks, callbacks_of_pytorch_lightning
from tests.sources import Made
from tests.training.tiny import (
    SAMPLES,
    Data,
    Model,
    Watcher,
    make_trainer,
    plain_loader,
    rows_of,
    said,
    source,
)


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets variables: `switch("60%", NAME="photos")`."""

    def set_to(budget: str | None, **options: str) -> None:
        if budget is not None:
            monkeypatch.setenv("STOCACHE", budget)
        for name, value in options.items():
            monkeypatch.setenv(f"STOCACHE_{name}", value)

    return set_to


class Logging(Model):
    """Logs its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def hit_rates(caplog: pytest.LogCaptureFixture) -> list[float]:
    """The hit rates that are printed at the ends of epochs."""
    return [float(line.split(" %")[0].split()[-1]) for line in said(caplog, "% from the cache")]


@pytest.mark.parametrize("value", ["1", "true", "ON", "Yes", "auto", "1MiB", "1048576", "100%", " 1 MiB "])
def test_a_training_is_cached_without_an_edit(value, tmp_path, switch, caplog):
    """Each of these values caches all samples, so epoch two loads none."""
    switch(value)
    make_trainer(tmp_path, epochs=2).fit(Model(), plain_loader(source(tmp_path)))
    assert hit_rates(caplog)[1] == 100


@pytest.mark.parametrize("value", ["0", "false", "OFF", "No", "", " "])
def test_it_is_switched_off(value, switch):
    """Then further variables do not count either."""
    switch(value, NAEM="photos")
    assert callbacks() == callbacks_of_pytorch_lightning() == []


def test_options_are_variables_too(tmp_path, switch):
    """They are read as YAML; a text stays as it is typed."""
    switch(
        "{train: 8KB, val: 0}",
        NAME="123",
        FINGERPRINT="1.10",
        STORE="auto",
        PREFILL="yes",
        KEEP_CACHE="",
        DIR="",
    )
    [callback] = callbacks()
    options = callback.caches.options
    assert (options.name, options.fingerprint, options.store) == ("123", "1.10", "auto")
    assert options.prefill
    assert options.budget == {"train": "8KB", "val": 0}
    assert not options.keep_cache
    assert options.dir is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", False),
        ("1", True),
        ("no", False),
        ("yes", True),
        ("Off", False),
        ("on", True),
        ("false", False),
        (" 1 ", True),
    ],
)
def test_a_flag_is_written_as_flags_are(text, value, switch):
    """As a number, too; whatever its default."""
    switch("1", VERBOSE=text, PREFILL=text, STRICT=text)
    [callback] = callbacks()
    options = callback.caches.options
    assert (callback.verbose, options.prefill, options.strict) == (value, value, value)


@pytest.mark.parametrize(
    ("budget", "options", "words"),
    [
        ("1", {"NAEM": "photos"}, "STOCACHE_NAEM is no variable .* Did you mean STOCACHE_NAME?"),
        ("1", {"SAMPLING": "global"}, "STOCACHE_SAMPLING must be unset"),
        (None, {"BUDGET": "60%"}, "STOCACHE_BUDGET is no variable .* Did you mean STOCACHE"),
        ("60 percent", {}, "budget cannot be read; got '60 percent'"),
        ("ture", {}, "budget cannot be read; got 'ture'"),
        ("60", {}, "budget='60' means 60 bytes; write \"60%\" or \"60B\". The variables are STOCACHE='60'"),
        ("8000", {}, "would be 8000 bytes. Did you mean STOCACHE=8000MB"),
        (" 32 ", {}, "budget='32' means 32 bytes; write \"32%\""),
        (
            "1",
            {"STORE": "encodd"},
            "store must be 'decoded', 'encoded' or 'auto', got 'encodd'.*STOCACHE_STORE='encodd'",
        ),
        ("1", {"STRICT": "maybe"}, "strict must be true or false, got 'maybe'"),
        ("{val: }: 3", {}, "STOCACHE='{val: }: 3' is no YAML"),
        ("{valid: 3GiB}", {}, "budget may name the stages train, val, test, predict; got valid"),
        ("1", {"NAME": "a/b"}, "name"),
    ],
)
def test_a_wrong_variable_is_an_error_in_the_trainer(budget, options, words, tmp_path, switch):
    """It names the variable, and the nearest one, or what the option may be."""
    switch(budget, **options)
    with pytest.raises(ValueError, match=words):
        make_trainer(tmp_path)


def test_options_without_the_switch_are_pointed_out(tmp_path, switch, caplog):
    """One line says that nothing is cached."""
    switch(None, NAME="photos")
    for _ in range(2):
        make_trainer(tmp_path).fit(Model(), plain_loader(source(tmp_path)))
    [line] = said(caplog, "STOCACHE_NAME is set, and STOCACHE is not")
    assert "nothing is cached. Set STOCACHE=1" in line


def test_any_other_failure_is_one_warning(tmp_path, switch, caplog, monkeypatch):
    """The application trains without a cache."""
    switch("1")
    monkeypatch.setitem(sys.modules, "lightning_stocache.training.callbacks", None)  # it cannot be imported
    for _ in range(2):
        make_trainer(tmp_path).fit(Model(), plain_loader(source(tmp_path)))
    [line] = said(caplog, "STOCACHE is set, and nothing is cached")
    assert "ModuleNotFoundError" in line


def test_it_gives_way_to_every_cache_of_the_application(tmp_path, switch, caplog):
    """A StochasticCache, a DataModule that caches, or loaders of cached datasets: no second cache, and no word."""
    switch("1")
    make_trainer(tmp_path, [StochasticCache(budget="50%")], epochs=2).fit(Model(), plain_loader(source(tmp_path)))
    assert hit_rates(caplog)[1:] == [50]
    caplog.clear()
    ours = StocacheDataModule(source(tmp_path), budget="50%")
    for data in cache_datamodule(Data(source(tmp_path)), budget="50%"), ours:
        trainer = make_trainer(tmp_path, epochs=2)
        trainer.fit(Model(), datamodule=data)
        assert hit_rates(caplog)[1:] == [50]
        assert not [each for each in trainer.callbacks if type(each) in (StochasticCache, CacheMonitor)]
        caplog.clear()
    dataset = CachedDataset(source(tmp_path), budget="50%")
    make_trainer(tmp_path, epochs=2).fit(Model(), CachedLoader(dataset, 4))
    assert len(dataset.cache) == SAMPLES // 2
    dataset.close()
    assert not said(caplog, "there is a StochasticCache")
    assert not hit_rates(caplog)


def test_a_list_of_callbacks_for_two_trainers_brings_one_cache(tmp_path, switch, caplog):
    """Lightning appends to the application's own list, so the second Trainer has two callbacks of the switch."""
    switch("1")
    kept: list[Callback] = [Callback()]
    for _ in range(3):
        trainer = Trainer(callbacks=kept, max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False)
        trainer.fit(Model(), plain_loader(source(tmp_path)))
    assert hit_rates(caplog)[1::2] == [100, 100, 100]
    assert not [record for record in caplog.records if record.name.startswith("lightning_stocache.training")]


def test_values_go_to_dashboards_alone(tmp_path, switch):
    """Not into `callback_metrics`, a CSV file, hyperparameters or a checkpoint between epochs."""
    switch("1")
    csv, board = CSVLogger(tmp_path, name="csv"), TensorBoardLogger(tmp_path, name="board")
    checkpoint = ModelCheckpoint(tmp_path / "kept", save_last=True)
    trainer = make_trainer(tmp_path, [checkpoint], epochs=2, logger=[csv, board], enable_checkpointing=True)
    trainer.fit(Logging(), plain_loader(source(tmp_path)), plain_loader(source(tmp_path, "val", 8)))
    assert list(trainer.callback_metrics) == ["loss"]
    assert not [key for key in (*trainer.callback_metrics, *trainer.logged_metrics) if "stocache" in key]
    assert not [key for row in rows_of(csv) for key in row if "stocache" in key]
    hyperparameters = [path.read_text() for path in tmp_path.rglob("hparams.yaml")]  # the loggers' own may be empty
    assert not [text for text in hyperparameters if "stocache" in text]
    saved = torch.load(tmp_path / "kept" / "last.ckpt", weights_only=False)
    assert [key for key in saved["callbacks"] if not key.startswith("ModelCheckpoint")] == []
    assert b"stocache/hit_rate" in b"".join(path.read_bytes() for path in Path(board.log_dir).glob("events*"))


def test_where_nothing_is_cached_nothing_is_logged(tmp_path, switch, caplog):
    """A source that cannot be cached passes through, with its warning and without values."""
    switch("1")
    board = TensorBoardLogger(tmp_path, name="board")
    noise = Made(lambda index: torch.rand(3, 8, 8), SAMPLES)
    make_trainer(tmp_path, epochs=2, logger=board).fit(Watcher(), plain_loader(noise))
    assert len(said(caplog, "passes through uncached")) == 1
    assert not hit_rates(caplog)
    assert b"stocache/" not in b"".join(path.read_bytes() for path in Path(board.log_dir).glob("events*"))


@pytest.mark.parametrize("steps", [6, 9, 18])
@pytest.mark.parametrize(("writes", "reads"), [(True, False), (False, True)])
def test_a_checkpoint_is_loaded_with_and_without_the_switch(writes, reads, steps, tmp_path, monkeypatch):
    """The training goes on as it does where neither has it, also from the middle of an epoch."""

    def fit(on: bool, *, max_steps: int = -1, path: Path | None = None) -> list[tuple[str, bytes]]:
        monkeypatch.setenv("STOCACHE", "1" if on else "0")
        model = Watcher()
        trainer = make_trainer(tmp_path, epochs=4, logger=False, enable_checkpointing=True, max_steps=max_steps)
        trainer.fit(model, plain_loader(source(tmp_path)), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / "kept.ckpt")
        return model.batches

    def batches(writes: bool, reads: bool) -> tuple[list[tuple[str, bytes]], list[tuple[str, bytes]]]:
        return fit(writes, max_steps=steps), fit(reads, path=tmp_path / "kept.ckpt")

    assert batches(writes, reads) == batches(False, False)


@pytest.mark.parametrize("barebones", [False, True])
def test_the_package_pytorch_lightning_has_it_too(barebones, tmp_path, switch, caplog):
    """Its Trainer gets a callback of its own base class, and so does what that brings."""
    pl = pytest.importorskip("pytorch_lightning")

    class Line(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.weight.sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    switch("1")
    options = {"barebones": True} if barebones else {"logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", default_root_dir=str(tmp_path), **options)
    data = source(tmp_path)
    trainer.fit(Line(), plain_loader(data))
    assert len(said(caplog, "room for all 24 samples")) == 1
    assert all(isinstance(callback, pl.Callback) for callback in trainer.callbacks)


@pytest.mark.processes
def test_without_the_variable_a_trainer_loads_nothing_more():
    """Of this package only its console and the switch are imported."""
    code = (
        "import sys; from lightning.pytorch import Trainer; Trainer(logger=False, enable_checkpointing=False); "
        "print(*sorted(name for name in sys.modules if name.startswith('lightning_stocache')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["lightning_stocache", "lightning_stocache.console", "lightning_stocache.switch"]


@pytest.mark.processes
def test_it_is_sent_to_spawned_ranks(tmp_path, switch):
    """Two ranks of `ddp_spawn` share one cache."""
    switch("1")
    data = source(tmp_path)
    trainer = make_trainer(tmp_path, epochs=6, logger=False, strategy="ddp_spawn", devices=2)
    trainer.fit(Model(), DataLoader(data, 4))
    assert data.loads < 4 * SAMPLES  # set-up reads each twice
