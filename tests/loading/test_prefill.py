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
IDLE: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "persistent_workers": True}


class Texts(CountedSource):
    """A tensor and a text; one of them may be broken."""

    broken: int | None = None

    def expected(self, index: int) -> Any:
        if index == self.broken:
            raise OSError(f"sample {index} is broken")
        return torch.full((3,), index), str(index)


@pytest.fixture
def source(tmp_path: Path) -> Texts:
    return Texts(LENGTH, log_path=tmp_path / "loads")


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_idle_workers_fill_what_nobody_asked_for(source: Texts, method: str) -> None:
    """After one batch all of it is filled, and what was served is what was counted.

    A sample is loaded twice only where it is asked for while it is being loaded ahead.
    """
    with closing(CachedDataset(source, prefill=True)) as dataset:
        Path(source.log_path).unlink()
        loader = CachedLoader(dataset, multiprocessing_context=method, **IDLE)
        batches = iter(loader)
        first = next(batches)
        wait_until(lambda: dataset.cache is not None and dataset.cache.filled == LENGTH)
        rest = list(batches)
        loader.close()
        assert [text for _, texts in [first, *rest] for text in texts] == list(map(str, range(LENGTH)))
        assert first[0].tolist() == [[index] * 3 for index in range(4)]
        assert set(source.loaded) == set(range(LENGTH))
        assert source.loads <= LENGTH + 5
        counts = totals(dataset)
        assert (counts.served, counts.fills, counts.bypasses) == (LENGTH, LENGTH, 0)


def test_a_broken_sample_is_left_to_who_asks_for_it(source: Texts) -> None:
    """The others are filled; whoever asks for the broken one gets its error."""
    source.broken = 55
    with closing(CachedDataset(source, prefill=True)) as dataset:
        loader = CachedLoader(dataset, **IDLE)
        batches = iter(loader)
        next(batches)
        wait_until(lambda: dataset.cache is not None and dataset.cache.filled == LENGTH - 1)
        with pytest.raises(OSError, match="sample 55 is broken"):
            list(batches)
        loader.close()


def test_it_ends_where_there_is_no_room(source: Texts) -> None:
    """A cache of a part fills that part, and workers go on waiting for requests."""
    with closing(CachedDataset(source, "50%", prefill=True)) as dataset:
        loader = CachedLoader(dataset, **IDLE)
        for _ in range(2):
            assert sum(len(texts) for _, texts in loader) == LENGTH
        loader.close()
        assert source.loads < 3 * LENGTH
