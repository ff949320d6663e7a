"""The siblings of one lease: each slot is played, taken over, retried within its budget, and sealed once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from rollouter.agent import Agent
from rollouter.claims import Claims, NotClaimed, PastClaims
from rollouter.episode import EpisodeBroken, Stage, aborted_episode, play_attempt
from rollouter.generation import GenerationFailed, WeightsReplaced
from rollouter.journal import AttemptName, AttemptTaken, Holder, Journal, SlotLog
from rollouter.sandbox_client import SandboxLost
from rollouter.takeover import PastAttempt, SlotHistory, histories
from schemas.attempts import AttemptReason
from schemas.lease import GroupLease
from schemas.table import Stream
from schemas.task import Task, TaskSuite
from schemas.termination import Termination
from schemas.trajectory import Episode
from services.bus import BusError, IntegrityError, OnceConflict
from services.consume import read_events
from services.health import Health
from services.tracing import span

log = structlog.get_logger()
MAX_TAKEOVERS = 5  # holders that a group may lose; then it counts as poisonous
MAX_RESTARTS = 4  # of one slot for changes of weights; the next attempt goes on across them, its tokens labelled
SUSPECT_AFTER = 2  # lost holders after which a group is played without another such beside it
_SHUT_OUT_TRIES = 8  # a holder that still appends can win so often at most, since a turn takes longer than a read
_ALONE_S = 3600.0
_TERMINATIONS: dict[AttemptReason, Termination] = {
    "cancelled": Termination.SCHEDULER_CANCEL,
    "poison": Termination.POISON,
}


class GroupTaken(Exception):
    """Another process holds this group now; nothing here goes on with it."""


class AttemptFailed(Exception):
    """An attempt was given up, and the journal says so."""

    def __init__(self, reason: AttemptReason, detail: str) -> None:
        super().__init__(detail)
        self.reason: AttemptReason = reason


class OtherBehaviour(Exception):
    """The lease was made for another behaviour manifest than this process plays."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where one slot stands when its play here begins."""

    number: int
    log: SlotLog
    attempt: int = 0
    past: PastAttempt | None = None
    aborts: int = 0  # retries that are used up
    restarts: int = 0  # attempts that changes of weights ended


class Groups:
    """Plays groups until every slot has its sealed episode.

    Consumes: a lease. Produces: claims, attempts, and `episode.<group>.<slot>`, once per slot. Waits for: its episodes, each of
    which has its own deadlines; a group that has lost several holders also waits until no other such group is in play here. On
    error: an infrastructure abort of a slot is retried from the base snapshot and the finished siblings are kept; beyond its
    budget, or when its data are broken, the slot is sealed as an abort. A group that has lost more than `MAX_TAKEOVERS` holders
    is sealed as poison. On cancellation: what the journal names stays as it is, and whoever gets the lease next continues it.
    """

    def __init__(
        self, stage: Stage, suite: TaskSuite, manifest: str, agent_for: Callable[[Task], Agent], health: Health
    ) -> None:
        self._stage = stage
        self._suite = suite
        self._manifest = manifest
        self._agent_for = agent_for
        self._health = health
        self._claims = Claims(stage.bus, stage.rollouter)
        self._held: dict[str, int] = {}  # group -> our claim
        self._suspect = asyncio.Lock()
        self._suspected = ""

    async def play(self, lease: GroupLease, delivery: str = "") -> None:
        """Play a lease; `delivery` is where its delivery is acknowledged.

        Returns when all slots are sealed, by this process or by another one. Raises `NotClaimed` or `GroupTaken`.
        """
        self._held.pop(lease.group, None)
        if await self._claims.first(lease.group, delivery):
            self._held[lease.group] = 0
            holder = Holder(rollouter=self._stage.rollouter, claim=0)
            slots = [Slot(number=n, log=SlotLog(self._stage.bus, lease.group, n, holder)) for n in range(lease.group_size)]
            await self._play_slots(lease, slots)
        else:
            if await self._missing_slots(lease):
                past = await self._claims.past(lease.group)
                async with self._alone_if_suspect(lease.group, past):
                    claim = await self._claims.next(lease.group, past, delivery)
                    self._held[lease.group] = claim
                    await self._take_over(lease, past, Holder(rollouter=self._stage.rollouter, claim=claim))
            await self._stage.sandboxes.close_group(lease.group)  # what a lost holder never came to name in the journal
        self._held.pop(lease.group, None)

    async def release(self, group: str, reason: str) -> None:
        """Say that this process gives a group back of its own accord, so that it does not count as lost."""
        if group in self._held:
            await self._claims.release(group, self._held.pop(group), reason)

    @asynccontextmanager
    async def _alone_if_suspect(self, group: str, past: PastClaims) -> AsyncIterator[None]:
        """One suspect at a time, and claimed only then: or a poisonous group would make all that stand beside it suspect."""
        if past.lost < SUSPECT_AFTER:
            yield
            return
        what = f"its turn to be played alone, after {past.lost} lost holders: group {group}"
        with self._health.waiting(what, self._suspected or group, _ALONE_S, "the lease is handed back"):
            try:
                async with asyncio.timeout(_ALONE_S):
                    await self._suspect.acquire()
            except TimeoutError as error:
                raise NotClaimed(f"{group}: {self._suspected} has been in play alone for {_ALONE_S:.0f} s") from error
        self._suspected = group
        try:
            yield
        finally:
            self._suspect.release()

    async def _take_over(self, lease: GroupLease, past: PastClaims, holder: Holder) -> None:
        missing = await self._missing_slots(lease)
        log.warning(
            "taking over",
            group=lease.group,
            slots=missing,
            holder=past.holder(),
            claimed_s_ago=round(past.age_s(), 1),
            lost_holders=past.lost,
        )
        self._health.count("takeovers")
        slots = await self._shut_out(lease, missing, holder)
        if past.lost > MAX_TAKEOVERS:
            await self._seal_poison(lease, slots, past)
        else:
            await self._play_slots(lease, slots)

    async def _shut_out(self, lease: GroupLease, missing: list[int], holder: Holder) -> list[Slot]:
        """Make every open slot ours, with all that is known of it. Raises `GroupTaken`."""
        slots: list[Slot] = []
        open_slots = list(missing)
        for _ in range(_SHUT_OUT_TRIES):
            if not open_slots:
                return slots
            found = histories(await read_events(self._stage.bus, Stream.TURNS, f"turn.{lease.group}.*.*.*"), open_slots)
            for number, history in found.items():
                if history.newest_claim > holder.claim:
                    raise GroupTaken(f"{lease.group}: claim {history.newest_claim} follows ours, {holder.claim}")
                try:
                    slots.append(await self._slot(lease, number, history, holder))
                except AttemptTaken:  # its holder lives and has appended since we read
                    continue
                open_slots.remove(number)
        raise GroupTaken(f"{lease.group}: slots {open_slots} move on faster than they can be taken over")

    async def _slot(self, lease: GroupLease, number: int, history: SlotHistory, holder: Holder) -> Slot:
        """One slot's first record under our claim: nothing that its holder before appends is accepted after it."""
        slot_log = SlotLog(self._stage.bus, lease.group, number, holder, history.last_seq)
        past, attempt = history.continuable(), history.current
        if past is not None:
            await slot_log.take_over(attempt)
        else:
            await slot_log.end(attempt, "orphaned", "nothing that could be continued was journalled")
            attempt += 1
        for box in history.left_sandboxes():
            await self._stage.sandboxes.discard(box.name, box.executor)
        return Slot(number=number, log=slot_log, attempt=attempt, past=past, aborts=history.aborts, restarts=history.restarts)

    async def _missing_slots(self, lease: GroupLease) -> list[int]:
        sealed = await asyncio.gather(*(self._is_sealed(lease, slot) for slot in range(lease.group_size)))
        return [slot for slot, is_sealed in enumerate(sealed) if not is_sealed]

    async def _is_sealed(self, lease: GroupLease, slot: int) -> bool:
        bus = self._stage.bus
        try:
            return await bus.last(bus.subjects.episode(lease.group, slot)) is not None
        except IntegrityError:  # a damaged episode holds its subject like any other; its readers say so
            return True

    async def _play_slots(self, lease: GroupLease, slots: list[Slot]) -> None:
        """Raises `GroupTaken` as soon as another process turns out to hold one slot, since it then holds them all."""
        taken = ""
        try:
            async with asyncio.TaskGroup() as siblings:
                for slot in slots:
                    siblings.create_task(self._seal_slot(lease, slot), name=f"{lease.group}/{slot.number}")
        except* AttemptTaken as errors:
            taken = str(errors.exceptions[0])
        if taken:
            self._health.count("groups_taken")
            raise GroupTaken(taken)

    async def _seal_slot(self, lease: GroupLease, slot: Slot) -> None:
        started_ns = time.time_ns()
        attempt, past, retries_left, restarts = slot.attempt, slot.past, lease.slot_retries - slot.aborts, slot.restarts
        name = AttemptName(lease=lease, slot=slot.number, attempt=attempt)
        episode = aborted_episode(name, Termination.INFRA_ABORT, self._stage.rollouter, started_ns)
        while retries_left >= 0:
            name = AttemptName(lease=lease, slot=slot.number, attempt=attempt)
            try:
                episode = await self._attempt(name, slot.log, past, self._stage.one_version and restarts < MAX_RESTARTS)
                break
            except AttemptFailed as failure:
                termination = _TERMINATIONS.get(failure.reason, Termination.INFRA_ABORT)
                episode = aborted_episode(name, termination, self._stage.rollouter, started_ns)
                if failure.reason not in ("infra_abort", "restarted"):
                    break
                restarts += failure.reason == "restarted"
                retries_left -= failure.reason == "infra_abort"
            attempt, past = attempt + 1, None
        await self._publish(episode)

    async def _attempt(self, name: AttemptName, slot_log: SlotLog, past: PastAttempt | None, restarts: bool) -> Episode:
        """One attempt. Raises `AttemptFailed` once the journal says that it was given up, and `AttemptTaken`."""
        journal = Journal(slot_log, name)
        try:
            with span("episode", None, group=name.lease.group, slot=name.slot, attempt=name.attempt):
                return await self._play_attempt(name, journal, past, restarts)
        except (AttemptTaken, BusError):
            raise
        except Exception as error:  # suites, templates and agents are foreign code: one bad sample ends alone
            reason = self._reason_of(name, error)
            await journal.end(reason, str(error))  # first, since only whoever may say so may remove the sandbox
            box = journal.box or (past.box if past is not None else None)
            if box is not None:
                await self._stage.sandboxes.discard(box.name, box.executor)
            raise AttemptFailed(reason, str(error)) from error
        finally:
            if journal.box is not None and not journal.named:  # nobody else knows of it
                await self._stage.sandboxes.discard(journal.box.name, journal.box.executor)

    async def _play_attempt(self, name: AttemptName, journal: Journal, past: PastAttempt | None, restarts: bool) -> Episode:
        if name.lease.manifest != self._manifest:
            raise OtherBehaviour(f"lease of behaviour {name.lease.manifest}, and this rollouter's is {self._manifest}")
        task = self._suite.task(name.lease.task_id)
        return await play_attempt(self._stage, self._agent_for(task), name, task, journal, past, restarts=restarts)

    def _reason_of(self, name: AttemptName, error: Exception) -> AttemptReason:
        reason: AttemptReason = "broken"
        if isinstance(error, SandboxLost | GenerationFailed):
            reason = "infra_abort"
        elif isinstance(error, WeightsReplaced):
            reason = "restarted"
        elif isinstance(error, OtherBehaviour):
            reason = "cancelled"
        foreign = reason == "broken" and not isinstance(error, EpisodeBroken)
        self._health.count("infra_aborts" if reason == "infra_abort" else f"{reason}_episodes")
        say = log.info if reason == "restarted" else log.warning
        say(
            "attempt given up",
            group=name.lease.group,
            slot=name.slot,
            attempt=name.attempt,
            task=name.lease.task_id,
            why=reason,
            detail=str(error) or repr(error),
            exc_info=error if foreign else None,
        )
        return reason

    async def _seal_poison(self, lease: GroupLease, slots: list[Slot], past: PastClaims) -> None:
        """Give up a group that took down one holder after the other, without touching anything that is the group's own."""
        detail = f"{past.lost} holders were lost with it, {past.holder()} the last"
        log.error("group is poisonous", group=lease.group, task=lease.task_id, detail=detail)
        self._health.count("poisonous_groups")
        for slot in slots:
            name = AttemptName(lease=lease, slot=slot.number, attempt=slot.attempt)
            try:
                await slot.log.end(slot.attempt, "poison", detail)
            except AttemptTaken as error:
                raise GroupTaken(str(error)) from error
            if slot.past is not None:
                await self._stage.sandboxes.discard(slot.past.box.name, slot.past.box.executor)
            await self._publish(aborted_episode(name, Termination.POISON, self._stage.rollouter, time.time_ns()))

    async def _publish(self, episode: Episode) -> None:
        try:
            await self._stage.bus.publish_once(self._stage.bus.subjects.episode(episode.group, episode.slot), episode)
        except OnceConflict:
            self._health.count("sealed_elsewhere")
            log.warning("slot was sealed by another process", group=episode.group, slot=episode.slot)
            return
        self._health.count("episodes_sealed")
        self._health.count(f"ended_{episode.termination}")
