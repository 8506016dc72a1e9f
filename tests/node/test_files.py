"""The files of segments: only what is certainly this user's own is opened, and a header is read as it was written."""

import json
import os
import socket
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stocache.node.files import (
    FORMAT,
    HEADER_BYTES,
    MANIFEST_OFFSET,
    Geometry,
    Manifest,
    ManifestError,
    make_file,
    open_own,
    printable,
    read_manifest,
    write_header,
)
from tests.processes import call

STRANGER = 12345
PAYLOAD = 4096
GOOD = Manifest(
    Geometry(size=1000, slots=400, start=600, step=7),
    dataset="Photos (1,000 samples, train)",
    node=1,
    nodes=2,
    budget="8 GiB",
    fingerprint={"dataset": "photos.Photos", "length": 1000, "fingerprint": "é"},
)
VALUES: dict[str, Any] = asdict(GOOD)


# --- whose file it is


def make_link(path: Path) -> None:
    path.symlink_to(path.parent / "elsewhere")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(path))


def make_open_to_all(path: Path) -> None:
    path.touch()
    path.chmod(0o666)


def make_foreign(path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    path.touch(0o666)
    os.chown(path, STRANGER, STRANGER)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("make", [make_link, os.mkfifo, os.mkdir, make_socket, make_open_to_all, make_foreign])
def test_what_is_strange_is_refused_without_waiting(tmp_path: Path, make: Any, create: bool) -> None:
    """The error is printable, and tells the way out. No link is followed, no file made, no pipe waited for."""
    make(tmp_path / "file\x1b[2J")
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(PermissionError, match=r"is not trusted.*: give another name, or remove it") as caught:
        open_own(str(tmp_path / "file\x1b[2J"), create=create)
    assert str(caught.value).isprintable()
    assert not (tmp_path / "elsewhere").exists()
    assert set(os.listdir("/proc/self/fd")) == before


def test_what_is_own_is_opened_and_made(tmp_path: Path) -> None:
    """A missing file is made for this user alone. Opened again, it is the same file."""
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        open_own(str(path))
    made = open_own(str(path), create=True)
    again = open_own(str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.fstat(made).st_ino == os.fstat(again).st_ino
    os.close(made), os.close(again)


@pytest.mark.processes
def test_a_user_is_told_of_roots_file(tmp_path: Path) -> None:
    """A user who may not open the file gets the same message."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    path = tmp_path / "file"
    path.touch(0o600)
    for folder in (tmp_path, *tmp_path.parents):
        folder.chmod(0o755)
        if folder.name.startswith("pytest-of-"):
            break
    assert "is not trusted" in call(as_stranger, str(path))


def as_stranger(path: str) -> str:
    os.setresuid(STRANGER, STRANGER, 0)
    with pytest.raises(PermissionError) as caught:
        open_own(path)
    os.setresuid(0, 0, 0)
    return str(caught.value)


# --- its header


def header(text: str | bytes, *, version: int = FORMAT) -> bytes:
    """A header as `write_header` makes it, with any text in it."""
    text = text.encode() if isinstance(text, str) else text
    begin = b"STOCACHE" + bytes(16) + version.to_bytes(4, "little")
    size = len(text).to_bytes(4, "little")
    return (begin.ljust(MANIFEST_OFFSET, b"\0") + size + text).ljust(HEADER_BYTES, b"\0")[:HEADER_BYTES]


def test_what_is_written_is_read_if_it_fits() -> None:
    """Every value comes back as it was; a manifest that has no room in a header is an error."""
    file, _ = make_file("memfd")
    write_header(file, PAYLOAD, GOOD)
    assert read_manifest(os.pread(file, HEADER_BYTES, 0), PAYLOAD) == GOOD
    with pytest.raises(ManifestError, match="must fit in 4028 bytes, got"):
        write_header(file, PAYLOAD, replace(GOOD, dataset="x" * HEADER_BYTES))
    os.close(file)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (header(b"\xff\xfe"), "is damaged"),
        (header("{" * 5000), "is damaged"),
        (header(json.dumps(VALUES | {"geometry": {"slots": 3}})), "is damaged"),
        (header(json.dumps(VALUES | {"geometry": {"size": 10**6, "slots": 10**6}})), "is damaged: 1000000 slots"),
        (header(json.dumps(VALUES))[:100], "is damaged"),
        (header(json.dumps(VALUES), version=0), "another version"),
        (header(json.dumps(VALUES), version=FORMAT + 1), f"format {FORMAT + 1}, this one has {FORMAT}"),
        (header(b""), "does not say what it holds"),
    ],
)
def test_what_cannot_be_read_is_told_apart(content: bytes, words: str) -> None:
    """Each fault has its words: broken text, a missing value, too many slots, a cut file, another version."""
    with pytest.raises(ManifestError, match=words):
        read_manifest(content, PAYLOAD)


@given(st.text('aé \\"{}[],:\x00\x1b\u202e\ud800', max_size=20))
def test_printable_text_is_printable(name: str) -> None:
    """Every file name can be shown. A printable name is shown unchanged."""
    shown = printable(name)
    assert shown.isprintable()
    assert shown == name or not name.isprintable()
