"""The parser of headers: what it accepts is in range and printable, and all else is one kind of error."""

from __future__ import annotations

import json
import os
import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stocache.cache.placement import Arc
from lightning_stocache.node.files import FORMAT, HEADER_BYTES, MANIFEST_OFFSET
from lightning_stocache.node.manifest import (
    Geometry,
    Manifest,
    ManifestError,
    printable,
    read_manifest,
    write_manifest,
)

PAYLOAD = 4096
GOOD = Manifest(
    Geometry(size=1000, slots=400, start=600, step=7),
    dataset="Photos (1,000 samples, train)",
    node=1,
    nodes=2,
    created=1_700_000_000,
    budget="8 GiB",
    fingerprint={"dataset": "photos.Photos", "length": 1000, "spec": "['image']: uint8 [3, 8, 8]", "fingerprint": "é"},
)
VALUES = asdict(GOOD)
JSON = json.dumps(VALUES).encode()


def header(text: str | bytes, *, version: int = FORMAT, length: int | None = None) -> bytes:
    """A header as `write_header` makes it, with any text in it."""
    text = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    begin = b"STOCACHE" + bytes(16) + version.to_bytes(4, "little")
    size = (len(text) if length is None else length).to_bytes(4, "little")
    return (begin.ljust(MANIFEST_OFFSET, b"\0") + size + text).ljust(HEADER_BYTES, b"\0")[:HEADER_BYTES]


def change(**values: Any) -> str:
    return json.dumps({**VALUES, **values})


def geometry(**numbers: Any) -> str:
    return change(geometry={**VALUES["geometry"], **numbers})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Every value comes back as it was."""
    (tmp_path / "file").write_bytes(header(b""))
    file = os.open(tmp_path / "file", os.O_RDWR)
    write_manifest(file, GOOD)
    assert read_manifest(os.pread(file, HEADER_BYTES, 0), PAYLOAD) == GOOD
    os.close(file)


def test_what_does_not_fit_is_not_written(tmp_path: Path) -> None:
    """One byte more than a header has room for is an error, and the file stays as it is."""
    (tmp_path / "file").write_bytes(header(b""))
    file = os.open(tmp_path / "file", os.O_RDWR)
    room = HEADER_BYTES - MANIFEST_OFFSET - 4
    least = len(
        json.dumps(asdict(replace(GOOD, fingerprint={"a": "", "b": "", "c": "", "d": ""})), ensure_ascii=False).encode()
    )
    for more in (1, 0):
        texts = dict.fromkeys("abc", "x" * 1000) | {"d": "x" * (room + more - least - 3000)}
        manifest = replace(GOOD, fingerprint=texts)
        if more:
            with pytest.raises(ManifestError, match=f"must fit in {room} bytes, got {room + 1}"):
                write_manifest(file, manifest)
            assert (tmp_path / "file").read_bytes() == header(b"")
        else:
            write_manifest(file, manifest)
            assert read_manifest(os.pread(file, HEADER_BYTES, 0), PAYLOAD) == manifest
    os.close(file)


BROKEN = {
    "deep": "[" * 4000,
    "deep objects": '{"a":' * 800,
    "a list": "[]",
    "a text": '"geometry"',
    "no text": b"\xff\xfe",
    "NaN": change(created=float("nan")),
    "infinity": change(created=float("inf")),
    "a fraction": change(created=1.0),
    "a huge number": change(created=10**3000),
    "a negative number": change(node=-1),
    "a node too many": change(node=2),
    "a truth": change(nodes=True),
    "a number for a text": change(dataset=3),
    "a text for a number": change(nodes="3"),
    "nothing": change(dataset=None),
    "terminal codes": change(dataset="\x1b[2J"),
    "a direction of writing": change(dataset="\u202ename"),
    "half a character": change(dataset="\ud800"),
    "a long text": change(dataset="x" * 2000),
    "codes in a key": change(fingerprint={"\x1b": 1}),
    "a nested fingerprint": change(fingerprint={"a": {"b": 1}}),
    "a fingerprint of another kind": change(fingerprint=["length"]),
    "a fingerprint of much": change(fingerprint={str(entry): entry for entry in range(9)}),
    "a negative number in a fingerprint": change(fingerprint={"length": -1}),
    "a huge number in a fingerprint": change(fingerprint={"length": 10**30}),
    "a missing key": json.dumps({"geometry": VALUES["geometry"]}),
    "a strange key": change(other=1),
    "a key twice": change()[:-1] + ', "node": 0}',
    "a geometry of another kind": change(geometry=[1000, 400, 600, 7]),
    "a geometry without slots": change(geometry={"size": 1000}),
    "a geometry with more": geometry(rows=3),
    "more slots than bytes": geometry(size=10**12, slots=10**12, start=0, step=1),
    "more slots than samples": geometry(slots=1001),
    "negative slots": geometry(slots=-1),
    "a fraction of slots": geometry(slots=1.0),
    "a negative start": geometry(start=-1),
    "a truth for a step": geometry(step=True),
    "a start outside": geometry(start=1000),
    "a step that divides": geometry(step=10),
    "a step too large": geometry(step=2**62 + 1),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_what_is_damaged_is_one_error(broken: str) -> None:
    """It says that the cache is damaged, in words that can be printed."""
    with pytest.raises(ManifestError, match="is damaged: ") as caught:
        read_manifest(header(BROKEN[broken]), PAYLOAD)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200


def test_other_versions_and_other_files_are_told_apart() -> None:
    """A header from before there were versions, one of a later version, one without a manifest, and none at all."""
    text = json.dumps(VALUES)
    for content, words in (
        (header(text, version=0), "another version"),
        (header(text, version=FORMAT + 1), f"format {FORMAT + 1}, this one has {FORMAT}"),
        (header(b""), "does not say what it holds"),
        (header(text)[:100], "cut off"),
        (b"", "cut off"),
        (bytes(HEADER_BYTES), "another magic number"),
        (header(text, length=2**32 - 1), "is damaged"),
    ):
        with pytest.raises(ManifestError, match=words):
            read_manifest(content, PAYLOAD)
    with pytest.raises(ManifestError, match="cut off"):
        read_manifest(header(text), -1)


texts = st.text('aé \\"{}[],:\x00\x1b\u202e\ud800', max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=10,
)
mutated = st.dictionaries(st.sampled_from([*VALUES, "other"]), values, max_size=4).map(lambda new: change(**new))
bent = st.dictionaries(st.sampled_from(["size", "slots", "start", "step"]), st.integers(-2, 2**64) | values, max_size=4)
spoilt = st.builds(
    lambda place, new: JSON[:place] + new + JSON[place + len(new) :], st.integers(0, len(JSON)), st.binary(max_size=8)
)


@given(st.binary(max_size=200) | st.binary(max_size=200).map(header) | (mutated | spoilt).map(header))
def test_no_bytes_are_another_error(content: bytes) -> None:
    """Whatever a header holds, it is a manifest that can be printed and counted with, or a ManifestError."""
    check(content)


@given(bent)
def test_every_geometry_is_an_arc_or_an_error(numbers: dict[str, Any]) -> None:
    """The rules are those of the Arc that is made of it."""
    check(header(geometry(**numbers)))


def check(content: bytes) -> None:
    try:
        manifest = read_manifest(content, PAYLOAD)
    except ManifestError:
        return
    assert Arc(**asdict(manifest.geometry)).geometry == asdict(manifest.geometry)
    assert manifest.geometry.slots <= PAYLOAD
    assert 0 <= manifest.node < manifest.nodes
    assert all(str(value).isprintable() for value in (manifest.dataset, manifest.budget, *manifest.fingerprint.items()))


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60), st.integers(0, 60))
def test_an_arc_is_a_geometry(size: int, slots: int, start: int, step: int) -> None:
    """What an Arc accepts, a manifest can hold."""
    try:
        arc = Arc(size, slots, start, step)
    except ValueError:
        with pytest.raises(ManifestError):
            Geometry(size, slots, start, step)
    else:
        assert asdict(Geometry(**arc.geometry)) == arc.geometry


def test_no_header_decides_how_much_memory_it_takes() -> None:
    """The worst that fits in a header costs less than a mebibyte."""
    worst = ["[" * 4000, "[" + "[]," * 1300 + "1]", geometry(size=10**18, slots=10**18), change(created=10**3900)]
    tracemalloc.start()
    for text in worst:
        with pytest.raises(ManifestError):
            read_manifest(header(text), PAYLOAD)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


@given(texts)
def test_printable_text_is_printable(name: str) -> None:
    """Whatever a file is called, its name can be shown, and reads as it is where it could be shown all along."""
    shown = printable(name)
    assert shown.isprintable()
    assert shown == name or not name.isprintable()
