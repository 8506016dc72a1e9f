"""Sound: recordings of varying length with their rate and transcript, padded by a collate_fn.

    python examples/speech.py                               # epoch one makes the recordings, later epochs read memory
    python examples/speech.py --devices 2 --strategy ddp    # two ranks, one cache

A sample is `(waveform, rate, transcript)`, as torchaudio's datasets return it.
"""

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from lightning_stocache import StochasticCache
from training import Loads, end, fit, parser

RATE = 8000
WORDS = ("yes", "no", "up", "down")
Recording = tuple[Tensor, int, str]


class Recordings(Dataset[Recording]):
    """Half a second to two seconds of a tone that stands for a word, with noise."""

    def __init__(self, samples: int, loads: Loads) -> None:
        self.samples, self.loads = samples, loads

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Recording:
        self.loads.note()
        chance = torch.Generator().manual_seed(index)
        word, length = index % len(WORDS), int(torch.randint(RATE // 2, 2 * RATE, (), generator=chance))
        tone = torch.sin(torch.arange(length) * (2 * math.pi * 200 * (word + 1) / RATE))
        return (tone + 0.3 * torch.randn(length, generator=chance))[None], RATE, WORDS[word]


def padded(samples: list[Recording]) -> dict[str, Any]:
    """Float32 `[samples, longest]`, how long each is, and the words."""
    waveforms = [waveform[0] for waveform, _, _ in samples]
    return {
        "waveforms": pad_sequence(waveforms, batch_first=True),
        "lengths": torch.tensor([len(waveform) for waveform in waveforms]),
        "transcripts": [word for _, _, word in samples],
    }


class Recogniser(LightningModule):
    """A convolution over the waveform, its mean energy over the recording, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Conv1d(1, 16, kernel_size=80, stride=40)
        self.head = nn.Linear(16, len(WORDS))

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        energy = self.filters(batch["waveforms"][:, None]).square()
        steps = (batch["lengths"] - 80) // 40
        inside = torch.arange(energy.shape[-1], device=energy.device) < steps[:, None]
        mean = (energy * inside[:, None]).sum(-1) / steps[:, None]
        labels = torch.tensor([WORDS.index(word) for word in batch["transcripts"]], device=energy.device)
        return cross_entropy(self.head(mean.log1p()), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main() -> None:
    chosen, loads = parser(__doc__, samples=4000).parse_args(), Loads()
    recordings = Recordings(chosen.samples, loads)
    loader = DataLoader(recordings, chosen.batch_size, shuffle=True, num_workers=chosen.workers, collate_fn=padded)
    fit(Recogniser(), loader, chosen, loads, [StochasticCache(budget=chosen.budget)])
    end()


if __name__ == "__main__":
    main()
