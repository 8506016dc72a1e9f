"""The layout of TensorBoard's Custom Scalars tab."""

import re

import pytest

from lightning_stocache.insight.dashboards import LAYOUT
from lightning_stocache.insight.metrics import Tally, summarise

LOGGED = summarise([Tally(node, ranks=1) for node in (0, 1)])
METRICS = sorted({name for name in LOGGED if "/" not in name} | {"coverage", "hit_rate_expected"})
CHARTS = {(category, chart): tags for category, charts in LAYOUT.items() for chart, (_, tags) in charts.items()}


def shown(tag: str) -> list[str]:
    """The categories with a chart that shows a tag, as TensorBoard matches it."""
    return [category for (category, _), tags in CHARTS.items() if any(re.match(pattern, tag) for pattern in tags)]


@pytest.mark.parametrize(
    ("tag", "category"),
    [
        ("hit_rate", "Stochastic cache"),
        ("samples_per_second", "Stochastic cache"),
        ("hit_rate_expected", None),
        ("live/hit_rate", "Stochastic cache: in the epoch so far"),
        ("val/hit_rate", "Stochastic cache: validation, test and prediction"),
        ("predict/hit_rate", "Stochastic cache: validation, test and prediction"),
        ("node12/memory_bytes", "Stochastic cache: nodes"),
    ],
)
def test_a_tag_is_shown_in_its_category_alone(tag, category):
    """Tags of training, live values, other stages and nodes have different categories, even if they begin alike."""
    assert shown(f"stocache/{tag}") == ([category] if category else [])


def test_every_chart_shows_something_that_is_logged():
    """Each pattern of the layout matches a tag that is logged."""
    tags = {f"stocache/{prefix}{name}" for name in (*LOGGED, *METRICS) for prefix in ("", "val/", "live/")}
    assert [tag for tags_of in CHARTS.values() for tag in tags_of if not any(re.match(tag, one) for one in tags)] == []


def test_a_summary_writer_takes_the_layout(tmp_path):
    """SummaryWriter.add_custom_scalars accepts the layout, and TensorBoard's plugin reads it back."""
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    layout_pb2 = pytest.importorskip("tensorboard.plugins.custom_scalar.layout_pb2")
    summary = tensorboard.summary.custom_scalars(LAYOUT)
    read = layout_pb2.Layout.FromString(summary.value[0].tensor.string_val[0])
    assert [category.title for category in read.category] == list(LAYOUT)
    assert [chart.title for category in read.category for chart in category.chart] == [chart for _, chart in CHARTS]
    assert all(chart.multiline.tag for category in read.category for chart in category.chart)
