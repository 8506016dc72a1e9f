"""The page without a server: the runs below a folder, and what it makes of them in table and charts."""

import csv
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lightning_stocache.insight.report import charts, report
from lightning_stocache.insight.runs import LogError, find_runs, labels, table
from lightning_stocache.insight.steps import PARTS
from tests.jobs import refused

OF_STEPS = "What a step is made of"  # for runs with a StepTimer
EVERY_RUN = ["Seconds per epoch", "Hit rate"]
SWEEP = ["Seconds per epoch", "Seconds over the budget", "Hit rate"]


# ---- runs, as loggers leave them ----


def rows_of_a_run(share: float = 0.5, epochs: int = 3, *, nodes: int = 1, steps: bool = False):
    """The rows of 100 samples in 10 steps per epoch, (step, epoch or None, metrics), with a wait that gets shorter."""
    for epoch in range(epochs):
        hits = round(100 * share) if epoch else 0
        for step, fill in ((5, 0.5), (10, 0.9)):
            fill = 1.0 if epoch else fill
            now = {"hit_rate": hits / 100, "fill_fraction": fill, "memory_bytes": fill * share * 2**20}
            yield 10 * epoch + step - 1, None, {f"stocache/live/{name}": value for name, value in now.items()}
        values = {"hits": hits, "misses": 100 - hits, "bypasses": 0, "hit_rate": hits / 100, "fill_fraction": 1.0}
        values |= {"coverage": share, "memory_bytes": share * 2**20, "budget_bytes": share * 2**20}
        validation = {f"stocache/val/{name}": value for name, value in values.items()}
        yield 10 * epoch + 9, epoch, {"val/loss": 0.1} | validation
        values |= {"bytes_from_cache": hits * 2**20 / 100, "bytes_from_source": (100 - hits) * 2**20 / 100}
        waits = (100 - hits) / 50
        values |= {"data_wait_seconds": waits, "compute_seconds": 2.0, "epoch_seconds": waits + 2.0}
        values |= {f"node{node}/hit_rate": hits / 100 for node in range(nodes) if nodes > 1}
        if steps:
            seconds = dict.fromkeys(PARTS, 0.0) | {"wait": 0.03 - 0.01 * epoch, "forward": 0.01}
            values |= {f"step/{part}_seconds": spent for part, spent in seconds.items()}
        yield 10 * epoch + 9, epoch, {f"stocache/{name}": value for name, value in values.items()}


def write_csv(folder: Path, rows) -> Path:
    """Write a CSV like CSVLogger: one line per call, one column per key."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{"step": step, "epoch": "" if epoch is None else epoch, **values} for step, epoch, values in rows]
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, sorted({name for line in lines for name in line}))
        writer.writeheader()
        writer.writerows(lines)
    return folder


def write_hydra(folder: Path, overrides: list[str], rows) -> None:
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps(overrides))  # JSON is YAML
    write_csv(folder / "csv", rows)


@pytest.fixture
def multirun(tmp_path):
    """Three jobs of a Hydra sweep over the budget."""
    for number, share in enumerate((0.0, 0.5, 1.0)):
        write_hydra(tmp_path / "sweep" / str(number), ["seed=1", f"cache.budget={share:.0%}"], rows_of_a_run(share))
    return tmp_path / "sweep"


def test_runs_are_named_by_what_differs(multirun, tmp_path):
    """Overrides that most runs have are left out; numbers decide the order, and a run given twice is one run."""
    runs, left_out = find_runs([multirun])
    assert [run.name for run in runs] == ["cache.budget=0%", "cache.budget=50%", "cache.budget=100%"]
    assert left_out == []
    folders = [write_csv(tmp_path / "logs" / f"version_{number}", rows_of_a_run()) for number in (10, 9)]
    assert [run.name for run in find_runs([folders[0], tmp_path / "logs"])[0]] == ["version_9", "version_10"]
    for number, given in enumerate((["+cache.budget=0", "model=a"], ["model=a"], ["model=a"], ["seed=1"])):
        write_hydra(tmp_path / "template" / str(number), given, rows_of_a_run())
    names = [run.name for run in find_runs([tmp_path / "template"])[0]]
    assert names == ["cache.budget=0", "1", "2", "seed=1, without model"]


@pytest.mark.parametrize("text", ["", "a scalar", "{a: 1}", "- [broken", "\x00"])
def test_broken_overrides_name_a_run_by_its_folder(multirun, text):
    """A killed job may have left anything in the file."""
    (multirun / "0" / ".hydra" / "overrides.yaml").write_text(text)
    assert find_runs([multirun])[0][0].name.startswith("0")


def test_of_several_validations_in_an_epoch_the_last_counts(tmp_path):
    """A line over epochs has one point at each."""
    rows = [(step, 0, {"stocache/val/hit_rate": step / 10}) for step in (4, 9)]
    [run], _ = find_runs([write_csv(tmp_path, rows)])
    assert run.epochs("val/hit_rate") == [(0, 0.9)]


def test_tensorboard_says_the_same_as_csv(tmp_path):
    """Of a live value and an epoch's value under one step, the epoch's counts, in event files as in the CSV."""
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    writer = tensorboard.SummaryWriter(str(tmp_path / "events"))
    rows = list(rows_of_a_run(0.5, nodes=2, steps=True))
    for step, epoch, values in rows:
        for name, value in {**values, **({} if epoch is None else {"epoch": epoch})}.items():
            writer.add_scalar(name, value, step)
    writer.close()
    write_csv(tmp_path / "csv", rows)
    (events,), (lines,) = find_runs([tmp_path / "events"])[0], find_runs([tmp_path / "csv"])[0]
    assert table([events]) == table([lines])
    metrics = "hit_rate val/hit_rate bytes_from_cache epoch_seconds node1/hit_rate step/wait_seconds"
    for metric in metrics.split():
        assert lines.epochs(metric)
        assert dict(events.epochs(metric)) == pytest.approx(dict(lines.epochs(metric)))


@pytest.mark.parametrize("text", ["epoch,step,train/loss\n0,9,0.5\n", "epoch,step,stocache/hits\n0,9", "\0\1\2"])
def test_a_bad_csv_is_one_sentence(tmp_path, text):
    """Foreign, truncated and binary files are refused by what is missing in them."""
    (tmp_path / "metrics.csv").write_text(text)
    with pytest.raises(LogError, match="no stocache/ value") as refused:
        find_runs([tmp_path])
    assert "\n" not in str(refused.value)


# ---- charts and page ----


class Page(HTMLParser):
    """Tags, attributes and text of a page, as a browser without scripts sees it."""

    def __init__(self, folder: Path, output: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        report([folder], output)
        self.feed(output.read_text())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data.strip() + "\n" if data.strip() else ""


def drawn(folder: Path, title: str):
    """The axes of a chart of the runs in a folder."""
    axes = Figure().subplots()
    runs, _ = find_runs([folder])
    found = charts(dict(zip(labels(runs), runs, strict=True)))
    next(chart for chart in found if chart.title == title).draw(axes)
    return axes


def lines(axes) -> list[list[tuple[float, float]]]:
    """The points of each line, the first line first."""
    return [[tuple(point) for point in line.get_xydata().tolist()] for line in axes.get_lines()]


def heights(axes) -> list[float]:
    """The height of every part of a bar, bar after bar from the left."""
    return [patch.get_height() for patch in sorted(axes.patches, key=Rectangle.get_x)]


def test_the_page_has_the_charts_and_the_table(multirun, tmp_path):
    """It has every chart that has values, stands by itself, and has no scripts or links."""
    page = Page(multirun, html := tmp_path / "report.html")
    assert [title for title in (*SWEEP, OF_STEPS) if title in page.text] == SWEEP
    assert sum(tag == "svg" for tag, _ in page.tags) == len(SWEEP)
    columns = table(find_runs([multirun])[0])
    assert {cell for cells in columns.values() for cell in cells if cell} <= set(page.text.splitlines())
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    attributes = [attribute for _, of_tag in page.tags for attribute in of_tag.items()]
    links = [value for name, value in attributes if name.endswith(("src", "href"))]
    assert not [value for value in links if not value.startswith("#")]
    assert not re.search(r"url\((?!#)|@import", html.read_text())
    assert any(name == "content" and value.startswith("default-src 'none'") for name, value in attributes)


def test_a_single_run_has_its_epochs_stages_and_nodes(tmp_path):
    """Charts over epochs show epochs only, in bars of waiting and the rest, and lines of hit rates."""
    folder = write_csv(tmp_path / "run", rows_of_a_run(0.5, nodes=2))
    curves = lines(drawn(folder, "Hit rate"))
    assert len(curves) == 5  # hit rate, the share that fits, validation and two nodes
    assert {epoch for curve in curves for epoch, _ in curve} == {0, 1, 2}
    assert curves[:2] == [[(0, 0.0), (1, 0.5), (2, 0.5)], [(0, 0.5), (1, 0.5), (2, 0.5)]]
    assert heights(drawn(folder, "Seconds per epoch")) == pytest.approx([2, 2, 1, 2, 1, 2])
    page = Page(folder, tmp_path / "report.html")
    assert "3 epochs" in page.text
    assert "share that fits\n50 %" in page.text


def test_runs_of_a_multirun_stand_side_by_side(multirun):
    """Each run has its line, its bars and its row; those without a cache are what the others are compared with."""
    hit_rates = lines(drawn(multirun, "Hit rate"))
    assert sorted(curve[-1][1] for curve in hit_rates) == [0, 0.5, 1]
    axes = drawn(multirun, "Seconds per epoch")
    assert heights(axes) == pytest.approx([2, 2] * 2 + [2, 2, 1, 2] + [2, 2, 0, 2])  # the first epoch, then the later
    assert lines(axes) == [[(0, 4), (1, 4)]]
    axes = drawn(multirun, "Seconds over the budget")
    assert lines(axes) == [[(0, 4), (0.5, 4), (1, 4)], [(0, 4), (0.5, 3), (1, 2)]]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0%", "50%", "100%"]
    write_hydra(multirun / "3", ["cache.budget=50%", "seed=1", "model=other"], rows_of_a_run(0.5))
    columns = table(find_runs([multirun])[0])
    assert columns["hit rate"] == columns["share that fits"] == ["0 %", "50 %", "100 %", "50 %"]
    assert columns["first epoch"] == ["4.0 s"] * 4
    assert columns["later epochs"] == ["4.0 s", "3.0 s", "2.0 s", "3.0 s"]
    assert columns["waiting, later"] == ["2.0 s", "1.0 s", "0 ms", "1.0 s"]
    assert columns["speed-up"] == ["", "1.3x", "2.0x", ""]  # the last has another model


def test_a_run_in_its_first_epoch_has_a_page(tmp_path):
    """A chart without values is left out."""
    rows = [row for row in rows_of_a_run(epochs=1) if row[1] is None]
    page = Page(write_csv(tmp_path / "run", rows), tmp_path / "report.html")
    assert "the first epoch is not over yet" in page.text
    assert [title for title in EVERY_RUN if title in page.text] == []
    page = Page(write_csv(tmp_path / "val", [(0, 0, {"stocache/val/hit_rate": 0.5})]), tmp_path / "report.html")
    assert "val hit rate\n50 %" in page.text


def test_parts_of_a_step_are_bars(tmp_path):
    """Where a StepTimer logged, even if it was alone, there is a chart more, with a bar for each epoch."""
    rows = list(rows_of_a_run(epochs=2, steps=True))
    for _, _, values in rows:
        values.pop("stocache/hits", None)
    axes = drawn(write_csv(tmp_path, rows), OF_STEPS)
    assert heights(axes) == pytest.approx([0.03, 0, 0.01, 0, 0, 0, 0.02, 0, 0.01, 0, 0, 0])


def test_more_runs_than_can_be_drawn_are_all_in_the_table(tmp_path):
    """The first are drawn, the page says so, and the table has the number and the name of each run."""
    for number in range(20):
        write_csv(tmp_path / f"version_{number}", [(9, 0, {"stocache/hit_rate": 1.0})])
    page = Page(tmp_path, tmp_path / "report.html")
    assert re.search(r"first \d+ of 20 runs", page.text)
    runs, _ = find_runs([tmp_path])
    assert all(f"run {number}: {run.name}" in page.text for number, run in enumerate(runs, 1))


def test_hostile_names_are_escaped(tmp_path):
    """Markup in an override or a folder is text in the page and in its charts, and a name is no formula."""
    rows = [(9, 0, {"stocache/hit_rate": 1.0, "stocache/<script>": 1.0})]
    names = ["x=<script>", "x=<b>", "x=$\\frac{1$", "'\" onload=1"]
    for number, name in enumerate(names[:3]):
        write_hydra(tmp_path / "runs" / str(number), [name], rows)
    write_csv(tmp_path / "runs" / names[3], rows)
    page = Page(tmp_path / "runs", tmp_path / "report.html")
    assert not {"script", "b"} & {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert all(page.text.count(name) > 1 for name in names)  # the reader sees them, in the table and in a chart


@pytest.mark.parametrize(
    ("missing", "extra"), [("matplotlib", "report"), ("jinja2", "report"), ("tensorboard", "tensorboard")]
)
def test_a_library_that_is_missing_is_named(tmp_path, monkeypatch, capsys, missing, extra):
    """Without matplotlib, jinja2, or TensorBoard for its events, the sentence says what to install."""
    for module in ("charts", "report"):
        monkeypatch.delitem(sys.modules, f"lightning_stocache.insight.{module}")
    for name in {missing, *(name for name in sys.modules if name.partition(".")[0] == missing)}:
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "events.out.tfevents.1.host").write_bytes(b"")
    err = refused(capsys, "report", str(tmp_path), "--output", str(tmp_path / "report.html"))
    assert re.search(rf"{missing}.*lightning-stocache\[{extra}\]", err)
