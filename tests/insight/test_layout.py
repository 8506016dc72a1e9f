"""The layout of TensorBoard's Custom Scalars tab."""

import re

import pytest

from lightning_stocache.insight.layout import LAYOUT

METRICS = [
    "hit_rate",
    "fill_fraction",
    "coverage",
    "hits",
    "misses",
    "bypasses",
    "fills",
    "bytes_from_cache",
    "bytes_from_source",
    "source_seconds",
    "fill_seconds",
    "gather_seconds",
    "data_wait_seconds",
    "compute_seconds",
    "samples_per_second",
    "memory_bytes",
    "budget_bytes",
    "hit_rate_expected",
]
CHARTS = {(category, chart): tags for category, charts in LAYOUT.items() for chart, (_, tags) in charts.items()}


def shown(tag: str) -> list[str]:
    """The categories with a chart that shows a tag, as TensorBoard matches it."""
    return [category for (category, _), tags in CHARTS.items() if any(re.match(one, tag) for one in tags)]


@pytest.mark.parametrize("metric", METRICS)
def test_every_training_metric_has_one_chart(metric):
    """Each metric of training is shown once, and not among those of the stages or nodes."""
    (category,) = shown(f"stocache/{metric}")
    assert category in ("Stochastic cache", "Stochastic cache: samples")


@pytest.mark.parametrize("metric", ["hit_rate", "fill_fraction", "memory_bytes"])
def test_metrics_of_a_node_are_shown_with_the_nodes(metric):
    """What is logged per node is shown in the category of the nodes only."""
    assert shown(f"stocache/node12/{metric}") == ["Stochastic cache: nodes"]


@pytest.mark.parametrize("tag", ["stocache/val/hit_rate", "stocache/test/coverage"])
def test_other_stages_have_a_category_of_their_own(tag):
    """Validation does not mix with training."""
    assert shown(tag) == ["Stochastic cache: validation and test"]


def test_every_pattern_is_a_whole_tag():
    """TensorBoard matches the beginning of a tag, so a pattern without an end would catch longer ones."""
    assert all(tag.startswith("^stocache/") and tag.endswith("$") for tags in CHARTS.values() for tag in tags)


def test_a_summary_writer_takes_the_layout(tmp_path):
    """The layout is what SummaryWriter.add_custom_scalars takes, and what TensorBoard's plugin reads back."""
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    layout_pb2 = pytest.importorskip("tensorboard.plugins.custom_scalar.layout_pb2")
    summary = tensorboard.summary.custom_scalars(LAYOUT)
    read = layout_pb2.Layout.FromString(summary.value[0].tensor.string_val[0])
    assert [category.title for category in read.category] == list(LAYOUT)
    assert [chart.title for category in read.category for chart in category.chart] == [chart for _, chart in CHARTS]
    assert all(chart.multiline.tag for category in read.category for chart in category.chart)
