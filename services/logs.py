"""Structured logs: one JSON object per line, on standard error unless told otherwise, with service and instance bound."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog


def start_logging(service: str, instance: str, level: str, stream: TextIO = sys.stderr) -> None:
    """Configure structlog and the standard library to write to the same stream."""
    numeric = getattr(logging, level.upper())
    logging.basicConfig(
        stream=stream, level=max(numeric, logging.WARNING), format="%(levelname)s %(name)s %(message)s", force=True
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
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(service=service, instance=instance)
