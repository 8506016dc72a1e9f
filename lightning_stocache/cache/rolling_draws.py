"""What the fillers of a rolling store draw, and how many samples each has drawn.

On a disk these numbers outlive their job, so the fillers of the next job can continue after its draws.
"""

from __future__ import annotations

from contextlib import suppress

from lightning_stocache.node.segment import Numbers

__all__ = ["DRAWS_NUMBERS", "FILLERS", "RollingDraws"]

FILLERS = 64
"""The most fillers of a store."""

DRAWS_NUMBERS = 1 + FILLERS
"""How many numbers, int64 each: the plan, and a count per filler."""


class RollingDraws:
    """The draws of a store's fillers.

    Args:
        numbers: the numbers of the store.
        begin: the first number of the draws.

    Example:
        >>> draws = RollingDraws(memoryview(bytearray(8 * DRAWS_NUMBERS)).cast("q"), 0)
        >>> draws.plan(7, goes_on=True), draws.note(2, 5), draws.plan(7, goes_on=True), draws.count(2)
        (False, None, False, 5)
        >>> draws.plan(8, goes_on=True), draws.count(2)
        (True, 0)
    """

    def __init__(self, numbers: Numbers, begin: int) -> None:
        self._numbers, self._plan, self._counts = numbers, begin, begin + 1

    def plan(self, plan: int, *, goes_on: bool) -> bool:
        """Note the plan of the draws. The counts of the last job stay only if its plan is equal and `goes_on`.

        Args:
            plan: a digest of everything that decides the draws.
            goes_on: whether the fillers continue after the draws of the last job.

        Returns:
            Whether the fillers cannot go on, because the last job had another plan.
        """
        last = self._numbers[self._plan]
        with suppress(OSError):  # a full disk
            if not (goes_on and last == plan):
                for filler in filter(self.count, range(FILLERS)):
                    self._numbers[self._counts + filler] = 0
            self._numbers[self._plan] = plan
        return goes_on and last not in (0, plan)

    def count(self, filler: int) -> int:
        """The number of samples that a filler has drawn; of a stream, since its beginning."""
        return int(self._numbers[self._counts + filler])

    def note(self, filler: int, count: int) -> None:
        """Note how many samples a filler has drawn."""
        with suppress(OSError):  # a full disk: some are drawn again
            self._numbers[self._counts + filler] = count

    def close(self) -> None:
        """Drop the view."""
        self._numbers = memoryview(b"")
