"""The command line in tests: what it is given, what it prints, and how it ends where its input is no good."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from lightning_stocache.__main__ import main


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write texts under their paths below a folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def said(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """What a command prints on stdout; nothing stands on stderr."""
    main([*map(str, arguments)])
    out, err = capsys.readouterr()
    assert err == ""
    return out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What stands on stderr where a command ends with code 2, without a traceback, and prints nothing else."""
    with pytest.raises(SystemExit) as end:
        main([*arguments])
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert "Traceback" not in err
    return err
