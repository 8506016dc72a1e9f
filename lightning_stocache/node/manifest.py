"""What a segment says about itself, in its header: a few plain values, as JSON.

A name that is meant to last needs it, to be known again. Other segments carry one for people who ask who holds what.

A header outlives the job and the version that wrote it, and may have been damaged since. `read_manifest` is the only
one who looks into it, and takes nothing on trust: it looks at the magic number and the format, reads at most the
header's own 4 KiB, and gives a `Manifest`, whose numbers are in range and whose texts can be printed, or raises a
`ManifestError`. Nothing else, whatever the bytes are.
"""

from __future__ import annotations

import json
import math
import os
import struct
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NoReturn

from lightning_stocache.node.files import FORMAT, HEADER_BYTES, MANIFEST_OFFSET, format_of

__all__ = ["Geometry", "Manifest", "ManifestError", "printable", "read_manifest", "write_manifest"]

_LENGTH = struct.Struct("<I")
_START = MANIFEST_OFFSET + _LENGTH.size
_MOST = 2**63 - 1
_END_OF_TIME = 253_402_300_799  # the last second of the year 9999, which is as far as dates go
_LONGEST = 1000  # characters of a text
_ENTRIES = 8


class ManifestError(ValueError):
    """A header holds no manifest that this version can read."""


@dataclass(frozen=True)
class Geometry:
    """Where the samples lie: the numbers of a `cache.placement.Arc`, under the same rules.

    Raises:
        ManifestError: they are none of an arc.
    """

    size: int
    slots: int
    start: int = 0
    step: int = 1

    def __post_init__(self) -> None:
        for name, number in asdict(self).items():
            _check_number(name, number, 0, _MOST)
        if not (self.slots <= self.size and self.start < max(self.size, 1)):
            raise ManifestError(f"its arc is none: {self.slots} slots from {self.start} on, of {self.size}")
        if self.size * self.step > _MOST or math.gcd(self.step, self.size) != 1:
            raise ManifestError(f"its arc is none: step {self.step} on a ring of {self.size}")


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

    Raises:
        ManifestError: a value has another type, is out of range, or is text that cannot be printed.
    """

    geometry: Geometry
    dataset: str = ""
    node: int = 0
    nodes: int = 1
    created: int = field(default_factory=lambda: int(time.time()))
    payload: int = 0
    budget: str = ""
    fingerprint: Mapping[str, str | int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_text("dataset", self.dataset)
        _check_text("budget", self.budget)
        _check_number("nodes", self.nodes, 1, _MOST)
        _check_number("node", self.node, 0, self.nodes - 1)
        _check_number("created", self.created, 0, _END_OF_TIME)
        _check_number("payload", self.payload, 0, _MOST - HEADER_BYTES)
        if type(self.fingerprint) is not dict or len(self.fingerprint) > _ENTRIES:
            raise ManifestError("its fingerprint is none")
        for key, value in self.fingerprint.items():
            _check_text("fingerprint", key)
            if type(value) is int:
                _check_number("fingerprint", value, 0, _MOST)
            else:
                _check_text("fingerprint", value)


_KEYS = {entry.name for entry in fields(Manifest)}


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
        values = json.loads(
            header[_START : _START + length].decode(),
            parse_float=_refuse,
            parse_constant=_refuse,
            object_pairs_hook=_each_once,
        )
        if values.keys() != _KEYS:
            raise ManifestError("it says other things of itself than it should")
        manifest = Manifest(**values | {"geometry": Geometry(**values["geometry"])})
    except ManifestError as error:
        raise ManifestError(f"is damaged: {error}") from error
    except (ValueError, AttributeError, TypeError, RecursionError) as error:  # no JSON, no objects, or too deep
        raise ManifestError("is damaged: what it says of itself cannot be read") from error
    if manifest.geometry.slots > payload:  # each has a byte that says whether it is filled
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


def _check_number(name: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ManifestError(f"its {name} is no number from {least} to {most}")


def _check_text(name: str, value: object) -> None:
    if type(value) is not str or len(value) > _LONGEST or not value.isprintable():
        raise ManifestError(f"its {name} is no text of at most {_LONGEST} printable characters")


def _refuse(text: str) -> NoReturn:
    raise ValueError("there are no fractions in a manifest")


def _each_once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    pairs = list(pairs)
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key is there twice")
    return values
