"""Samples of any kind, which are cached as records: photographs of many sizes, text, molecules.

    python examples/benchmarks/records.py                      # about 15 minutes on 2 cores
    python examples/benchmarks/records.py --only imagenet --photographs 2000

imagenet  samples/s of warm epochs over JPEG files around 500x375, with RandomResizedCrop(224) and flip in the workers:
          on images of PIL with ToTensor and Normalize after it (the usual recipe, v1), or on tensors of bytes (v2). The
          list holds the decoded photographs in memory, with the same steps in a plain DataLoader: the best that a cache
          behind a DataLoader can give (its workers take fresh memory for each batch; a CachedLoader's do not). MONAI is
          its `CacheDataset`; DataLoader is the recipe without a cache; the last row is what the random steps take
small     1000 samples/s of warm epochs over reviews (a string, 5 to 200 tokens as a list, a label) and molecules (four
          tensors and a string), collated by padding or to one graph, or not at all. The lists copy each sample that is
          read, as a cache must: by `copy.deepcopy`, or key by key. MONAI's hands out its own samples, not copies

There is no gain where random steps on the CPU take all the time: compare the two recipes. What is cached of the usual
one is decoding, less than half of it. Nor is there any where samples are made in no time, as these reviews are.
"""

from __future__ import annotations

from measure import Report, parser
from photographs import measure_photographs
from small import measure_small

PARTS = {"imagenet": measure_photographs, "small": measure_small}


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="some of the parts")
    options.add_argument("--workers", type=int, default=2, help="of the loaders (2)")
    options.add_argument("--batch", type=int, default=64, help="samples of a batch (64)")
    options.add_argument("--photographs", type=int, help="JPEG files (600; quick: 48)")
    options.add_argument("--small", type=int, help="reviews, and molecules (8000; quick: 256)")
    chosen = options.parse_args(arguments)
    report = Report("records", chosen)
    report.save(**{part: PARTS[part](report, chosen) for part in chosen.only})


if __name__ == "__main__":
    main()
