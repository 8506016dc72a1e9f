"""What is written into a header is read again; what a crash or another version has left there is one kind of error."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stocache.node.header import (
    FORMAT,
    HEADER_BYTES,
    MANIFEST_OFFSET,
    Geometry,
    Manifest,
    ManifestError,
    new_header,
    printable,
    read_manifest,
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
VALUES: dict[str, Any] = asdict(GOOD)


def header(text: str | bytes, *, version: int = FORMAT, length: int | None = None) -> bytes:
    """A header as `new_header` makes it, with any text in it."""
    text = text.encode() if isinstance(text, str) else text
    begin = b"STOCACHE" + bytes(16) + version.to_bytes(4, "little")
    size = (len(text) if length is None else length).to_bytes(4, "little")
    return (begin.ljust(MANIFEST_OFFSET, b"\0") + size + text).ljust(HEADER_BYTES, b"\0")[:HEADER_BYTES]


def test_what_is_written_is_read_if_it_fits() -> None:
    """Every value comes back as it was; a manifest that has no room in a header is an error."""
    assert read_manifest(new_header(GOOD), PAYLOAD) == GOOD
    with pytest.raises(ManifestError, match="must fit in 4028 bytes, got"):
        new_header(replace(GOOD, dataset="x" * HEADER_BYTES))


@pytest.mark.parametrize(
    "broken",
    [
        b"\xff\xfe",
        "[]",
        "{" * 100,
        json.dumps(VALUES | {"other": 1}),
        json.dumps(VALUES | {"geometry": {"slots": 3}}),
        json.dumps(VALUES | {"geometry": {"size": 10**6, "slots": 10**6}}),
    ],
)
def test_what_is_damaged_is_one_error(broken: str | bytes) -> None:
    """No text, no object, cut off, with another key, without one, and with more slots than bytes."""
    with pytest.raises(ManifestError, match="is damaged: "):
        read_manifest(header(broken), PAYLOAD)


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


@given(st.text('aé \\"{}[],:\x00\x1b\u202e\ud800', max_size=20))
def test_printable_text_is_printable(name: str) -> None:
    """Whatever a file is called, its name can be shown, and reads as it is where it could be shown all along."""
    shown = printable(name)
    assert shown.isprintable()
    assert shown == name or not name.isprintable()
