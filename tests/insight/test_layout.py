"""The layout of TensorBoard's Custom Scalars tab."""

import itertools
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image

from lightning_stocache.insight.layout import LAYOUT, LIVE_ZERO, ZERO, mark_zero
from lightning_stocache.insight.logs import read_log
from lightning_stocache.insight.metrics import Tally, summarise

LOGGED = summarise([Tally(node, ranks=1) for node in (0, 1)])
OF_NODES = sorted({name.partition("/")[2] for name in LOGGED if "/" in name})
METRICS = sorted({name for name in LOGGED if "/" not in name} | {"coverage", "hit_rate_expected"})
CHARTS = {(category, chart): tags for category, charts in LAYOUT.items() for chart, (_, tags) in charts.items()}


def shown(tag: str) -> list[str]:
    """The categories with a chart that shows a tag, as TensorBoard matches it."""
    return [category for (category, _), tags in CHARTS.items() if any(re.match(pattern, tag) for pattern in tags)]


@pytest.mark.parametrize("metric", METRICS)
def test_every_training_metric_has_one_chart(metric):
    """Each metric of training is shown once, and not among those of the stages or nodes."""
    (category,) = shown(f"stocache/{metric}")
    assert category in ("Stochastic cache", "Stochastic cache: samples")


@pytest.mark.parametrize("metric", OF_NODES)
def test_metrics_of_a_node_are_shown_with_the_nodes(metric):
    """What is logged per node is shown in the category of the nodes only."""
    assert shown(f"stocache/node12/{metric}") == ["Stochastic cache: nodes"]


@pytest.mark.parametrize("tag", ["stocache/val/hit_rate", "stocache/test/coverage"])
def test_other_stages_have_a_category_of_their_own(tag):
    """Validation does not mix with training."""
    assert shown(tag) == ["Stochastic cache: validation, test and prediction"]


def test_every_chart_shows_something_that_is_logged():
    """A pattern for what nobody logs would be a chart without a line."""
    tags = {f"stocache/{prefix}{name}" for name in (*LOGGED, *METRICS) for prefix in ("", "val/", "live/")}
    tags |= {ZERO, LIVE_ZERO}
    assert [tag for tags_of in CHARTS.values() for tag in tags_of if not any(re.match(tag, one) for one in tags)] == []


def test_every_pattern_is_a_whole_tag():
    """TensorBoard matches the beginning of a tag, so a pattern without an end would catch longer ones."""
    assert all(tag.startswith("^stocache/") and tag.endswith("$") for tags in CHARTS.values() for tag in tags)


def test_every_chart_draws_zero():
    """TensorBoard cuts an axis to what is drawn: with a zero in it, it starts there. Live values have their own."""
    live = {chart: any("live/" in tag for tag in tags[:-1]) for chart, tags in CHARTS.items()}
    assert all(re.match(tags[-1], LIVE_ZERO if live[chart] else ZERO) for chart, tags in CHARTS.items())
    assert ZERO.removeprefix("stocache/") not in METRICS


def test_zero_is_for_tensorboard_alone(tmp_path):
    """TensorBoard gets a zero at the step of the values; another logger gets nothing, and no report reads it."""
    pytest.importorskip("tensorboard")
    tensorboard, csv = (
        TensorBoardLogger(tmp_path, name="", version=""),
        CSVLogger(tmp_path / "csv", name="", version=""),
    )
    for logger in (tensorboard, csv):
        logger.log_metrics({"stocache/hit_rate": 0.5}, step=7)
        for _ in range(2):  # a value and an epoch's end may have one step
            mark_zero(logger, 7)
        mark_zero(logger, 7, LIVE_ZERO)
        logger.save()
    events = import_module("tensorboard.backend.event_processing.event_accumulator")
    accumulator = events.EventAccumulator(str(tmp_path))
    accumulator.Reload()
    assert [(event.step, event.value) for event in accumulator.Scalars(ZERO)] == [(7, 0.0)]
    assert read_log(tmp_path) == [{"step": 7, "stocache/hit_rate": 0.5}]
    assert "zero" not in (tmp_path / "csv" / "metrics.csv").read_text()


def test_a_summary_writer_takes_the_layout(tmp_path):
    """The layout is what SummaryWriter.add_custom_scalars takes, and what TensorBoard's plugin reads back."""
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    layout_pb2 = pytest.importorskip("tensorboard.plugins.custom_scalar.layout_pb2")
    summary = tensorboard.summary.custom_scalars(LAYOUT)
    read = layout_pb2.Layout.FromString(summary.value[0].tensor.string_val[0])
    assert [category.title for category in read.category] == list(LAYOUT)
    assert [chart.title for category in read.category for chart in category.chart] == [chart for _, chart in CHARTS]
    assert all(chart.multiline.tag for category in read.category for chart in category.chart)


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ORANGE = (255, 112, 67)  # of TensorBoard's first run


def screenshot(address: str, folder: Path) -> np.ndarray[Any, Any]:
    """What a browser shows after a while, as bytes `[height, width, 3]`."""
    picture, home = folder / "screen.png", f"--user-data-dir={folder / 'browser'}"
    quiet = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")
    screen = ("--window-size=1400,1100", "--virtual-time-budget=20000", f"--screenshot={picture}")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", *quiet, home, *screen, address]
    subprocess.run(command, capture_output=True, timeout=280, check=True)
    with Image.open(picture) as image:
        return np.asarray(image.convert("RGB")).astype(int)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_tensorboard_shows_the_tab_in_a_browser(tmp_path):
    """The tab draws a line in each of the six charts, for a run that logged their metrics and the layout."""
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="needs TensorBoard")
    with tensorboard.SummaryWriter(tmp_path / "run") as writer:
        writer.add_custom_scalars(LAYOUT)
        for metric, step in itertools.product(METRICS, range(10)):
            writer.add_scalar(f"stocache/{metric}", step * (2 + METRICS.index(metric)), step)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", tmp_path, "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            said = (re.search(r"http://127.0.0.1:\d+/", line) for line in server.stderr)
            address = next((found[0] for found in said if found), None)
            if address is None:
                pytest.skip("TensorBoard does not start in this environment")
            screen = screenshot(f"{address}#custom_scalars&_smoothingWeight=0", tmp_path)
        finally:
            server.terminate()
            server.stderr.read()
    charts = screen[140:1000, 380:1080].reshape(2, 430, 2, 350, 3)  # three rows of two charts, seen as four corners
    near = (np.abs(charts - ORANGE).sum(-1) < 60).sum(axis=(1, 3))
    assert (near > 200).all(), near
