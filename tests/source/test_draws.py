"""What the fillers of a rolling cache draw, each its own share."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice, zip_longest
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lightning_stocache.source.draws import Draw, Draws, EndOfStreamError, shuffled
from tests.sources import CountedStream


def values(draws: Iterator[Draw]) -> list[Any]:
    found = []
    for draw in draws:
        with suppress(EndOfStreamError):
            found.append(draw.load())
    return found


@given(length=st.integers(1, 40), fillers=st.integers(1, 7), passes=st.integers(1, 3), shuffle=st.booleans())
def test_all_fillers_together_draw_each_index_once_per_pass(length, fillers, passes, shuffle):
    """Their shares are the passes over the source, without replacement, dealt in turn."""
    draws = Draws(list(range(length)), shuffle=shuffle, passes=passes)
    shares = [[draw.index for draw in draws.share(k, fillers)] for k in range(fillers)]
    drawn = [index for turn in zip_longest(*shares) for index in turn if index is not None]
    assert len(drawn) == passes * length
    for number in range(passes):
        part = drawn[number * length : (number + 1) * length]
        assert sorted(part) == list(range(length))
        assert shuffle or part == sorted(part)
    if shuffle and passes > 1 and length >= 20:
        assert drawn[:length] != drawn[length : 2 * length]
    for done in (1, 7):  # a filler that is started anew goes on behind what it had begun
        assert [draw.index for draw in draws.share(0, fillers, done)] == shares[0][done:]


@given(length=st.integers(1, 70), seed=st.integers(0, 2**40))
def test_the_order_of_a_long_source_needs_no_table(length, seed):
    """Each index comes once in a pass, in another order for each seed. A source of 10^12 samples has such an order."""
    order = [shuffled(position, length, seed) for position in range(length)]
    assert sorted(order) == list(range(length))
    assert length < 20 or order != [shuffled(position, length, seed + 1) for position in range(length)]
    long = 10**12
    drawn = [[draw.index for draw in islice(Draws(range(long), seed=seed).share(k, 2), 4)] for k in range(2)]
    assert [index for pair in zip(*drawn, strict=True) for index in pair] == [shuffled(k, long, seed) for k in range(8)]
    [last] = Draws(range(long), seed=seed, passes=1).share(1, 2, done=long // 2 - 1)
    assert last.load() == shuffled(long - 1, long, seed)


def test_a_stream_begins_again_when_it_ends():
    """An IterableDataset is read again and again; a generator, which gives nothing again, once, and an empty stream."""
    letters = CountedStream(3, "abc".__getitem__)
    assert values(islice(Draws(letters).share(0, 2), 8)) == list("abcabc")  # every fourth draw finds the end
    assert values(Draws(iter("abcde")).share(1, 2)) == ["b", "d"]
    assert values(Draws(letters, passes=2).share(0, 1)) == list("abcabc")
    assert values(Draws(letters, passes=2).share(0, 1, done=2)) == list("cabc")
    assert values(Draws(iter("abcde")).share(1, 2, done=1)) == ["d"]
    assert values(Draws(iter(())).share(0, 1)) == []
    assert values(Draws(CountedStream(0)).share(0, 1)) == []
