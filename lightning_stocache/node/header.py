"""The header of a segment's file: its first 4096 bytes.

    byte  0  magic number (8 bytes)
    byte  8  random token, by which an attaching process recognizes the segment (16)
    byte 24  number of this format (4)
    byte 48  two int64 for the owner of the segment (16)
    byte 64  length of the manifest (4), then the manifest as JSON

A named segment needs a manifest. In others it tells people what takes their memory.
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
]

HEADER_BYTES = 4096
NUMBERS_OFFSET = 48
MANIFEST_OFFSET = 64
FORMAT = 6  # of header, manifest and payload; another one is refused, so change it with any of them
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
    """The content of a segment.

    Args:
        geometry: where its samples lie.
        dataset: what is cached, for people.
        node: number of the job's node whose part this is.
        nodes: number of nodes of the job.
        created: seconds since the epoch.
        payload: bytes behind the header, which show whether a file was cut off.
        budget: the budget of the job that made it, as text; empty if the segment is not shared between jobs.
        fingerprint: what two jobs that share the segment must have in common; empty if it is not shared.
        found: digest of what set-up found out about the samples; empty if unknown.
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


def new_header(manifest: Manifest | None = None) -> bytes:
    """A header with a random token.

    Raises:
        ManifestError: the manifest is too large.
    """
    header = _MAGIC + os.urandom(_TOKEN_BYTES) + _NUMBER.pack(FORMAT)
    if manifest is not None:
        text = json.dumps(asdict(manifest), sort_keys=True, ensure_ascii=False).encode()
        room = HEADER_BYTES - _MANIFEST_START
        if len(text) > room:
            raise ManifestError(f"manifest must fit in {room} bytes, got {len(text)}")
        header = header.ljust(MANIFEST_OFFSET, b"\0") + _NUMBER.pack(len(text)) + text
    return header.ljust(HEADER_BYTES, b"\0")


def token_of(data: int) -> bytes:
    """The token of a segment's file.

    Raises:
        ValueError: the file is not a segment.
    """
    header = os.pread(data, len(_MAGIC) + _TOKEN_BYTES, 0)
    if not header.startswith(_MAGIC):
        raise ValueError("the file is not a segment of lightning_stocache: its header has another magic number")
    return header[len(_MAGIC) :]


def read_manifest(header: bytes, payload: int) -> Manifest:
    """The manifest in a header.

    Args:
        header: the first bytes of a file of this user, whose content is trusted.
        payload: number of bytes behind the header.

    Raises:
        ManifestError: the header is cut off, damaged, or of another version. The message continues "the cache ...".
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
        fits = manifest.geometry.slots <= payload  # a slot has a byte at least, its state
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ManifestError("is damaged: what it says of itself cannot be read") from error
    if not fits:
        raise ManifestError(f"is damaged: {manifest.geometry.slots} slots do not fit in its {payload} bytes")
    return manifest


def printable(text: str, longest: int | None = None) -> str:
    r"""The text with every unprintable character escaped, cut to at most `longest` characters.

    File names and command lines can hold terminal codes, or halves of characters that cannot be written at all.

    Example:
        >>> printable("photos\x1b[2J"), printable("a long name", longest=8)
        ('photos\\x1b[2J', 'a lon...')
    """
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return shown if longest is None or len(shown) <= longest else f"{shown[: longest - 3]}..."
