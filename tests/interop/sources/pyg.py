"""Graphs of PyG, whose loader collates them into one big graph."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.interop.sources.files import SAMPLES
from tests.interop.training import Setting

pyg_data = pytest.importorskip("torch_geometric.data")
pyg_loader = pytest.importorskip("torch_geometric.loader")
pyg_transforms = pytest.importorskip("torch_geometric.transforms")


def _graph(index: int, nodes: int) -> Any:
    ring = torch.arange(nodes)
    edges = torch.stack([ring, ring.roll(1)])
    return pyg_data.Data(
        x=torch.full((nodes, 3), float(index)), edge_index=edges, y=index % 2, pos=torch.rand(nodes, 2)
    )


def _graphs(*, of_equal_size: bool) -> list[Any]:
    return [_graph(index, 5 if of_equal_size else 3 + index % 4) for index in range(SAMPLES)]


class _Graphs(Dataset[Any]):
    def __init__(self, graphs: list[Any], transform: Any = None) -> None:
        self.graphs, self.transform = graphs, transform

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, index: int) -> Any:
        graph = self.graphs[index]
        return graph if self.transform is None else self.transform(graph)


def graphs_of_varying_size(setting: Setting) -> Any:
    return setting.loader(_graphs(of_equal_size=False), pyg_loader.DataLoader)


def graphs_of_equal_size(setting: Setting) -> Any:
    return setting.loader(_Graphs(_graphs(of_equal_size=True)), pyg_loader.DataLoader)


def graphs_with_a_random_transform(setting: Setting) -> Any:
    jitter = pyg_transforms.RandomJitter(0.1)
    return setting.loader(_Graphs(_graphs(of_equal_size=True), jitter), pyg_loader.DataLoader)


def graphs_in_a_plain_loader(setting: Setting) -> Any:
    collate = pyg_data.Batch.from_data_list
    return setting.loader(_Graphs(_graphs(of_equal_size=False)), DataLoader, collate_fn=collate)


def hetero_graphs(setting: Setting) -> Any:
    graphs = []
    for index in range(SAMPLES):
        graph = pyg_data.HeteroData()
        graph["user"].x = torch.full((2, 3), float(index))
        graph["item"].x = torch.ones(3, 2)
        graph["user", "buys", "item"].edge_index = torch.tensor([[0, 1], [1, 2]])
        graphs.append(graph)
    return setting.loader(_Graphs(graphs), pyg_loader.DataLoader)
