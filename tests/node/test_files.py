"""The files of segments: only what is certainly this user's own is opened, and a header is read as it was written."""

import json
import os
import socket
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lightning_stocache.node.files import (
    FORMAT,
    HEADER_BYTES,
    MANIFEST_OFFSET,
    Geometry,
    Manifest,
    ManifestError,
    make_file,
    open_own,
    read_manifest,
    write_header,
)

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
def test_what_is_strange_is_refused_without_waiting(tmp_path: Path) -> None:
    """The error is printable, and tells the way out. No link is followed, no file made, no pipe waited for. A missing
    file is made for this user alone. Opened again, it is the same file."""
    path = tmp_path / "file\x1b[2J"
    before = set(os.listdir("/proc/self/fd"))
    for make in (make_link, os.mkfifo, os.mkdir, make_socket, make_open_to_all, make_foreign):
        make(path)
        for create in (False, True):
            with pytest.raises(PermissionError, match=r"is not trusted.*: give another name, or remove it") as caught:
                open_own(str(path), create=create)
            assert str(caught.value).isprintable()
        path.rmdir() if path.is_dir() else path.unlink()
    assert os.listdir(tmp_path) == []
    assert set(os.listdir("/proc/self/fd")) == before
    with pytest.raises(FileNotFoundError):
        open_own(str(path))
    made = open_own(str(path), create=True)
    again = open_own(str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.fstat(made).st_ino == os.fstat(again).st_ino
    os.close(made), os.close(again)


# --- its header


def header(text: bytes, *, version: int = FORMAT) -> bytes:
    """A header as `write_header` makes it, with any text in it."""
    begin = b"STOCACHE" + bytes(16) + version.to_bytes(4, "little")
    size = len(text).to_bytes(4, "little")
    return (begin.ljust(MANIFEST_OFFSET, b"\0") + size + text).ljust(HEADER_BYTES, b"\0")[:HEADER_BYTES]


def test_what_cannot_be_read_is_told_apart() -> None:
    """Every value comes back as it was written; a manifest that has no room in a header is an error. Each fault has its
    words: broken text, a missing value, too many slots, a cut file, another version."""
    file, _ = make_file("memfd")
    write_header(file, PAYLOAD, GOOD)
    assert read_manifest(os.pread(file, HEADER_BYTES, 0), PAYLOAD) == GOOD
    with pytest.raises(ManifestError, match="must fit in 4028 bytes, got"):
        write_header(file, PAYLOAD, replace(GOOD, dataset="x" * HEADER_BYTES))
    os.close(file)
    geometries = ({}, {"geometry": {"slots": 3}}, {"geometry": {"size": 10**6, "slots": 10**6}})
    good, missing, many = (json.dumps(asdict(GOOD) | geometry).encode() for geometry in geometries)
    for content, words in [
        (header(b"\xff\xfe"), "is damaged"),
        (header(b"{" * 5000), "is damaged"),
        (header(missing), "is damaged"),
        (header(many), "is damaged: 1000000 slots"),
        (header(good)[:100], "is damaged"),
        (header(good, version=FORMAT + 1), f"format {FORMAT + 1}, this one has {FORMAT}"),
        (header(b""), "does not say what it holds"),
    ]:
        with pytest.raises(ManifestError, match=words):
            read_manifest(content, PAYLOAD)
