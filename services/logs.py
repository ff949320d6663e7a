"""Structured logs: one JSON object per line, on standard error unless told otherwise, with service and instance bound."""

from __future__ import annotations

import io
import logging
import sys
from typing import TextIO, cast

import structlog


def start_logging(service: str, instance: str, level: str, stream: TextIO = sys.stderr) -> None:
    """Configure structlog and the standard library to write to the same stream."""
    patient = PatientStream(stream)
    numeric = getattr(logging, level.upper())
    logging.basicConfig(
        stream=patient, level=max(numeric, logging.WARNING), format="%(levelname)s %(name)s %(message)s", force=True
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(numeric),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, patient)),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(service=service, instance=instance)


class PatientStream(io.TextIOBase):
    """A text stream whose writer goes on when a disk is full: what cannot be written is dropped and counted, and the next line
    that can be says how much.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._dropped = 0

    def write(self, text: str) -> int:
        try:
            if self._dropped:
                self._stream.write(f'{{"event": "log lines were dropped, the disk was full", "pieces": {self._dropped}}}\n')
                self._stream.flush()
                self._dropped = 0
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            self._dropped += 1
        return len(text)

    def flush(self) -> None:
        """Every write is flushed."""
