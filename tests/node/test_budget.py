"""Budgets are read or refused in words."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stocache.node.budget import Budget, format_bytes

KIB, MIB, GIB = 2**10, 2**20, 2**30
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
BIG = 10**18


def bytes_of(value: int | float | str | Budget) -> int:
    return Budget.parse(value).wanted(BIG, BIG)


# --- reading a budget


@given(
    number=st.decimals(0, 10**6, places=3),
    unit=st.sampled_from(sorted(UNITS)),
    recase=st.sampled_from([str, str.lower, str.upper, str.swapcase]),
    gap=st.sampled_from(["", " ", "  "]),
)
def test_amount_with_unit(number, unit, recase, gap):
    """A number and a unit are that many bytes, rounded down, in any case and with or without a space."""
    assert bytes_of(f" {number}{gap}{recase(unit)} ") == math.floor(Fraction(number) * UNITS[unit])


@given(
    percent=st.decimals(0, 100, places=3),
    dataset=st.integers(0, 2**50),
    free=st.integers(0, 2**50),
    spelling=st.sampled_from(["{}%", "{} %", " {}% "]),
)
def test_percent(percent, dataset, free, spelling):
    """A percentage is a share of the dataset, or with "of free" a share of what may be used, rounded down."""
    share = Fraction(percent) / 100
    assert Budget.parse(spelling.format(percent)).wanted(dataset, free) == math.floor(share * dataset)
    assert Budget.parse(spelling.format(percent) + " of  Free").wanted(dataset, free) == math.floor(share * free)


@given(st.integers(2, 2**53))
def test_a_number_is_bytes(n):
    """Ints, digits, NumPy's integers, and integral floats above 1 (as Hydra reads 8e9) are bytes."""
    assert bytes_of(n) == bytes_of(str(n)) == bytes_of(np.int64(n)) == bytes_of(float(n)) == bytes_of(f"{n}.0") == n
    assert bytes_of("8e9") == bytes_of("8e+9") == bytes_of(8e9) == 8 * 10**9


def test_auto_and_off():
    """Auto is the whole dataset, however much is free. Every way to write zero is off, and all of them are equal. Of
    less than nothing, as of an impossible dataset, nothing is wanted."""
    assert Budget.parse("auto").wanted(123, 5) == Budget.parse(" AUTO ").wanted(123, 5) == 123
    assert Budget.parse("auto") == Budget.parse("100%")
    assert [Budget.parse(value).wanted(-100, -100) for value in ("60%", "60% of free", "auto")] == [0] * 3
    for zero in (0, -0.0, "0", "0.0", "0%", "0 % of free", "0GiB"):
        assert Budget.parse(zero) == Budget.parse(0)
        assert Budget.parse(zero).off
        assert bytes_of(zero) == 0


def test_texts_are_readable():
    """A budget's text uses the largest unit that divides it, and is read back. Bytes are written with the unit that
    keeps the number below 1024, and one decimal where it says something."""
    sizes = {0: "0 B", 1536: "1.5 KiB", MIB - 1: "1 MiB", 2**51: "2048 TiB", -1536: "-1.5 KiB"}
    assert {size: format_bytes(size) for size in sizes} == sizes
    for value, text in [
        ("8gib", "8 GiB"),
        (8e9, "8 GB"),
        (4097, "4097 B"),
        ("1.5TiB", "1536 GiB"),
        ("33.333333333 % OF FREE", "33.333333333% of free"),
        (2**70 + 1, "1180591620717411303425 B"),
        ("100%", "auto"),
        ("0%", "0"),
    ]:
        assert str(Budget.parse(value)) == text
        assert Budget.parse(text) == Budget.parse(value)


REFUSED = [
    (-1, "must not be negative"),
    ("-8GiB", "must not be negative"),
    (float("nan"), "cannot convert NaN"),
    (float("inf"), "cannot convert Infinity"),
    (0.5, 'could mean a share or bytes .*write "50%" for the share'),
    ("1.0", "could mean a share or bytes"),
    ("2.5", "whole number of bytes"),
    ("8G", 'could mean GB or GiB: write "8GiB" .*"8GB"'),
    ("8 gi", 'could mean GB or GiB: write "8 giB"'),
    ("100.001%", "more than 100 percent"),
    ("150% of free", "more than 100 percent"),
    *((text, "cannot be read") for text in ("", "nan", "GiB", "8 apples", "8GiB 2", "60% of", "auto 5", "1e999999999")),
    *((value, "must be a number or a string") for value in (None, True, np.True_, [1], b"8GiB")),
]


@pytest.mark.parametrize(("value", "rule"), REFUSED)
def test_refused(value, rule):
    """The error for a value that is no budget names the rule, the value and every accepted form."""
    error = TypeError if "a string" in rule else ValueError
    with pytest.raises(error, match=rule) as caught:
        Budget.parse(value)
    forms = ('"8GiB"', '"500MB"', '"60%"', '"60% of free"', '"auto"', "bytes", "0 (off)", repr(value))
    assert all(form in str(caught.value) for form in forms)
