"""The messages of the package, in processes where pytest's caplog does not reach."""

import logging

import pytest


class Log(logging.Handler):
    """Collects what the package logs in this process, from a level on, from now on or, as a context, to its end."""

    def __init__(self, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.lines: list[str] = []
        self.package = logging.getLogger("lightning_stocache")
        self.package.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        self.package.removeHandler(self)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings that pytest has heard."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
