"""LMDBSource: what it reads, in which processes, behind a cache, what it says of files that are no good; its blobs."""

import io
import math
import os
import pickle
import random
import shutil
import struct
import subprocess
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image
from torch.utils.data import StackDataset, Subset
from torchvision import tv_tensors

from lightning_stocache import CachedDataset, CachedLoader, LMDBSource
from lightning_stocache.cache.codec import UnsupportedSampleError
from lightning_stocache.source.blob import decode_blob, encode_blob
from lightning_stocache.source.lmdb_source import MANIFEST_KEY, LMDBError, key_of
from lightning_stocache.source.pack import pack
from lightning_stocache.source.samples import bits
from tests.cache.leaves import Pair, leaves_of
from tests.odds import CROWD
from tests.processes import call
from tests.sources import Made, lmdb_values, write_lmdb

pytest.importorskip("lmdb")

LENGTH = 40


def photo(index: int) -> Any:
    """An image, a label, and what else a sample may hold."""
    pixels = torch.full((3, 8, 8 + index % 3), index, dtype=torch.uint8)
    return {"image": pixels, "label": index % 2, "name": f"photo {index}", "box": np.arange(4) * index}


def jpeg(index: int) -> bytes:
    with io.BytesIO() as file:
        Image.new("RGB", (10 + index, 12), (index, 2 * index, 3)).save(file, "jpeg")
        return file.getvalue()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    pack(Made(photo, LENGTH), tmp_path / "photos.lmdb")
    return tmp_path / "photos.lmdb"


def test_packed_samples_come_back(photos: Path) -> None:
    """Bit for bit, from the front and the back, and as slices, without a word on how it is read; several share it."""
    source = LMDBSource(photos)
    assert len(source) == LENGTH
    assert [bits(source[i]) for i in range(LENGTH)] == [bits(photo(i)) for i in range(LENGTH)]
    assert bits(source[-1]) == bits(photo(LENGTH - 1))
    assert bits(source[torch.tensor(3)]) == bits(source[np.int64(3)]) == bits(photo(3))
    assert [sample["label"] for sample in source[1:9:4]] == [1, 1]
    assert sum(1 for _ in source) == LENGTH  # the protocol of sequences ends at an IndexError
    source[3]["image"] += 1  # what is read is the sample's own
    source[3]["box"] += 1
    assert bits(source[3]) == bits(photo(3))
    for index in (LENGTH, -LENGTH - 1):
        with pytest.raises(IndexError, match=f"one of {LENGTH} samples, got {index}"):
            source[index]
    with pytest.raises(ValueError, match="read by its manifest"):
        LMDBSource(photos, kind="image")
    # LMDB opens a file once per process; a copy, a Subset and a second source of it do not know that.
    second, copied = LMDBSource(photos), pickle.loads(pickle.dumps(source))
    for each in (source, second, copied, Subset(source, list(range(LENGTH)))):
        assert each[3]["label"] == 1
    del source, copied, each
    assert second[4]["label"] == 0


def test_keys_may_be_given(tmp_path: Path) -> None:
    """Some of them, in an order, of which two sources are stacked; without, all but __len__, numbers in their order."""
    lsun = LMDBSource(write_lmdb(tmp_path / "lsun", {f"key{i:02}": jpeg(i) for i in range(5)}, subdir=True))
    assert [(image.size, image.mode) for image in lsun] == [((10 + i, 12), "RGB") for i in range(5)]
    numbers: dict[Any, bytes] = {i: b"%d" % i for i in range(12)} | {"__len__": b"x", "__keys__": b"y"}
    assert list(LMDBSource(write_lmdb(tmp_path / "numbers", numbers), kind="json")) == list(range(12))
    values: dict[Any, bytes] = {f"image-{i}": jpeg(i) for i in range(4)} | {f"label-{i}": b"%d" % i for i in range(4)}
    path = write_lmdb(tmp_path / "text", values)
    images = LMDBSource(path, keys=[f"image-{i}" for i in (3, 1)])
    labels = LMDBSource(path, kind="text", keys=[b"label-3", b"label-1"])
    image, label = StackDataset(images, labels)[0]
    assert (image.size, label) == ((13, 12), "3")
    with pytest.raises(LMDBError, match=r"has no key b'nope', of sample 0"):
        LMDBSource(path, keys=["nope"])[0]


def test_plain_values_are_read_as_they_are_said_to_be(tmp_path: Path) -> None:
    """Bytes, text, JSON, tensors, safetensors, or by a function; arguments that do not go together are refused."""
    array = np.arange(12, dtype=np.int16).reshape(3, 4)
    path = write_lmdb(tmp_path / "plain", {"a": array.tobytes()})
    assert LMDBSource(path, kind="bytes")[0] == array.tobytes()
    assert torch.equal(LMDBSource(path, dtype="int16", shape=[3, 4])[0], torch.from_numpy(array))
    assert LMDBSource(path, dtype=torch.int16)[0].shape == (12,)
    assert LMDBSource(path, decode=len)[0] == 24
    assert LMDBSource(write_lmdb(tmp_path / "t", {"a": "é".encode()}), kind="text")[0] == "é"
    assert LMDBSource(write_lmdb(tmp_path / "j", {"a": b'{"x": [1]}'}), kind="json")[0] == {"x": [1]}
    with pytest.raises(ValueError, match="kind must be one of image, bytes"):
        LMDBSource(path, kind="jpeg")
    for arguments in ({"kind": "tensor"}, {"shape": [3]}, {"dtype": "uint8", "kind": "text"}, {"dtype": "uint9"}):
        with pytest.raises(ValueError, match="needs dtype="):
            LMDBSource(path, **arguments)
    save = pytest.importorskip("safetensors.torch").save
    blob = write_lmdb(tmp_path / "s", {"a": save({"x": torch.ones(2, dtype=torch.bfloat16)})})
    assert torch.equal(LMDBSource(blob, kind="safetensors")[0]["x"], torch.ones(2, dtype=torch.bfloat16))


def read_all(_: int, source: LMDBSource) -> list[Any]:
    return [bits(source[index]) for index in range(len(source))]


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_many_processes_read_at_the_same_time(photos: Path, method: str, crowd: Any, second_thread: Any) -> None:
    """Forked or sent to them, whether the parent has read from it or not; the parent reads on, in two threads."""
    source, expected = LMDBSource(photos), [bits(photo(index)) for index in range(LENGTH)]
    assert crowd(read_all, source, method=method) == [expected] * CROWD
    assert bits(source[0]) == expected[0]
    assert call(read_all, 0, source, method=method) == expected
    second_thread(lambda: source[3])
    assert read_all(0, source) == expected


def read_pickled(source: bytes) -> list[Any]:
    return read_all(0, pickle.loads(source))


def test_many_threads_open_a_file_at_the_same_time(photos: Path) -> None:
    """The first reads of several threads, of one source and of several, find one open file."""
    expected = [bits(photo(index)) for index in range(8)]
    for _ in range(60):
        sources = pickle.loads(pickle.dumps([LMDBSource(photos)] * 4 + [LMDBSource(photos)]))
        start = threading.Barrier(8)

        def read(index: int, sources: Any = sources, start: Any = start) -> Any:
            start.wait()
            return bits(sources[index % 5][index])

        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(read, range(8))) == expected
        del sources


@pytest.mark.processes
def test_a_process_that_is_forked_while_a_thread_opens_a_file_can_read(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forked process has not the thread, and opens files of its own."""
    source, opens, forked = pickle.dumps(LMDBSource(photos)), threading.Event(), threading.Event()
    lmdb = pytest.importorskip("lmdb")

    def slow_open(*args: Any, open_now: Any = lmdb.open, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            opens.set()
            forked.wait(60)
        return open_now(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(lmdb, "open", slow_open)
        thread = threading.Thread(target=lambda: LMDBSource(photos))
        thread.start()
        opens.wait(60)
        try:
            assert call(read_pickled, source, method="fork") == [bits(photo(index)) for index in range(LENGTH)]
        finally:
            forked.set()
            thread.join()


@pytest.mark.parametrize(
    "content",
    [
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n",
        struct.pack("<I6I2x", 0xC6D3D0C5, 32, 90, 0, 0, 0, 0)
        + b"\0\0%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n",
    ],
)
def test_no_program_runs_on_the_content_of_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """PIL runs Ghostscript on PostScript; here such a value is no image. Other formats are read as before."""
    started: list[Any] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **_: started.append(args))
    for name in ("check_call", "run", "call", "check_output"):
        monkeypatch.setattr(subprocess, name, lambda *args, **_: started.append(args))
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", "gs")
    source = LMDBSource(write_lmdb(tmp_path / "foreign.lmdb", {0: content, 1: jpeg(1), 2: tiff()}))
    with pytest.raises(LMDBError, match="cannot be read"):
        source[0]
    assert [source[index].size for index in (1, 2)] == [(11, 12), (5, 6)]
    assert started == []


def tiff() -> bytes:
    with io.BytesIO() as file:
        Image.new("L", (5, 6)).save(file, "tiff")
        return file.getvalue()


@pytest.mark.processes
def test_it_is_cached(photos: Path) -> None:
    """As bytes, with workers: each sample is stored once, at set-up or in epoch one, then hit."""
    dataset = CachedDataset(LMDBSource(photos), budget="auto", store="encoded")
    loader = CachedLoader(dataset, batch_size=4, num_workers=2, collate_fn=list)
    expected = [bits(photo(index)) for index in range(LENGTH)]
    for _ in range(2):
        assert [bits(sample) for batch in loader for sample in batch] == expected
    counts = dataset.counters.totals()
    assert counts.setup_fills + counts.fills == LENGTH
    assert (counts.hits, counts.misses) == (2 * LENGTH - counts.fills, counts.fills)
    dataset.close()


def test_what_is_no_lmdb_is_said(tmp_path: Path) -> None:
    """No file; a folder without one; an empty or short one, other bytes, zeros."""
    for path, words in ((tmp_path / "nope.lmdb", r"nope\.lmdb"), (tmp_path, r"data\.mdb")):
        with pytest.raises(FileNotFoundError, match=words):
            LMDBSource(path)
    for content in (b"", b"x" * 10, b"x" * 10_000, bytes(10_000)):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(LMDBError, match="is not an LMDB"):
            LMDBSource(tmp_path / "x")


def test_a_damaged_sample_or_manifest_is_an_error(photos: Path) -> None:
    """It is never another sample. A manifest of another version, of a pack that has not ended, of more samples."""
    write_lmdb(photos, {key_of(3): lmdb_values(photos)[key_of(4)]})
    with pytest.raises(LMDBError, match=r"sample 3: .*here lies sample 4.*copy or pack it again"):
        LMDBSource(photos)[3]
    manifest = lmdb_values(photos)[MANIFEST_KEY]
    for old, new, words in (
        (b'"version": 2', b'"version": 1', "is of version 1 of `pack`, this package reads 2: pack it again"),
        (b'"complete": true', b'"complete": false', f"has {LENGTH} of the {LENGTH} samples of .*Made"),
        (b'"samples": 40', b'"samples": 41', "has 40 of the 41 samples"),
    ):
        write_lmdb(photos, {MANIFEST_KEY: manifest.replace(old, new)})
        with pytest.raises(LMDBError, match=words):
            LMDBSource(photos)


def test_a_value_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    """The key, how it begins, and the way out; of a pickle, that nothing is unpickled."""
    path = write_lmdb(tmp_path / "x", {"a": b"GIF?", "b": pickle.dumps((b"x", 3)), "c": b"\xff"})
    for index, words in enumerate([r"value of b'a', 4 bytes that begin with b'GIF\?'", "nothing is unpickled here"]):
        with pytest.raises(LMDBError, match=words):
            LMDBSource(path)[index]
    for arguments in ({"kind": "text"}, {"kind": "json"}, {"dtype": "int16"}, {"kind": "safetensors"}):
        with pytest.raises(LMDBError, match="value of b'c', 1 bytes"):
            LMDBSource(path, **arguments)[2]


def truncated(path: Path, whole: Path, positions: list[int], arguments: dict[str, Any]) -> list[int]:
    """The positions of a truncation that is not refused when the file is opened or read."""
    read = []
    for position in positions:
        shutil.copyfile(whole, path)
        os.truncate(path, position)
        try:
            assert list(LMDBSource(path, **arguments))
        except LMDBError:
            continue
        read.append(position)
    return read


@pytest.mark.processes
def test_no_truncation_gives_a_sample(tmp_path: Path) -> None:
    """At 40 positions, in a process that would die of a missing page: each is refused; the whole file is not."""
    values = {f"{i:04}": os.urandom(random.Random(i).choice([20, 900, 9000])) for i in range(200)}
    pack(list(values.values()), tmp_path / "packed")
    for whole, arguments in ((tmp_path / "packed", {}), (write_lmdb(tmp_path / "foreign", values), {"kind": "bytes"})):
        size = whole.stat().st_size
        positions = [*random.Random(0).sample(range(size), 40), 0, 4096, 8192, size - 1, size]
        assert call(truncated, tmp_path / "x", whole, positions, arguments) == [size]


@pytest.mark.processes
def test_a_file_that_is_replaced_is_not_read_by_others(tmp_path: Path) -> None:
    """A worker that starts later would read samples of another dataset."""
    pack([1, 2], tmp_path / "x")
    source = LMDBSource(tmp_path / "x")
    (tmp_path / "x").unlink()
    pack(["other", "samples"], tmp_path / "x")
    with pytest.raises(AssertionError, match="has changed since it was opened"):
        call(LMDBSource.__getitem__, source, 0)


# ---- a sample as one blob ----


def noise(mode: str) -> Image.Image:
    colours = np.random.default_rng(0).integers(0, 256, (7, 5, 3), dtype=np.uint8)
    image = Image.fromarray(colours).convert(mode)
    image.info = {"transparency": b"\x00\x80"} if mode == "P" else {}
    return image


LEAVES: list[Any] = [
    *(leaf for name, leaf in leaves_of(1).items() if name not in ("Parameter", "complex", "torch.complex32")),
    *(np.array(["a", "bcd"]), np.str_("x"), -(2**80), 1.5, -0.0, math.inf),
    *("", 'x\ud800é"\\', b"", b"abc", (), [], {}),
    *map(noise, ("RGB", "L", "P", "1", "F", "I;16", "RGBA", "CMYK", "LA")),
]


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: f"{type(leaf).__name__}-{getattr(leaf, 'dtype', '')}")
def test_every_kind_of_leaf_comes_back(leaf: Any) -> None:
    """Bit for bit, with its type; in containers, too."""
    for sample in (leaf, {"a": [leaf, (leaf, 3)], 7: leaf}):
        assert bits(decode_blob(encode_blob(sample, 5), 5)) == bits(sample)
    if getattr(leaf, "mode", "") == "P":  # and is converted as it was before
        assert decode_blob(encode_blob(leaf, 0), 0).convert("RGBA").tobytes() == leaf.convert("RGBA").tobytes()


def test_what_cannot_be_packed_is_named() -> None:
    """The place in the sample, and what lies there."""
    boxes = tv_tensors.BoundingBoxes(torch.zeros(1, 4), format="XYXY", canvas_size=(2, 2))
    for sample, words in (
        ({"a": [1, {2}]}, r"sample\['a'\]\[1\] is a set"),
        (Pair(1, 2), "Pair"),
        ((0, torch.zeros(1, requires_grad=True)), r"sample\[1\] is a .*Tensor of torch.float32, which cannot"),
        ({"x": torch.eye(2).to_sparse()}, r"sample\['x'\] is a .*What can be packed: dense tensors"),
        (np.array([object()]), "of object"),
        ([{(1, 2): 3}], r"sample\[0\] is a dict.*strings or ints as keys"),
        (boxes, "BoundingBoxes"),
        (lambda: 0, "function"),
    ):
        with pytest.raises(UnsupportedSampleError, match=words):
            encode_blob(sample, 0)


def test_no_damaged_blob_gives_a_sample() -> None:
    """With any bit flipped, cut anywhere, with zeros in place of the rest or more behind it; or of another index."""
    blob = encode_blob({"image": torch.arange(40), "label": 3}, 7)
    damaged = [blob + b" "]
    for bit in random.Random(0).sample(range(8 * len(blob)), 2000):
        flipped = bytearray(blob)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(flipped))
    for end in range(len(blob)):
        damaged += [blob[:end], blob[:end] + bytes(len(blob) - end)]
    for content in damaged:
        if content != blob:
            with pytest.raises(ValueError, match="no packed sample"):
                decode_blob(content, 7)
    with pytest.raises(ValueError, match="here lies sample 7"):
        decode_blob(blob, 8)


def test_a_blob_that_others_have_made_is_no_crash() -> None:
    """Its checksum is right, and what it says makes no sample: bytes are never taken for addresses of objects."""
    for tree in (
        '{"array":0,"dtype":"O","shape":[1]}',
        '{"tensor":0,"dtype":"load","shape":[8]}',
        '{"tensor":0,"dtype":"uint8","shape":[-8]}',
        '{"tensor":3,"dtype":"uint8","shape":[8]}',
        '{"image":["none",[2,4],null,null,{"bytes":0}]}',
        '{"set":0}',
        "{}",
        "[" * 100_000,
    ):
        header = f"[7,{tree},[8]]".encode()
        blob = struct.pack("<I", len(header)) + header + b"\1" * 8
        with pytest.raises((ValueError, TypeError, LookupError, AttributeError, StopIteration, RuntimeError)):
            decode_blob(struct.pack("<I", zlib.crc32(blob)) + blob, 7)
