"""The batch of default_collate, made from fields; and the samples for which there is no short cut."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map
from torchvision import tv_tensors

from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.loading.collate import Collator
from tests.loading.twins import same


def test_the_batch_lies_in_the_memory_that_was_gathered():
    """Nothing is copied."""
    rows = [np.zeros(4 * 12, dtype=np.uint8), np.zeros(4 * 8, dtype=np.uint8)]
    image, label = Collator(SampleSpec.infer((torch.zeros(3), 1))).batch(rows, 4)
    assert (image.data_ptr(), label.data_ptr()) == (rows[0].ctypes.data, rows[1].ctypes.data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # NumPy has not the second
def test_batches_that_were_gathered_together_are_batches_of_their_own(dtype):
    """The last may be smaller. Who pickles one sends no other, and who changes one in place changes no other."""
    samples: Any = [(torch.full((2,), float(i), dtype=dtype), i) for i in range(5)]
    spec = SampleSpec.infer(samples[0])
    columns = zip(*map(spec.flatten, samples), strict=True)
    batches = Collator(spec).batches([torch.cat(column).numpy() for column in columns], 5, 2)
    assert same(batches, [default_collate(samples[first : first + 2]) for first in (0, 2, 4)])
    assert [image.untyped_storage().nbytes() for image, _ in batches] == [image.nbytes for image, _ in batches]
    if dtype == torch.float32:
        assert all(image._base is None for image, _ in batches)
        batches[0][0].requires_grad_()
    batches[1][0].add_(1)
    assert same(batches[2], default_collate(samples[4:]))


@pytest.mark.parametrize("sample", [(), {}, ((), [])], ids=str)
def test_samples_without_a_field_have_no_short_cut(sample):
    """The loader then leaves them to DataLoader."""
    with pytest.raises(TypeError):
        Collator(SampleSpec.infer(sample))


def test_samples_that_default_collate_refuses_have_no_short_cut():
    """It says why, in its own words."""
    with pytest.raises(TypeError, match="datetime64"):
        Collator(SampleSpec.infer(np.array(0, dtype="datetime64[s]")))


def test_what_keeps_its_type_in_a_batch_has_no_short_cut(monkeypatch):
    """A function that the user registered may make anything of a type."""
    monkeypatch.setitem(default_collate_fn_map, tv_tensors.Mask, lambda masks, *, collate_fn_map: masks[0])
    with pytest.raises(TypeError, match="default_collate makes a Mask of a field"):
        Collator(SampleSpec.infer(tv_tensors.Mask(torch.zeros(2, 2))))
