"""The scheduling of one lane as pure functions over a frozen state.

A ticket waits, then holds one run slot until it leaves. While it starts it also holds one start permit: many sandboxes starting
at once is what breaks a host, not many running. Tickets are served in the order in which they came; a full lane refuses.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Lane(StrEnum):
    """Kinds of work that must not starve one another."""

    RESET = "reset"
    COMMAND = "command"
    PACKAGE = "package"
    VERIFY = "verify"
    CLEANUP = "cleanup"


class LaneSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of one lane."""

    run_permits: int
    start_permits: int
    queue_bound: int = 256
    max_wait_s: float = 300.0  # a ticket that waited so long is refused, so that no wait is without an end
    cpu_sets: tuple[tuple[int, ...], ...] = ()  # of run slot k: element k; empty: not pinned


class LaneState(msgspec.Struct, frozen=True, kw_only=True):
    """Who waits and who holds which slot."""

    waiting: tuple[str, ...] = ()
    slots: tuple[tuple[int, str], ...] = ()  # (slot, ticket), by slot
    starting: frozenset[str] = frozenset()

    @property
    def running(self) -> int:
        return len(self.slots)


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """A ticket's turn: its run slot and that slot's CPUs."""

    ticket: str
    slot: int
    cpus: tuple[int, ...] = ()


def offer(spec: LaneSpec, state: LaneState, ticket: str) -> LaneState | None:
    """The state with the ticket waiting at the end, or None: the lane is full. Raises `ValueError` for a ticket that is
    there.
    """
    if ticket in state.waiting or any(ticket == holder for _, holder in state.slots):
        raise ValueError(f"ticket {ticket!r} is in the lane already")
    if len(state.waiting) >= spec.queue_bound and (state.waiting or not _permits(spec, state)):
        return None
    return msgspec.structs.replace(state, waiting=(*state.waiting, ticket))


def grant(spec: LaneSpec, state: LaneState) -> tuple[LaneState, tuple[Grant, ...]]:
    """Give free slots to those who wait longest; each gets the lowest free slot, so CPU sets are a function of the order."""
    grants: list[Grant] = []
    while state.waiting and _permits(spec, state):
        taken = {slot for slot, _ in state.slots}
        slot = next(number for number in range(spec.run_permits) if number not in taken)
        ticket, *rest = state.waiting
        slots = tuple(sorted((*state.slots, (slot, ticket))))
        state = LaneState(waiting=tuple(rest), slots=slots, starting=state.starting | {ticket})
        cpus = spec.cpu_sets[slot % len(spec.cpu_sets)] if spec.cpu_sets else ()
        grants.append(Grant(ticket=ticket, slot=slot, cpus=cpus))
    return state, tuple(grants)


def started(state: LaneState, ticket: str) -> LaneState:
    """The ticket's start is over; saying it twice, or for a ticket that has left, changes nothing."""
    return msgspec.structs.replace(state, starting=state.starting - {ticket})


def leave(state: LaneState, ticket: str) -> LaneState:
    """The ticket is gone, wherever it was; a ticket that is not there changes nothing."""
    return LaneState(
        waiting=tuple(other for other in state.waiting if other != ticket),
        slots=tuple((slot, holder) for slot, holder in state.slots if holder != ticket),
        starting=state.starting - {ticket},
    )


def _permits(spec: LaneSpec, state: LaneState) -> bool:
    return state.running < spec.run_permits and len(state.starting) < spec.start_permits
