"""Text: strings that are tokenised to varying lengths, and padded by a collate_fn.

    python examples/text.py                                # the first epoch tokenises, later epochs read from memory
    python examples/text.py --devices 2 --strategy ddp     # two ranks, one cache
    python examples/text.py --budget 0                     # without a cache

What is cached is the sample as the dataset returns it: the string, its tokens and its label, whatever their lengths.
The collate_fn runs in the workers, as it does without a cache.
"""

import random
import re
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from lightning_stocache import StochasticCache
from training import Counted, Loads, end, fit, parser

WORDS = {0: ["good", "fine", "great", "lovely", "bright"], 1: ["bad", "poor", "awful", "dull", "cold"]}
ANY = ["the", "a", "film", "book", "day", "it", "was", "and", "then", "very", "quite", "one", "of", "them", "we", "saw"]
VOCABULARY = 512


class Reviews(Dataset[dict[str, Any]]):
    """Reviews of 5 to 200 words, good or bad, and their tokens."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        chance, label = random.Random(index), index % 2
        words = chance.choices(ANY + 2 * WORDS[label], k=chance.randint(5, 200))
        text = " ".join(words).capitalize() + "."
        return {"text": text, "input_ids": tokens(text), "label": label}


def tokens(text: str) -> list[int]:
    """A number for each word and mark; 0 is for padding."""
    return [1 + sum(word.encode()) % (VOCABULARY - 1) for word in re.findall(r"\w+|[^\w\s]", text.lower())]


def padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Int64 `[samples, longest]` and `[samples]`."""
    ids = [torch.tensor(sample["input_ids"]) for sample in samples]
    labels = torch.tensor([sample["label"] for sample in samples])
    return {"input_ids": pad_sequence(ids, batch_first=True), "label": labels}


class Classifier(LightningModule):
    """The mean of the tokens' embeddings, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(VOCABULARY, 32, padding_idx=0)
        self.head = nn.Linear(32, 2)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return cross_entropy(self.head(self.embedding(batch["input_ids"])), batch["label"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main() -> None:
    chosen, loads = parser(__doc__, samples=8000, batch_size=64).parse_args(), Loads()
    reviews = Counted(Reviews(chosen.samples), loads)  # counted for the printed line, no more
    loader = DataLoader(reviews, chosen.batch_size, shuffle=True, num_workers=chosen.workers, collate_fn=padded)
    fit(Classifier(), loader, chosen, loads, [StochasticCache(budget=chosen.budget)])
    end()


if __name__ == "__main__":
    main()
