"""The dashboard without a server: what it makes of runs, in the page, in the picture and in a browser."""

import re
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lightning_stocache.insight.panels import MOST_DRAWN, Lines, Stacks, panels
from lightning_stocache.insight.report import report
from lightning_stocache.insight.runs import find_runs
from lightning_stocache.insight.summary import table
from tests.insight.logged import rows_of_a_run, write_csv, write_hydra, write_multirun

TITLES = [
    "Hit rate",
    "Fill in the first epoch",
    "Where the bytes came from",
    "Waiting for data",
    "Samples per second",
    "Memory against budget",
]
COMING = ("data_wait_seconds", "compute_seconds", "samples_per_second", "hit_rate_expected")


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
        self.text += data + "\n"


def page_of(folders, tmp_path: Path) -> Page:
    report(folders, tmp_path / "report.html")
    return Page((tmp_path / "report.html").read_text())


def panel_of(folder: Path, title: str):
    runs, _ = find_runs([folder])
    return next(panel for panel in panels(runs) if panel.title == title)


def test_a_csv_folder_becomes_a_page_with_six_panels(tmp_path):
    """A folder of CSVLogger gives one page with every panel drawn and the headline figures in it."""
    page = page_of([write_csv(tmp_path / "version_0", rows_of_a_run())], tmp_path)
    assert all(title in page.text for title in TITLES)
    assert sum(tag == "svg" for tag, _ in page.tags) == len(TITLES)
    assert "of at most 50 %" in page.text
    assert "512 KiB of 512 KiB" in page.text


def test_the_page_stands_by_itself(multirun, tmp_path):
    """Nothing is loaded and nothing is run: no script, no link, no address, and a policy that forbids both."""
    page = page_of([multirun], tmp_path)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not {"src", "href", "xlink:href"} & {name for _, attributes in page.tags for name in attributes}
    assert not re.search(r"url\(|@import|https?:", (tmp_path / "report.html").read_text())
    assert any((attributes.get("content") or "").startswith("default-src 'none'") for _, attributes in page.tags)


def test_epoch_values_and_live_values_are_told_apart(tmp_path):
    """Live values have columns of their own; the panel over epochs shows the values of epochs only."""
    folder = write_csv(tmp_path / "run", rows_of_a_run(0.5))
    series = {line.label: list(line.points) for line in panel_of(folder, "Hit rate").series}
    assert series["hit rate"] == [(0, 0.0), (1, 0.5), (2, 0.5)]
    assert series["ceiling"] == [(0, 0.5), (1, 0.5), (2, 0.5)]
    assert series["expected"] == [(0, 0.0), (1, 0.5), (2, 0.5)]
    assert [list(line.points) for line in panel_of(folder, "Fill in the first epoch").series] == [[(4, 0.5), (9, 1.0)]]


def test_rates_have_a_fixed_axis(tmp_path):
    """A hit rate of 2 % is drawn on an axis that reaches 100 %."""
    page = page_of([write_csv(tmp_path / "run", rows_of_a_run(0.02))], tmp_path)
    assert page.text.count("100 %") >= 2
    assert panel_of(tmp_path / "run", "Hit rate").unit == "%"


def test_runs_of_a_multirun_stand_side_by_side(multirun):
    """Each run has its line, its bars and its row of the table."""
    runs, _ = find_runs([multirun])
    hit_rate, _, sources, *_ = panels(runs)
    assert isinstance(hit_rate, Lines)
    assert isinstance(sources, Stacks)
    assert [line.label for line in hit_rate.series if line.style == "solid"] == [
        "budget=0%",
        "budget=50%",
        "budget=100%",
    ]
    assert [stack.bars[-1] for stack in sources.stacks] == [(2, 0, 2**20), (2, 2**19, 2**19), (2, 2**20, 0)]
    head, rows = table(runs)
    assert [row[head.index("hit rate")] for row in rows] == ["0 %", "50 %", "100 %"]
    assert rows[1][head.index("saved per epoch")] == "2.5 s"  # of the 5 s that epoch one waited


@pytest.mark.parametrize("count", [2, 4, 8])
def test_names_of_runs_do_not_overlap(tmp_path, count):
    """Long names that begin alike are numbers in the charts, short enough for each, and the table has both."""
    for number in range(count):
        overrides = ["model=resnet50_of_a_long_name", f"data.root=/mnt/storage/dataset_{number}"][number % 2 :]
        write_hydra(tmp_path / str(number), overrides, rows_of_a_run())
    runs, _ = find_runs([tmp_path])
    hit_rate, _, sources, _, speed, memory = panels(runs)
    numbers = [f"run {number}" for number in range(1, count + 1)]
    assert [stack.label for stack in sources.stacks] == numbers
    assert [series.label for series in hit_rate.series if series.style == "solid"] == numbers
    assert [series.label for series in speed.series] == numbers
    assert [meter.label for meter in memory.rows] == numbers
    assert [row[0] for row in table(runs)[1]] == [
        f"{number}: {run.name}" for number, run in zip(numbers, runs, strict=True)
    ]


def test_gains_are_told(multirun, tmp_path):
    """The table has seconds per epoch, the gain over epoch one and over the run of the sweep with budget 0."""
    write_hydra(multirun / "3", ["cache.budget=50%", "seed=1", "model=other"], rows_of_a_run(0.5))
    head, rows = table(find_runs([multirun])[0])
    told = [dict(zip(head, row, strict=True)) for row in rows]
    assert [row["epoch one"] for row in told] == ["2 s"] * 4  # 100 samples at 50 per second
    assert [row["later epochs"] for row in told] == ["2 s", "1 s", "0.67 s", "1 s"]
    assert [row["faster than epoch one"] for row in told] == ["1.0x", "2.0x", "3.0x", "2.0x"]
    assert [row["faster than budget=0"] for row in told] == ["", "2.0x", "3.0x", ""]  # the last has another model
    page = page_of([multirun / "1"], tmp_path)
    assert "seconds per epoch\n1 s\nlater ones; epoch one 2 s" in page.text
    assert "faster than epoch one\n2.0x" in page.text


def test_one_epoch_has_seconds_and_no_gain(tmp_path):
    """A run of one epoch is not compared with itself."""
    page = page_of([write_csv(tmp_path / "run", rows_of_a_run(epochs=1))], tmp_path)
    assert "seconds of epoch one\n2 s" in page.text
    assert "faster than" not in page.text


def test_metrics_that_older_runs_lack_leave_a_sentence(tmp_path):
    """The panels of what was not logged say so; the others are drawn."""
    page = page_of([write_csv(tmp_path / "run", rows_of_a_run(without=COMING))], tmp_path)
    assert "data_wait_seconds and compute_seconds were not logged" in page.text
    assert "samples_per_second was not logged" in page.text
    assert sum(tag == "svg" for tag, _ in page.tags) == len(TITLES) - 2


def test_a_run_in_its_first_epoch_has_a_page(tmp_path):
    """Live values alone show the fill and the memory."""
    rows = [row for row in rows_of_a_run(epochs=1) if row[1] is None]
    page = page_of([write_csv(tmp_path / "run", rows)], tmp_path)
    assert "first epoch not over yet" in page.text
    assert sum(tag == "svg" for tag, _ in page.tags) == 2


def test_nodes_have_lines_of_their_own(tmp_path):
    """With several nodes, a single run shows the hit rate and the memory of each."""
    folder = write_csv(tmp_path / "run", rows_of_a_run(nodes=2))
    assert {"node 0", "node 1"} <= {line.label for line in panel_of(folder, "Hit rate").series}
    assert [row.label for row in panel_of(folder, "Memory against budget").rows][-1] == "training, node 1"


def test_more_runs_than_colours_are_all_in_the_table(tmp_path):
    """Of many runs the first are drawn, the page says so, and no run is lost."""
    for number in range(MOST_DRAWN + 2):
        write_csv(tmp_path / f"version_{number}", rows_of_a_run())
    page = page_of([tmp_path], tmp_path)
    assert f"first {MOST_DRAWN} of {MOST_DRAWN + 2} runs" in page.text
    assert f"version_{MOST_DRAWN + 1}" in page.text


def test_hostile_names_are_escaped(tmp_path):
    """Markup in an override, a folder or a column's name is text in the page, or is not in it at all."""
    bad = "<script>alert(1)</script>"
    extra = [(3, 0, {f"stocache/{bad}": 1.0, f"stocache/node{bad}/hit_rate": 1.0, "stocache/hits": 1.0})]
    write_hydra(tmp_path / "a", [f"x={bad}"], [*rows_of_a_run(), *extra])
    write_csv(tmp_path / "<script>alert(2)<" / "b\nc", rows_of_a_run())
    write_csv(tmp_path / "'\" onload=alert(3)", [(1, 0, {"val/loss": 1.0})])
    page = page_of([tmp_path], tmp_path)
    assert "script" not in {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert f"x={bad}" in page.text  # the reader still sees the name


def test_a_run_that_cannot_be_read_does_not_hide_the_others(multirun, tmp_path):
    """One empty log in a sweep is left out with a sentence, on the page too."""
    (multirun / "1" / "csv" / "metrics.csv").write_text("")
    (sentence,) = report([multirun], tmp_path / "report.html")
    assert "is empty" in sentence
    assert sentence in Page((tmp_path / "report.html").read_text()).text


def test_numbers_that_are_none_do_not_break_the_page(tmp_path):
    """Infinite, negative, huge and missing values are left out or cut off at the axis."""
    values = {"stocache/hits": "1e308", "stocache/bytes_from_cache": "1e308", "stocache/bytes_from_source": "-5"}
    odd = {"stocache/hit_rate": "7", "stocache/memory_bytes": "inf", "stocache/samples_per_second": "-1"}
    write_csv(tmp_path / "run", [(1, 0, values | odd), (2, "x", values), (1e30, 1e30, values)])
    page = page_of([tmp_path / "run"], tmp_path)
    assert all(title in page.text for title in TITLES)
    assert "nan" not in page.text


def test_the_picture_has_the_same_panels(multirun, tmp_path):
    """A PNG is drawn of runs whose names would be formulas to matplotlib."""
    pytest.importorskip("matplotlib")
    write_hydra(multirun / "3", ["x=$\\frac{1$"], rows_of_a_run(without=COMING))
    report([multirun], tmp_path / "report.html", tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_says_what_the_page_says(multirun, tmp_path, monkeypatch):
    """Every word and number of the page's charts stands in the PNG, too."""
    axes = pytest.importorskip("matplotlib.axes").Axes
    written, write = [], axes.text
    monkeypatch.setattr(
        axes, "text", lambda self, x, y, words, **style: written.append(words) or write(self, x, y, words, **style)
    )
    report([multirun], tmp_path / "report.html", tmp_path / "report.png")
    drawings = re.findall("<svg.*?</svg>", (tmp_path / "report.html").read_text())
    words = [
        "".join(text.itertext()).strip()
        for svg in drawings
        for text in ElementTree.fromstring(svg)
        if text.tag == "text"
    ]
    assert len(words) > 50
    assert not Counter(words) - Counter(written)


def test_matplotlib_that_is_missing_is_named(tmp_path, monkeypatch):
    """Without matplotlib the sentence says what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"lightning-stocache\[report\]"):
        report([write_csv(tmp_path / "run", rows_of_a_run())], tmp_path / "report.html", tmp_path / "report.png")


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_browser_shows_the_panels(multirun, tmp_path):
    """Headless Chromium draws every panel, and hostile names stay text in its document."""
    write_hydra(multirun / "3", ["x=<script>document.title='run'</script>"], rows_of_a_run(0.2))
    report([multirun], tmp_path / "report.html")
    quiet = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")
    headless = (
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        *quiet,
        f"--user-data-dir={tmp_path / 'browser'}",
    )
    address = (tmp_path / "report.html").as_uri()
    done = subprocess.run([*headless, "--dump-dom", address], capture_output=True, text=True, timeout=280, check=True)
    page = Page(done.stdout)
    assert [title for title in TITLES if title not in page.text] == []
    assert sum(tag == "svg" for tag, _ in page.tags) == len(TITLES)
    assert "script" not in {tag for tag, _ in page.tags}
    assert "Stochastic cache: 4 runs" in page.text
