"""The messages of the package, in processes where pytest's caplog does not reach."""

import logging

__all__ = ["Log"]


class Log(logging.Handler):
    """Collects what the package logs in this process, from now on."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("lightning_stocache").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
