"""Recordings: what is in them, how small they are, and that damage is said by its block."""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec
import pytest
from admission_stage import connected, items, make_lease
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_run import STEPS, configuration, finished, recording_of

from admission import recorded
from admission.record_command import asked_for
from loadtests.audit_speed import SyntheticRun, write
from schemas.codec import CODEC_VERSION, encode
from schemas.ledger import BatchEntry
from schemas.message import SCHEMA_VERSION
from schemas.table import Role, Stream
from services.cli import main
from services.recorded_range import Range, RangeError
from services.recording import FILE_HEAD, RECORDED, Form, Manifest, Part, Record, RecordingError
from services.recording_reader import RecordingReader
from services.recording_writer import RecordingWriter

pytestmark = pytest.mark.timeout(240)


def manifest(**changes: object) -> Manifest:
    made = Manifest(
        run="t",
        headrace="test",
        codec_version=CODEC_VERSION,
        schema_version=SCHEMA_VERSION,
        bodies=True,
        made_ns=1,
        source="test",
        asked="everything",
        parts={"TASKS": Part(first=1, last=0, whole=True)},
    )
    return msgspec.structs.replace(made, **changes)


def write_leases(path: Path, count: int, body: int = 0) -> Path:
    """Leases, and large blocks where `body` says so."""
    with RecordingWriter(path, manifest()) as writer:
        for n in range(count):
            data = encode(make_lease(n)) + bytes(body)
            writer.add(Stream.TASKS, Record(n + 1, 10 + n, f"task.lease.{n}", Form.WHOLE, data), [f"g{n:08d}"])
    return path


def test_what_goes_in_comes_out_and_is_found_by_name(tmp_path: Path) -> None:
    path = write_leases(tmp_path / "r", 3000, body=4096)  # three blocks
    with RecordingReader(path) as reader:
        records = list(reader.records(Stream.TASKS))
        assert [record.seq for record in records] == list(range(1, 3001))
        assert reader.count(Stream.TASKS) == 3000
        assert [r.seq for r in reader.records(Stream.TASKS, first=2990)] == list(range(2990, 3001))
        found = [record for stream, record in reader.about(["g00001234"]) if record.name == "task.lease.1234"]
        assert [record.time_ns for record in found] == [10 + 1234]
        assert len(list(reader.about(["g00001234"]))) < 3000, "one block of several"
        assert not list(reader.about(["nothing"]))
        assert reader.verify() == 3000
    assert not list(tmp_path.glob(".r*")), "nothing is left beside it"


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_flipped_byte_and_no_cut_goes_unnoticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Wherever it is, reading fails with the file's name and never with anything else."""
    folder = tmp_path_factory.mktemp("damage")
    whole = write_leases(folder / "r", 40).read_bytes()
    if data.draw(st.booleans()):
        damaged = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        at = data.draw(st.integers(0, len(whole) - 1))
        damaged = whole[:at] + bytes([whole[at] ^ (1 << data.draw(st.integers(0, 7)))]) + whole[at + 1 :]
    path = folder / "damaged"
    path.write_bytes(damaged)
    with pytest.raises(RecordingError) as error, RecordingReader(path) as reader:
        reader.verify()
    assert str(path) in str(error.value)


def test_damage_names_the_block_and_what_is_in_it(tmp_path: Path) -> None:
    path = write_leases(tmp_path / "r", 3000, body=4096)
    with RecordingReader(path) as reader:
        second = int(reader._offsets[1])
    data = bytearray(path.read_bytes())
    data[second + 100] ^= 1
    path.write_bytes(data)
    with (
        RecordingReader(path) as reader,
        pytest.raises(RecordingError, match=r"block 2 \(TASKS \d+ to \d+\) at byte \d+: its bytes"),
    ):
        reader.verify()
    path.write_bytes(data[: second + 100])
    with pytest.raises(RecordingError, match=r"block 2 \(TASKS \d+ to \d+\) at byte \d+: the file ends in it; it is torn"):
        RecordingReader(path)


def test_a_lying_size_reserves_nothing(tmp_path: Path) -> None:
    """The head of the manifest's block promises 4 GB."""
    path = write_leases(tmp_path / "r", 3)
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, FILE_HEAD.size + 12, 2**32 - 1)
    path.write_bytes(data)
    with pytest.raises(RecordingError, match=r"block 0 .* declares 4294967295 bytes, more than the limit"):
        RecordingReader(path)


def test_other_versions_are_refused_by_name(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "other", manifest(schema_version=99, headrace="9.9")):
        pass
    with pytest.raises(RecordingError, match=r"schema 99; this build reads codec 1, schema 1; read it with headrace 9\.9"):
        RecordingReader(tmp_path / "other")
    (tmp_path / "text").write_text("not a recording at all")
    with pytest.raises(RecordingError, match="is not a recording"):
        RecordingReader(tmp_path / "text")


def test_an_error_while_recording_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), RecordingWriter(tmp_path / "r", manifest()):
        raise RuntimeError("the server went away")
    assert not list(tmp_path.iterdir())


def test_the_command_says_what_is_wrong_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r").write_bytes(b"HRRECORD")
    assert main(["replay", str(tmp_path / "r"), "--verify"]) == 2
    assert capsys.readouterr().err.startswith(f"headrace: {tmp_path / 'r'}: is not a recording")


@pytest.mark.parametrize("text", ["EPISODES", "NOSUCH=1-2", "EPISODES=a-b"])
def test_a_range_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(RangeError, match="write STREAM=FIRST-LAST"):
        asked_for([text], None, None, None, None)


async def test_a_run_is_recorded_byte_for_byte_or_without_bodies(nats_url: str, run_name: str, tmp_path: Path) -> None:
    """With bodies every message of every stream; without, small; by steps only the groups that these steps decided about."""
    config = configuration(run_name, nats_url)
    async with finished(nats_url, config) as bus:
        whole = await recording_of(config, tmp_path / "whole", bodies=True)
        small = await recording_of(config, tmp_path / "small")
        with RecordingReader(whole) as reader:
            for stream in RECORDED:
                stored = [(i.seq, i.time_ns, i.digest) for i in await items(bus, stream)]
                held = [(r.seq, r.time_ns, r.digest) for r in reader.records(stream)]
                assert held == stored, stream
            assert reader.manifest.bodies
            assert nats_url not in reader.manifest.config, "a recording names no server"
        with RecordingReader(small) as reader:
            held = [(r.seq, r.digest) for r in reader.records(Stream.EPISODES)]
            assert held == [(i.seq, i.digest) for i in await items(bus, Stream.EPISODES)]
            assert {r.form for r in reader.records(Stream.EPISODES)} == {Form.SLIM}
        steps = await recording_of(config, tmp_path / "steps", asked=Range(from_step=1, to_step=2))
        with RecordingReader(steps) as reader:
            ledger = recorded.ledger(reader)
            batches = {e.step: e for _, e in ledger if isinstance(e, BatchEntry)}
            assert set(batches) == {0, 1, 2}, "the ledger from its beginning to the last step asked for"
            groups = {record.name.split(".")[1] for record in reader.records(Stream.EPISODES)}
            assert {m.group for s in (1, 2) for m in batches[s].groups} <= groups
            assert not groups & {m.group for m in batches[0].groups}
        part = await recording_of(config, tmp_path / "part", asked=Range(seqs={Stream.EPISODES: (3, 9)}))
        with RecordingReader(part) as reader:
            assert [r.seq for r in reader.records(Stream.EPISODES)] == list(range(3, 10))
        with pytest.raises(RangeError, match=f"the ledger has batches 0 to {STEPS - 1}"):
            await recording_of(config, tmp_path / "none", asked=Range(from_step=77))
        with pytest.raises(RangeError, match="decisions are folds, so READY begins at 1"):
            await recording_of(config, tmp_path / "none", asked=Range(seqs={Stream.READY: (3, 9)}))
        assert not (tmp_path / "none").exists()


async def test_without_bodies_a_trajectory_takes_two_kilobytes_at_most(nats_url: str, tmp_path: Path) -> None:
    """Measured on 200 groups of 8 siblings whose every digest is another; the whole file is counted."""
    run = "sized"
    async with connected(nats_url, run, Role.OBSERVER) as bus:
        await write(bus, SyntheticRun(run, 200, 8))
        config = configuration(run, nats_url)
        path = await recording_of(config, tmp_path / "small")
        whole = await recording_of(config, tmp_path / "whole", bodies=True)
    with RecordingReader(path) as reader:
        episodes = sum(record.name.startswith("episode.") for record in reader.records(Stream.EPISODES))
    assert episodes == 1600
    per_trajectory = path.stat().st_size / episodes
    print(f"{per_trajectory:.0f} bytes per trajectory, {whole.stat().st_size / episodes:.0f} with bodies")
    assert per_trajectory <= 2048
