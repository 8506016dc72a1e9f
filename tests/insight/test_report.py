"""The dashboard without a server: what it makes of runs, in charts, in the page and in the picture."""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.table import Table
from matplotlib.text import Text

from lightning_stocache.insight.charts import COLOURS
from lightning_stocache.insight.report import charts, report
from lightning_stocache.insight.runs import find_runs, labels, table
from tests.commands import refused
from tests.insight.logged import rows_of_a_run, step_rows, write_csv, write_hydra, write_multirun

OF_STEPS = "What a step is made of"  # for runs with a StepTimer
EVERY_RUN = [
    "Hit rate",
    "Fill in the first epoch",
    "Where the bytes came from",
    "Waiting for data",
    "Samples per second",
    "Memory against budget",
]


@pytest.fixture
def multirun(tmp_path):
    return write_multirun(tmp_path / "sweep")


class Page(HTMLParser):
    """Tags, attributes and text of a page, as a browser without scripts sees it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data.strip() + "\n" if data.strip() else ""


def page_of(folders, tmp_path: Path) -> Page:
    report(folders, tmp_path / "report.html")
    return Page((tmp_path / "report.html").read_text())


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


def words(axes) -> list[str]:
    """The names in the legend, what stands above the bars, and the names of groups of bars."""
    above = [tick.get_text() for child in axes.child_axes for tick in child.get_xticklabels()]
    return [text.get_text() for text in (*axes.get_legend().get_texts(), *axes.texts)] + above


def heights(axes) -> list[float]:
    """The height of every part of a bar, bar after bar from the left."""
    return [patch.get_height() for patch in sorted(axes.patches, key=Rectangle.get_x)]


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """The folder of a sweep with its page and its picture, and the figures of which these were drawn."""
    folder, figures, write = tmp_path_factory.mktemp("reported"), [], Figure.savefig
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda self, *a, **how: (figures.append(self), write(self, *a, **how)))
        report([write_multirun(folder / "sweep")], folder / "report.html", folder / "report.png")
    return folder, figures


def test_the_page_has_all_charts_and_stands_by_itself(reported):
    """Nothing is loaded and nothing is run: no script, no link to elsewhere, and a policy that forbids both."""
    text = (reported[0] / "report.html").read_text()
    page = Page(text)
    assert [title for title in (*EVERY_RUN, OF_STEPS) if title in page.text] == EVERY_RUN
    assert sum(tag == "svg" for tag, _ in page.tags) == len(EVERY_RUN)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    links = [
        value for _, attributes in page.tags for name, value in attributes.items() if name.endswith(("src", "href"))
    ]
    assert not [value for value in links if not value.startswith("#")]
    assert not re.search(r"url\((?!#)|@import", text)
    assert any((attributes.get("content") or "").startswith("default-src 'none'") for _, attributes in page.tags)


def test_epoch_values_and_live_values_are_told_apart(tmp_path):
    """The chart over epochs shows the values of epochs only, of a single run also those of stages and nodes."""
    folder = write_csv(tmp_path / "run", rows_of_a_run(0.5, nodes=2))
    hit_rate, ceiling, expected, *_ = lines(drawn(folder, "Hit rate"))
    assert hit_rate == [(0, 0.0), (1, 0.5), (2, 0.5)]
    assert ceiling == [(0, 0.5), (1, 0.5), (2, 0.5)]
    assert expected == [(0, 0.0), (1, 0.5), (2, 0.5)]
    names = ["hit rate", "at most", "expected", "val", "node 0", "node 1"]
    assert words(drawn(folder, "Hit rate")) == [f"50 % {name}" for name in names]
    assert lines(drawn(folder, "Fill in the first epoch")) == [[(4, 0.5), (9, 1.0)]]


def test_axes_are_fixed_or_round(tmp_path):
    """A hit rate of 2 % is drawn on an axis that reaches 100 %; ticks of bytes are powers of 1024."""
    axes = drawn(write_csv(tmp_path / "low", rows_of_a_run(0.02)), "Hit rate")
    assert axes.get_ylim() == (0, 1)
    assert [label.get_text() for label in axes.get_yticklabels()][::4] == ["0 %", "100 %"]
    axes = drawn(write_csv(tmp_path / "run", rows_of_a_run()), "Where the bytes came from")
    assert {"0 B", "256 KiB", "512 KiB"} <= {label.get_text() for label in axes.get_yticklabels()}


def test_runs_of_a_multirun_stand_side_by_side(multirun):
    """Each run has its line, its bars and its row of the table."""
    names = ["budget=0%", "budget=50%", "budget=100%"]
    hit_rate = drawn(multirun, "Hit rate")
    assert sorted(words(hit_rate)) == sorted(f"{share} {name}" for share, name in zip(SHARES, names, strict=True))
    assert len({line.get_color() for line in hit_rate.get_lines()}) == 3
    sources = drawn(multirun, "Where the bytes came from")
    assert words(sources)[-3:] == [f"{name}\n{share}" for name, share in zip(names, SHARES, strict=True)]
    parts = heights(sources)
    assert [parts[6 * run + 4 : 6 * run + 6] for run in range(3)] == [[0, 2**20], [2**19, 2**19], [2**20, 0]]
    assert table(find_runs([multirun])[0])["hit rate"] == SHARES


SHARES = ["0 %", "50 %", "100 %"]


def test_long_names_of_runs_are_numbers_in_the_charts(tmp_path):
    """Two names that do not fit into a legend are "run 1" and "run 2" there."""
    for number in range(2):
        overrides = ["model=resnet50_of_a_long_name", f"data.root=/mnt/storage/dataset_{number}"][number:]
        write_hydra(tmp_path / "runs" / str(number), overrides, rows_of_a_run())
    assert words(drawn(tmp_path / "runs", "Samples per second")) == ["100 run 1", "100 run 2"]


def test_gains_are_told(multirun, tmp_path):
    """The table has seconds per epoch, the gain over epoch one and over the run of the sweep with budget 0."""
    write_hydra(multirun / "3", ["cache.budget=50%", "seed=1", "model=other"], rows_of_a_run(0.5))
    columns = table(find_runs([multirun])[0])
    assert columns["epoch one"] == ["2 s"] * 4  # 100 samples at 50 per second
    assert columns["later epochs"] == ["2 s", "1 s", "0.67 s", "1 s"]
    assert columns["faster than epoch one"] == ["1.0x", "2.0x", "3.0x", "2.0x"]
    assert columns["faster than budget=0"] == ["", "2.0x", "3.0x", ""]  # the last has another model
    page = page_of([multirun / "1"], tmp_path)
    assert "epoch one\n2 s\nlater epochs\n1 s\nfaster than epoch one\n2.0x" in page.text
    assert "at most\n50 %" in page.text


def test_a_run_in_its_first_epoch_has_a_page(tmp_path):
    """Live values alone show the fill. A chart without values is left out of the page and the picture."""
    rows = [row for row in rows_of_a_run(epochs=1) if row[1] is None]
    page = page_of([write_csv(tmp_path / "run", rows)], tmp_path)
    assert "first epoch not over yet" in page.text
    assert [title for title in EVERY_RUN if title in page.text] == ["Fill in the first epoch"]
    only_validated = write_csv(tmp_path / "val", [(0, 0, {"stocache/val/hit_rate": 0.5})])
    report([only_validated], tmp_path / "report.html", tmp_path / "report.png")
    assert "val hit rate\n50 %" in Page((tmp_path / "report.html").read_text()).text


@pytest.mark.parametrize("alone", [False, True])
def test_parts_of_a_step_are_bars(tmp_path, alone):
    """Where a StepTimer logged there is a chart more, with a bar for each epoch; it may have logged alone."""
    rows = list(step_rows(rows_of_a_run(epochs=2)))
    for _, _, values in rows:
        if alone:
            values.pop("stocache/hits", None)
    axes = drawn(write_csv(tmp_path, rows), OF_STEPS)
    assert heights(axes) == pytest.approx([0.03, 0, 0.01, 0, 0, 0, 0.02, 0, 0.01, 0, 0, 0])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1"]
    assert {"75 %", "67 %", "wait", "forward"} <= {*words(axes)}


def test_more_runs_than_colours_are_all_in_the_table(tmp_path):
    """Of many runs the first are drawn, the page says so, and the table has the number and the name of each."""
    for number in range(len(COLOURS) + 2):
        write_csv(tmp_path / f"version_{number}", rows_of_a_run(epochs=2))
    page = page_of([tmp_path], tmp_path)
    assert f"first {len(COLOURS)} of {len(COLOURS) + 2} runs" in page.text
    runs, _ = find_runs([tmp_path])
    assert all(f"run {number}: {run.name}" in page.text for number, run in enumerate(runs, 1))


def test_hostile_names_are_escaped(tmp_path):
    """Markup in an override or a folder is text in the page and in its charts, and a name is no formula."""
    names = ["x=<script>", "x=<b>", "x=$\\frac{1$", "'\" onload=1"]
    for number, name in enumerate(names[:3]):
        write_hydra(tmp_path / "runs" / str(number), [name], rows_of_a_run())
    write_csv(tmp_path / "runs" / names[3], [*rows_of_a_run(), (3, 0, {"stocache/<script>": 1.0})])
    page = page_of([tmp_path / "runs"], tmp_path)
    assert not {"script", "b"} & {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert all(f"\n{name}\n" in page.text for name in names)  # the reader sees them, in the table
    assert all(f"100 {name}\n" in page.text for name in names)  # and in a chart


def test_the_picture_has_the_charts_and_the_table(reported):
    """Every title and legend of the page's charts, and every cell of its table, stands in the PNG, too."""
    folder, figures = reported
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    *of_page, picture = ([text.get_text() for text in figure.findobj(Text)] for figure in figures)
    legends = {words(axes)[0] for figure in figures[:-1] for axes in figure.axes}
    assert len(of_page) == len(EVERY_RUN)
    assert {*EVERY_RUN, *legends} <= {*picture}
    [cells] = figures[-1].findobj(Table)
    columns = table(find_runs([folder])[0])
    assert {cell for column in columns.values() for cell in column} <= {
        cell.get_text().get_text() for cell in cells.get_celld().values()
    }


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
