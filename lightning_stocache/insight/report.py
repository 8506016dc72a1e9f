"""The dashboard without a server: from the folders of runs to one page that can be opened, mailed and kept.

logs -> runs -> panels and summary -> drawings (`chart`) -> page; `picture` makes a PNG of the same drawings. Nothing
here knows Lightning or torch, and nothing is sent or fetched.

The page stands by itself: style and pictures inside, no script, nothing loaded. It follows the reader's light or dark
setting, and prints. Names of runs were written by others: they are escaped where they are written, and the page forbids
itself scripts and every request, should an escape ever be forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from lightning_stocache.insight.chart import draw
from lightning_stocache.insight.panels import MOST_DRAWN, Panel, Stacks, panels
from lightning_stocache.insight.picture import COLOURS, save
from lightning_stocache.insight.runs import Run, find_runs, labels
from lightning_stocache.insight.summary import headline, table

__all__ = ["page", "report"]

_STYLE = ":root {" + "".join(f" --{name}: {colour};" for name, colour in COLOURS.items())
_STYLE += """ --paper: #f6f7f9; --card: #fff; --ink: #1b2330; --rule: #e4e7ec; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --paper: #10141b; --card: #181e27; --ink: #e7ebf2; --dim: #98a2b3;
  --rule: #2a323e; --track: #303a48; --good: #4ba3e3; --bad: #f0a53a;
  --c0: #5cb3f0; --c1: #ff8f5a; --c2: #36c9a0; --c3: #e79cc6;
  --c4: #e8c547; --c5: #9cc3ff; --c6: #b6beca; --c7: #b79cff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 28px 24px 40px; max-width: 1240px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { margin: 0; font-size: 24px; line-height: 1.25; letter-spacing: -.01em; }
h1 + p { margin: 4px 0 0; color: var(--dim); overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 14px; margin: 22px 0 14px; }
.figures div, figure, .table { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
.figures div { padding: 12px 16px; display: flex; flex-direction: column; }
.figures dt, .figures dd { margin: 0; }
.figures dt, .figures dd + dd { color: var(--dim); font-size: 13px; line-height: 1.35; }
.figures dd { font-size: 26px; font-weight: 650; line-height: 1.3; letter-spacing: -.01em;
  font-variant-numeric: tabular-nums; }
.figures dd + dd { font-weight: 400; letter-spacing: 0; }
.panels { display: grid;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 14px; margin: 14px 0; }
figure { margin: 0; padding: 14px 16px 8px; min-width: 0; display: flex; flex-direction: column; break-inside: avoid; }
h2 { margin: 0; font-size: 16px; font-weight: 650; }
figcaption { color: var(--dim); font-size: 13px; line-height: 1.4; margin-bottom: 8px; }
.head { display: flex; flex-wrap: wrap; justify-content: space-between; align-items: baseline; }
.head p { margin: 0; font-size: 13px; }
.head i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin: 0 5px 0 12px; }
i.good { background: var(--good); } i.bad { background: var(--bad); }
.empty { margin: auto; padding: 72px 24px; color: var(--dim); text-align: center; }
.chart { margin-top: auto; overflow-x: auto; }
.chart svg { display: block; width: 100%; min-width: 460px; height: auto; overflow: visible; }
svg text { font-size: 13px; fill: var(--ink); font-variant-numeric: tabular-nums; }
svg .dim { fill: var(--dim); font-size: 12px; } svg .strong { font-weight: 650; } svg .name { font-weight: 500; }
svg .share { font-size: 12px; font-weight: 600; } svg .ink { fill: var(--c); }
.grid { stroke: var(--rule); } .line { fill: none; stroke: var(--c); stroke-width: 2.5; stroke-linejoin: round; }
.dashed { stroke-dasharray: 7 5; stroke-width: 1.8; } .dotted { stroke-dasharray: 1.5 5; stroke-linecap: round; }
.thin { stroke-width: 1.3; opacity: .75; } .mark { fill: var(--c); stroke: var(--card); stroke-width: 1.5; }
rect.good { fill: var(--good); } rect.bad { fill: var(--bad); } .track { fill: var(--track); } .used { fill: var(--c); }
.table { padding: 6px 16px; overflow-x: auto; margin: 22px 0 14px; } main + .table { margin: 0; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 7px 0 7px 15px; border-top: 1px solid var(--rule); white-space: nowrap; }
thead th { border: 0; color: var(--dim); font-weight: 500; font-size: 13px; line-height: 1.3; white-space: normal;
  vertical-align: bottom; }
th:first-child { text-align: left; padding-left: 0; }
tbody th:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 190px; }
tbody th { font-weight: 600; }
tbody th i { display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin-right: 8px; }
@media (max-width: 600px) { body { padding: 16px 10px 24px; } .figures div, figure, .table { padding: 10px 12px; }
  .figures { grid-template-columns: 1fr 1fr; } tbody th:first-child { min-width: 165px; font-size: 13px; } }
@media print { .chart svg { min-width: 0; } }
.note { color: var(--dim); font-size: 13px; margin: 10px 2px 0; overflow-wrap: anywhere; }
"""
_STYLE += "".join(f".c{n} {{ --c: var(--c{n}); }} i.c{n} {{ background: var(--c); }}\n" for n in range(MOST_DRAWN))


def report(folders: Sequence[Path], output: Path, png: Path | None = None) -> list[str]:
    r"""Write the dashboard of the runs in these folders.

    Args:
        folders: Run folders, or folders above them: of CSVLogger, of TensorBoardLogger (needs the extra
            `tensorboard`), of Hydra, one run or a multirun.
        output: The HTML page, written anew.
        png: Where to draw the panels as a picture too (needs the extra `report`).

    Returns:
        One sentence for each run below the folders that had to be left out.

    Raises:
        LogError: There is no run that could be read.
        ModuleNotFoundError: A picture is asked for and matplotlib is not installed.
        OSError: A file cannot be written.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> text = "epoch,step,stocache/hit_rate,stocache/hits\n0,9,0.5,5\n"
        >>> _ = (folder / "metrics.csv").write_text(text)
        >>> report([folder], folder / "report.html"), (folder / "report.html").stat().st_size > 0
        ([], True)
    """
    runs, left_out = find_runs(folders)
    output.write_text(page(runs, left_out), encoding="utf-8", errors="replace")
    if png is not None:
        drawn = runs[:MOST_DRAWN]
        numbered = labels(drawn)[0] == "run 1"  # the names, which the page's table has beside its charts
        names = [f"run {number}: {run.name}" for number, run in enumerate(drawn, 1)]
        save(panels(runs), png, footnotes=names if numbered else ())
    return left_out


def page(runs: Sequence[Run], left_out: Sequence[str] = ()) -> str:
    """The page of these runs.

    Args:
        runs: One run, or several that are shown side by side.
        left_out: A sentence for each run that could not be read; they stand at the end of the page.

    Example:
        >>> from pathlib import Path
        >>> html = page(
        ...     [Run("<b>", Path("."), [{"epoch": 0, "step": 9, "stocache/hit_rate": 0.5, "stocache/hits": 5}])]
        ... )
        >>> "&lt;b&gt;" in html, "<b>" in html
        (True, False)
    """
    return "".join(_parts(runs, left_out))


def _parts(runs: Sequence[Run], left_out: Sequence[str]) -> Iterator[str]:
    title = "Stochastic cache" if len(runs) == 1 else f"Stochastic cache: {len(runs)} runs"
    about = f"{runs[0].name} ({_epochs(runs[0])})" if len(runs) == 1 else "side by side, named by what sets them apart"
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    yield (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n"
        f"<body><header><h1>{title}</h1><p>{escape(about)}</p></header>\n"
    )
    if len(runs) == 1:
        figures = (
            f"<div><dt>{escape(a)}</dt><dd>{escape(b)}</dd><dd>{escape(c)}</dd></div>" for a, b, c in headline(runs[0])
        )
        yield f'<dl class="figures">{"".join(figures)}</dl>\n'
    else:
        yield _table(runs)
    yield '<main class="panels">\n'
    for panel in panels(runs):
        head = f'<div class="head"><h2>{escape(panel.title)}</h2>{_key(panel)}</div>'
        caption = f"<figcaption>{escape(panel.caption)}</figcaption>"
        empty = f'<p class="empty">{escape(panel.empty)}</p>'
        drawing = empty if panel.empty else f'<div class="chart">{draw(panel)}</div>'
        yield f"<figure>{head}{caption}{drawing}</figure>\n"
    yield "</main>\n"
    if len(runs) == 1:
        yield _table(runs)
    yield from (f'<p class="note">{escape(note)}</p>\n' for note in _notes(runs, left_out))
    yield "</body></html>\n"


def _key(panel: Panel) -> str:
    if not isinstance(panel, Stacks) or panel.empty:
        return ""
    named = zip(("good", "bad"), panel.parts, strict=True)
    return "<p>" + "".join(f'<i class="{kind}"></i>{escape(part)}' for kind, part in named) + "</p>"


def _table(runs: Sequence[Run]) -> str:
    head, rows = table(runs)
    lines = ["".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)]
    for colour, (name, *cells) in enumerate(rows):
        dot = f'<i class="c{colour}"></i>' if len(runs) > 1 and colour < MOST_DRAWN else ""
        lines.append(
            f'<th scope="row">{dot}{escape(name)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        )
    top, *body = (f"<tr>{line}</tr>" for line in lines)
    return f'<div class="table"><table><thead>{top}</thead><tbody>{"".join(body)}</tbody></table></div>\n'


def _notes(runs: Sequence[Run], left_out: Sequence[str]) -> Iterator[str]:
    if any(run.seconds_saved for run in runs):
        yield (
            "Waiting saved: what epoch one waited for data, sample for sample, less what later epochs waited; mean per "
            "later epoch."
        )
    if len(runs) > MOST_DRAWN:
        yield f"The charts show the first {MOST_DRAWN} of {len(runs)} runs; the table has all."
    if left_out:
        yield f"Left out: {len(left_out)}."
        yield from left_out


def _epochs(run: Run) -> str:
    count = run.epoch_count
    return "first epoch not over yet" if not count else f"{count} epoch" + ("s" if count > 1 else "")
