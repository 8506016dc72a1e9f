"""The recipe of Ray Train: equal batches with one worker and with two, and each sample is loaded once."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from tests.apps.recipes.guide import GUIDE, run
from tests.loading.twins import looked
from tests.sources import CountedSource

SAMPLES = 90
FOLDER = Path.cwd()


def train(loader: Any, folder: Path, cached: bool) -> None:
    """Three epochs; writes down the batches, and what was counted."""
    digest = hashlib.sha256()
    for epoch in range(3):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            digest.update(images.numpy().tobytes() + labels.numpy().tobytes())
    dist.barrier()
    counts = loader.dataset.counters.totals() if cached else None
    loads = None if counts is None else counts.misses + counts.setup_fills
    looks = looked(loader.dataset) if cached else 0
    dist.barrier()
    said = {"digest": digest.hexdigest(), "loads": loads, "looks": looks}
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(said))


def ranks(world: int, cached: bool) -> list[dict[str, Any]]:
    """What each worker has written down."""
    folder = FOLDER / f"ray-{world}-{cached}"
    folder.mkdir()

    def loop(config: dict[str, Any]) -> None:
        torch.manual_seed(1)
        source = CountedSource(SAMPLES, log_path=folder / "loads")
        names = run(
            "Ray Train", cached=cached, make_photos=lambda: source, train=lambda loader: train(loader, folder, cached)
        )
        names["loop"](config)

    scaling = ScalingConfig(num_workers=world, use_gpu=False)
    TorchTrainer(loop, scaling_config=scaling, run_config=RunConfig(storage_path=str(folder / "results"))).fit()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]


ray.init(
    num_cpus=4,
    include_dashboard=False,
    object_store_memory=100 << 20,
    runtime_env={
        "env_vars": {"PYTHONPATH": os.pathsep.join([str(GUIDE.parents[2]), os.environ.get("PYTHONPATH", "")])}
    },
)
for count in (1, 2):
    plain, with_cache = ranks(count, cached=False), ranks(count, cached=True)
    assert [rank["digest"] for rank in plain] == [rank["digest"] for rank in with_cache]
    assert with_cache[0]["loads"] <= SAMPLES + 8, with_cache  # two ranks may ask for a sample at once
    print(with_cache)
ray.shutdown()
print("equal")
