"""The charts of the caches as a saved view of a W&B project: those that TensorBoard's Custom Scalars tab has.

    pip install wandb-workspaces
    python examples/wandb_workspace.py my-team my-project  # makes the view, and prints its address: needs the network

Values of an epoch are drawn over epochs, live ones over steps; runs are grouped by the budget that was asked for. A run
needs nothing but a CacheMonitor (or StochasticCache) and a WandbLogger.
"""

import argparse
from typing import Any

import wandb_workspaces.reports.v2 as reports
import wandb_workspaces.workspaces as workspaces

from lightning_stocache.insight.dashboards import LAYOUT
from lightning_stocache.insight.metrics import LIVE


def workspace(entity: str, project: str) -> Any:
    """The view, not saved yet."""
    sections = []
    for category, charts in LAYOUT.items():
        panels = [chart(title, tags) for title, (_, tags) in charts.items()]
        sections.append(workspaces.Section(name=category, panels=panels, is_open=True))
    grouped = workspaces.RunsetSettings(groupby=[workspaces.Config("stocache.budget")])
    return workspaces.Workspace(
        entity=entity, project=project, name="Stochastic cache", sections=sections, runset_settings=grouped
    )


def chart(title: str, tags: list[str]) -> Any:
    """A line for each tag."""
    live = any(LIVE in tag for tag in tags)
    options = {"title": title, "x": "trainer/global_step" if live else "epoch", "range_y": (0, None)}
    if any(character in tag for tag in tags for character in "(\\"):  # of several stages or nodes
        return reports.LinePlot(**options, metric_regex="|".join(tags))
    return reports.LinePlot(**options, y=[tag.strip("^$") for tag in tags])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("entity", help="the user or team")
    parser.add_argument("project")
    chosen = parser.parse_args()
    print(workspace(chosen.entity, chosen.project).save().url)


if __name__ == "__main__":
    main()
