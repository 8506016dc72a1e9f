"""The command `chemprop train --no-cache` on small alcohols, ethers and amines."""

import sys
from itertools import product
from pathlib import Path

from chemprop.cli.main import main
from chemprop.data.datasets import MoleculeDataset
from lightning.pytorch import seed_everything
from record import count, note_losses

seed_everything(1)
note_losses()
molecules = ["C" * n + group + "C" * m for n, group, m in product(range(1, 7), ("O", "N", "CO", "C(=O)"), range(1, 6))]
rows = [f"{molecule},{len(molecule) % 7}" for molecule in molecules]
Path("data.csv").write_text("\n".join(["smiles,value", *rows]))
count(MoleculeDataset, len(molecules) * 8 // 10)
sizes = "--message-hidden-dim 8 --ffn-hidden-dim 8 --batch-size 16"
sys.argv = f"chemprop train --data-path data.csv --no-cache --epochs 4 --num-workers 0 --pytorch-seed 1 {sizes}".split()
main()
