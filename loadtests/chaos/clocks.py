"""Wall clocks that jump, one service's at a time, by Debian's libfaketime preloaded into it.

The monotonic clock stays what it is, as on a machine whose time is corrected: deadlines inside a process do not move.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

JUMPS_S = (-7200, -90, 90, 7200)
# A rollouter puts wall-clock deadlines into its requests, and an engine holds its own clock against them: theirs only expire,
# and are issued again. The others' work carries wall-clock times to nobody.
LABELS = ("sampler-0", "verifier-0", "bank-0", "admission-0", "rollouter-0", "engine-e0")
_CACHE_S = 1


class Clocks:
    """`library` is the path of `libfaketimeMT.so.1`; each service reads its offset from a file of its own, once a second."""

    def __init__(self, library: Path, folder: Path, labels: Sequence[str] = LABELS) -> None:
        if not library.is_file():
            raise FileNotFoundError(f"{library} is not there; Debian's package libfaketime has it")
        self._library = library
        self._files = {label: folder / f"{label}.offset" for label in labels}
        folder.mkdir(parents=True, exist_ok=True)
        for label in labels:
            self.set(label, 0)

    def labels(self) -> list[str]:
        return list(self._files)

    def options(self) -> list[str]:
        """Words for `loadtests.chaos.stack`."""
        out = []
        for label, file in self._files.items():
            for setting in (
                f"LD_PRELOAD={self._library}",
                f"FAKETIME_TIMESTAMP_FILE={file}",
                f"FAKETIME_CACHE_DURATION={_CACHE_S}",
                "FAKETIME_DONT_FAKE_MONOTONIC=1",
            ):
                out += ["--env", f"{label}:{setting}"]
        return out

    def set(self, label: str, offset_s: int) -> None:
        """From about now on this service's wall clock is off by so much."""
        aside = self._files[label].with_suffix(".new")
        aside.write_text(f"{offset_s:+d}\n", encoding="ascii")
        aside.replace(self._files[label])
