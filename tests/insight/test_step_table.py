"""What steps are made of, written down and drawn."""

from __future__ import annotations

import pytest

from lightning_stocache.insight.breakdown import Breakdown
from lightning_stocache.insight.chart import draw
from lightning_stocache.insight.step_table import as_text, bars_of, save, sentences


def epoch(wait: float, steps: int = 10, samples: int = 32) -> Breakdown:
    made = Breakdown()
    for _ in range(steps):
        made.add({"wait": wait, "forward": 0.004, "backward": 0.006}, samples)
    return made


def test_a_loader_that_is_too_slow() -> None:
    """It gives what is trained on, while steps could take more."""
    [said] = sentences(epoch(0.030))
    assert "75 % of the time waiting" in said
    assert "The loader gives 800 samples/s, the steps could take 3,200." in said


def test_a_loader_without_workers_gives_more_than_it_is_asked_for() -> None:
    """It stands still while a step runs."""
    assert "gives 1,067 samples/s while it is asked, 800 in all" in sentences(epoch(0.030), ahead=False)[0]


def test_a_loader_that_is_fast_enough() -> None:
    """What it could give is not known, and not said; what the steps need is."""
    [said] = sentences(epoch(0.0001))
    assert "The loader" not in said
    assert "Steps take 3,168 samples/s, most of their time in backward." in said


def test_batches_of_unknown_size_are_steps() -> None:
    """Rates are of steps then."""
    assert "gives 25 steps/s" in sentences(epoch(0.030, samples=0))[0]


@pytest.mark.parametrize(("epochs", "shown"), [(1, []), (3, [0, 1, 2]), (50, [0, 1, 25, 49])])
def test_the_table_is_narrow(epochs: int, shown: list[int]) -> None:
    """Of many epochs some stand in the table, the first two and the last among them; no line is too long."""
    text = as_text([epoch(0.01 / (1 + number)) for number in range(epochs)])
    head = text.splitlines()[0]
    assert [int(word) for word in head.split() if word.isdigit()] == shown
    assert max(map(len, text.splitlines()[:-1])) <= 100


def test_the_drawing_has_every_part_of_every_bar() -> None:
    """Parts of no length are left out; names are escaped."""
    drawing = draw(bars_of({"<a>": epoch(0.01), "b": epoch(0.0)}, "title", "caption", "x"))
    assert drawing.count("<title>") == 3 + 2
    assert "&lt;a&gt;" in drawing


def test_the_picture_is_a_png(tmp_path) -> None:
    """Of one epoch, and of more than there is room for."""
    pytest.importorskip("matplotlib")
    for count in (1, 40):
        save([epoch(0.01)] * count, path := tmp_path / f"{count}.png")
        assert path.read_bytes().startswith(b"\x89PNG")
