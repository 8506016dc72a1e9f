"""What `pack` writes into an LMDB beside the samples: the manifest, under a key of its own, and the samples' keys.

A sample lies as a blob (`blob`) under its index in twelve decimal digits: LMDB's order is that of the indices. The
manifest is JSON. Every commit has it, with `complete: false` until the last sample is there; the number of keys beside
it is the number of samples that are packed. Commits are atomic, so resuming needs nothing else.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = ["MANIFEST_KEY", "PackManifest", "key_of"]

MANIFEST_KEY = b"#lightning_stocache"  # before the digits
_FORMAT, _VERSION = "lightning_stocache pack", 1
_TYPES = {"samples": int, "source": str, "encoded": bool, "fingerprint": str, "classes": list, "complete": bool}


def key_of(index: int) -> bytes:
    """The key of a sample.

    Example:
        >>> key_of(7)
        b'000000000007'
    """
    return b"%012d" % index


@dataclass(frozen=True)
class PackManifest:
    """What an LMDB was packed from.

    Args:
        samples: how many there are, once all are packed.
        source: class of the dataset.
        encoded: whether images lie there as their files.
        fingerprint: the user's word for whatever else decides what the samples are.
        classes: names of classes that the source had, else empty.
        complete: whether all samples are there.

    Example:
        >>> manifest = PackManifest(3, "photos.Photos")
        >>> PackManifest.parse(manifest.to_bytes()) == manifest
        True
    """

    samples: int
    source: str
    encoded: bool = False
    fingerprint: str = ""
    classes: tuple[str, ...] = ()
    complete: bool = False

    def to_bytes(self) -> bytes:
        """As it lies in the LMDB."""
        return json.dumps({"format": _FORMAT, "version": _VERSION} | asdict(self)).encode()

    @classmethod
    def parse(cls, content: bytes) -> PackManifest:
        """Read one, with distrust.

        Raises:
            ValueError: it is none, or one of another version; the message says which.
        """
        try:
            read: Any = json.loads(content)
        except (ValueError, RecursionError):
            read = None
        if not isinstance(read, dict) or read.get("format") != _FORMAT:
            raise ValueError("its manifest is damaged")
        if read.get("version") != _VERSION:
            raise ValueError(
                f"it was packed in version {read.get('version')} of the format, and this package reads version "
                f"{_VERSION}: pack it again, or install the package that packed it"
            )
        given: dict[str, Any] = {field.name: read.get(field.name) for field in fields(cls)}
        of_their_types = all(type(given[name]) is kind for name, kind in _TYPES.items())
        if not of_their_types or given["samples"] < 1 or {*map(type, given["classes"])} - {str}:
            raise ValueError("its manifest is damaged")
        return cls(**given | {"classes": tuple(given["classes"])})
