"""Deliberate bugs of the kinds that lose or double work, each with the test that must notice it.

Every edit replaces a text that stands exactly once in its file. Where a mutation has several edits, the first one that fits is
made; one that fits nowhere is an error, so that this table cannot go stale in silence.
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
    edits: tuple[Edit, ...]
    test: str

    def edit_for(self, root: Path) -> Edit:
        """Raises `LookupError` naming the mutation when its text is nowhere, or more than once."""
        fitting = next((edit for edit in self.edits if edit.fits(root)), None)
        if fitting is None:
            raise LookupError(f"{self.name}: its text is not exactly once in {', '.join(edit.file for edit in self.edits)}")
        return fitting


MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        name="ack before publish",
        because="a worker that dies after the ack has lost its message",
        edits=(
            Edit(
                file="services/work.py",
                old='            await handler(found)\n            await acknowledge(message, b"+ACK")\n',
                new='            await acknowledge(message, b"+ACK")\n            await handler(found)\n',
            ),
            Edit(
                file="services/consume.py",
                old='            await handler(item)\n            await _ack(message, b"+ACK")\n',
                new='            await _ack(message, b"+ACK")\n            await handler(item)\n',
            ),
        ),
        test="tests/test_bus_reads.py::test_what_a_stopped_worker_could_not_finish_comes_to_another_at_once",
    ),
    Mutation(
        name="no fencing of the ledger",
        because="two admissions decide from different states, and a group enters two batches",
        edits=(
            Edit(
                file="services/bus.py",
                old='{"Nats-Expected-Last-Sequence": str(after), "Nats-Expected-Last-Subject-Sequence": "0"}',
                new='{"Nats-Expected-Last-Subject-Sequence": "0"}',
            ),
        ),
        test="tests/test_bus_writes.py::test_a_log_refuses_a_second_writer",
    ),
    Mutation(
        name="a cursor instead of the state of each group",
        because="the sibling that came before the restart is skipped, and its group never becomes whole",
        edits=(
            Edit(
                file="admission/bank_service.py",
                old="events(self.bus, Stream.EPISODES, stop=self.context.stop)",
                new="events(self.bus, Stream.EPISODES, stop=self.context.stop,"
                " start=await self.bus.last_sequence(Stream.EPISODES) + 1)",
            ),
            Edit(
                file="admission/bank_service.py",
                old="fold(context.bus, Stream.EPISODES, stop=context.stop)",
                new="fold(context.bus, Stream.EPISODES, stop=context.stop,"
                " start=await context.bus.last_sequence(Stream.EPISODES) + 1)",
            ),
        ),
        test="tests/faults/test_restarted_state.py::test_a_bank_that_restarts_between_siblings_completes_the_group",
    ),
    Mutation(
        name="a checkpoint without the groups that it consumed",
        because="nobody can tell from a checkpoint which groups are in its weights",
        edits=(Edit(file="trainer/learner.py", old="consumed_group_ids=tuple(self._consumed)", new="consumed_group_ids=()"),),
        test="tests/faults/test_runs_under_faults.py::test_a_checkpoint_names_every_group_that_is_in_its_weights",
    ),
    Mutation(
        name="once only within the window of message ids",
        because="after the window, or with other bytes inside it, a second message counts as well",
        edits=(
            Edit(
                file="services/bus.py",
                old='data, {"Nats-Expected-Last-Subject-Sequence": "0"})',
                new='data, {"Nats-Msg-Id": subject})',
            ),
            Edit(
                file="services/bus.py",
                old='data, {"Nats-Expected-Last-Subject-Sequence": "0"}, ',
                new='data, {"Nats-Msg-Id": subject}, ',
            ),
        ),
        test="tests/test_bus_writes.py::test_once_means_once_for_ever",
    ),
    Mutation(
        name="state in memory only",
        because="a restarted admission or sampler knows nothing of what was closed or leased before",
        edits=(
            Edit(
                file="services/feed.py",
                old="events(self._bus, source.stream, *source.patterns, stop=stop, ",
                new="events(self._bus, source.stream, *source.patterns, stop=stop,"
                " start=await self._bus.last_sequence(source.stream) + 1, ",
            ),
            Edit(
                file="services/feed.py",
                old="fold(self._bus, source.stream, *source.patterns, stop=stop, ",
                new="fold(self._bus, source.stream, *source.patterns, stop=stop,"
                " start=await self._bus.last_sequence(source.stream) + 1, ",
            ),
        ),
        test="tests/faults/test_restarted_state.py::test_an_admission_that_restarts_knows_what_it_has_closed",
    ),
    Mutation(
        name="no heartbeats while a message is in work",
        because="work that takes longer than the acknowledgement may is done by two at the same time",
        edits=(
            Edit(
                file="services/work.py", old='            await acknowledge(message, b"+WPI")\n', new="            continue\n"
            ),
            Edit(file="services/consume.py", old='            await _ack(message, b"+WPI")\n', new="            continue\n"),
        ),
        test="tests/faults/test_restarted_state.py::test_a_message_in_work_is_not_given_to_another",
    ),
    Mutation(
        name="a patch is applied without its digest",
        because="an engine serves weights under a version that they are not",
        edits=(Edit(file="param_sync/patch/codec.py", old="    if found != header.digest:\n", new="    if False:\n"),),
        test="tests/test_patch_damage.py",
    ),
    Mutation(
        name="a torn checkpoint is trusted",
        because="a trainer that was killed while it wrote starts again from half a state",
        edits=(
            Edit(
                file="trainer/checkpoint.py",
                old="        if _digest(place) != file.digest:\n",
                new="        if False:\n",
            ),
        ),
        test="tests/test_trainer_checkpoint.py::test_damage_is_named_and_the_one_before_is_used",
    ),
    Mutation(
        name="an unanswered publish is not tried again",
        because="whatever was on its way when the server died is missing, or its service ends",
        edits=(
            Edit(
                file="services/bus.py",
                old="            if time.monotonic() > deadline:\n",
                new="            if True:\n",
            ),
        ),
        test="tests/test_bus_writes.py::test_a_publish_outlives_a_killed_server",
    ),
    Mutation(
        name="a repeated command runs again",
        because="a request that is delivered twice changes the sandbox twice",
        edits=(
            Edit(
                file="services/sandbox/resident.py",
                old="        if recorded := self._journal.result_of(command_id, request):\n            return recorded\n",
                new="",
            ),
        ),
        test="tests/test_sandbox_executor.py::test_a_command_runs_once_by_its_id",
    ),
    Mutation(
        name="a verdict on other bytes counts",
        because="a reward belongs to an episode that nobody trains on",
        edits=(
            Edit(
                file="admission/joining.py",
                old=" and judged.episode_digest == episode.digest\n",
                new="\n",
            ),
        ),
        test="tests/test_bank_joining.py::test_a_verdict_on_other_bytes_is_no_verdict",
    ),
)
