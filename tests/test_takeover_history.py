"""What the records of one slot mean for whoever takes it over; pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from rollouter.takeover import SlotHistory, histories
from schemas.actions import Finish, ToolCall
from schemas.arrays import Array
from schemas.attempts import AttemptEnded, AttemptOpened, AttemptPlayed, AttemptReason, AttemptTakeover
from schemas.codec import encode
from schemas.message import Message
from schemas.trajectory import TurnEffect, TurnRecord, VersionSpan
from services.items import Item

IDS = Array.of(np.asarray([4, 5, 6], dtype=np.int32))
LOGPROBS = Array.of(np.asarray([-0.1, -0.2, -0.3], dtype=np.float32))


def effect(state: str, *, refused: bool = False) -> TurnEffect:
    return TurnEffect(observation=b"o", lane="command", exit_code=0, state_after="" if refused else state, refused=refused)


def opened(attempt: int = 0, claim: int = 0) -> AttemptOpened:
    return AttemptOpened(
        run="t",
        group="g1",
        slot=0,
        attempt=attempt,
        claim=claim,
        rollouter="r",
        sandbox=f"box{attempt}",
        executor="x0",
        state_hash="s0",
        started_ns=7,
    )


def turn(number: int, *, state: str = "s0", previous: TurnEffect | None = None, runs: bool = True) -> TurnRecord:
    return TurnRecord(
        run="t",
        group="g1",
        slot=0,
        attempt=0,
        turn=number,
        task_id="t",
        manifest="m",
        prompt_ids=IDS,
        sampled_ids=IDS,
        logprobs=LOGPROBS,
        versions=(VersionSpan(0, 3, 1),),
        finish_reason="stop",
        previous=previous,
        action=ToolCall(name="shell", arguments={"command": "ls"}) if runs else Finish(),
        command_id=f"box0.{number}" if runs else "",
        executor="x0",
        state_before=state,
    )


def ended(attempt: int, reason: AttemptReason, claim: int = 0) -> AttemptEnded:
    return AttemptEnded(
        run="t", group="g1", slot=0, attempt=attempt, claim=claim, rollouter="r", reason=reason, detail="", at_ns=1
    )


PLAYED = AttemptPlayed(run="t", group="g1", slot=0, attempt=0, last=effect("s2"))


def history(*records: Message, attempt: int = 0) -> SlotHistory:
    words = {AttemptOpened: "open", AttemptPlayed: "played", AttemptEnded: "end", AttemptTakeover: "takeover-1"}
    items = []
    for seq, record in enumerate(records, start=5):
        number = getattr(record, "attempt", attempt)
        word = words.get(type(record)) or str(getattr(record, "turn", 0))
        data = encode(record)
        items.append(Item("s", f"hr.t.turn.g1.0.{number}.{word}", seq, 0, data, "", {}))
    claim = Item("s", "hr.t.turn.g1.claim.0.taken", 99, 0, b"", "", {})
    return histories([*items, claim], [0])[0]


@pytest.mark.parametrize(
    ("records", "ran", "pending", "state"),
    [
        ((), "", "", "s0"),
        ((turn(0),), "", "box0.0", "s0"),
        ((turn(0), turn(1, state="s1", previous=effect("s1"))), "box0.0", "box0.1", "s1"),
        ((turn(0), turn(1, previous=effect("", refused=True))), "", "box0.1", "s0"),  # a refused command has not run
        ((turn(0), turn(1, state="s1", previous=effect("s1"), runs=False)), "box0.0", "", "s1"),
        ((turn(0), turn(1, state="s1", previous=effect("s1")), PLAYED), "box0.0", "box0.1", "s1"),
    ],
)
def test_an_attempt_is_continued_where_its_records_end(records: Sequence[Message], ran: str, pending: str, state: str) -> None:
    past = history(opened(), *records).continuable()
    assert past is not None
    assert (past.attempt, past.started_ns, past.ran, past.pending) == (0, 7, ran, pending)
    assert (past.box.name, past.box.executor, past.box.state_hash) == ("box0", "x0", state)
    turns = [record for record in records if isinstance(record, TurnRecord)]
    assert [p.acted is not None for p in past.turns[:-1]] == [True] * (len(turns) - 1 if turns else 0)
    assert past.played == (PLAYED in records) and all(p.acted is None for p in past.turns[-1:])
    for before, record in zip(past.turns, turns, strict=True):
        np.testing.assert_array_equal(before.fed, record.prompt_ids.numpy())
        np.testing.assert_array_equal(before.sampled.logprobs, record.logprobs.numpy())
        assert (before.sampled.versions, before.action) == (record.versions, record.action)
    assert past.stands(state, ran)
    assert not past.stands("elsewhere", ran) and not past.stands(state, "foreign")
    assert past.stands("whatever it left", pending) == bool(pending)


@pytest.mark.parametrize(
    "records",
    [
        (turn(0),),  # no sandbox is named
        (opened(), turn(1, previous=effect("s1"))),  # a turn is missing
        (opened(), turn(0), turn(1)),  # nothing says what the first turn did
        (opened(), turn(0), turn(1, previous=effect("s1")), turn(1, previous=effect("s1"))),
        (opened(), msgspec.structs.replace(turn(0), versions=())),  # tokens without a policy version
        (opened(), msgspec.structs.replace(turn(0), logprobs=Array.of(np.asarray([-0.1], dtype=np.float32)))),
        (opened(), ended(0, "infra_abort")),
        (AttemptTakeover(run="t", group="g1", slot=0, attempt=0, claim=1, rollouter="r", at_ns=1),),
    ],
)
def test_an_attempt_that_lacks_something_is_not_continued(records: Sequence[Message]) -> None:
    found = history(*records)
    assert found.continuable() is None
    assert [box.name for box in found.left_sandboxes()] == (["box0"] if isinstance(records[0], AttemptOpened) else [])


def test_attempts_retries_and_claims_are_counted() -> None:
    nothing = history()
    assert (nothing.current, nothing.aborts, nothing.newest_claim, nothing.last_seq) == (0, 0, -1, 0)
    found = history(
        opened(0),
        ended(0, "infra_abort"),
        ended(1, "orphaned", claim=2),
        opened(2, claim=2),
        ended(2, "infra_abort", claim=2),
        opened(3, claim=2),
    )
    assert (found.current, found.aborts, found.newest_claim, found.last_seq) == (3, 2, 2, 10)
    past = found.continuable()
    assert past is not None and (past.attempt, past.box.name, past.turns) == (3, "box3", ())
    assert [box.name for box in found.left_sandboxes()] == ["box0", "box2"]
