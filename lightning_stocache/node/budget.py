"""The user's budget. `Budget.parse` reads "8GiB", "60%", "60% of free", "auto", bytes, 0, and refuses other values."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal, SupportsIndex

__all__ = ["Budget", "format_bytes"]

_UNITS = {"B": 1}
for _power, _prefix in enumerate("KMGT", 1):
    _UNITS |= {f"{_prefix}B": 1000**_power, f"{_prefix}iB": 1024**_power}
_FORMS = (
    '"8GiB" or "500MB" (B, KB to TB, KiB to TiB), "60%" (of the dataset\'s cached size), "60% of free" (of the memory '
    'that may safely be used), "auto" (the whole dataset), a whole number of bytes, or 0 (off)'
)
_TEXT = re.compile(
    r"(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:e\+?\d{1,2})?)\s*(?:(?P<unit>(?:[kmgt]i?)?b)|(?P<percent>%)(?P<free>\s*of\s+free)?)?",
    re.IGNORECASE | re.ASCII,
)


@dataclass(frozen=True)
class Budget:
    """The user's budget per node. Made by `parse`.

    Args:
        amount: Bytes, or a percentage from 0 to 100.
        unit: What `amount` counts: bytes, percent of the dataset's cached size, or percent of the free memory.
        written: The budget as the user wrote it, for messages.

    Raises:
        ValueError: `amount` is negative, not whole (bytes), or above 100 (percent).

    Example:
        >>> str(Budget.parse(2**33)), str(Budget.parse("60 % of free")), str(Budget.parse("0%"))
        ('8 GiB', '60% of free', '0')
    """

    amount: Fraction
    unit: Literal["bytes", "% of dataset", "% of free"] = "bytes"
    written: Any = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.amount < 0:
            raise ValueError("budget must not be negative")
        if self.unit == "bytes" and self.amount.denominator != 1:
            raise ValueError("budget without a unit must be a whole number of bytes")
        if self.unit != "bytes" and self.amount > 100:
            raise ValueError("budget cannot be more than 100 percent")

    @classmethod
    def parse(cls, value: int | float | str | Budget) -> Budget:
        """Read a budget as people write it in Python, YAML and on the command line.

        Units may be written in any case, with or without a space. An integral float above 1 is bytes (Hydra reads
        `8e9` as a float). A float in (0, 1] could mean a share, and a whole number from 1 to 100 a percentage: both are
        refused.

        Raises:
            ValueError: The value has none of the accepted forms; the message names the value and lists the forms.
            TypeError: The value is None, a bool, or neither a number nor a string.

        Example:
            >>> [Budget.parse(value).wanted(2000, 1000) for value in ("auto", "25%", "25% of free", 0, "0%")]
            [2000, 500, 250, 0, 0]
            >>> [Budget.parse(value).wanted(2000, 1000) for value in ("1.5KB", "1 kib", 4096, "4096", 8e3)]
            [1500, 1024, 4096, 4096, 8000]
        """
        if isinstance(value, Budget):
            return value
        try:
            budget = cls._of_text(value.strip()) if isinstance(value, str) else cls._of_number(value)
        except (TypeError, ValueError, OverflowError) as error:  # infinity and NaN have no fraction
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{error}; got {value!r}. Accepted are {_FORMS}.") from None
        has_unit = budget.unit != "bytes" or str(value).strip().upper().endswith("B")
        if 1 <= budget.amount <= 100 and not has_unit:
            count = int(budget.amount)
            raise ValueError(f'budget={value!r} means {count} bytes; write "{count}%" or "{count}B"')
        return replace(budget, written=value)

    @classmethod
    def _of_number(cls, number: Any) -> Budget:
        if type(number).__name__ in ("bool", "bool_") or not isinstance(number, (float, SupportsIndex)):
            raise TypeError("budget must be a number or a string")
        if isinstance(number, float):
            return cls._of_decimal(Fraction(number))
        return cls(Fraction(number.__index__()))  # NumPy's integers, too

    @classmethod
    def _of_text(cls, text: str) -> Budget:
        if text.lower() == "auto":
            return cls(Fraction(100), "% of dataset")
        match = _TEXT.fullmatch(text)
        if match is None:
            if _TEXT.fullmatch(f"{text}B"):  # "32G"
                short = text.rstrip("iI")
                raise ValueError(f'budget could mean GB or GiB: write "{short}iB" (1024) or "{short}B" (1000)')
            raise ValueError("budget must not be negative" if text.startswith("-") else "budget cannot be read")
        number = Fraction(match["number"])
        if match["unit"]:
            return cls(Fraction(math.floor(number * _UNITS[match["unit"].upper().replace("I", "i")])))
        if not match["percent"]:  # the shell or YAML may have turned a number into a string: the same rules
            return cls(number) if match["number"].isdigit() else cls._of_decimal(number)
        if number == 0:
            return cls(Fraction(0))  # every way to be off gives an equal budget
        return cls(number, "% of free" if match["free"] else "% of dataset")

    @classmethod
    def _of_decimal(cls, number: Fraction) -> Budget:
        if 0 < number <= 1:
            share = f'"{float(number * 100):.12g}%"'
            raise ValueError(f"budget is ambiguous: it could mean a share or bytes (write {share} for the share)")
        return cls(number)

    def limited(self, amount: int) -> Budget:
        """So many bytes: what is left of this budget."""
        return replace(self, amount=Fraction(amount), unit="bytes")

    @property
    def off(self) -> bool:
        """Whether nothing is to be cached."""
        return self.amount == 0

    def part_of(self, samples: int) -> int:
        """The samples that the budget asks for: a percentage of the dataset's samples, or all samples."""
        return round(self.amount * samples / 100) if self.unit == "% of dataset" else samples

    def wanted(self, dataset_bytes: int, free_bytes: int) -> int:
        """The bytes that the budget asks for, rounded down; never negative, and not limited by anything."""
        whole = {"bytes": 100, "% of dataset": dataset_bytes, "% of free": free_bytes}[self.unit]
        return max(0, math.floor(self.amount * whole / 100))

    def __str__(self) -> str:
        """The text that `parse` reads back as an equal budget."""
        if self.unit != "bytes":
            if self.unit == "% of dataset" and self.amount == 100:
                return "auto"
            return f"{float(self.amount):.9f}".rstrip("0").rstrip(".") + self.unit.removesuffix(" of dataset")
        if self.off:
            return "0"
        size, unit = max((size, unit) for unit, size in _UNITS.items() if self.amount % size == 0)
        return f"{self.amount / size} {unit}"


def format_bytes(n: int) -> str:
    """Write a number of bytes for people, in powers of 1024 and with at most one decimal.

    Example:
        >>> format_bytes(1_825_361_100), format_bytes(64 * 2**20), format_bytes(0)
        ('1.7 GiB', '64 MiB', '0 B')
    """
    power = 0
    while power < 4 and round(abs(n) / 1024**power, 1) >= 1024:  # rounded first, or 1023.99 MiB would read "1024 MiB"
        power += 1
    return f"{n / 1024**power:.1f}".removesuffix(".0") + (" B", " KiB", " MiB", " GiB", " TiB")[power]
