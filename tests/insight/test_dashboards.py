"""What loggers are told besides values, seen by the calls that reach TensorBoard's writer."""

import re
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest

from lightning_stocache.insight.dashboards import lay_out
from lightning_stocache.insight.metrics import Tally, summarise


def test_tensorboard_gets_charts_of_what_is_logged_once_per_run():
    """Training, live values, other stages and nodes have a category each, and each chart has values to show."""
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    writer = create_autospec(tensorboard.SummaryWriter, instance=True)
    for _ in range(2):
        lay_out(SimpleNamespace(experiment=writer))
    writer.add_custom_scalars.assert_called_once()
    [layout] = writer.add_custom_scalars.call_args.args
    patterns = {name: [tag for _, tags in charts.values() for tag in tags] for name, charts in layout.items()}

    def categories(name: str) -> list[str]:
        return [of for of, tags in patterns.items() if any(re.match(tag, f"stocache/{name}") for tag in tags)]

    kinds = [categories(f"{kind}hit_rate") for kind in ("", "live/", "val/", "node1/")]
    assert sorted(map(len, kinds)) == [1, 1, 1, 1]
    assert len({category for [category] in kinds}) == 4
    assert categories("predict/hit_rate") == categories("val/hit_rate")
    names = [*summarise([Tally(node, ranks=1) for node in (0, 1)]), "coverage"]
    logged = [f"stocache/{prefix}{name}" for prefix in ("", "val/", "live/") for name in names]
    charted = [tag for tags in patterns.values() for tag in tags]
    assert [tag for tag in charted if not any(re.match(tag, name) for name in logged)] == []
