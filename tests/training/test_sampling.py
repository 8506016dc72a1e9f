"""Which sampler a loader may have on several ranks."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader, DistributedSampler

from lightning_stocache.training.sampling import check_sampler, replicas
from tests.training.test_call_loaders import Dealing
from tests.training.tiny import make_trainer


def test_a_sampler_that_would_be_wrapped_is_refused():
    """A sampler that deals to ranks must be a DistributedSampler, where Lightning would wrap it; on one rank not."""
    numbers = list(range(8))
    own, torchs = Dealing(), DistributedSampler(numbers, 2, 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Dealing deals samples to ranks, but is not .* 1/2 of its share"):
        check_sampler(DataLoader(numbers, sampler=own), 2)
    check_sampler(DataLoader(numbers, sampler=own), 1)
    check_sampler(DataLoader(numbers, sampler=torchs), 2)
    check_sampler(DataLoader(numbers, shuffle=True), 2)


def test_a_trainer_that_leaves_samplers_alone_divides_nothing(tmp_path):
    """With use_distributed_sampler=False a user's loader is one rank's own; the package's own sampler still deals."""
    for leaves_alone, own in ((False, 4), (True, 1)):
        trainer = make_trainer(
            tmp_path, devices=2, num_nodes=2, strategy="ddp", use_distributed_sampler=not leaves_alone
        )
        assert replicas(trainer) == (own, 0)
        assert replicas(trainer, always=True) == (4, 0)
