"""One live sandbox on the event loop: its requests in order, each command once, sealed after export."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from schemas.trajectory import StateRef
from services.sandbox.box import Box, state_limits
from services.sandbox.cgroups import CgroupError
from services.sandbox.classify import lane_of
from services.sandbox.command import MAX_OUTPUT_BYTES, CommandRefused, CommandResult, Limits, Outcome, SandboxError, SetupFailed
from services.sandbox.errands import Errands
from services.sandbox.host import Host
from services.sandbox.journal import Ended, Journal, JournalError, Opened, Ran, Sealed, digest_of
from services.sandbox.lane_rules import Lane
from services.sandbox.lanes import Lanes, Permit
from services.sandbox.refusals import SandboxBusy, SandboxLost, SandboxSealed, SnapshotMismatch
from services.sandbox.snapshots import Snapshots
from services.sandbox.state import PackedState, SnapshotManifest, hash_files
from services.sandbox.tar import StateRefused

T = TypeVar("T")
_MAX_PENDING = 8
_NOTHING_RAN = (CommandRefused, SetupFailed, CgroupError)


class ResetResult(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox stands at this state."""

    sandbox_id: str
    state_hash: str
    snapshot_id: str = ""  # the stored snapshot that it started from, if it did


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where a sandbox stands between two commands."""

    sandbox_id: str
    state_hash: str
    last_command: str  # id of the last one that ran; empty: none


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """What a sandbox starts from: files, or a stored snapshot."""

    request: str  # digest of the request
    files: Mapping[str, bytes] = {}
    manifest: SnapshotManifest | None = None
    archive: bytes = b""
    expected_hash: str = ""


class Resident:
    """Requests wait for one another in the order of arrival; at most a few may wait."""

    def __init__(self, host: Host, lanes: Lanes, errands: Errands, *, snapshots: Snapshots, box: Box, journal: Journal) -> None:
        self._host, self._lanes, self._errands, self._snapshots = host, lanes, errands, snapshots
        self._box, self._journal = box, journal
        self._lock = asyncio.Lock()
        self._pending: dict[str, tuple[str, asyncio.Task[CommandResult]]] = {}
        self._snapshot_id = ""
        self.sealed = False
        self.lost = ""  # why nothing runs here any more
        self.last_used_s = time.monotonic()

    @property
    def index(self) -> int:
        return self._box.index

    @property
    def idle(self) -> bool:
        return not self._pending and not self._lock.locked()

    async def open(self, content: Content) -> ResetResult:
        """Build the sandbox. On any failure what was built is removed again."""
        async with self._lock, self._lanes.permit(Lane.RESET, self._box.sandbox_id) as permit:
            state_hash = await self._thread(lambda: self._build(content))
            permit.started()
        self._snapshot_id = content.manifest.snapshot_id if content.manifest else ""
        return self._reset_result(state_hash)

    async def run(
        self, command_id: str, command: str, *, timeout_s: float, limits: Limits | None, lane: Lane | None
    ) -> CommandResult:
        """Run one shell line, or give the recorded result of the same id."""
        request = digest_of(command.encode("utf-8", "surrogatepass"))
        self.last_used_s = time.monotonic()
        if recorded := self._journal.result_of(command_id, request):
            return recorded
        if (pending := self._pending.get(command_id)) is None:
            self._check_open()
            if len(self._pending) >= _MAX_PENDING:
                raise SandboxBusy(f"sandbox {self._box.sandbox_id}: {len(self._pending)} commands wait already")
            work = self._run(
                command_id,
                command,
                request,
                timeout_s=timeout_s,
                limits=limits or self._box.limits,
                lane=lane or lane_of(command),
            )
            pending = (request, self._errands.start(work, f"command {command_id}"))
            self._pending[command_id] = pending
            pending[1].add_done_callback(lambda _: self._pending.pop(command_id, None))
        if pending[0] != request:
            raise JournalError(f"command id {command_id!r} is in use for another command; ids are never used twice")
        return await asyncio.shield(pending[1])

    async def export(self) -> PackedState:
        """Seal the sandbox and pack its terminal state. Later calls give the same answer."""
        self._check_alive()
        self.sealed = True
        return await self._errands.finish(self._ordered(Lane.VERIFY, "export", self._box.pack), "export")

    async def keep_sealed(self, state: StateRef) -> StateRef:
        """Record the reference under which the terminal state went out; gives the one that was recorded first."""
        return await self._errands.finish(self._keep_in_order(state), "keep sealed")

    async def sealed_state(self) -> StateRef | None:
        """The recorded reference to the terminal state."""
        return await self._thread(self._journal.sealed_state)

    async def standing(self) -> Standing:
        """Where the sandbox stands once what was asked for before has ended. Raises `SandboxLost` if something else than its
        commands has changed it.
        """
        if (sealed := await self.sealed_state()) is not None:
            return self._standing(sealed.state_hash)
        self._check_alive()
        return await self._errands.finish(self._ordered(Lane.VERIFY, "look", self._look), "look")

    async def snapshot(self, environment: str) -> SnapshotManifest:
        self._check_alive()
        parent = self._snapshot_id
        return await self._errands.finish(
            self._ordered(
                Lane.VERIFY, "snapshot", lambda: self._snapshots.put(self._box.pack(), parent=parent, environment=environment)
            ),
            "snapshot",
        )

    async def restore(self, request_id: str, snapshot_id: str) -> ResetResult:
        """Put the workspace back to a snapshot; a repeated request id does nothing again."""
        request = digest_of(b"restore", snapshot_id.encode())
        if recorded := self._journal.result_of(request_id, request):
            return self._reset_result(recorded.state_hash_after)
        self._check_open()
        work = self._ordered(Lane.RESET, f"restore {snapshot_id}", lambda: self._restore(request_id, request, snapshot_id))
        return self._reset_result(await self._errands.finish(work, "restore"))

    def stop(self, reason: str) -> None:
        """Kill what runs and let nothing run any more."""
        self.lost = self.lost or reason
        self._box.stop()

    async def close(self, reason: str) -> None:
        """Stop, remove everything, and say so in the journal. Raises `TeardownUnconfirmed`; may then be called again."""
        self.stop(reason)
        async with self._lock, self._lanes.permit(Lane.CLEANUP, self._box.sandbox_id) as permit:
            await self._thread(self._box.close)
            await self._thread(lambda: self._journal.append(Ended(reason=self.lost)))
            permit.started()

    async def _run(
        self, command_id: str, command: str, request: str, *, timeout_s: float, limits: Limits, lane: Lane
    ) -> CommandResult:
        fixed = msgspec.structs.replace(
            limits,
            disk_bytes=self._box.limits.disk_bytes,
            max_files=self._box.limits.max_files,
            output_bytes=min(limits.output_bytes, MAX_OUTPUT_BYTES),
        )
        loop = asyncio.get_running_loop()

        def work(permit: Permit) -> CommandResult:
            def on_started() -> None:
                loop.call_soon_threadsafe(permit.started)

            result = self._box.run(
                command_id, command, timeout_s=timeout_s, limits=fixed, cpus=permit.cpus, on_started=on_started
            )
            if self.lost and result.outcome is Outcome.CANCELLED:
                raise SandboxLost(self.lost)  # ended by us: what it did is no result of the command
            self._journal.append(Ran(request=request, result=result))
            return result

        async with self._lock, self._lanes.permit(lane, f"{self._box.sandbox_id}/{command_id}") as permit:
            self._check_open()
            try:
                return await self._thread(lambda: work(permit))
            except _NOTHING_RAN:
                raise
            except (SandboxError, OSError) as error:  # it may have run without a record, so nothing may run here again
                self.lost = self.lost or f"command {command_id} ended without a record: {error}"
                raise SandboxLost(f"sandbox {self._box.sandbox_id}: {self.lost}") from error

    def _build(self, content: Content) -> str:
        try:
            self._box.open()
            if content.manifest is None:
                state_hash = self._box.fill(content.files)
                wanted = hash_files(content.files, state_limits(self._box.limits))
            else:
                state_hash, wanted = self._box.unpack(content.archive), content.manifest.state_hash
            if state_hash != wanted or content.expected_hash not in ("", state_hash):
                asked = content.expected_hash or wanted
                raise SnapshotMismatch(f"sandbox {self._box.sandbox_id}: the state is {state_hash}, not {asked} as asked for")
            self._journal.append(Opened(request=content.request, state_hash=state_hash))
        except StateRefused as error:
            self._box.close()
            raise SnapshotMismatch(f"sandbox {self._box.sandbox_id}: its initial state is not admissible ({error})") from error
        except BaseException:
            self._box.close()
            raise
        return state_hash

    def _restore(self, request_id: str, request: str, snapshot_id: str) -> str:
        manifest, archive = self._snapshots.get(snapshot_id)
        state_hash = self._box.replace(archive)
        if state_hash != manifest.state_hash:
            self.lost = f"restore of {snapshot_id} gave {state_hash}"
            raise SnapshotMismatch(f"sandbox {self._box.sandbox_id}: {self.lost}, not {manifest.state_hash}")
        done = CommandResult(command_id=request_id, outcome=Outcome.EXITED, exit_code=0, state_hash_after=state_hash)
        self._journal.append(Ran(request=request, result=done))
        self._snapshot_id = snapshot_id
        return state_hash

    def _look(self) -> Standing:
        found, recorded = self._box.state_hash(), self._journal.state_hash
        if found != recorded:
            self.lost = f"its state is {found}, and its last command left {recorded}"
            raise SandboxLost(f"sandbox {self._box.sandbox_id}: {self.lost}")
        return self._standing(found)

    def _standing(self, state_hash: str) -> Standing:
        return Standing(sandbox_id=self._box.sandbox_id, state_hash=state_hash, last_command=self._journal.last_command)

    async def _keep_in_order(self, state: StateRef) -> StateRef:
        async with self._lock:
            return await self._thread(lambda: self._keep_sealed(state))

    def _keep_sealed(self, state: StateRef) -> StateRef:
        kept = self._journal.sealed_state()
        if kept is None:
            self._journal.append(Sealed(state=state))
        return kept or state

    async def _ordered(self, lane: Lane, label: str, work: Callable[[], T]) -> T:
        async with self._lock, self._lanes.permit(lane, f"{self._box.sandbox_id}/{label}") as permit:
            self._check_alive()
            result = await self._thread(work)
            permit.started()
            return result

    async def _thread(self, work: Callable[[], T]) -> T:
        self.last_used_s = time.monotonic()
        return await asyncio.get_running_loop().run_in_executor(self._host.pool, work)

    def _check_alive(self) -> None:
        if self.lost:
            raise SandboxLost(f"sandbox {self._box.sandbox_id}: {self.lost}")

    def _check_open(self) -> None:
        self._check_alive()
        if self.sealed:
            raise SandboxSealed(f"sandbox {self._box.sandbox_id}: its terminal state was exported")

    def _reset_result(self, state_hash: str) -> ResetResult:
        return ResetResult(sandbox_id=self._box.sandbox_id, state_hash=state_hash, snapshot_id=self._snapshot_id)
