"""Which runs are found below a folder, what they are called, and what bad folders get."""

import pytest

from lightning_stocache.insight.runs import LogError, find_runs, table
from tests.insight.logged import rows_of_a_run, step_rows, write_csv, write_multirun


def test_a_live_value_and_an_epochs_end_may_have_one_step(tmp_path):
    """In TensorBoard's events, too, and the fill of the first epoch ends with the epoch's."""
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        for name, value in (("live/fill_fraction", 0.75), ("fill_fraction", 1.0), ("hits", 5)):
            writer.add_scalar(f"stocache/{name}", value, 9)
    [run] = find_runs([tmp_path])[0]
    assert run.first_epoch("fill_fraction") == [(9, 1.0)]


def test_runs_of_a_multirun_are_named_by_what_differs(tmp_path):
    """Overrides that all runs have are left out of their names; the order is that of the job numbers."""
    runs, left_out = find_runs([write_multirun(tmp_path)])
    assert [run.name for run in runs] == ["cache.budget=0%", "cache.budget=50%", "cache.budget=100%"]
    assert left_out == []


def test_versions_of_a_logger_are_runs_in_the_order_of_their_numbers(tmp_path):
    """lightning_logs/version_N are runs by that name, and version_10 comes after version_9."""
    for number in (10, 9):
        write_csv(tmp_path / "lightning_logs" / f"version_{number}", rows_of_a_run())
    assert [run.name for run in find_runs([tmp_path])[0]] == ["version_9", "version_10"]


def test_a_run_that_is_given_twice_is_shown_once(tmp_path):
    """A folder and the folder above it lead to the same run."""
    folder = write_csv(tmp_path / "run", rows_of_a_run())
    assert len(find_runs([folder, tmp_path])[0]) == 1


def test_tensorboard_says_the_same_as_csv(tmp_path):
    """Event files, in which each tag lies by itself, give the values that the CSV gives."""
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    writer = tensorboard.SummaryWriter(str(tmp_path / "events"))
    for step, epoch, values in step_rows(rows_of_a_run(0.5, nodes=2)):
        for name, value in {**values, **({} if epoch is None else {"epoch": epoch})}.items():
            writer.add_scalar(name, value, step)
    writer.close()
    write_csv(tmp_path / "csv", step_rows(rows_of_a_run(0.5, nodes=2)))
    (events,), (lines,) = find_runs([tmp_path / "events"])[0], find_runs([tmp_path / "csv"])[0]
    assert table([events]) == table([lines])
    for metric in ("hit_rate", "val/hit_rate", "bytes_from_cache", "samples_per_second", "node1/hit_rate"):
        assert lines.epochs(metric)
        assert dict(events.epochs(metric)) == pytest.approx(dict(lines.epochs(metric)))
    assert dict(events.epochs("step/wait_seconds")) == pytest.approx(dict(lines.epochs("step/wait_seconds")))
    assert events.first_epoch("fill_fraction") == lines.first_epoch("fill_fraction")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no stocache/ value"),
        ("epoch,step,train/loss\n0,9,0.5\n", "no stocache/ value"),
        ("epoch,step,stocache/hits\n0,9", "no stocache/ value"),  # cut off
        ("\x00\x01\x02", "no stocache/ value"),
    ],
)
def test_a_bad_csv_is_one_sentence(tmp_path, text, says):
    """Empty, foreign, truncated and binary files are refused by what is missing in them."""
    (tmp_path / "metrics.csv").write_text(text)
    with pytest.raises(LogError, match=says) as refused:
        find_runs([tmp_path])
    assert "\n" not in str(refused.value)


def test_folders_that_are_none_are_refused(tmp_path):
    """A folder that is missing, a file instead of one, and a folder without a run, each in a sentence."""
    file = write_csv(tmp_path / "run", rows_of_a_run()) / "metrics.csv"
    (tmp_path / "empty").mkdir()
    for path, says in ((tmp_path / "no", "is no folder"), (file, "is no folder"), (tmp_path / "empty", "holds no run")):
        with pytest.raises(LogError, match=says):
            find_runs([path])
