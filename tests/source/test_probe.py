"""How random samples of a stream are found while it is served."""

from collections.abc import Iterator

import numpy as np
import torch

from lightning_stocache.source.probe import StreamReader


def test_generators_of_a_stream_are_watched() -> None:
    """The stream's own too, unless draws do not matter; what a training draws meanwhile is not the stream's."""
    own = np.random.default_rng(0)

    def noisy() -> Iterator[float]:
        return iter(own.random, 2.0)

    for stream, watched, moved in ((noisy, True, "function().own"), (noisy, False, None), (range(5), True, None)):
        reader = StreamReader(stream, watched)
        for _ in range(5):
            torch.rand(1)
            next(reader)
        assert reader.moved == moved
