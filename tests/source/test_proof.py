"""A cut is proved: nothing that code behind a transform makes of its result is lost."""

import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.source import proof
from lightning_stocache.source.opaque import LookedAtError, read_blindly
from lightning_stocache.source.probe import MANY, SOME
from lightning_stocache.source.random_split import split
from tests.loading.twins import same
from tests.source import behind
from tests.source.behind import BLIND, LENGTH, LOOKING, LOOKS, LOOKS_AT_A_DICT, LOST, Boxes, hands_on, shift


@pytest.mark.parametrize("name", LOST)
@pytest.mark.parametrize("quick", [0, 28])
def test_code_that_needs_the_result_is_not_cut_off(name: str, quick: int) -> None:
    """The source stays whole, however seldom the result makes a difference."""
    parts = split(LOST[name], quick=quick)
    assert parts.tail is None
    assert parts.reason is not None


@pytest.mark.parametrize("source", BLIND.values(), ids=BLIND)
def test_code_that_does_not_look_is_cut_off(source: Any) -> None:
    """By construction: no comparison is left for epoch one."""
    parts = split(source)
    assert parts.tail is not None
    assert (parts.tail.cut.is_blind, parts.tail.cut.unproved) == (True, 0)
    for index in range(len(source)):
        torch.manual_seed(index)
        whole = source[index]
        torch.manual_seed(index)
        assert same(parts.tail(parts.source[index], index), whole)


@pytest.mark.parametrize("name", LOOKING)
def test_code_that_looks_in_vain_is_cut_off(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After eight comparisons in any case, or 32 if there is time."""
    for seconds, unproved in ((60.0, 0), (-1.0, MANY - SOME)):
        monkeypatch.setattr(proof, "PROVING_SECONDS", seconds)
        tail = split(LOOKING[name]).tail
        assert tail is not None
        assert (tail.cut.is_blind, tail.cut.unproved) == (False, unproved)


def looking(looks: Any, *, at_a_dict: bool) -> Boxes:
    """A dataset whose code does something with a result, hides any error, and hands it on."""

    def look(held: Boxes, index: int) -> Any:
        sample = held.drawn_dict(index) if at_a_dict else held.drawn(index)
        try:
            looks(sample)
        except Exception:
            behind.log.debug("it cannot be looked at", exc_info=True)
        return sample

    return Boxes(look, behind.shift_dict if at_a_dict else shift)


@pytest.mark.parametrize(
    ("looks", "at_a_dict"),
    [*((looks, False) for looks in LOOKS.values()), *((looks, True) for looks in LOOKS_AT_A_DICT.values())],
    ids=[*LOOKS, *(f"dict {name}" for name in LOOKS_AT_A_DICT)],
)
def test_each_look_is_noted(looks: Any, at_a_dict: bool) -> None:
    """Whatever the code does with a result, and whatever errors it catches."""
    parts = split(Boxes(behind.hands_a_dict_on, behind.shift_dict) if at_a_dict else Boxes(hands_on, shift))
    source: Any = looking(looks, at_a_dict=at_a_dict)
    tail = parts.cut.apply(source)  # type: ignore[union-attr]
    head = tail.head
    with pytest.raises(LookedAtError, match="looks at the result"):
        read_blindly(lambda: [head[3]], [3], tail)
    head.behind = parts.source.behind
    samples, objection = read_blindly(lambda: [head[3]], [3], tail)
    assert objection is None
    assert same(samples, [parts.source[3]])


def test_a_result_that_is_kept_elsewhere_is_no_result_that_nobody_looks_at() -> None:
    """Code might look at it later, which is an error like others then."""
    tail = split(Boxes(hands_on)).cut.apply(Boxes(behind.keeps_the_last))  # type: ignore[union-attr]
    head = tail.head
    with pytest.raises(LookedAtError, match="keeps the result"):
        read_blindly(lambda: [head[3]], [3], tail)
    with pytest.raises(RuntimeError, match="has no content"):
        len(head.last)


def test_results_at_other_places_cannot_be_finished() -> None:
    """A result twice, none, another order, and a sample of another form are objections, and no looks."""
    parts = split(Boxes(behind.draws_two_views))
    for sample_of in (
        lambda held, index: ([held.drawn(index)] * 2, index),
        lambda held, index: ([held.drawn(index), held.drawn(index)][::-1], index),
        lambda held, index: ([held.drawn(index), held.boxes[index]], index),
        lambda held, index: ({"views": [held.drawn(index), held.drawn(index)]}, index),
        lambda held, index: (held.boxes[index], index),
    ):
        tail = parts.cut.apply(Boxes(sample_of))  # type: ignore[union-attr]
        head = tail.head
        _, objection = read_blindly(lambda head=head: [head[3]], [3], tail)  # type: ignore[misc]
        assert objection is not None


def test_a_result_of_another_form_makes_the_sample_that_the_source_makes() -> None:
    """The code behind gets the results that were drawn, and reads the sample again around them."""

    def views(boxes: Any) -> Any:
        count = 2 + int(behind.ANOTHER and torch.rand(()) < 0.3)
        return [shift(boxes) for _ in range(count)]

    def takes_both(held: Boxes, index: int) -> Any:
        first, other = held.drawn(index), held.drawn(index)
        return [*first, len(first)], other[0]

    whole = Boxes(takes_both, views)
    source: Any = Subset(ConcatDataset([Boxes(hands_on), whole]), range(140, 200))
    parts = split(source)
    assert parts.tail is not None
    samples = [parts.source[index] for index in range(60)]
    behind.ANOTHER = True
    try:
        lengths = set()
        for index, sample in enumerate(samples):
            torch.manual_seed(index)
            expected = source[index]
            state = torch.get_rng_state()
            torch.manual_seed(index)
            served = parts.tail(sample, index)
            assert same(served, expected)
            assert torch.equal(torch.get_rng_state(), state)
            lengths.add(len(served[0]))
        assert {3, 4} <= lengths
    finally:
        behind.ANOTHER = False


# ---- while samples are served ----


def drop_often(boxes: torch.Tensor) -> torch.Tensor:
    return behind.shift(boxes) if torch.rand(()) < 0.6 else boxes[:0]


class Later(Boxes):
    """Code that depends on the result once a file is there, which set-up does not see."""

    def __init__(self, code: Any, flag: Path) -> None:
        super().__init__(code, drop_often)
        self.flag = flag

    def __getitem__(self, index: int) -> Any:
        return self.behind(self, index) if self.flag.exists() else hands_on(self, index)


def replaces_in_one(held: Boxes, index: int) -> Any:
    return behind.replaces_if_short(held, index) if index == 77 else hands_on(held, index)


def replaces_in_a_part(held: Boxes, index: int) -> Any:
    return behind.replaces_after_an_error(held, index) if 70 <= index < 75 else hands_on(held, index)


def takes_the_next_in_a_part(held: Boxes, index: int) -> Any:
    return behind.takes_the_next(held, index) if index % 8 == 7 else hands_on(held, index)


@pytest.mark.processes
@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("of", [lambda source: source, lambda source: ConcatDataset([Boxes(hands_on), source])])
@pytest.mark.parametrize("code", [replaces_in_one, replaces_in_a_part, takes_the_next_in_a_part])
def test_a_cut_that_fails_later_makes_the_job_pass_through(
    code: Any, of: Any, num_workers: int, tmp_path: Path, caplog: Any
) -> None:
    """For good, with one warning."""
    with closing(CachedDataset(of(Later(code, tmp_path / "flag")))) as dataset:
        assert dataset.cache is not None
        counters: Any = dataset.counters
        (tmp_path / "flag").touch()
        loader = CachedLoader(dataset, 10, num_workers=num_workers, collate_fn=list)
        list(loader)
        assert counters.says_changed
        hits = counters.totals().hits
        for _ in range(2):
            list(loader)
        assert counters.totals().hits == hits
    if num_workers == 0:
        assert len([text for text in caplog.messages if "cannot be cut at its random steps" in text]) == 1


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("kind", [CachedLoader, DataLoader])
def test_a_cut_that_fails_later_draws_nothing(kind: Any, tmp_path: Path) -> None:
    """The batch in which it fails is drawn once, so that later ones have the draws of the source."""
    flag = tmp_path / "flag"
    flag.touch()
    torch.manual_seed(0)
    expected = list(DataLoader(Later(replaces_in_one, flag), 10, collate_fn=list))
    state = torch.get_rng_state()
    flag.unlink()
    with closing(CachedDataset(Later(replaces_in_one, flag))) as dataset:
        counters: Any = dataset.counters
        flag.touch()
        torch.manual_seed(0)
        assert same(list(kind(dataset, 10, collate_fn=list)), expected)
        assert torch.equal(torch.get_rng_state(), state)
        assert counters.says_changed


def looks_and_replaces(held: Boxes, index: int) -> Any:
    return behind.replaces_if_short(held, index) if held.flag.exists() else behind.checks(held, index)  # type: ignore[attr-defined]


@pytest.mark.processes
@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_set_up_had_no_time_for_is_proved_in_epoch_one(num_workers: int, tmp_path: Path, monkeypatch: Any) -> None:
    """And a cut that fails then is given up; also in a look, if nothing was left for epoch one."""
    for seconds, epochs in ((-1.0, 1), (60.0, 4)):
        monkeypatch.setattr(proof, "PROVING_SECONDS", seconds)
        source = Boxes(looks_and_replaces, drop_often)
        flag = source.flag = tmp_path / f"flag{epochs}"  # type: ignore[attr-defined]
        with closing(CachedDataset(source)) as dataset:
            loader = CachedLoader(dataset, 8, num_workers=num_workers, collate_fn=list)
            flag.touch()
            for _ in range(epochs):
                list(loader)
            assert dataset.counters.says_changed  # type: ignore[union-attr]


@pytest.mark.parametrize("source", [*BLIND.values(), *LOOKING.values()], ids=[*BLIND, *LOOKING])
def test_a_proved_cut_serves_what_the_source_gives(source: Any) -> None:
    """With the same draws, in every epoch; from the second on nothing is loaded but what a look reads."""
    seed, expected = torch.manual_seed, []
    for epoch in range(3):
        seed(epoch)
        expected += list(DataLoader(source, 10, collate_fn=list))
    with closing(CachedDataset(source)) as dataset:
        served = []
        for epoch in range(3):
            seed(epoch)
            served += list(DataLoader(dataset, 10, collate_fn=list))
        assert same(served, expected)
        assert dataset.counters.totals().bypasses == 0  # type: ignore[union-attr]


def mosaic(held: Boxes, index: int) -> Any:
    """Reads other samples of itself, which it draws."""
    others = torch.randint(0, len(held), (3,)).tolist()
    return torch.cat([held.drawn(other) for other in (index, *others)]), index


def mixed_up(held: Boxes, index: int) -> Any:
    other, share = int(torch.randint(0, len(held), ())), torch.rand(())
    return share * held.boxes[index] + (1 - share) * held.boxes[other], index


def pasted(held: Boxes, index: int) -> Any:
    boxes, others = held.drawn(index), held.drawn((index * 7) % len(held))
    return torch.cat([boxes, others[: len(boxes)]]), index


def pairs(held: Boxes, index: int) -> Any:
    """Two images of which nothing is made but a pair: it can be cut."""
    return held.drawn(index), held.drawn((index * 7) % len(held))


def looks_at_a_view_in_a_part(held: Boxes, index: int) -> Any:
    first, second = held.drawn(index)
    return first.abs() if 70 <= index < 75 else first, second


@pytest.mark.epoch_one_reads_all
def test_code_that_looks_at_a_part_later_makes_the_job_pass_through(caplog: Any) -> None:
    """What is served are the samples of the source, with one warning."""
    source = Boxes(looks_at_a_view_in_a_part, behind.two)
    torch.manual_seed(0)
    expected = list(DataLoader(source, 10, collate_fn=list))
    with closing(CachedDataset(source)) as dataset:
        assert dataset.cache is not None
        torch.manual_seed(0)
        assert same(list(DataLoader(dataset, 10, collate_fn=list)), expected)
        assert dataset.counters.says_changed  # type: ignore[union-attr]
    assert len([text for text in caplog.messages if "cannot be cut at its random steps" in text]) == 1


@pytest.mark.parametrize(("code", "is_cut"), [(mosaic, False), (mixed_up, False), (pasted, False), (pairs, True)])
def test_a_dataset_that_reads_others_of_its_samples_stays_right(code: Any, is_cut: bool) -> None:
    """Mosaic, mix-up and copy-paste stay whole."""
    parts = split(Boxes(code), quick=28)
    assert (parts.tail is not None) == is_cut
    assert (parts.reason is None) == is_cut


def test_a_second_thread_makes_no_cut_wrong() -> None:
    """Each thread has blind reads of its own."""
    with closing(CachedDataset(Boxes(hands_on))) as dataset:
        wrong = list[int]()

        def read(first: int) -> None:
            wrong.extend(index for index in range(first, LENGTH, 2) if dataset[index][1] != index)

        threads = [threading.Thread(target=read, args=(first,)) for first in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert dataset.cache is not None
        assert not dataset.counters.says_changed  # type: ignore[union-attr]


def test_a_rare_result_is_searched_for() -> None:
    """One in a hundred is empty, and code that looks at each result replaces it: that is found."""

    def rarely(boxes: Any) -> Any:
        return boxes[:0] if torch.rand(()) < 0.01 else shift(boxes)

    refused = sum(split(Boxes(behind.replaces_if_short, rarely)).tail is None for _ in range(3))
    assert refused == 3


class Counting:
    """Code of a user's subclass of a library's dataset, behind its transform."""

    counts = False

    def __getitem__(self, index: Any) -> Any:
        rows = super().__getitem__(index)  # type: ignore[misc]
        if not self.counts:
            return rows
        pixels = rows["pixels"]
        return {**rows, "count": len(pixels) if isinstance(index, int) else list(map(len, pixels))}


def noisy_rows(rows: dict[str, Any]) -> dict[str, Any]:
    return {"pixels": [torch.rand(2 if torch.rand(()) < 0.5 else 3) for _ in rows["image"]]}


@pytest.mark.parametrize("counts", [False, True])
def test_code_of_a_subclass_of_hugging_faces_dataset_is_compared(counts: bool) -> None:
    """What it makes of the result of the format's transform is not lost."""
    datasets = pytest.importorskip("datasets")
    kind = type("Rows", (Counting, datasets.Dataset), {"counts": counts})
    rows = datasets.Dataset.from_dict({"image": [[index, 1] for index in range(40)]}).with_transform(noisy_rows)
    rows.__class__ = kind
    parts = split(rows)
    assert (parts.tail is None) == counts
    if parts.tail is not None:
        assert not parts.tail.cut.is_blind
