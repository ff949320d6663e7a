"""A recording of real services decides again as it was decided, bit for bit, and what was altered is found by its name."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from recorded_run import STEPS, configuration, finished, recording_of, rewritten

from admission import recorded
from admission.verify import verify
from schemas.ledger import AbandonEntry, BatchEntry, QuarantineEntry
from schemas.table import Stream
from services.cli import main
from services.recorded_range import Range
from services.recording_reader import RecordingReader

pytestmark = pytest.mark.timeout(240)


async def test_recorded_decisions_come_out_again_and_an_altered_one_is_named(
    nats_url: str, run_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Invariant 9 on a file: real bank and admission, some groups quarantined and some abandoned."""
    config = configuration(run_name, nats_url)
    async with finished(nats_url, config):
        path = await recording_of(config, tmp_path / "small")
        whole = await recording_of(config, tmp_path / "whole", bodies=True)
        part = await recording_of(config, tmp_path / "part", asked=Range(from_step=1))
    for file in (path, whole):
        with RecordingReader(file) as reader:
            found = verify(reader)
            entries = recorded.ledger(reader)
            assert found.same
            assert found.whole
            assert found.bank.groups == reader.count(Stream.READY)
            assert found.admission.entries == len(entries)
            kinds = {type(entry) for _, entry in entries}
            assert kinds == {BatchEntry, QuarantineEntry, AbandonEntry}, "the test wants every kind of decision"
            assert sum(isinstance(e, BatchEntry) for _, e in entries) == STEPS
    with RecordingReader(part) as reader:
        found = verify(reader)
        assert found.same
        assert found.bank.outside
        assert not found.bank.lost
        assert not found.admission.trusted, "the decisions of a range need nothing outside of it"
    assert main(["replay", str(path), "--verify"]) == 0
    assert "every recorded decision comes out again, bit for bit" in capsys.readouterr().out

    seq, batch = next((s, e) for s, e in entries if isinstance(e, BatchEntry) and e.step == 2)
    other = msgspec.structs.replace(batch.groups[1], lag=batch.groups[1].lag + 1)
    altered = rewritten(path, tmp_path / "altered", Stream.LEDGER, seq, groups=(batch.groups[0], other, *batch.groups[2:]))
    assert main(["replay", str(altered), "--verify", "--json", str(tmp_path / "out.json")]) == 1
    said = capsys.readouterr().out
    assert f"LEDGER {seq}: batch 2: groups: recorded" in said
    assert f"READY {batch.groups[1].ready_seq}" in said, "its inputs are shown"
    assert f"TRAIN {batch.demand_seq}" in said
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["admission"]["difference"]["ledger_seq"] == seq

    with RecordingReader(path) as reader:
        record, group = next((r, g) for r, g in recorded.ready(reader) if g.purpose == "train" and r.seq > 3)
    siblings = (msgspec.structs.replace(group.siblings[0], reward=0.25), *group.siblings[1:])
    altered = rewritten(path, tmp_path / "altered", Stream.READY, record.seq, siblings=siblings)
    assert main(["replay", str(altered), "--verify"]) == 1
    said = capsys.readouterr().out
    assert f"READY {record.seq}: {group.group}: slot 0, reward: recorded 0.25, replayed" in said
    assert said.count(f"EpisodeFact(group='{group.group}'") == len(siblings), "its inputs are shown"


async def test_settings_that_the_configuration_no_longer_says_are_found(nats_url: str, run_name: str, tmp_path: Path) -> None:
    """A run that was restarted under other settings, or a recording made with another configuration at hand."""
    config = configuration(run_name, nats_url)
    async with finished(nats_url, config):
        other = configuration(run_name, nats_url, max_lag=7, min_rewards=2, zero_variance="skip")
        path = await recording_of(other, tmp_path / "r")
    with RecordingReader(path) as reader:
        admitted = verify(reader).admission
    assert admitted.difference is None
    assert [(s.max_lag, s.min_rewards, s.zero_variance) for s in admitted.settings] == [(1, 1, "keep")]
