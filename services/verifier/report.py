"""The grader's one line, read strictly: anything but the promised object is an error of the verifier and never a reward."""

from __future__ import annotations

import msgspec

_MAX_NAMES = 64
_MAX_NAME_CHARS = 200
_MAX_LINE_BYTES = 16 * 1024


class ReportError(ValueError):
    """The grader did not print what it promised; the text says what is wrong with its last line."""


class GraderReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`{"success": bool, "components": {name: number}, "violations": [str]}`, all three and nothing else."""

    success: bool
    components: dict[str, float]
    violations: list[str]


_DECODER = msgspec.json.Decoder(GraderReport)


def read_report(stdout: bytes) -> GraderReport:
    """The report on the last line of a grader's output. Raises `ReportError`."""
    line = stdout.rstrip(b"\r\n").rpartition(b"\n")[2]
    if not line.strip():
        raise ReportError("the grader's output ends without a report")
    if len(line) > _MAX_LINE_BYTES:
        raise ReportError(f"the grader's last line has {len(line)} bytes, more than {_MAX_LINE_BYTES}")
    try:
        report = _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # validation errors are decode errors too
        raise ReportError(f"the grader's last line is no report ({error}): {line[:200].decode(errors='replace')}") from error
    names = [*report.components, *report.violations]
    if len(names) > _MAX_NAMES or any(not name or len(name) > _MAX_NAME_CHARS for name in names):
        raise ReportError(
            f"the report has {len(names)} names; at most {_MAX_NAMES} of 1 to {_MAX_NAME_CHARS} characters are allowed"
        )
    return report
