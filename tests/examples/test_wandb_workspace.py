"""examples/wandb_workspace.py: the view that it would save, made without the network."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_stocache.insight.dashboards import LAYOUT, axes

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def test_the_view_has_tensorboards_charts(monkeypatch):
    """Each chart is there, its lines are logged keys, drawn over the axis that W&B has been told for them."""
    pytest.importorskip("wandb_workspaces")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    import wandb_workspace

    sys.modules.pop("wandb_workspace")
    view = wandb_workspace.workspace("team", "project")
    assert [section.name for section in view.sections] == list(LAYOUT)
    assert [len(section.panels) for section in view.sections] == [len(charts) for charts in LAYOUT.values()]
    over = {axis["name"]: axis.get("step_metric") for axis in axes()}
    names = [
        (metric if isinstance(metric, str) else metric.name, panel)
        for section in view.sections
        for panel in section.panels
        for metric in panel.y or ()
    ]
    assert len(names) > 10
    beside_live = "stocache/fill_fraction"
    assert [name for name, panel in names if over[name] != str(panel.x)] == [beside_live]
