"""A sample that cannot be cached among others that can."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

__all__ = ["Odd", "warn_of_odd"]

log = logging.getLogger(__name__)


def warn_of_odd(source: Any, words: str) -> None:
    """Say that some samples of a source are not cached, because they cannot be kept as the others are."""
    log.warning(
        "%s: some samples are not cached, but loaded every time. %s (strict=True makes it an error)",
        type(source).__name__,
        words,
    )


@dataclass(frozen=True)
class Odd:
    """A sample that is not of the cache's spec, as the source gave it; it is loaded every time.

    Args:
        index: of the sample.
        sample: what the source gave.
        has_all_places: whether it is built like the others, and differs in dtypes and shapes alone.
    """

    index: int
    sample: Any
    has_all_places: bool = True
