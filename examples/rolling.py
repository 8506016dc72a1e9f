"""Training on a remote set of terabytes, which grows while it is trained on and drops its oldest samples.

    python examples/rolling.py                                # a minute and a half; then look at rolling.png
    python examples/rolling.py --latency 0.3 --fillers 8      # a slower store, more processes that load

Every sample is a volume of raw numbers, which no codec makes smaller, behind a connection that takes its time. Four
fillers load volumes into a RollingCache; training starts with the first few, and each epoch trains on what is resident
by then, at memory speed. When the budget is full, the oldest leave. The same loop with a DataLoader of as many workers
waits for every volume.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_stocache import CachedLoader, RollingCache

SHAPE = (48, 96, 96)


class RemoteVolumes(Dataset[tuple[Tensor, float]]):
    """Noisy waves, int16 `[48, 96, 96]`, 0.9 MB each, and their amplitude; each takes `latency` seconds to come."""

    def __init__(self, samples: int, latency: float) -> None:
        self.samples, self.latency = samples, latency

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        time.sleep(self.latency)
        chance = np.random.default_rng(index)
        amplitude = float(chance.uniform())
        wave = 8000 * amplitude * np.sin(np.arange(SHAPE[-1]) / 3 + chance.uniform(0, 6))
        volume = chance.integers(-8000, 8000, SHAPE, dtype=np.int16) + wave.astype(np.int16)
        return torch.from_numpy(volume), amplitude


class Moment(NamedTuple):
    """After a batch: seconds since the start, samples trained on, seconds waited for them, and samples of the pool."""

    at: float
    trained: int
    waited: float
    resident: int = 0
    evicted: int = 0


def train(make_loader: Callable[[], Any], seconds: float, pool: RollingCache | None = None) -> list[Moment]:
    """Train for that many seconds, and two batches at least. The wait for the first sample counts, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(1, 4, 8, stride=8), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 12 * 12, 1))
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    moments, start, trained, waited = [Moment(0.0, 0, 0.0)], time.monotonic(), 0, 0.0
    asked, loader = start, make_loader()
    while True:
        for volumes, amplitudes in loader:
            waited += time.monotonic() - asked
            loss = nn.functional.mse_loss(model(volumes.float()[:, None] / 8000)[:, 0], amplitudes.float())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            trained += len(amplitudes)
            held = (0, 0) if pool is None else (pool.stats().resident, pool.stats().evicted)
            moments.append(Moment(time.monotonic() - start, trained, waited, *held))
            asked = time.monotonic()
            if asked - start > seconds and len(moments) > 2:  # a line in the picture needs two points after its start
                return moments


def draw(rolling: list[Moment], plain: list[Moment], capacity: int) -> None:
    """The picture: samples trained on, and what was resident, over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"axes.grid": True, "grid.color": "#dddddd", "legend.frameon": False})
    made, (left, right) = pyplot.subplots(1, 2, figsize=(9.6, 3.8), layout="constrained")
    times, blue = [m.at for m in rolling], "#0072B2"
    left.plot(times, [m.trained for m in rolling], color=blue, label="RollingCache")
    left.plot([m.at for m in plain], [m.trained for m in plain], color="#D55E00", label="DataLoader")
    left.plot(times, [m.resident + m.evicted for m in rolling], ":", color=blue, label="samples that had come")
    left.set(ylabel="samples trained on", ylim=(0, None))
    right.plot(times, [m.resident for m in rolling], color="#009E73", label="resident")
    right.plot(times, [m.evicted for m in rolling], "-.", color="#888888", label="evicted")
    right.axhline(capacity, color="#000000", linewidth=0.8, linestyle="--", label="room in the budget")
    right.set(ylabel="samples")
    for axis in (left, right):
        axis.set(xlabel="seconds since the start")
        axis.legend()
        axis.spines[["top", "right"]].set_visible(False)
    times_as_many = rolling[-1].trained / max(plain[-1].trained, 1)
    made.suptitle(f"{times_as_many:.0f} times the samples from the same slow store", weight="bold")
    made.savefig("rolling.png", dpi=140)
    print("rolling.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20_000, help="volumes in the remote store")
    parser.add_argument("--latency", type=float, default=0.15, help="seconds that one takes to come")
    parser.add_argument("--budget", default="300MB", help="memory for volumes")
    parser.add_argument("--fillers", type=int, default=4, help="processes that load, and workers of the DataLoader")
    parser.add_argument("--minimum", type=int, default=16, help="volumes with which training starts")
    parser.add_argument("--seconds", type=float, default=40, help="of training, each")
    chosen = parser.parse_args()

    source = RemoteVolumes(chosen.samples, chosen.latency)
    pool = RollingCache(source, chosen.budget, fillers=chosen.fillers, minimum=chosen.minimum)
    rolling = train(lambda: CachedLoader(pool, batch_size=8, shuffle=True), chosen.seconds, pool)
    stats = pool.stats()
    pool.close()
    plain = train(lambda: DataLoader(source, 8, shuffle=True, num_workers=chosen.fillers), chosen.seconds)
    for name, last in (("RollingCache", rolling[-1]), ("DataLoader", plain[-1])):
        print(f"{name}: {last.trained} samples in {last.at:.0f} s, {last.waited:.1f} s of them waited for")
    print(
        f"{stats.appended} volumes came, {stats.resident} are resident, each was seen {stats.times_seen:.1f} times; "
        f"{stats.renewed} left during an epoch that wanted them, and newer ones came in their place"
    )
    try:
        draw(rolling, plain, stats.capacity)
    except ImportError:
        print("the picture needs matplotlib")


if __name__ == "__main__":
    main()
