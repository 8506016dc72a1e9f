"""Budgets are read or refused in words."""

import math
import subprocess
import sys
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


def test_auto():
    """Auto is the whole dataset, however much is free. Of less than nothing, as of an impossible dataset, nothing is
    wanted."""
    assert Budget.parse("auto").wanted(123, 5) == Budget.parse(" AUTO ").wanted(123, 5) == 123
    assert Budget.parse("auto") == Budget.parse("100%")
    assert [Budget.parse(value).wanted(-100, -100) for value in ("60%", "60% of free", "auto")] == [0] * 3


@pytest.mark.parametrize("value", [0, 0.0, -0.0, "0", "0.0", "0%", "0 % of free", "0GiB", " 0 "])
def test_off(value):
    """Every way to write zero is off, and all of them are equal."""
    budget = Budget.parse(value)
    assert budget.off
    assert budget == Budget.parse(0)
    assert budget.wanted(BIG, BIG) == 0


@given(
    st.one_of(
        st.integers(0, 2**70),
        st.floats(2, 1e308).map(math.floor).map(float),
        st.builds("{}{}".format, st.decimals(0, 10**6, places=3), st.sampled_from([*UNITS, "MiB", "GiB"])),
        st.builds("{:f}%{}".format, st.decimals(0, 100, places=9), st.sampled_from(["", " of free"])),
        st.just("auto"),
    )
)
def test_str_reads_back(value):
    """A budget's text is read back as an equal budget."""
    budget = Budget.parse(value)
    assert Budget.parse(str(budget)) == budget


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("8gib", "8 GiB"),
        ("500 mb", "500 MB"),
        (8e9, "8 GB"),
        (4097, "4097 B"),
        ("1.5TiB", "1536 GiB"),
        ("60.0%", "60%"),
        ("33.3 % OF FREE", "33.3% of free"),
        ("100%", "auto"),
        ("0%", "0"),
    ],
)
def test_str_is_readable(value, text):
    """A budget's text uses the largest unit that divides it."""
    assert str(Budget.parse(value)) == text


REFUSED = [
    (-1, "must not be negative"),
    (-0.5, "must not be negative"),
    ("-8GiB", "must not be negative"),
    ("-5%", "must not be negative"),
    (float("nan"), "cannot convert NaN"),
    (float("inf"), "cannot convert Infinity"),
    (0.5, "could mean a share or bytes"),
    (0.5, 'write "50%" for the share'),
    (1.0, "could mean a share or bytes"),
    ("0.5", "could mean a share or bytes"),
    ("1.0", "could mean a share or bytes"),
    (2.5, "whole number of bytes"),
    ("2.5", "whole number of bytes"),
    ("8G", 'could mean GB or GiB: write "8GiB" .*"8GB"'),
    ("8 gi", 'could mean GB or GiB: write "8 giB"'),
    ("150%", "more than 100 percent"),
    ("100.001%", "more than 100 percent"),
    ("150% of free", "more than 100 percent"),
]
UNREADABLE = ["", "lots", "nan", "GiB", "%", "8 apples", "8ib", "8GiB 2", "1_000", "60% of", "auto 5", "1e999999999"]


@pytest.mark.parametrize(("value", "rule"), [*REFUSED, *((text, "cannot be read") for text in UNREADABLE)])
def test_refused(value, rule):
    """The error for a value that is no budget names the rule, the value and every accepted form."""
    with pytest.raises(ValueError, match=rule) as caught:
        Budget.parse(value)
    message = str(caught.value)
    assert repr(value) in message
    assert all(
        form in message for form in ('"8GiB"', '"500MB"', '"60%"', '"60% of free"', '"auto"', "bytes", "0 (off)")
    )


@pytest.mark.parametrize("value", [None, True, np.True_, [1], b"8GiB", 1j])
def test_wrong_type(value):
    """A value that is neither a number nor a string is a TypeError, which names the value and the forms."""
    with pytest.raises(TypeError, match="must be a number or a string") as caught:
        Budget.parse(value)
    assert repr(value) in str(caught.value)
    assert '"60% of free"' in str(caught.value)


# --- words


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0 B"), (KIB, "1 KiB"), (1536, "1.5 KiB"), (MIB - 1, "1 MiB"), (2**51, "2048 TiB"), (-1536, "-1.5 KiB")],
)
def test_format_bytes(n, text):
    """Bytes are written with the unit that keeps the number below 1024, and one decimal where it says something."""
    assert format_bytes(n) == text


@pytest.mark.processes
def test_imports_only_the_standard_library():
    """Reading a budget costs no import of torch or NumPy."""
    code = "import sys, lightning_stocache.node.budget; print({'torch', 'numpy', 'lightning'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
