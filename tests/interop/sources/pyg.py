"""Graphs of PyG, whose loader collates them into one big graph."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.interop.sources.files import SAMPLES

pyg_data = pytest.importorskip("torch_geometric.data")
PyGLoader = pytest.importorskip("torch_geometric.loader").DataLoader
RandomJitter = pytest.importorskip("torch_geometric.transforms").RandomJitter


def _graphs(*, of_equal_size: bool = True) -> list[Any]:
    graphs = []
    for index in range(SAMPLES):
        nodes = 5 if of_equal_size else 3 + index % 4
        ring = torch.arange(nodes)
        edges, positions = torch.stack([ring, ring.roll(1)]), torch.rand(nodes, 2)
        x = torch.full((nodes, 3), float(index))
        graphs.append(pyg_data.Data(x=x, edge_index=edges, y=index % 2, pos=positions))
    return graphs


def _hetero_graphs() -> list[Any]:
    graphs = []
    for index in range(SAMPLES):
        graph = pyg_data.HeteroData()
        graph["user"].x = torch.full((2, 3), float(index))
        graph["item"].x = torch.ones(3, 2)
        graph["user", "buys", "item"].edge_index = torch.tensor([[0, 1], [1, 2]])
        graphs.append(graph)
    return graphs


class _Graphs(Dataset[Any]):
    def __init__(self, graphs: list[Any], transform: Any = None) -> None:
        self.graphs, self.transform = graphs, transform

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, index: int) -> Any:
        graph = self.graphs[index]
        return graph if self.transform is None else self.transform(graph)


WAYS = {
    "graphs_of_varying_size": lambda setting: setting.loader(_graphs(of_equal_size=False), PyGLoader),
    "graphs_of_equal_size": lambda setting: setting.loader(_Graphs(_graphs()), PyGLoader, follow_batch=["x"]),
    "graphs_with_a_random_transform": lambda setting: setting.loader(_Graphs(_graphs(), RandomJitter(0.1)), PyGLoader),
    "graphs_in_a_plain_loader": lambda setting: setting.loader(
        _Graphs(_graphs(of_equal_size=False)), DataLoader, collate_fn=pyg_data.Batch.from_data_list
    ),
    "hetero_graphs": lambda setting: setting.loader(_Graphs(_hetero_graphs()), PyGLoader),
}
