"""Workers that wait load what nobody has asked for yet."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_stocache import CachedDataset, CachedLoader
from tests.loading.twins import totals
from tests.processes import wait_until
from tests.sources import CountedSource

pytestmark = pytest.mark.processes

LENGTH = 60


class Texts(CountedSource):
    """A tensor and a text; one of them may be broken."""

    def __init__(self, path: Path, broken: int | None = None) -> None:
        super().__init__(LENGTH, log_path=path)
        self.broken = broken

    def expected(self, index: int) -> Any:
        if index == self.broken:
            raise OSError(f"sample {index} is broken")
        return torch.full((3,), index), str(index)


def wait_for(dataset: CachedDataset, filled: int) -> None:
    wait_until(lambda: dataset.cache is None or dataset.cache.filled >= filled)


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_idle_workers_fill_what_nobody_asked_for(tmp_path: Path, method: str) -> None:
    """After one batch all of it is filled, and what was served is what was counted.

    A sample is loaded twice only where it is asked for while it is being loaded ahead.
    """
    dataset = CachedDataset(Texts(tmp_path / "loads"), prefill=True)
    (tmp_path / "loads").unlink()
    with closing(dataset):
        loader = CachedLoader(dataset, 4, num_workers=2, persistent_workers=True, multiprocessing_context=method)
        batches = iter(loader)
        first = next(batches)
        assert first[0].tolist() == [[index] * 3 for index in range(4)]
        wait_for(dataset, LENGTH)
        rest = list(batches)
        loader.close()
        assert [text for _, texts in [first, *rest] for text in texts] == list(map(str, range(LENGTH)))
        loads = dataset.source.loaded
        assert set(loads) == set(range(LENGTH))
        assert len(loads) <= LENGTH + 5
        counts = totals(dataset)
        assert (counts.served, counts.fills, counts.bypasses) == (LENGTH, LENGTH, 0)


def test_a_broken_sample_is_left_to_who_asks_for_it(tmp_path: Path) -> None:
    """The others are filled; whoever asks for the broken one gets its error."""
    source = Texts(tmp_path / "loads", broken=55)
    with closing(CachedDataset(source, prefill=True)) as dataset:
        loader = CachedLoader(dataset, 4, num_workers=2, persistent_workers=True)
        batches = iter(loader)
        next(batches)
        wait_for(dataset, LENGTH - 1)
        with pytest.raises(OSError, match="sample 55 is broken"):
            list(batches)
        loader.close()


def test_it_ends_where_there_is_no_room(tmp_path: Path) -> None:
    """A cache of a part fills that part, and workers go on waiting for requests."""
    dataset = CachedDataset(Texts(tmp_path / "loads"), "50%", prefill=True)
    with closing(dataset):
        loader = CachedLoader(dataset, 4, num_workers=1, persistent_workers=True)
        assert sum(len(texts) for _, texts in loader) == LENGTH
        assert sum(len(texts) for _, texts in loader) == LENGTH
        loader.close()
        assert dataset.source.loads < 3 * LENGTH
