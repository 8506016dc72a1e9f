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


def gathered(samples: list[Any]) -> Any:
    """The batch from the bytes of the samples, as a gather gives them."""
    spec = SampleSpec.infer(samples[0])
    columns = zip(*(spec.flatten(sample) for sample in samples), strict=True)
    return Collator(spec).batch([torch.cat(column).numpy() for column in columns], len(samples))


def test_the_batch_lies_in_the_memory_that_was_gathered():
    """Nothing is copied."""
    rows = [np.zeros(4 * 12, dtype=np.uint8), np.zeros(4 * 8, dtype=np.uint8)]
    image, label = Collator(SampleSpec.infer((torch.zeros(3), 1))).batch(rows, 4)
    assert (image.data_ptr(), label.data_ptr()) == (rows[0].ctypes.data, rows[1].ctypes.data)


def test_batches_that_were_gathered_together_are_batches_of_their_own():
    """The last may be smaller. Who pickles one sends no other, and who changes one in place changes no other."""
    rows = [np.arange(5 * 8, dtype=np.uint8), np.arange(5).view(np.uint8)]
    batches = Collator(SampleSpec.infer((torch.zeros(2), 1))).batches(rows, 5, 2)
    assert [label.tolist() for _, label in batches] == [[0, 1], [2, 3], [4]]
    assert torch.cat([image for image, _ in batches]).numpy().tobytes() == bytes(range(40))
    for image, label in batches:
        assert image.untyped_storage().nbytes() == len(label) * 8
        assert image._base is None
    batches[0][0].requires_grad_()
    batches[1][0].add_(1)


def test_a_dtype_that_numpy_has_not():
    """bfloat16 goes by another way to the same batches, each with memory of its own to pickle."""
    samples = [torch.full((3,), float(i), dtype=torch.bfloat16) for i in range(3)]
    assert same(gathered(samples), default_collate(samples))
    rows = [torch.stack(samples).view(torch.uint8).flatten().numpy()]
    batches = Collator(SampleSpec.infer(samples[0])).batches(rows, 3, 2)
    assert same(batches, [default_collate(samples[:2]), default_collate(samples[2:])])
    assert [batch.untyped_storage().nbytes() for batch in batches] == [12, 6]


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
