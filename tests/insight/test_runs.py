"""Which runs are found below a folder, what they are called, and what bad folders get."""

import pytest

from lightning_stocache.insight.runs import LogError, find_runs, table
from tests.insight.logged import rows_of_a_run, step_rows, write_csv, write_multirun


def test_runs_of_a_multirun_are_named_by_what_differs(tmp_path):
    """Overrides that all runs have are left out of their names; the order is that of the job numbers."""
    runs, left_out = find_runs([write_multirun(tmp_path)])
    assert [run.name for run in runs] == ["cache.budget=0%", "cache.budget=50%", "cache.budget=100%"]
    assert left_out == []


def test_versions_of_a_logger_are_runs_in_the_order_of_their_numbers(tmp_path):
    """version_N are runs by that name, and version_10 comes after version_9. A run that is given twice is one run."""
    folders = [write_csv(tmp_path / "lightning_logs" / f"version_{number}", rows_of_a_run()) for number in (10, 9)]
    assert [run.name for run in find_runs([folders[0], tmp_path])[0]] == ["version_9", "version_10"]


def test_tensorboard_says_the_same_as_csv(tmp_path):
    """Event files, in which each tag lies by itself, give the values that the CSV gives. Of a live value and an epoch's
    value under one step, the epoch's counts."""
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    writer = tensorboard.SummaryWriter(str(tmp_path / "events"))
    for step, epoch, values in step_rows(rows_of_a_run(0.5, nodes=2)):
        for name, value in {**values, **({} if epoch is None else {"epoch": epoch})}.items():
            writer.add_scalar(name, value, step)
    writer.close()
    write_csv(tmp_path / "csv", step_rows(rows_of_a_run(0.5, nodes=2)))
    (events,), (lines,) = find_runs([tmp_path / "events"])[0], find_runs([tmp_path / "csv"])[0]
    assert table([events]) == table([lines])
    metrics = ("hit_rate", "val/hit_rate", "bytes_from_cache", "samples_per_second", "node1/hit_rate")
    for metric in (*metrics, "step/wait_seconds"):
        assert lines.epochs(metric)
        assert dict(events.epochs(metric)) == pytest.approx(dict(lines.epochs(metric)))
    assert events.first_epoch("fill_fraction") == lines.first_epoch("fill_fraction") == [(4, 0.5), (9, 1.0)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "epoch,step,train/loss\n0,9,0.5\n",
        "epoch,step,stocache/hits\n0,9",  # cut off
        "\x00\x01\x02",
    ],
)
def test_a_bad_csv_is_one_sentence(tmp_path, text):
    """Empty, foreign, truncated and binary files are refused by what is missing in them."""
    (tmp_path / "metrics.csv").write_text(text)
    with pytest.raises(LogError, match="no stocache/ value") as refused:
        find_runs([tmp_path])
    assert "\n" not in str(refused.value)
