"""What is private of torch's may go away: each use has a way without it."""

from torch.utils.data import RandomSampler

from lightning_stocache.torch_internals import draws_all_once


def test_a_sampler_that_draws_once_is_known():
    """Others are the user's."""
    assert draws_all_once(RandomSampler(range(3)))
    assert not draws_all_once(RandomSampler(range(3), replacement=True))
    assert not draws_all_once(RandomSampler(range(3), num_samples=2))
