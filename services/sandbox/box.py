"""One sandbox on its host: a workspace, a user, a control group. Blocking; used by one thread at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

import msgspec

from services.sandbox import state
from services.sandbox.cgroups import Cgroup
from services.sandbox.command import Bind, CommandResult, CommandSpec, Limits, Outcome, shell
from services.sandbox.host import Host, open_folder
from services.sandbox.process import run_blocking
from services.sandbox.state import PackedState
from services.sandbox.tar import StateLimits

WORK = "/work"


class BoxLabel(msgspec.Struct, frozen=True, kw_only=True):
    """Who a sandbox belongs to; written beside it, for people who look."""

    sandbox_id: str
    owner: str
    marker: str
    index: int
    created_ns: int


def state_limits(limits: Limits) -> StateLimits:
    """What fits into a workspace can be carried, but no more."""
    return StateLimits(max_entries=limits.max_files, max_file_bytes=limits.disk_bytes, max_total_bytes=limits.disk_bytes)


class Box:
    """Created empty by `open`; gone after `close`. `index` is its number among the host's sandboxes."""

    def __init__(self, host: Host, sandbox_id: str, index: int, limits: Limits, owner: str = "") -> None:
        self.host, self.sandbox_id, self.index, self.limits, self.owner = host, sandbox_id, index, limits, owner
        self.stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # readable: whatever runs here must end
        self._folder = host.path("sandboxes", sandbox_id)
        self._group: Cgroup | None = None
        self._generation = 0

    @property
    def workspace(self) -> str:
        return os.path.join(self._folder, f"work-{self._generation}")

    def open(self) -> None:
        open_folder(self._folder, 0o711)
        label = BoxLabel(
            sandbox_id=self.sandbox_id,
            owner=self.owner,
            marker=self.host.marker,
            index=self.index,
            created_ns=time.time_ns(),
        )
        with open(os.path.join(self._folder, "label.json"), "wb") as file:
            file.write(msgspec.json.encode(label))
        self.host.make_folder(self.workspace, self.index, self.limits)
        self._group = self.host.group(f"sandbox-{self.index}")

    def fill(self, files: Mapping[str, bytes]) -> str:
        """Write a task's files into the empty workspace; returns the state hash as read back from it. Raises `StateRefused`."""
        uid = self.host.uid(self.index)
        for entry, content in state.entries_of(files, state_limits(self.limits)):
            state.place(self.workspace, entry, content, uid=uid, gid=uid)
        return state.hash_folder(self.workspace, state_limits(self.limits))

    def unpack(self, archive: bytes) -> str:
        """Write a packed state into the empty workspace; returns its hash. Raises `StateRefused`."""
        uid = self.host.uid(self.index)
        return state.unpack(archive, self.workspace, state_limits(self.limits), uid=uid, gid=uid)

    def replace(self, archive: bytes) -> str:
        """Swap the whole workspace for a packed state; if that fails the old workspace stays as it is."""
        old = self.workspace
        self._generation += 1
        try:
            self.host.make_folder(self.workspace, self.index, self.limits)
            state_hash = self.unpack(archive)
        except BaseException:
            self.host.drop_folder(self.workspace)
            self._generation -= 1
            raise
        self.host.drop_folder(old)
        return state_hash

    def run(
        self,
        command_id: str,
        command: str,
        *,
        timeout_s: float,
        limits: Limits,
        cpus: tuple[int, ...],
        on_started: Callable[[], None] | None = None,
    ) -> CommandResult:
        """Run one shell line; the result carries the state hash that it left. Raises what `run_blocking` raises."""
        if self._group is not None:
            self._group.apply(limits, cpus)
        spec = CommandSpec(
            command_id=command_id,
            argv=shell(command),
            binds=(Bind(source=self.workspace, target=WORK, writable=True),),
            cwd=WORK,
            timeout_s=timeout_s,
            limits=limits,
            cpus=cpus,
            uid=self.host.uid(self.index),
        )
        result = run_blocking(self.host.launcher, spec, cgroup=self._group, cancel_fd=self.stop_fd, on_started=on_started)
        after = self.state_hash()
        over = after.startswith(state.REFUSED) and result.outcome is Outcome.EXITED
        return msgspec.structs.replace(result, state_hash_after=after, outcome=Outcome.OVER_QUOTA if over else result.outcome)

    def state_hash(self) -> str:
        """Of the workspace as it is now; a `refused:` value says why it has none."""
        return state.hash_or_refusal(self.workspace, state_limits(self.limits))

    def pack(self) -> PackedState:
        return state.pack_or_refusal(self.workspace, state_limits(self.limits))

    def stop(self) -> None:
        """Kill what runs here; later commands end at once. Not while `close` runs."""
        if self.stop_fd >= 0:
            os.eventfd_write(self.stop_fd, 1)

    def close(self) -> None:
        """Remove everything; returns when it is confirmed. Nothing may run here any more. Raises `TeardownUnconfirmed`."""
        if self._group is not None:
            self._group.remove()
        for generation in range(self._generation + 1):
            self.host.drop_folder(os.path.join(self._folder, f"work-{generation}"))
        self.host.drop_folder(self._folder)
        self.release()

    def release(self) -> None:
        """Give back the descriptor of a box that was never opened. Idempotent."""
        if self.stop_fd >= 0:
            os.close(self.stop_fd)
            self.stop_fd = -1
