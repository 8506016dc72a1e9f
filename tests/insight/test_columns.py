"""Columns of a table stand one below the other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_stocache.insight.columns import aligned

CELLS = st.lists(st.tuples(*[st.text("ab0.%", min_size=1, max_size=6)] * 3), min_size=1, max_size=5)


@given(CELLS, st.integers(0, 3))
def test_cells_of_a_column_begin_or_end_at_one_place(rows, left):
    """Columns to the left begin at the same place in every line, the others end at the same place."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, line in zip(rows, aligned(rows, left), strict=True):
        begin = 0
        for number, (cell, width) in enumerate(zip(row, widths, strict=True)):
            place = begin if number < left else begin + width - len(cell)
            assert line[begin : begin + width].strip() == cell
            assert line[place : place + len(cell)] == cell
            begin += width + 2
