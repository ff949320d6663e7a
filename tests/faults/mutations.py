"""Deliberate bugs of the kinds that lose or double work, each with the test that must notice it.

Every edit replaces a text that stands exactly once in its file; one that does not fit is an error, so that this table cannot go
stale in silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Edit:
    file: str
    old: str
    new: str

    def fits(self, root: Path) -> bool:
        path = root / self.file
        return path.is_file() and path.read_text(encoding="utf-8").count(self.old) == 1

    def make(self, root: Path) -> None:
        path = root / self.file
        path.write_text(path.read_text(encoding="utf-8").replace(self.old, self.new), encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """`test` is the pytest name of what must fail; `because` says what the bug would do to a run."""

    name: str
    because: str
    edit: Edit
    test: str

    def make(self, root: Path) -> None:
        """Raises `LookupError` naming the mutation when its text is nowhere, or more than once."""
        if not self.edit.fits(root):
            raise LookupError(f"{self.name}: its text is not exactly once in {self.edit.file}")
        self.edit.make(root)


MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        name="ack before publish",
        because="a worker that dies after the ack has lost its message",
        edit=Edit(
            file="services/work.py",
            old='            await handler(found)\n            await acknowledge(message, b"+ACK")\n',
            new='            await acknowledge(message, b"+ACK")\n            await handler(found)\n',
        ),
        test="tests/test_bus_reads.py::test_what_a_stopped_worker_could_not_finish_comes_to_another_at_once",
    ),
    Mutation(
        name="no fencing of the ledger",
        because="two admissions decide from different states, and a group enters two batches",
        edit=Edit(
            file="services/bus.py",
            old='{"Nats-Expected-Last-Sequence": str(after), "Nats-Expected-Last-Subject-Sequence": "0"}',
            new='{"Nats-Expected-Last-Subject-Sequence": "0"}',
        ),
        test="tests/test_bus_writes.py::test_a_log_refuses_a_second_writer",
    ),
    Mutation(
        name="a cursor instead of the state of each group",
        because="the sibling that came before the restart is skipped, and its group never becomes whole",
        edit=Edit(
            file="admission/bank_service.py",
            old="events(self.bus, Stream.EPISODES, stop=self.context.stop)",
            new="events(self.bus, Stream.EPISODES, stop=self.context.stop,"
            " start=await self.bus.last_sequence(Stream.EPISODES) + 1)",
        ),
        test="tests/faults/test_restarted_state.py::test_a_bank_that_restarts_between_siblings_completes_the_group",
    ),
    Mutation(
        name="a checkpoint without the groups that it consumed",
        because="nobody can tell from a checkpoint which groups are in its weights",
        edit=Edit(file="trainer/learner.py", old="consumed_group_ids=tuple(self._consumed)", new="consumed_group_ids=()"),
        test="tests/faults/test_steps_and_checkpoints.py::test_a_checkpoint_names_every_group_that_is_in_its_weights",
    ),
    Mutation(
        name="once only within the window of message ids",
        because="after the window, or with other bytes inside it, a second message counts as well",
        edit=Edit(
            file="services/bus.py",
            old='data, {"Nats-Expected-Last-Subject-Sequence": "0"}, ',
            new='data, {"Nats-Msg-Id": subject}, ',
        ),
        test="tests/test_bus_writes.py::test_once_means_once_for_ever",
    ),
    Mutation(
        name="state in memory only",
        because="a restarted admission or sampler knows nothing of what was closed or leased before",
        edit=Edit(
            file="services/feed.py",
            old="events(self._bus, source.stream, *source.patterns, stop=stop, ",
            new="events(self._bus, source.stream, *source.patterns, stop=stop,"
            " start=await self._bus.last_sequence(source.stream) + 1, ",
        ),
        test="tests/faults/test_restarted_state.py::test_an_admission_that_restarts_knows_what_it_has_closed",
    ),
    Mutation(
        name="no heartbeats while a message is in work",
        because="work that takes longer than the acknowledgement may is done by two at the same time",
        edit=Edit(
            file="services/work.py", old='            await acknowledge(message, b"+WPI")\n', new="            continue\n"
        ),
        test="tests/faults/test_restarted_state.py::test_a_message_in_work_is_not_given_to_another",
    ),
    Mutation(
        name="a patch is applied without its digest",
        because="an engine serves weights under a version that they are not",
        edit=Edit(file="param_sync/patch/codec.py", old="    if found != header.digest:\n", new="    if False:\n"),
        test="tests/test_patch_damage.py",
    ),
    Mutation(
        name="a torn checkpoint is trusted",
        because="a trainer that was killed while it wrote starts again from half a state",
        edit=Edit(
            file="trainer/checkpoint.py",
            old="        if _digest(place) != file.digest:\n",
            new="        if False:\n",
        ),
        test="tests/test_trainer_checkpoint.py::test_damage_is_named_and_the_one_before_is_used",
    ),
    Mutation(
        name="an unanswered publish is not tried again",
        because="whatever was on its way when the server died is missing, or its service ends",
        edit=Edit(
            file="services/bus.py",
            old="            if held_s > self._patience_s(give_up_s):\n",
            new="            if True:\n",
        ),
        test="tests/test_bus_writes.py::test_a_publish_outlives_a_killed_server",
    ),
    Mutation(
        name="a repeated command runs again",
        because="a request that is delivered twice changes the sandbox twice",
        edit=Edit(
            file="services/sandbox/resident.py",
            old="        if recorded := self._journal.result_of(command_id, request):\n            return recorded\n",
            new="",
        ),
        test="tests/test_sandbox_executor.py::test_a_command_runs_once_by_its_id",
    ),
    Mutation(
        name="a verdict on other bytes counts",
        because="a reward belongs to an episode that nobody trains on",
        edit=Edit(
            file="admission/joining.py",
            old=" and judged.episode_digest == episode.digest\n",
            new="\n",
        ),
        test="tests/test_bank_joining.py::test_a_verdict_on_other_bytes_is_no_verdict",
    ),
    Mutation(
        name="an owner that wakes up does not look who owns the role",
        because="a second writer works beside the one that took over",
        edit=Edit(
            file="services/ownership.py",
            old="        if held is None or held.owner.token != self._token:\n            raise _Taken(",
            new="        if held is None:\n            raise _Taken(",
        ),
        test="tests/test_ownership.py::test_an_owner_that_is_cut_off_stops_and_the_second_takes_over",
    ),
    Mutation(
        name="a trainer that was overtaken publishes",
        because="two trainers commit steps, and a version has two sets of weights",
        edit=Edit(
            file="trainer/step_log.py",
            old="        stored = await self._bus.append("
            "subject, commit, after=self._last_seq, within=self._bus.subjects.pattern(_STEPS))\n",
            new="        stored = await self._bus.publish(subject, commit)\n",
        ),
        test="tests/test_step_log.py::test_a_trainer_that_was_overtaken_cannot_publish",
    ),
    Mutation(
        name="a step is announced before its checkpoint is durable",
        because="the announcement names a checkpoint that a crash has left half written",
        edit=Edit(
            file="trainer/service.py",
            old="                if not await self._save(learner):\n"
            '                    commit = msgspec.structs.replace(commit, checkpoint="")\n'
            "            self._announcement = encode(commit)\n"
            "            await self._ownership.confirm()\n"
            "            await self._steps.announce(commit)\n",
            new="            self._announcement = encode(commit)\n"
            "            await self._ownership.confirm()\n"
            "            await self._steps.announce(commit)\n"
            "            if commit.checkpoint:\n"
            "                await self._save(learner)\n",
        ),
        test="tests/faults/test_steps_and_checkpoints.py::test_a_step_is_not_announced_while_its_checkpoint_is_being_written",
    ),
    Mutation(
        name="an incarnation that reuses a version's name",
        because="whoever holds the version by its name holds other weights than whoever reads it now",
        edit=Edit(
            file="trainer/step_log.py",
            old="        return self.line.incarnation + 1\n",
            new="        return self.line.incarnation\n",
        ),
        test="tests/test_step_log.py::test_an_outcome_is_named_by_what_was_published",
    ),
    Mutation(
        name="a rollouter may publish verdicts",
        because="whoever plays an episode also judges it",
        edit=Edit(
            file="schemas/table.py",
            old='SubjectSpec(pattern="verdict.*.*", publishers=(R.VERIFIER,), once=True)',
            new='SubjectSpec(pattern="verdict.*.*", publishers=(R.VERIFIER, R.ROLLOUTER), once=True)',
        ),
        test="tests/test_identities.py::test_who_decides_one_thing_cannot_decide_another",
    ),
    Mutation(
        name="an audit that passes a group in two steps",
        because="the check that the user relies on says that everything agrees",
        edit=Edit(
            file="admission/audit.py",
            old="            if group in steps:\n",
            new="            if False:\n",
        ),
        test="tests/test_audit.py::test_what_does_not_agree_is_found_by_name_and_place",
    ),
)
