"""Keeps the head and the tail of a stream of any length in bounded memory."""

from __future__ import annotations


class Capture:
    """The first half and the last half of `limit_bytes`; what lies between is counted and dropped."""

    def __init__(self, limit_bytes: int) -> None:
        self._head_limit = limit_bytes - limit_bytes // 2
        self._tail_limit = limit_bytes // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._seen = 0

    def feed(self, chunk: memoryview) -> None:
        self._seen += len(chunk)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        if self._tail_limit == 0 or not chunk:
            return
        if len(chunk) >= self._tail_limit:
            self._tail[:] = chunk[-self._tail_limit :]
            return
        self._tail += chunk
        if len(self._tail) > 2 * self._tail_limit:  # trimmed rarely, so that small chunks cost no copy each
            del self._tail[: -self._tail_limit]

    @property
    def dropped_bytes(self) -> int:
        return max(0, self._seen - len(self._head) - min(len(self._tail), self._tail_limit))

    def data(self) -> bytes:
        """The whole stream if it was short, else head, marker and tail."""
        tail = self._tail[-self._tail_limit :] if self._tail_limit else b""
        dropped = self.dropped_bytes
        marker = f"\n[... {dropped} bytes dropped ...]\n".encode() if dropped else b""
        return bytes(self._head) + marker + bytes(tail)
