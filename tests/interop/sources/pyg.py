"""Graphs of PyG, whose loader collates them into one big graph."""

from typing import Any

import pytest
import torch

from tests.interop.setting import SAMPLES, Setting, held

pyg_data = pytest.importorskip("torch_geometric.data")
collated = pyg_data.Batch.from_data_list
PyGLoader = pytest.importorskip("torch_geometric.loader").DataLoader
RandomJitter = pytest.importorskip("torch_geometric.transforms").RandomJitter


def _graph(index: int, nodes: int) -> Any:
    ring = torch.arange(nodes)
    edges, positions = torch.stack([ring, ring.roll(1)]), torch.rand(nodes, 2)
    return pyg_data.Data(x=torch.full((nodes, 3), float(index)), edge_index=edges, y=index % 2, pos=positions)


def _hetero_graph(index: int) -> Any:
    graph = pyg_data.HeteroData()
    graph["user"].x = torch.full((2, 3), float(index))
    graph["item"].x = torch.ones(3, 2)
    graph["user", "buys", "item"].edge_index = torch.tensor([[0, 1], [1, 2]])
    return graph


def _of_varying_size() -> list[Any]:
    return [_graph(index, 3 + index % 4) for index in range(SAMPLES)]


def _of_equal_size() -> list[Any]:
    return [_graph(index, 5) for index in range(SAMPLES)]


def _held(graphs: list[Any]) -> Any:
    return held(lambda self, index: self.graphs[index], graphs=graphs)


def _jittered(setting: Setting) -> Any:
    transform, graphs = RandomJitter(0.1), _of_equal_size()
    dataset = held(lambda self, index: self.transform(self.graphs[index]), graphs=graphs, transform=transform)
    return setting.loader(dataset, PyGLoader)


PYG = {
    "graphs_of_varying_size": lambda setting: setting.loader(_of_varying_size(), PyGLoader),
    "graphs_of_equal_size": lambda setting: setting.loader(_held(_of_equal_size()), PyGLoader, follow_batch=["x"]),
    "graphs_with_a_random_transform": _jittered,
    "graphs_in_a_plain_loader": lambda setting: setting.loader(_held(_of_varying_size()), collate_fn=collated),
    "hetero_graphs": lambda setting: setting.loader(_held([*map(_hetero_graph, range(SAMPLES))]), PyGLoader),
}
