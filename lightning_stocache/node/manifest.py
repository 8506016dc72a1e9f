"""What a segment says about itself, in its header: plain values, as JSON.

A name that is meant to last needs it, to be known again. Other segments carry one for people who ask who holds what.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from typing import Any

from lightning_stocache.node.files import HEADER_BYTES, MANIFEST_OFFSET

__all__ = ["read_manifest", "write_manifest"]

_LENGTH = struct.Struct("<I")


def write_manifest(data: int, manifest: Mapping[str, Any]) -> None:
    """Write a manifest into the header of a file.

    Raises:
        ValueError: it is too large.
    """
    text = json.dumps(manifest, sort_keys=True).encode()
    room = HEADER_BYTES - MANIFEST_OFFSET - _LENGTH.size
    if len(text) > room:
        raise ValueError(f"manifest must fit in {room} bytes, got {len(text)}")
    os.pwrite(data, _LENGTH.pack(len(text)) + text, MANIFEST_OFFSET)


def read_manifest(header: bytes) -> dict[str, Any]:
    """The manifest in a header.

    Raises:
        ValueError: there is none.
    """
    try:
        (length,) = _LENGTH.unpack_from(header, MANIFEST_OFFSET)
    except struct.error as error:
        raise ValueError("the header is cut off") from error
    start = MANIFEST_OFFSET + _LENGTH.size
    manifest = json.loads(header[start : start + length])
    if not isinstance(manifest, dict):
        raise ValueError("the header holds no manifest")
    return manifest
