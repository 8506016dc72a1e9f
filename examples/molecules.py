"""Graphs: molecules of varying size, put together to one big graph per batch.

    python examples/molecules.py                               # epoch one builds the graphs, later epochs read memory
    python examples/molecules.py --devices 2 --strategy ddp    # two ranks, one cache
    python examples/molecules.py --plain                       # dicts of tensors, even where PyG is installed

With PyG (`pip install torch_geometric`) samples are its Data objects, and batches come from its own DataLoader. Without
it they are dicts of tensors, and the collate_fn below does what PyG's does.
"""

import importlib.util
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

from lightning_stocache import StochasticCache
from training import Loads, end, fit, parser

ELEMENTS = 10
SYMBOLS = ("", "H", "He", "Li", "Be", "B", "C", "N", "O", "F")


class Molecules(Dataset[Any]):
    """Atoms along a chain with some rings, bonds between those that are near, and a number to be learnt.

    Args:
        samples: how many.
        loads: counts them.
        plain: dicts of tensors, not Data of PyG.
    """

    def __init__(self, samples: int, loads: Loads, plain: bool) -> None:
        self.samples, self.loads, self.plain = samples, loads, plain

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        self.loads.note()
        chance = torch.Generator().manual_seed(index)
        atoms = 5 + index % 30
        z = torch.randint(1, ELEMENTS, (atoms,), generator=chance)
        pos = torch.randn(atoms, 3, generator=chance).cumsum(0)
        near = torch.cdist(pos, pos) < 2
        edge_index = near.fill_diagonal_(False).nonzero().T.contiguous()
        sample = {"z": z, "pos": pos, "edge_index": edge_index, "y": z.float().mean()[None]}
        if self.plain:
            return sample | {"formula": "".join(SYMBOLS[number] for number in z.tolist())}
        from torch_geometric.data import Data

        return Data(**sample)


def one_graph(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """All atoms and bonds of a batch; `batch` says which molecule an atom belongs to."""
    sizes = torch.tensor([len(sample["z"]) for sample in samples])
    starts = (sizes.cumsum(0) - sizes).tolist()
    edges = [sample["edge_index"] + start for sample, start in zip(samples, starts, strict=True)]
    together = {key: torch.cat([sample[key] for sample in samples]) for key in ("z", "pos", "y")}
    batch = torch.arange(len(samples)).repeat_interleave(sizes)
    formulas = [sample["formula"] for sample in samples]
    return together | {"edge_index": torch.cat(edges, dim=1), "batch": batch, "formula": formulas}


class Network(LightningModule):
    """Two rounds of messages between neighbours, then the mean over each molecule's atoms."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ELEMENTS, 32)
        self.rounds = nn.ModuleList(nn.Linear(64, 32) for _ in range(2))
        self.head = nn.Linear(32, 1)

    def training_step(self, graph: Any) -> Tensor:
        atoms = self.embedding(graph["z"])
        source, target = graph["edge_index"]
        for layer in self.rounds:
            messages = torch.zeros_like(atoms).index_add(0, target, atoms[source])
            atoms = layer(torch.cat([atoms, messages], dim=1)).relu()
        molecules = len(graph["y"])
        sums = atoms.new_zeros(molecules, atoms.shape[1]).index_add(0, graph["batch"], atoms)
        sizes = torch.bincount(graph["batch"], minlength=molecules)
        return mse_loss(self.head(sums / sizes[:, None])[:, 0], graph["y"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main() -> None:
    options = parser(__doc__, samples=8000, batch_size=64)
    options.add_argument("--plain", action="store_true", help="without PyG")
    chosen, loads = options.parse_args(), Loads()
    plain = chosen.plain or importlib.util.find_spec("torch_geometric") is None
    molecules = Molecules(chosen.samples, loads, plain)
    settings: dict[str, Any] = {"shuffle": True, "num_workers": chosen.workers}
    if plain:
        loader: Any = DataLoader(molecules, chosen.batch_size, collate_fn=one_graph, **settings)
    else:
        from torch_geometric import loader as pyg

        loader = pyg.DataLoader(molecules, chosen.batch_size, **settings)
    fit(Network(), loader, chosen, loads, [StochasticCache(budget=chosen.budget)])
    end()


if __name__ == "__main__":
    main()
