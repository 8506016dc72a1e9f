"""The header of a segment's file: its first 4096 bytes.

From byte 0 a magic number (8 bytes); from byte 8 a random token by which an attaching process knows the segment again
(16); from byte 24 the number of this format (4); from byte 48 two numbers of 8 bytes for the owner of the segment; from
byte 64 a manifest: its length (4) and that many bytes of JSON. A named segment is known again by its manifest; other
segments carry one for people who ask what takes their memory.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

__all__ = [
    "FORMAT",
    "HEADER_BYTES",
    "MANIFEST_OFFSET",
    "NUMBERS_OFFSET",
    "Geometry",
    "Manifest",
    "ManifestError",
    "new_header",
    "printable",
    "read_manifest",
    "token_of",
    "write_manifest",
]

HEADER_BYTES = 4096
NUMBERS_OFFSET = 48
MANIFEST_OFFSET = 64
FORMAT = 4  # of header, manifest and payload; another one is refused, so change it with any of them
_MAGIC = b"STOCACHE"
_TOKEN_BYTES = 16
_NUMBER = struct.Struct("<I")  # the format, and the manifest's length
_MANIFEST_START = MANIFEST_OFFSET + _NUMBER.size


class ManifestError(ValueError):
    """A header holds no manifest that this version can read."""


@dataclass(frozen=True)
class Geometry:
    """Where the samples lie: the numbers of a `cache.placement.Arc`."""

    size: int
    slots: int
    start: int = 0
    step: int = 1


@dataclass(frozen=True)
class Manifest:
    """What a segment says about itself.

    Args:
        geometry: where its samples lie.
        dataset: what is cached, for people.
        node: of which node of the job this is the part, from 0 on.
        nodes: how many nodes the job has.
        created: seconds since the epoch.
        payload: bytes behind the header, by which one sees that a file was cut off.
        budget: what its maker was given to spend, as text; empty where it does not matter.
        fingerprint: what two jobs that share it must have in common; empty where it is not shared.
        found: what its maker has found out about the samples, as a digest; empty where that is not known.
    """

    geometry: Geometry
    dataset: str = ""
    node: int = 0
    nodes: int = 1
    created: int = field(default_factory=lambda: int(time.time()))
    payload: int = 0
    budget: str = ""
    fingerprint: Mapping[str, str | int] = field(default_factory=dict)
    found: str = ""


def new_header() -> bytes:
    """The beginning of a header with a token of its own, without a manifest."""
    return _MAGIC + os.urandom(_TOKEN_BYTES) + _NUMBER.pack(FORMAT)


def token_of(data: int) -> bytes:
    """The token of a segment's file.

    Raises:
        ValueError: the file is not a segment.
    """
    header = os.pread(data, len(_MAGIC) + _TOKEN_BYTES, 0)
    if not header.startswith(_MAGIC):
        raise ValueError("the file is not a segment of lightning_stocache: its header has another magic number")
    return header[len(_MAGIC) :]


def write_manifest(data: int, manifest: Manifest) -> None:
    """Write a manifest into the header of a file.

    Raises:
        ManifestError: it is too large.
    """
    text = json.dumps(asdict(manifest), sort_keys=True, ensure_ascii=False).encode()
    room = HEADER_BYTES - _MANIFEST_START
    if len(text) > room:
        raise ManifestError(f"manifest must fit in {room} bytes, got {len(text)}")
    os.pwrite(data, _NUMBER.pack(len(text)) + text, MANIFEST_OFFSET)


def read_manifest(header: bytes, payload: int) -> Manifest:
    """The manifest in a header. The file is this user's own, so its text is trusted to be what was written.

    Args:
        header: the first bytes of a file.
        payload: how many bytes follow after the header.

    Raises:
        ManifestError: the header is cut off, damaged, or of another version; the message is what follows after
            "the cache ...".
    """
    if len(header) < HEADER_BYTES or payload < 0:
        raise ManifestError("is damaged: its header is cut off")
    if not header.startswith(_MAGIC):
        raise ManifestError("is none: it has another magic number")
    (version,) = _NUMBER.unpack_from(header, len(_MAGIC) + _TOKEN_BYTES)  # 0: from before there was a number
    if version != FORMAT:
        raise ManifestError(f"is of another version of lightning_stocache (format {version}, this one has {FORMAT})")
    (length,) = _NUMBER.unpack_from(header, MANIFEST_OFFSET)
    if not length:
        raise ManifestError("does not say what it holds")
    try:
        values = json.loads(header[_MANIFEST_START : _MANIFEST_START + length])
        manifest = Manifest(**values | {"geometry": Geometry(**values["geometry"])})
        fits = manifest.geometry.slots <= payload  # each has a byte that says whether it is filled
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ManifestError("is damaged: what it says of itself cannot be read") from error
    if not fits:
        raise ManifestError(f"is damaged: {manifest.geometry.slots} slots do not fit in its {payload} bytes")
    return manifest


def printable(text: str, longest: int | None = None) -> str:
    r"""The text with every character that is not printable as its escape, cut where it is too long.

    File names, command lines and headers can hold anything: codes that move the cursor or name the window anew, that
    turn the direction of writing, or halves of characters that cannot be written at all.

    Example:
        >>> printable("photos\x1b[2J"), printable("a long name", longest=8)
        ('photos\\x1b[2J', 'a lon...')
    """
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return shown if longest is None or len(shown) <= longest else f"{shown[: longest - 3]}..."
