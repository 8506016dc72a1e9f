"""Generators that belong to a source are found wherever its code can come to them; states are plain values."""

import functools
import importlib
import itertools
import json
import random
import threading
import uuid
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_stocache.source.generators import (
    Generators,
    as_text,
    owned_generators,
    put_back,
    restore,
    states_of,
    watch_entropy,
)

GLOBAL = np.random.default_rng(1)
Pair = namedtuple("Pair", "left right")


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


class Drawing:
    """A generator belongs to the class, and its code names one of its module."""

    draws = np.random.RandomState(2)

    def __getitem__(self, index: int) -> float:
        return sum(GLOBAL.random() for _ in range(index))


PLACES: list[Callable[[Any], Any]] = [
    Holder,
    lambda held: Holder(OrderedDict(noise=[None, Pair(1, (held,))])),
    lambda held: Holder(lambda: held.random()),
    lambda held: Holder(lambda generator=held: generator.random()),
    lambda held: Holder(Holder(held).__init__),  # type: ignore[misc]
    lambda held: Holder(functools.partial(print, sep=held)),
]


def test_a_generator_is_found() -> None:
    """Of each kind; a class's own, and a global that a method names. The process-wide ones are known by name."""
    for place, kind in itertools.product(
        PLACES, (np.random.default_rng, np.random.RandomState, random.Random, torch.Generator)
    ):
        generator = kind()
        assert list(owned_generators(place(generator)).values()) == [generator]
    assert owned_generators(Drawing()) == {"Drawing.Drawing.draws": Drawing.draws, f"{__name__}.GLOBAL": GLOBAL}
    assert not owned_generators(Holder([np.random.mtrand._rand, random._inst, torch.default_generator]))  # type: ignore[attr-defined]


BIT_GENERATORS = (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
MAKERS: dict[str, Callable[[int], Any]] = {
    **{kind.__name__: lambda seed, kind=kind: np.random.Generator(kind(seed)) for kind in BIT_GENERATORS},
    "RandomState": np.random.RandomState,
    "Random": random.Random,
    "torch": lambda seed: torch.Generator().manual_seed(seed),
}


def draws(generator: Any, count: int) -> list[float]:
    """Normal numbers, of which some generators keep every second."""
    if isinstance(generator, torch.Generator):
        return torch.randn(count, generator=generator).tolist()
    normal = generator.gauss if isinstance(generator, random.Random) else generator.normal
    return [normal(0.0, 1.0) for _ in range(count)]


@pytest.mark.parametrize("name", MAKERS)
@given(seed=st.integers(0, 2**32 - 2), drawn=st.integers(0, 9))
@settings(max_examples=10)
def test_a_generator_goes_on_where_its_state_was_taken(name: str, seed: int, drawn: int) -> None:
    """After any number of draws; from text also in another of its kind. States are equal without a draw only."""
    generator, other = MAKERS[name](seed), MAKERS[name](seed + 1)
    draws(generator, drawn)
    state = states_of({"mine": generator})
    text = json.loads(json.dumps(as_text(state)))
    following = draws(generator, 5)
    assert states_of({"mine": generator}) != state
    for each in (generator, other):
        put_back({"mine": each}, text)
        assert states_of({"mine": each}) == state
        assert draws(each, 5) == following
    restore({"mine": generator}, state)
    assert draws(generator, 5) == following


def test_beside_another_thread_a_move_is_no_evidence_and_nothing_is_seeded() -> None:
    """Threads of this package and of progress bars do not count."""
    ends = threading.Event()
    for name, is_evidence in (("jitter", False), ("stocache-prefetch", True)):
        thread = threading.Thread(target=ends.wait, name=name)
        thread.start()
        state = random.getstate()
        with Generators() as generators:
            with generators.watch() as moved:
                random.random()
            assert moved == ["random"] * is_evidence
            drawn = random.getstate()
            generators.seed(3)
            assert (random.getstate() == drawn) is not is_evidence
        assert random.getstate() == state
        ends.set()
        thread.join()
        ends.clear()


def test_entropy_for_a_module_that_a_read_imports_is_no_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first read imports it; entropy for anything else is a draw."""
    (tmp_path / "asks_once.py").write_text("import uuid\n\nKEY = uuid.uuid4()\n")
    monkeypatch.syspath_prepend(tmp_path)
    generators = Generators()
    with watch_entropy():
        before = generators.state()
        importlib.import_module("asks_once")
        assert generators.changed(before) == []
        uuid.uuid4()
        assert generators.changed(before) == ["the system"]


def test_the_index_of_a_long_dataset_is_a_seed() -> None:
    """NumPy's seeds end at 2^32. Two seeds in a row give other draws there, too."""
    with Generators(None) as generators:
        drawn = []
        for seed in (2**33, 2**33 + 1, 2**41):
            generators.seed(seed)
            drawn.append((np.random.rand(), torch.rand(1).item(), random.random()))
        generators.seed(2**33)
        assert drawn[0] == (np.random.rand(), torch.rand(1).item(), random.random())
        assert drawn[0][0] != drawn[1][0]
