"""The sandboxes of one host: reset, run, export, snapshot, restore, fork, cleanup; each once by its id.

A command's result is on disk before anybody is told, so a repeated command id gets the recorded result and never runs again. A
sandbox does not outlive its executor: the next one removes what is left and answers `SandboxLost` for what was not recorded. So
a command that was cut off by a crash cannot run a second time, and no intent has to be written before it runs.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import msgspec

from schemas.trajectory import StateRef
from services.sandbox.box import Box
from services.sandbox.command import CommandResult, Limits
from services.sandbox.cpus import default_lanes
from services.sandbox.errands import Errands
from services.sandbox.executor_status import CleanupResult, ExecutorStatus
from services.sandbox.host import Host, HostConfig
from services.sandbox.journal import Journal, digest_of
from services.sandbox.journals import Journals
from services.sandbox.lane_rules import Lane, LaneSpec
from services.sandbox.lanes import Lanes
from services.sandbox.owners import Owners
from services.sandbox.refusals import (
    BadSandboxId,
    ExecutorStopped,
    SandboxConflict,
    SandboxLost,
    TooManySandboxes,
    UnknownSandbox,
)
from services.sandbox.resident import Content, ResetResult, Resident, Standing
from services.sandbox.snapshots import Snapshots, is_snapshot_id
from services.sandbox.state import PackedState, SnapshotManifest

T = TypeVar("T")
_SANDBOX_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class ExecutorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox host. Example: `ExecutorConfig(host=HostConfig(root="/var/lib/headrace/sandbox-0"))`."""

    host: HostConfig
    limits: Limits = Limits()  # of every sandbox; disk and files are fixed at reset, the rest may differ by command
    lanes: dict[Lane, LaneSpec] | None = None  # None: laid out for this machine's CPUs
    max_sandboxes: int = 128
    max_snapshot_bytes: int = 1 << 30
    journals_kept: int = 4096  # of sandboxes that are gone, so that late repeats still find their results
    journals_kept_bytes: int = 256 * 2**20  # of the same; small terminal states lie in them
    prune_every: int = 256  # closed sandboxes between two passes over the journals, each of which looks at all of them
    idle_s: float = 3600.0  # a sandbox unused for so long is removed by `reap_idle`; more than any living episode pauses


class Executor:
    """Belongs to one event loop. All methods may be called at the same time, repeated, and cancelled at any point."""

    def __init__(self, config: ExecutorConfig, host: Host) -> None:
        self._config, self._host = config, host
        self._lanes = Lanes(config.lanes or default_lanes(sorted(os.sched_getaffinity(0))))
        self._snapshots = Snapshots(host.path("snapshots"), config.max_snapshot_bytes)
        self._journals = Journals(
            host, kept=config.journals_kept, kept_bytes=config.journals_kept_bytes, prune_every=config.prune_every
        )
        self._errands = Errands()
        self._residents: dict[str, Resident] = {}
        self._openings: dict[str, tuple[str, asyncio.Task[ResetResult]]] = {}
        self._closings: dict[str, asyncio.Task[None]] = {}
        self._owners = Owners()
        self._stopped = False

    @classmethod
    async def start(cls, config: ExecutorConfig) -> Executor:
        """Take over the root folder and remove a predecessor's leftovers. Raises `RootInUse` or `HostUnusable`."""
        return cls(config, await asyncio.to_thread(Host.open, config.host))

    async def reset(
        self, sandbox_id: str, files: Mapping[str, bytes], base_snapshot: str = "", *, owner: str = ""
    ) -> ResetResult:
        """A new sandbox at exactly these files, or at a stored snapshot. The same request again gives the same answer.

        `base_snapshot` is empty, or the state hash that the files must have, or (with no files) the id of a snapshot of this
        host. `owner` is `<group>/<slot>/<attempt>`: sandboxes of older attempts at the slot are removed. Raises
        `SandboxConflict` if the id stands for other contents or the slot has a newer attempt here, `SandboxLost` if the id is
        spent, `SnapshotMismatch`, `SnapshotUnknown`, `TooManySandboxes`, `LaneBusy`, `SetupFailed`.
        """
        self._check_running(sandbox_id)
        parts = [base_snapshot.encode(), *(part for path, data in sorted(files.items()) for part in (os.fsencode(path), data))]
        request = digest_of(*parts)
        opening = self._openings.get(sandbox_id)
        if opening is None:
            if len(self._openings) >= self._config.max_sandboxes:
                raise TooManySandboxes(f"sandbox {sandbox_id}: the host holds {len(self._openings)}, its bound")
            orphans = self._owners.admit(sandbox_id, owner)
            for orphan in orphans:
                self._errands.start(self.cleanup(orphan, f"its slot went on as {owner}"), f"orphan {orphan}")
            work = self._open(sandbox_id, request, files, base_snapshot, owner)
            opening = (request, self._errands.start(work, f"reset {sandbox_id}"))
            self._openings[sandbox_id] = opening
        if opening[0] != request:
            raise SandboxConflict(f"sandbox {sandbox_id}: it was reset to other contents; use another id")
        return await asyncio.shield(opening[1])

    async def run(
        self,
        sandbox_id: str,
        command_id: str,
        command: str,
        timeout_s: float = 10.0,
        limits: Limits | None = None,
        *,
        lane: Lane | None = None,
    ) -> CommandResult:
        """Run one shell line in the workspace, once per command id. `lane` None: chosen from the line itself.

        Raises `LaneBusy`, `SandboxBusy`, `SandboxSealed`, `SandboxLost`, `UnknownSandbox`, `CommandRefused`, `SetupFailed`, and
        `JournalError` if the id was used for another command.
        """
        resident = await self._resident(sandbox_id)
        if resident is None:
            return await self._recorded(sandbox_id, command_id, command)
        return await resident.run(command_id, command, timeout_s=timeout_s, limits=limits, lane=lane)

    async def export(self, sandbox_id: str) -> PackedState:
        """Seal the sandbox: no later command is accepted. Returns its terminal state; repeated calls give the same bytes."""
        return await (await self._live(sandbox_id)).export()

    async def seal(self, sandbox_id: str, publish: Callable[[PackedState], Awaitable[StateRef]]) -> StateRef:
        """Seal the sandbox and give the reference under which `publish` put its terminal state out; later calls give the same
        one, also when the sandbox is gone. Raises `SandboxLost` or `UnknownSandbox`.
        """
        _check_id(sandbox_id)
        resident = await self._resident(sandbox_id)
        if resident is None:
            journal = await self._journals.load(sandbox_id)
            recorded = await self._thread(journal.sealed_state)
            if recorded is None:
                raise _gone(sandbox_id, journal)
            return recorded
        if (recorded := await resident.sealed_state()) is not None:
            return recorded
        return await resident.keep_sealed(await publish(await resident.export()))

    async def standing(self, sandbox_id: str) -> Standing:
        """Where a sandbox stands after all that was asked of it before. Raises `SandboxLost` or `UnknownSandbox`."""
        _check_id(sandbox_id)
        if (resident := await self._resident(sandbox_id)) is not None:
            return await resident.standing()
        journal = await self._journals.load(sandbox_id)
        sealed = await self._thread(journal.sealed_state)
        if sealed is None:
            raise _gone(sandbox_id, journal)
        return Standing(sandbox_id=sandbox_id, state_hash=sealed.state_hash, last_command=journal.last_command)

    async def snapshot(self, sandbox_id: str, environment: str = "") -> SnapshotManifest:
        """Store the workspace as it is between two commands."""
        return await (await self._live(sandbox_id)).snapshot(environment)

    async def restore(self, sandbox_id: str, snapshot_id: str, request_id: str) -> ResetResult:
        """Put a sandbox back to a snapshot, once per request id (which shares its name space with command ids)."""
        return await (await self._live(sandbox_id)).restore(request_id, snapshot_id)

    async def fork(self, snapshot_id: str, sandbox_id: str) -> ResetResult:
        """A new sandbox at a snapshot; it shares nothing with the snapshot or with other forks."""
        return await self.reset(sandbox_id, {}, snapshot_id)

    async def cleanup(self, sandbox_id: str, reason: str = "cleaned up") -> CleanupResult:
        """Kill and remove a sandbox; returns when that is confirmed. Idempotent. Raises `TeardownUnconfirmed`, `LaneBusy`."""
        _check_id(sandbox_id)
        resident = await self._resident(sandbox_id)
        if resident is None:
            return CleanupResult(sandbox_id=sandbox_id, existed=False)
        closing = self._closings.get(sandbox_id)
        if closing is None:
            closing = self._errands.start(self._close(sandbox_id, resident, reason), f"cleanup {sandbox_id}")
            self._closings[sandbox_id] = closing
        await asyncio.shield(closing)
        return CleanupResult(sandbox_id=sandbox_id, existed=True)

    async def close_group(self, group: str) -> tuple[str, ...]:
        """Remove every sandbox of a group whose episodes are sealed, and make none for it any more. Returns their ids."""
        left = self._owners.close(group)
        for sandbox_id in left:
            await self.cleanup(sandbox_id, f"all episodes of {group} are sealed")
        return left

    async def reap_idle(self) -> tuple[str, ...]:
        """Remove the sandboxes that nobody has used for `idle_s`; their owners are gone. Returns their ids."""
        before_s = time.monotonic() - self._config.idle_s
        idle = [name for name, resident in self._residents.items() if resident.idle and resident.last_used_s < before_s]
        for sandbox_id in idle:
            await self.cleanup(sandbox_id, f"nobody used it for {self._config.idle_s:g} s")
        return tuple(idle)

    async def drop_snapshot(self, snapshot_id: str) -> None:
        await self._thread(lambda: self._snapshots.drop(snapshot_id))

    def status(self) -> ExecutorStatus:
        residents = self._residents.values()
        return ExecutorStatus(
            sandboxes=len(self._openings),
            max_sandboxes=self._config.max_sandboxes,
            sealed=sum(resident.sealed for resident in residents),
            lost=sum(bool(resident.lost) for resident in residents),
            lanes=self._lanes.status(),
            isolation=self._host.isolation,
            reaped_at_start=self._host.reaped,
        )

    def halt(self) -> None:
        """Refuse new work and kill what runs: every sandbox is lost from now on. Idempotent."""
        self._stopped = True
        for resident in self._residents.values():
            resident.stop("the executor stopped")

    async def close(self) -> None:
        """Refuse new work, end every sandbox, free the root folder. Idempotent. Raises `TeardownUnconfirmed`."""
        self.halt()
        await self._errands.drain()
        for sandbox_id, resident in list(self._residents.items()):
            self._closings[sandbox_id] = self._errands.start(self._close(sandbox_id, resident, ""), f"cleanup {sandbox_id}")
            await self._closings[sandbox_id]
        await asyncio.to_thread(self._host.close)

    async def _open(
        self, sandbox_id: str, request: str, files: Mapping[str, bytes], base_snapshot: str, owner: str
    ) -> ResetResult:
        try:
            journal = await self._journals.load(sandbox_id)
            if journal.opened is not None:
                raise SandboxLost(f"sandbox {sandbox_id}: {_why_gone(journal)}; its id is spent")
            content = await self._thread(lambda: self._content(request, files, base_snapshot))
            taken = {resident.index for resident in self._residents.values()}
            index = next(number for number in range(len(taken) + 1) if number not in taken)
            box = Box(self._host, sandbox_id, index, self._config.limits, owner)
            resident = Resident(self._host, self._lanes, self._errands, snapshots=self._snapshots, box=box, journal=journal)
            self._residents[sandbox_id] = resident
            try:
                return await resident.open(content)
            except BaseException:
                box.release()
                raise
        except BaseException:
            self._residents.pop(sandbox_id, None)
            self._openings.pop(sandbox_id, None)
            self._owners.drop(sandbox_id)
            raise

    def _content(self, request: str, files: Mapping[str, bytes], base_snapshot: str) -> Content:
        if not is_snapshot_id(base_snapshot):
            return Content(request=request, files=files, expected_hash=base_snapshot)
        manifest, archive = self._snapshots.get(base_snapshot)
        return Content(request=request, manifest=manifest, archive=archive)

    async def _close(self, sandbox_id: str, resident: Resident, reason: str) -> None:
        try:
            await resident.close(reason)
            del self._residents[sandbox_id]
            del self._openings[sandbox_id]
            self._owners.drop(sandbox_id)
        finally:
            del self._closings[sandbox_id]
        await self._journals.one_more_closed(frozenset(self._openings))

    async def _resident(self, sandbox_id: str) -> Resident | None:
        """The sandbox, once its reset has ended; None if it is not (or no longer) here."""
        if opening := self._openings.get(sandbox_id):
            await asyncio.wait([opening[1]])
        return self._residents.get(sandbox_id)

    async def _live(self, sandbox_id: str) -> Resident:
        self._check_running(sandbox_id)
        resident = await self._resident(sandbox_id)
        if resident is None:
            raise _gone(sandbox_id, await self._journals.load(sandbox_id))
        return resident

    async def _recorded(self, sandbox_id: str, command_id: str, command: str) -> CommandResult:
        _check_id(sandbox_id)
        request = digest_of(command.encode("utf-8", "surrogatepass"))
        journal = await self._journals.load(sandbox_id)
        recorded = await self._thread(lambda: journal.result_of(command_id, request))
        if recorded is None:
            raise _gone(sandbox_id, journal)
        return recorded

    def _check_running(self, sandbox_id: str) -> None:
        _check_id(sandbox_id)
        if self._stopped:
            raise ExecutorStopped(f"sandbox {sandbox_id}: the executor has stopped")

    async def _thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._host.pool, work)


def _check_id(sandbox_id: str) -> None:
    if _SANDBOX_ID.fullmatch(sandbox_id) is None:
        raise BadSandboxId(
            f"sandbox id {sandbox_id!r}: use letters, digits, '.', '-' and '_', at most 128, and start with a letter or digit"
        )


def _gone(sandbox_id: str, journal: Journal) -> SandboxLost | UnknownSandbox:
    if journal.opened is None:
        return UnknownSandbox(f"sandbox {sandbox_id}: this executor has never had it")
    return SandboxLost(f"sandbox {sandbox_id}: {_why_gone(journal)}")


def _why_gone(journal: Journal) -> str:
    return journal.ended.reason if journal.ended else "its executor went down and took it along"
