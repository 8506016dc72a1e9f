"""What a segment says about itself, in its header: a few plain values, as JSON.

A name that is meant to last needs it, to be known again. Other segments carry one for people who ask who holds what.
The file is this user's own (`owned`). What a crash has damaged, or another version has written, is a `ManifestError`.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from lightning_stocache.node.files import FORMAT, HEADER_BYTES, MANIFEST_OFFSET, format_of

__all__ = ["Geometry", "Manifest", "ManifestError", "printable", "read_manifest", "write_manifest"]

_LENGTH = struct.Struct("<I")
_START = MANIFEST_OFFSET + _LENGTH.size


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
    """

    geometry: Geometry
    dataset: str = ""
    node: int = 0
    nodes: int = 1
    created: int = field(default_factory=lambda: int(time.time()))
    payload: int = 0
    budget: str = ""
    fingerprint: Mapping[str, str | int] = field(default_factory=dict)


def write_manifest(data: int, manifest: Manifest) -> None:
    """Write a manifest into the header of a file.

    Raises:
        ManifestError: it is too large.
    """
    text = json.dumps(asdict(manifest), sort_keys=True, ensure_ascii=False).encode()
    room = HEADER_BYTES - _START
    if len(text) > room:
        raise ManifestError(f"manifest must fit in {room} bytes, got {len(text)}")
    os.pwrite(data, _LENGTH.pack(len(text)) + text, MANIFEST_OFFSET)


def read_manifest(header: bytes, payload: int) -> Manifest:
    """The manifest in a header.

    Args:
        header: the first bytes of a file.
        payload: how many bytes follow after the header.

    Raises:
        ManifestError: it is no header of a segment, or of another version, cut off or damaged; the message is what
            follows after "the cache ...".
    """
    if len(header) < HEADER_BYTES or payload < 0:
        raise ManifestError("is damaged: its header is cut off")
    if (version := format_of(header)) is None:
        raise ManifestError("is none: it has another magic number")
    if version != FORMAT:
        raise ManifestError(f"is of another version of lightning_stocache (format {version}, this one has {FORMAT})")
    (length,) = _LENGTH.unpack_from(header, MANIFEST_OFFSET)
    if not length:
        raise ManifestError("does not say what it holds")
    try:
        values = json.loads(header[_START : _START + length])
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
