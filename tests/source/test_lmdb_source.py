"""LMDBSource: what it reads, in which processes, behind a cache, and what it says of files that are no good."""

import io
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import StackDataset, Subset

from lightning_stocache import CachedDataset, CachedLoader, LMDBSource
from lightning_stocache.source.lmdb_source import MANIFEST_KEY, LMDBError, key_of
from lightning_stocache.source.pack import pack
from lightning_stocache.source.samples import bits
from tests.processes import call, call_many
from tests.source.lmdbs import entries, put
from tests.sources import Made

pytest.importorskip("lmdb")

LENGTH = 40


def photo(index: int) -> Any:
    """An image, a label, and what else a sample may hold."""
    pixels = torch.full((3, 8, 8 + index % 3), index, dtype=torch.uint8)
    return {"image": pixels, "label": index % 2, "name": f"photo {index}", "box": np.arange(4) * index}


def number(index: int) -> Any:
    """A row: a tensor and a label."""
    return torch.full((16,), float(index)), index


def jpeg(index: int) -> bytes:
    with io.BytesIO() as file:
        Image.new("RGB", (10 + index, 12), (index, 2 * index, 3)).save(file, "jpeg")
        return file.getvalue()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    pack(Made(photo, LENGTH), tmp_path / "photos.lmdb")
    return tmp_path / "photos.lmdb"


# ---- what it reads ----


def test_packed_samples_come_back(photos: Path) -> None:
    """Bit for bit, from the front and the back, and as slices; without a word on how it is read."""
    source = LMDBSource(photos)
    assert len(source) == LENGTH
    assert [bits(source[i]) for i in range(LENGTH)] == [bits(photo(i)) for i in range(LENGTH)]
    assert bits(source[-1]) == bits(photo(LENGTH - 1))
    assert bits(source[torch.tensor(3)]) == bits(source[np.int64(3)]) == bits(photo(3))
    assert [sample["label"] for sample in source[1:9:4]] == [1, 1]
    assert sum(1 for _ in source) == LENGTH  # the protocol of sequences ends at an IndexError
    for index in (LENGTH, -LENGTH - 1):
        with pytest.raises(IndexError, match=f"one of {LENGTH} samples, got {index}"):
            source[index]
    with pytest.raises(ValueError, match="read by its manifest"):
        LMDBSource(photos, kind="image")


def test_encoded_files_of_others_are_images(tmp_path: Path) -> None:
    """As LSUN has them: every key a file, without one argument; in a folder as in a file."""
    for subdir in (True, False):
        path = put(tmp_path / f"lsun{subdir}", {f"key{i:02}": jpeg(i) for i in range(5)}, subdir=subdir)
        source = LMDBSource(path)
        assert [image.size for image in source] == [(10 + i, 12) for i in range(5)]
        assert source[2].mode == "RGB"


def test_keys_that_are_numbers_are_in_their_order(tmp_path: Path) -> None:
    """b"10" comes after b"9", and what looks like __len__ is no sample."""
    values: dict[Any, bytes] = {i: b"%d" % i for i in range(12)} | {"__len__": b"x", "__keys__": b"y"}
    source = LMDBSource(put(tmp_path / "numbers", values), kind="json")
    assert list(source) == list(range(12))


def test_keys_may_be_given(tmp_path: Path) -> None:
    """Some of them, in an order, as bytes or strings; two sources over one file are stacked."""
    values: dict[Any, bytes] = {f"image-{i}": jpeg(i) for i in range(4)} | {f"label-{i}": b"%d" % i for i in range(4)}
    path = put(tmp_path / "text", values)
    images = LMDBSource(path, keys=[f"image-{i}" for i in (3, 1)])
    labels = LMDBSource(path, kind="text", keys=[b"label-3", b"label-1"])
    image, label = StackDataset(images, labels)[0]
    assert (image.size, label) == ((13, 12), "3")
    with pytest.raises(LMDBError, match=r"has no key b'nope', of sample 0"):
        LMDBSource(path, keys=["nope"])[0]


def test_plain_values_are_read_as_they_are_said_to_be(tmp_path: Path) -> None:
    """Bytes, text, JSON, tensors of a dtype and a shape, safetensors, or by a function."""
    array = np.arange(12, dtype=np.int16).reshape(3, 4)
    path = put(tmp_path / "plain", {"a": array.tobytes()})
    assert LMDBSource(path, kind="bytes")[0] == array.tobytes()
    assert torch.equal(LMDBSource(path, dtype="int16", shape=[3, 4])[0], torch.from_numpy(array))
    assert LMDBSource(path, dtype=torch.int16)[0].shape == (12,)
    assert LMDBSource(path, decode=len)[0] == 24
    assert LMDBSource(put(tmp_path / "t", {"a": "é".encode()}), kind="text")[0] == "é"
    assert LMDBSource(put(tmp_path / "j", {"a": b'{"x": [1]}'}), kind="json")[0] == {"x": [1]}
    save = pytest.importorskip("safetensors.torch").save
    blob = put(tmp_path / "s", {"a": save({"x": torch.ones(2, dtype=torch.bfloat16)})})
    assert torch.equal(LMDBSource(blob, kind="safetensors")[0]["x"], torch.ones(2, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kind": "jpeg"}, "kind must be one of image, bytes"),
        ({"kind": "tensor"}, "needs dtype="),
        ({"shape": [3]}, "needs dtype="),
        ({"dtype": "uint8", "kind": "text"}, "needs dtype="),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    """With what was given."""
    path = put(tmp_path / "any", {"a": b"x"})
    with pytest.raises(ValueError, match=words):
        LMDBSource(path, **arguments)


def test_transforms_are_those_of_torchvision(tmp_path: Path) -> None:
    """Of two, one for the first and one for the second; of anything else for all of it."""
    pack([(1, 2), (3, 4)], tmp_path / "pairs")
    assert LMDBSource(tmp_path / "pairs", transform=float, target_transform=str)[1] == (3.0, "4")
    assert LMDBSource(tmp_path / "pairs", target_transform=str)[1] == (3, "4")
    pack([1, 2], tmp_path / "single")
    assert LMDBSource(tmp_path / "single", transform=str)[1] == "2"


# ---- processes, and the cache ----


def read_all(source: LMDBSource) -> list[Any]:
    return [bits(source[index]) for index in range(len(source))]


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_two_processes_read_at_the_same_time(photos: Path, method: str) -> None:
    """Forked or sent to them, whether the parent has read from it or not; the parent reads on."""
    source, expected = LMDBSource(photos), [bits(photo(index)) for index in range(LENGTH)]
    assert call_many(read_all, [(source,), (source,)], method=method) == [expected, expected]
    assert bits(source[0]) == expected[0]
    assert call(read_all, source, method=method) == expected
    assert read_all(source) == expected


def test_several_sources_share_a_file(photos: Path) -> None:
    """LMDB opens a file once per process; a copy, a Subset and a second source of it do not know that."""
    first, second = LMDBSource(photos), LMDBSource(photos)
    copied = pickle.loads(pickle.dumps(first))
    for source in (first, second, copied, Subset(first, list(range(LENGTH)))):
        assert source[3]["label"] == 1
    del first, copied
    assert second[4]["label"] == 0


@pytest.mark.processes
@pytest.mark.parametrize(("make", "store"), [(number, "decoded"), (photo, "encoded"), (photo, "auto")])
def test_it_is_cached(tmp_path: Path, make: Callable[[int], Any], store: str) -> None:
    """Decoded and as bytes, with workers: each sample is stored once, at set-up or in epoch one, then hit."""
    pack(Made(make, LENGTH), tmp_path / "x.lmdb")
    dataset = CachedDataset(LMDBSource(tmp_path / "x.lmdb"), budget="auto", store=store)
    loader = CachedLoader(dataset, batch_size=4, num_workers=2, collate_fn=list)
    expected = [bits(make(index)) for index in range(LENGTH)]
    for _ in range(2):
        assert [bits(sample) for batch in loader for sample in batch] == expected
    counts = dataset.counters.totals()
    assert counts.setup_fills + counts.fills == LENGTH
    assert (counts.hits, counts.misses) == (2 * LENGTH - counts.fills, counts.fills)
    dataset.close()


# ---- bad input ----


def test_what_is_no_lmdb_is_said(tmp_path: Path) -> None:
    """No file; a folder without one; an empty or short one, other bytes, zeros."""
    for path, words in ((tmp_path / "nope.lmdb", r"nope\.lmdb"), (tmp_path, r"data\.mdb")):
        with pytest.raises(FileNotFoundError, match=words):
            LMDBSource(path)
    for content in (b"", b"x" * 10, b"x" * 10_000, bytes(10_000)):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(LMDBError, match="is not an LMDB"):
            LMDBSource(tmp_path / "x")


def test_a_read_only_folder_is_no_obstacle(photos: Path) -> None:
    """It is opened without a lock file."""
    photos.chmod(0o400)
    photos.parent.chmod(0o500)
    try:
        assert len(LMDBSource(photos)[:3]) == 3
        assert [path.name for path in photos.parent.iterdir()] == [photos.name]
    finally:
        photos.parent.chmod(0o700)


@pytest.mark.parametrize(
    ("replace", "words"),
    [
        ((b'"version": 2', b'"version": 1'), "is of version 1 of `pack`, this package reads 2: pack it again"),
        ((b'"complete": true', b'"complete": false'), f"has {LENGTH} of the {LENGTH} samples of .*Made"),
        ((b'"samples": 40', b'"samples": 41'), "has 40 of the 41 samples"),
    ],
)
def test_a_manifest_that_is_no_good_is_said(photos: Path, replace: tuple[bytes, bytes], words: str) -> None:
    """Of another version, of a pack that has not ended, of a larger number of samples."""
    put(photos, {MANIFEST_KEY: entries(photos)[MANIFEST_KEY].replace(*replace)})
    with pytest.raises(LMDBError, match=words):
        LMDBSource(photos)


def test_a_damaged_sample_is_an_error(photos: Path) -> None:
    """One flipped bit, another's blob, or a pickle: never a sample."""
    good, other = entries(photos)[key_of(3)], entries(photos)[key_of(4)]
    for bad, words in (
        (good[:-1] + bytes([good[-1] ^ 1]), "sample 3: .* damaged.*copy or pack it again"),
        (other, "here lies sample 4"),
        (pickle.dumps(3), "sample 3: .* are no packed sample"),
    ):
        put(photos, {key_of(3): bad})
        with pytest.raises(LMDBError, match=words):
            LMDBSource(photos)[3]


def test_a_value_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    """The key, how it begins, and the way out; of a pickle, that nothing is unpickled."""
    path = put(tmp_path / "x", {"a": b"GIF?", "b": pickle.dumps((b"x", 3)), "c": b"\xff"})
    for index, words in enumerate([r"value of b'a', 4 bytes that begin with b'GIF\?'", "nothing is unpickled here"]):
        with pytest.raises(LMDBError, match=words):
            LMDBSource(path)[index]
    for arguments in ({"kind": "text"}, {"kind": "json"}, {"dtype": "int16"}, {"kind": "safetensors"}):
        with pytest.raises(LMDBError, match="value of b'c', 1 bytes"):
            LMDBSource(path, **arguments)[2]


def truncated(path: str, whole: str, positions: list[int], arguments: dict[str, Any]) -> list[str]:
    """What each truncation leads to: an error at opening, at reading, or samples."""
    found = []
    for position in positions:
        shutil.copyfile(whole, path)
        os.truncate(path, position)
        try:
            source = LMDBSource(path, **arguments)
        except LMDBError:
            found.append("refused")
        else:
            found.append("read" if [bits(sample) for sample in source] else "nothing")
    return found


@pytest.mark.processes
@pytest.mark.parametrize("make", ["packed", "foreign"])
def test_no_truncation_gives_a_sample(tmp_path: Path, make: str) -> None:
    """At 200 positions, in a process that would die of a missing page: each is refused; the whole file is not."""
    whole = tmp_path / "whole"
    values = {f"{i:04}": os.urandom(random.Random(i).choice([20, 900, 9000])) for i in range(200)}
    pack(list(values.values()), whole) if make == "packed" else put(whole, values)
    size = whole.stat().st_size
    positions = [*random.Random(0).sample(range(size), 200), 0, 4096, 8192, size - 1]
    arguments = {} if make == "packed" else {"kind": "bytes"}
    assert call(truncated, str(tmp_path / "x"), str(whole), [*positions, size], arguments) == [
        *["refused"] * len(positions),
        "read",
    ]


def first(source: LMDBSource) -> Any:
    return source[0]


@pytest.mark.processes
def test_a_file_that_is_replaced_is_not_read_by_others(tmp_path: Path) -> None:
    """A worker that starts later would read samples of another dataset."""
    pack([1, 2], tmp_path / "x")
    source = LMDBSource(tmp_path / "x")
    (tmp_path / "x").unlink()
    pack(["other", "samples"], tmp_path / "x")
    with pytest.raises(AssertionError, match="has changed since it was opened"):
        call(first, source)
