"""The layout of TensorBoard's Custom Scalars tab."""

import re

from lightning_stocache.insight.dashboards import LAYOUT
from lightning_stocache.insight.metrics import Tally, summarise

CHARTS = {(category, chart): tags for category, charts in LAYOUT.items() for chart, (_, tags) in charts.items()}


def test_every_tag_is_shown_in_its_category_alone():
    """Tags of training, live values, other stages and nodes have different categories, even if they begin alike, as
    TensorBoard matches them. Each pattern of the layout matches a tag that is logged."""
    names = [*summarise([Tally(node, ranks=1) for node in (0, 1)]), "coverage", "hit_rate_expected"]
    tags = [f"stocache/{prefix}{name}" for prefix in ("", "val/", "predict/", "live/") for name in names]
    shown = {tag: {name for (name, _), of in CHARTS.items() if any(re.match(one, tag) for one in of)} for tag in tags}
    of_stages = {"Stochastic cache: validation, test and prediction"}
    assert shown["stocache/hit_rate"] == shown["stocache/samples_per_second"] == {"Stochastic cache"}
    assert shown["stocache/hit_rate_expected"] == set()
    assert shown["stocache/live/hit_rate"] == {"Stochastic cache: in the epoch so far"}
    assert shown["stocache/val/hit_rate"] == shown["stocache/predict/hit_rate"] == of_stages
    assert shown["stocache/node1/memory_bytes"] == {"Stochastic cache: nodes"}
    assert [one for of in CHARTS.values() for one in of if not any(re.match(one, tag) for tag in tags)] == []
