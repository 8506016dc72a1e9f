"""The values of options: what is none of them is refused with its name, the rule, and what was given."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from lightning_stocache.setup.option import check_choice, check_count, check_flag


@pytest.mark.parametrize(("value", "least"), [(0, 0), (1, 1), (10**9, 1)])
def test_a_whole_number_is_a_count(value: int, least: int) -> None:
    """The least is one, too."""
    check_count("workers", value, least)


@pytest.mark.parametrize("value", [-1, 0, True, 2.0, "2", None])
def test_what_is_no_count_is_refused(value: Any) -> None:
    """A boolean is none, nor is a whole number that was written in another way."""
    with pytest.raises(ValueError, match=f"^workers must be a whole number of at least 1, got {value!r}$"):
        check_count("workers", value, 1)


@pytest.mark.parametrize("value", [0, 1, "true", None])
def test_what_is_no_flag_is_refused(value: Any) -> None:
    """Only true and false are."""
    check_flag("shuffle", True)
    check_flag("shuffle", False)
    with pytest.raises(ValueError, match=f"^shuffle must be true or false, got {value!r}$"):
        check_flag("shuffle", value)


@pytest.mark.parametrize("value", ["blue ", "", None, 1, ["red"]])
def test_what_is_no_choice_is_refused(value: Any) -> None:
    """The error names those that there are."""
    check_choice("colour", "blue", Literal["red", "blue", "green"])
    with pytest.raises(ValueError, match=r"^colour must be 'red', 'blue' or 'green', got "):
        check_choice("colour", value, Literal["red", "blue", "green"])
