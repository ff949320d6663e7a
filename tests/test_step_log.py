"""What a recovered trainer may continue from and what it may publish, over a real server."""

from __future__ import annotations

import msgspec
import pytest
from admission_stage import connected
from test_lineage import commit as plain_commit

from schemas.codec import encode
from schemas.ledger import LostItem
from schemas.policy import WeightsManifest
from schemas.table import Role
from schemas.training import Branch, LostGroup, StepCommit
from services.bus import Bus
from services.items import Fenced
from trainer.checkpoint import Commit
from trainer.step_log import StepLog

pytestmark = pytest.mark.timeout(60)
BASE = "d0.0"


def commit(step: int, incarnation: int = 0, *, after: str = "") -> StepCommit:
    """A step's commit that names the digest it starts from."""
    return msgspec.structs.replace(plain_commit(step, incarnation), base_digest=after or f"d{incarnation}.{step}")


def record(of: StepCommit, *, announcement: bytes | None = None, ranks: int = 1) -> Commit:
    """The record of a checkpoint that was written after this step."""
    return Commit(
        step=of.step,
        version=of.version,
        incarnation=of.incarnation,
        digest=of.digest,
        consumed_group_ids=(),
        ledger_position=0,
        config_hash="",
        ranks=ranks,
        announcement=encode(of) if announcement is None else announcement,
    )


async def published(bus: Bus, *made: StepCommit) -> StepLog:
    """A log in which these commits stand, read by a trainer that starts now."""
    writer = StepLog(bus, BASE)
    await writer.read()
    for one in made:
        await writer.announce(one)
    log = StepLog(bus, BASE)
    await log.read()
    return log


async def test_a_checkpoint_on_the_line_may_be_continued_and_one_of_a_dead_branch_may_not(nats_url: str, run_name: str) -> None:
    async with connected(nats_url, run_name, Role.TRAINER) as bus:
        living = [commit(0), commit(1), commit(1, 1, after="d0.1"), commit(2, 1)]
        log = await published(bus, living[0], living[1], commit(2), *living[2:])
        assert log.line.branches() == (Branch(1, 1),)
        assert [log.refusal(record(one), 1) for one in (living[0], *living[2:])] == ["", "", ""]
        assert "was published with other bits or was left" in log.refusal(record(commit(1)), 1)
        assert "it continues d0.2, the line has d1.2 as version 2" in log.refusal(record(commit(2)), 1)
        assert log.refusal(record(living[3]), 2) == "it holds 1 ranks, this trainer has 2"
        assert log.refusal(record(living[3], announcement=b""), 1) == "", "an older checkpoint of a published step"
        assert (log.steps_ahead(0), log.steps_ahead(2), log.steps_ahead(3)) == (3, 1, 0)
        assert [log.digest_of(version) for version in range(5)] == [BASE, "d0.1", "d1.2", "d1.3", ""]


async def test_a_checkpoint_whose_step_was_not_announced_brings_its_announcement(nats_url: str, run_name: str) -> None:
    """Invariant 5: it may continue the line, or begin the next incarnation on it; anything else is off the line."""
    async with connected(nats_url, run_name, Role.TRAINER) as bus:
        log = await published(bus, commit(0), commit(1))
        tip = commit(2)
        assert log.refusal(record(tip), 1) == "" and log.unannounced(record(tip)) == tip
        assert log.unannounced(record(commit(1))) is None
        assert "is not on the published line" in log.refusal(record(tip, announcement=b""), 1)
        assert "is not on the published line" in log.refusal(record(tip, announcement=encode(commit(1))), 1)
        assert "it continues other" in log.refusal(record(commit(2, after="other")), 1)
        assert "the line has nothing as version 5" in log.refusal(record(commit(5)), 1)
        begins = commit(1, 1, after="d0.1")
        assert log.refusal(record(begins), 1) == ""
        assert "published with other bits" in log.refusal(record(commit(1, 2, after="d0.1")), 1), (
            "no incarnation is passed over"
        )
        await log.announce(begins)
        assert log.refusal(record(begins), 1) == "" and log.unannounced(record(begins)) is None
        assert log.refusal(record(tip), 1) != ""


async def test_an_outcome_is_named_by_what_was_published(nats_url: str, run_name: str) -> None:
    async with connected(nats_url, run_name, Role.TRAINER) as bus:
        log = await published(bus, commit(0), commit(1))
        assert log.incarnation_of(2, "anything") == 0, "a step that nobody published"
        assert log.incarnation_of(1, "d0.2") == 0
        assert log.incarnation_of(1, "other") == 1
        trained = commit(1).groups
        assert log.incarnation_of(1, "d0.2", trained) == 0
        assert log.incarnation_of(1, "d0.2", (*trained, "g")) == 1, "the same bits of other groups are another step"
        await log.announce(commit(1, 1, after="d0.1"))
        assert log.incarnation_of(1, "d1.2") == 1 and log.incarnation_of(2, "anything") == 1
        assert log.incarnation_of(1, "d0.2") == 2, "the bits of a dead branch do not bring it back"
        assert log.incarnation_of(0, "d0.1") == 0 and log.incarnation_of(0, "other") == 2


async def test_a_trainer_that_was_overtaken_cannot_publish(nats_url: str, run_name: str) -> None:
    """Invariant 5: not the step that the other one published, not a later one, and not the beginning of an incarnation."""
    async with connected(nats_url, run_name, Role.TRAINER) as bus:
        old = await published(bus, commit(0))
        new = await published(bus)
        await new.announce(commit(1))
        for late in (commit(1), commit(2), commit(1, 1, after="d0.1")):
            with pytest.raises(Fenced):
                await old.announce(msgspec.structs.replace(late, digest="late"))
        await old.read()
        await old.announce(commit(2))
        with pytest.raises(Fenced):
            await new.announce(msgspec.structs.replace(commit(2), digest="other"))


async def test_a_step_whose_commit_is_lost_is_known_by_what_names_it_besides(nats_url: str, run_name: str) -> None:
    """Invariant 5: the next commit starts from its digest, and the manifest of its version has it. Others get another name."""
    async with connected(nats_url, run_name, Role.TRAINER) as bus:
        await bus.store(bus.subjects.step(1), b"not a commit", {})
        log = await published(bus, commit(0), commit(2))
        assert bus.alarms["unreadable"] == 1, "it is named, and nobody stops"
        assert [log.digest_of(version) for version in range(5)] == [BASE, "d0.1", "d0.2", "d0.3", ""]
        assert (log.incarnation_of(1, "d0.2"), log.incarnation_of(1, "other")) == (0, 1)
        assert log.refusal(record(commit(1)), 1) == "" and log.unannounced(record(commit(1))) == commit(1)
        link = WeightsManifest(
            run=run_name, version=4, incarnation=0, digest="d0.4", form="patch", base_version=3, base_digest="d0.3", objects=()
        )
        await bus.publish_once(bus.subjects.staged(4), link)
        again = StepLog(bus, BASE)
        await again.read()
        assert (again.incarnation_of(3, "d0.4"), again.incarnation_of(3, "other")) == (0, 1)
        await again.announce(commit(1))
        assert again.line.commit_of(1) == commit(1)


async def test_what_a_published_step_left_out_stays_left_out(nats_url: str, run_name: str) -> None:
    """On whichever line it was decided; the first word counts."""
    async with connected(nats_url, run_name, Role.TRAINER) as bus:
        first, later = LostItem("EPISODES", 7, "d"), LostItem("READY", 2, "")
        left = msgspec.structs.replace(commit(1), lost=(LostGroup("g1", first),))
        again = msgspec.structs.replace(commit(1, 1, after="d0.1"), lost=(LostGroup("g1", later), LostGroup("g2", later)))
        log = await published(bus, commit(0), left, again)
        assert log.lost_of(0) == {} and log.lost_of(1) == {"g1": first, "g2": later}
