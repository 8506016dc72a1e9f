"""On one node the predicted hit rates are those of a simulation, for every way to draw."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch

from lightning_stocache.insight.first_draws import Anew, ByWeight, FirstDraws, InOrder, Together, WithReplacement
from tests.insight.simulation import simulated

SIZE = 5000
LENGTHS = (SIZE, SIZE // 2, SIZE // 3, SIZE)
UNEVEN = torch.rand(SIZE, generator=torch.Generator().manual_seed(0)) ** 4 + 1e-6


def predicted(theory: FirstDraws, lengths: Iterable[int], held: np.ndarray, others: np.ndarray) -> list[float]:
    return [theory.hit_rate(length, held, others) for length in lengths]


def slots(share: float) -> np.ndarray:
    return np.random.default_rng(0).permutation(SIZE) < SIZE * share


def by_weight(weights: torch.Tensor, has_slot: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The groups of equal weights: the weight, and how many with and without a slot."""
    each, group = np.unique(weights.double().numpy(), return_inverse=True)
    held = np.bincount(group, has_slot, len(each))
    return each, held, np.bincount(group) - held


@pytest.mark.parametrize("share", [1.0, 0.4])
@pytest.mark.parametrize("weights", [torch.ones(SIZE), UNEVEN, (torch.arange(SIZE) % 10 + 1) / 1.0])
def test_draws_with_replacement_hit_within_the_epoch_too(share: float, weights: torch.Tensor) -> None:
    """Uniform, very uneven and by-class weights, in epochs of unlike lengths."""
    generator, has_slot = torch.Generator().manual_seed(0), slots(share)
    epochs = [torch.multinomial(weights, length, True, generator=generator).numpy() for length in LENGTHS]
    each, held, others = by_weight(weights, has_slot)
    theory = FirstDraws(WithReplacement(each / each.dot(held + others)))
    assert predicted(theory, LENGTHS, held, others) == pytest.approx(simulated(has_slot, epochs), abs=0.03)


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_weighted_draws_without_replacement(share: float) -> None:
    """The likely ones come in nearly every epoch, so a part of the dataset is hit more often than its part."""
    generator, has_slot = torch.Generator().manual_seed(0), slots(share)
    lengths = (1000, 2500, 4000, SIZE)
    epochs = [torch.multinomial(UNEVEN, length, generator=generator).numpy() for length in lengths]
    each, held, others = by_weight(UNEVEN, has_slot)
    theory = FirstDraws(ByWeight(each, held + others))
    assert predicted(theory, lengths, held, others) == pytest.approx(simulated(has_slot, epochs), abs=0.03)


def listed(order: np.ndarray, has_slot: np.ndarray, *, anew: bool) -> tuple[FirstDraws, np.ndarray, np.ndarray]:
    distinct, numbers, copies = np.unique(order, return_inverse=True, return_counts=True)
    each, group = np.unique(copies, return_inverse=True)
    if not anew:
        each, group = np.arange(len(distinct)), np.arange(len(distinct))
    held = np.bincount(group, has_slot[distinct], len(each))
    draws = Anew(each, len(order)) if anew else InOrder(numbers)
    return FirstDraws(draws), held, np.bincount(group) - held


OVERSAMPLED = np.concatenate((np.arange(SIZE), np.repeat(np.arange(500), 4), np.arange(0, SIZE, 9)))


@pytest.mark.parametrize("share", [1.0, 0.4])
@pytest.mark.parametrize("order", [np.arange(SIZE), OVERSAMPLED, np.arange(0, SIZE, 3)], ids=["all", "over", "part"])
@pytest.mark.parametrize("anew", [True, False])
def test_lists_are_drawn_anew_or_in_order(share: float, order: np.ndarray, anew: bool) -> None:
    """Whole epochs, parts, and more than the list: a loader that begins again while others have not ended."""
    chance, has_slot = np.random.default_rng(1), slots(share)
    lengths = [round(part * len(order)) for part in (0.5, 0.25, 1.0, 2.5)]

    def passes(length: int) -> np.ndarray:
        drawn = [chance.permutation(order) if anew else order for _ in range(length // len(order) + 1)]
        return np.concatenate(drawn)[:length]

    theory, held, others = listed(order, has_slot, anew=anew)
    expected = simulated(has_slot, map(passes, lengths))
    assert predicted(theory, lengths, held, others) == pytest.approx(expected, abs=0.03 if anew else 1e-9)


def test_what_was_ready_is_hit_at_once() -> None:
    """A cache that a job before has filled by half misses the other half."""
    theory = FirstDraws(Anew(np.ones(1), 100), ready=0.5)
    assert predicted(theory, (100, 100), np.array([80]), np.array([20])) == pytest.approx([0.4, 0.8])


@pytest.mark.parametrize(
    "draws", [lambda: Anew(np.ones(1), 10), lambda: WithReplacement(np.array([0.1])), lambda: InOrder(np.arange(1))]
)
def test_an_epoch_of_nothing_changes_nothing(draws: Callable[[], Anew | WithReplacement | InOrder]) -> None:
    """Where nothing was served there are no first draws."""
    theory = FirstDraws(draws())
    theory.hit_rate(0, np.array([10]), np.array([0]))
    assert theory.hit_rate(1, np.array([10]), np.array([0])) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_repeated_draws_hit_themselves(share: float) -> None:
    """Each index of a shuffled list three times in a row, and of those as many as the list is long."""
    chance, has_slot = np.random.default_rng(1), slots(share)
    epochs = [np.repeat(chance.permutation(SIZE), 3)[:length] for length in LENGTHS]
    held = np.array([has_slot.sum()])
    theory = FirstDraws(Anew(np.ones(1), SIZE, repeats=3))
    assert predicted(theory, LENGTHS, held, SIZE - held) == pytest.approx(simulated(has_slot, epochs), abs=0.02)


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_so_many_of_each_class_are_drawn_together(share: float) -> None:
    """Four of each of five classes that are not equally large, again and again: none twice in a round."""
    chance, has_slot = np.random.default_rng(1), slots(share)
    classes = np.split(np.arange(SIZE), [10, 100, 1000, 2500])
    lengths = (400, 2000, 2000)
    epochs = [
        np.concatenate([chance.choice(its, 4, replace=False) for _ in range(length // 20) for its in classes])
        for length in lengths
    ]
    held = np.array([has_slot[its].sum() for its in classes])
    others = np.array([len(its) for its in classes]) - held
    theory = FirstDraws(WithReplacement(np.array([4 / len(its) for its in classes]), together=20))
    assert predicted(theory, lengths, held, others) == pytest.approx(simulated(has_slot, epochs), abs=0.03)


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_what_one_loader_draws_another_hits(share: float) -> None:
    """A shuffled dataset beside draws by chance from its first half, three of these for one of those."""
    chance, has_slot = np.random.default_rng(1), slots(share)
    half, lengths = SIZE // 2, (1000, 4000, 2000)
    epochs = []
    for length in lengths:
        shuffled, drawn = chance.permutation(SIZE)[: length // 4], chance.integers(0, half, length * 3 // 4)
        epochs.append(chance.permutation(np.concatenate([shuffled, drawn])))
    each = [Anew(np.ones(1), SIZE), WithReplacement(np.array([1 / half]))]
    places = [np.array([0, 0]), np.array([0, -1])]
    theory = FirstDraws(Together(each, places, lambda draws: (draws // 4, draws * 3 // 4)))
    held = np.array([has_slot[:half].sum(), has_slot[half:].sum()])
    assert predicted(theory, lengths, held, half - held) == pytest.approx(simulated(has_slot, epochs), abs=0.03)
