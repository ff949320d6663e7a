"""Recordings: what is written is what was stored, small without bodies, and damage is named by its block."""

from __future__ import annotations

import asyncio
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from conftest import NatsServer, eventually
from hypothesis import given, settings
from hypothesis import strategies as st

from admission.record import RECORDED, Range, Taker, make_out, record_of
from admission.recorded import facts, ledger, message_of, messages
from loadtests.audit_speed import SyntheticRun, write
from loadtests.replay_speed import generate
from schemas.group import ReadyGroup
from schemas.ledger import BatchEntry
from schemas.table import Role, Stream
from schemas.training import BatchDemand
from schemas.trajectory import Episode, TurnRecord
from services.bus import Bus, Item
from services.cli import main
from services.config import check, load
from services.consume import read_all
from services.embedded_server import EmbeddedServers
from services.provision import provision
from services.recording import (
    BLOCK,
    DAMAGED,
    HEAD,
    MAGIC,
    OUTLINE,
    WIRE,
    Header,
    Record,
    Recording,
    RecordingError,
    group_key,
    sums,
)
from services.recording_writer import RecordingWriter, differences
from services.run_folder import RunFolder
from services.stopped_run import served
from tests.recorded_run import FIRST_STEP, LATER, SIZE, STALE, TRAINED, lean, record, short_run, whole

__all__ = ["lean", "whole"]  # fixtures
ROOT = Path(__file__).resolve().parent.parent
MAX_LEAN_BYTES = 2048  # of a trajectory
pytestmark = pytest.mark.timeout(300)


async def test_every_message_is_recorded_as_it_was_stored(whole: Path) -> None:
    folder = short_run()
    async with served(load(folder / "config.toml"), folder) as config:
        bus = await Bus.connect(config.nats.url, config.run.name, Role.OBSERVER, "test")
        stored = {stream: await read_all(bus, stream) for stream in RECORDED}
        await bus.close()
    with Recording(whole) as recording:
        assert recording.header.bodies and not recording.header.selection
        for stream, items in stored.items():
            records = list(recording.records(stream))
            assert [(r.seq, r.time_ns, r.data, r.digest.hex(), r.form) for r in records] == [
                (item.seq, item.time_ns, item.data, item.digest, WIRE) for item in items
            ], stream
            assert recording.facts(stream).last_seq == len(items)


def test_without_bodies_a_trajectory_is_small_and_the_banks_facts_are_the_same(whole: Path, lean: Path) -> None:
    with Recording(whole) as one, Recording(lean) as other:
        assert list(facts(one)) == list(facts(other))
        forms = {record.form for record in other.records(Stream.EPISODES)}
        assert forms == {OUTLINE}
        turns = [m for _, m in messages(other, Stream.TURNS) if isinstance(m, TurnRecord)]
        before = [m for _, m in messages(one, Stream.TURNS) if isinstance(m, TurnRecord)]
        assert [t.sampled_ids.shape for t in turns] == [t.sampled_ids.shape for t in before]
        assert not any(t.sampled_ids.data or t.logprobs.data for t in turns)
        assert all(t.previous is None or not t.previous.observation for t in turns)
        trajectories = sum(isinstance(m, Episode) for _, m in messages(other, Stream.EPISODES))
    assert trajectories == 12
    assert lean.stat().st_size <= MAX_LEAN_BYTES * trajectories, lean.stat().st_size / trajectories


def test_a_longer_run_stays_as_small(tmp_path: Path) -> None:
    path = tmp_path / "generated.hrr"
    generate(path, 200, 8, 8)
    assert path.stat().st_size <= MAX_LEAN_BYTES * 1600, path.stat().st_size / 1600


@pytest.mark.parametrize(
    ("words", "groups"),
    [
        (["--steps", f"{FIRST_STEP}"], set(TRAINED)),
        (["--steps", f"{FIRST_STEP + 1}:{FIRST_STEP + 1}"], {*STALE, *LATER}),
        (["--seq", "LEDGER=2"], {STALE[0]}),
        (["--seq", "READY=1"], set(TRAINED)),
    ],
)
def test_a_range_holds_everything_of_its_groups_and_of_no_others(words: list[str], groups: set[str], tmp_path: Path) -> None:
    path = record(tmp_path / "part.hrr", *words)
    with Recording(path) as recording:
        found = {m.group for _, m in messages(recording, Stream.READY) if isinstance(m, ReadyGroup)}
        episodes = [m for _, m in messages(recording, Stream.EPISODES) if isinstance(m, Episode)]
        assert found == groups == {episode.group for episode in episodes}
        assert len(episodes) == SIZE * len(groups)
        assert not recording.facts(Stream.EPISODES).whole
    assert main(["replay", str(path), "--verify"]) == 0


def test_a_range_by_time_holds_what_was_stored_in_it(whole: Path, tmp_path: Path) -> None:
    with Recording(whole) as recording:
        times = [record.time_ns for record, entry in ledger(recording) if isinstance(entry, BatchEntry)]
    since, until = ((times[0] - 1_000_000) / 1e9, (times[0] + 1_000_000) / 1e9)
    words = ["--since", _iso(since), "--until", _iso(until)]
    with Recording(record(tmp_path / "part.hrr", *words)) as part:
        found = [entry for _, entry in ledger(part)]
        assert [type(entry) for entry in found] == [BatchEntry]
        assert {m.group for _, m in messages(part, Stream.READY) if isinstance(m, ReadyGroup)} >= set(TRAINED)


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "900:901"], "the run has nothing there"),
        (["--steps", "x"], "--steps 'x': write one number, or the first and the last"),
        (["--seq", "REDY=1:2"], "'REDY' is no recorded stream; use LEDGER"),
        (["--since", "noon"], "--since 'noon': write a time as in 2026"),
    ],
)
def test_a_range_that_is_not_one_is_said(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "part.hrr"
    assert main(["record", str(out), "--run-folder", str(short_run()), *words]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "nothing is left of a recording that was not made"


def test_a_file_that_is_there_is_not_overwritten(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", str(whole), "--run-folder", str(short_run())]) == 2
    assert "is there already" in capsys.readouterr().err


# -- damage ------------------------------------------------------------------------------------------------------------------


def test_a_file_cut_short_says_after_which_block(whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()
    with Recording(whole) as recording:
        blocks = recording.index.blocks
    cut = tmp_path / "cut.hrr"
    for number, block in enumerate(blocks):
        cut.write_bytes(data[: block.offset + HEAD.size + block.stored // 2])
        with pytest.raises(RecordingError, match=rf"cut short inside block {number} \({block.stream}, from sequence"):
            Recording(cut)
        cut.write_bytes(data[: block.offset + HEAD.size + block.stored])
        with pytest.raises(RecordingError, match=f"cut short after block {number}, at byte"):
            Recording(cut)
    for size in range(0, len(data), max(1, len(data) // 97)):
        cut.write_bytes(data[:size])
        with pytest.raises(RecordingError, match=r"cut\.hrr: "):
            Recording(cut)


def test_a_flipped_byte_is_named_with_its_block(whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()
    with Recording(whole) as recording:
        blocks = recording.index.blocks
    bad = tmp_path / "bad.hrr"
    for number, block in enumerate(blocks):
        for place in (block.offset, block.offset + 8, block.offset + HEAD.size, block.offset + HEAD.size + block.stored - 1):
            bad.write_bytes(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
            with Recording(bad) as recording, pytest.raises(RecordingError, match=rf"block {number} \({block.stream}, seq"):
                recording.block(number)


def test_a_block_in_anothers_place_is_found(whole: Path, tmp_path: Path) -> None:
    """Each is whole by its own digest; the index names the bytes."""
    data = bytearray(whole.read_bytes())
    with Recording(whole) as recording:
        first, second = sorted(recording.index.blocks, key=lambda block: block.stored)[:2]
    frame = data[first.offset : first.offset + HEAD.size + first.stored]
    data[second.offset : second.offset + len(frame)] = frame
    bad = tmp_path / "swapped.hrr"
    bad.write_bytes(data)
    with Recording(bad) as recording, pytest.raises(RecordingError, match="the index names other bytes"):
        recording.block(recording.index.blocks.index(second))


def test_lengths_are_bounded_before_anything_is_allocated(whole: Path, tmp_path: Path) -> None:
    data = bytearray(whole.read_bytes())
    with Recording(whole) as recording:
        block = recording.index.blocks[0]
    fields = list(HEAD.unpack_from(data, block.offset))
    assert fields[0] == BLOCK
    fields[3] = 2**32 - 1
    HEAD.pack_into(data, block.offset, *fields)
    bad = tmp_path / "large.hrr"
    bad.write_bytes(data)
    with Recording(bad) as recording, pytest.raises(RecordingError, match=r"4294967295 when unpacked; .* the bound is"):
        recording.block(0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no recording"),
        (b"PK\x03\x04 something else", "is no recording"),
        (MAGIC[:6] + b"\x63\n", "format 99 is unknown"),
    ],
)
def test_what_is_no_recording_is_said(content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    assert main(["replay", str(path)]) == 2
    assert said in capsys.readouterr().err


def test_an_unusable_item_keeps_its_bytes_and_the_reason(tmp_path: Path) -> None:
    item = Item("s", "hr.t.episode.g00000001.0", 3, 7, b"garbage", "00" * 32, {})
    kept = record_of(item, "episode.g00000001.0", None, "its bytes are no message", bodies=False)
    path = tmp_path / "damaged.hrr"
    with RecordingWriter(path, Header(run="t", made_ns=0, bodies=False, selection="")) as writer:
        writer.add(Stream.EPISODES, kept, {group_key("g00000001")}, set())
    with Recording(path) as recording:
        (record_,) = recording.records(Stream.EPISODES)
        assert (record_.form, record_.data, record_.fact) == (DAMAGED, b"garbage", b"its bytes are no message")
        assert message_of(record_) is None
        (fact,) = facts(recording)
        assert (fact.group, fact.slot, fact.seq, fact.readable) == ("g00000001", 0, 3, False)


RECORDS = st.builds(
    Record,
    seq=st.integers(1, 2**40),
    time_ns=st.integers(0, 2**62),
    subject=st.text(max_size=20),
    digest=st.binary(min_size=32, max_size=32),
    size=st.integers(0, 2**30),
    form=st.sampled_from([WIRE, OUTLINE, DAMAGED]),
    data=st.binary(max_size=400),
    fact=st.binary(max_size=40),
)


@settings(max_examples=40, deadline=None)
@given(records=st.lists(RECORDS, max_size=30), groups=st.sets(st.integers(0, 2**32), max_size=10))
def test_what_is_written_is_read(records: list[Record], groups: set[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("any") / "any.hrr"
    with RecordingWriter(path, Header(run="t", made_ns=1, bodies=True, selection="")) as writer:
        for each in records:
            writer.add(Stream.TURNS, each, groups, set())
    with Recording(path) as recording:
        assert list(recording.records(Stream.TURNS)) == records
        if records:
            assert set(sums(recording.index.blocks[0].groups)) == groups
    assert list(sums(differences(groups))) == sorted(groups)


# -- live, and from a cluster ------------------------------------------------------------------------------------------------


async def test_a_running_run_is_recorded_as_it_goes_on(nats_process: NatsServer, run_name: str, tmp_path: Path) -> None:
    bus = await Bus.connect(nats_process.url, run_name, Role.OBSERVER, "test")
    await provision(bus, 2**28)
    first = await write(bus, SyntheticRun(run_name, 10, 2))
    path = tmp_path / "live.hrr"
    stop = asyncio.Event()
    with RecordingWriter(path, Header(run=run_name, made_ns=0, bodies=True, selection="")) as writer:
        taking = asyncio.create_task(Taker(bus, writer, bodies=True, selection=None).take(stop, follow=True))
        await eventually(lambda: sum(f.records for f in writer.streams.values()) == first, within_s=60)
        later = BatchDemand(run=run_name, step=99, version=99, incarnation=0, groups=1)
        await bus.publish_once(bus.subjects.demand(99), later)
        await eventually(lambda: sum(f.records for f in writer.streams.values()) == first + 1, within_s=60)
        stop.set()
        await asyncio.wait_for(taking, 60)
    with Recording(path) as recording:
        assert [m for _, m in messages(recording, Stream.TRAIN)][-1] == later
        assert sum(f.records for f in recording.index.streams.values()) == first + 1
    await bus.close()


async def test_following_ends_with_a_signal_and_a_whole_file(nats_process: NatsServer, run_name: str, tmp_path: Path) -> None:
    bus = await Bus.connect(nats_process.url, run_name, Role.OBSERVER, "test")
    await provision(bus, 2**28)
    count = await write(bus, SyntheticRun(run_name, 4, 2))
    await bus.close()
    out = tmp_path / "live.hrr"
    words = ["record", str(out), "--follow", "--nats", nats_process.url, "--set", f'run.name="{run_name}"']
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "services.cli", *words, cwd=ROOT)
    try:
        await eventually(lambda: out.with_name("live.hrr.part").exists(), within_s=90)
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 90) == 0
    finally:
        if process.returncode is None:
            process.kill()
    with Recording(out) as recording:
        assert sum(f.records for f in recording.index.streams.values()) == count


async def test_a_range_is_made_out_by_its_groups(nats_process: NatsServer, run_name: str) -> None:
    bus = await Bus.connect(nats_process.url, run_name, Role.OBSERVER, "test")
    await provision(bus, 2**28)
    await write(bus, SyntheticRun(run_name, 30, 2))
    ledger_items = await read_all(bus, Stream.LEDGER)
    chosen = await make_out(bus, Range(steps=(1, 1)))
    batches = {item.seq: item.decode(BatchEntry) for item in ledger_items if ".batch." in item.subject}
    places = sorted(batches)
    between = [item for item in ledger_items if places[0] < item.seq < places[1]]
    expected = {m.group for m in batches[places[1]].groups} | {item.subject.rpartition(".")[2] for item in between}
    assert chosen.groups == expected
    assert chosen.steps == {1}
    await bus.close()


@pytest.mark.slow
async def test_a_cluster_is_recorded(tmp_path: Path) -> None:
    config = check(
        {
            "run": {"name": "trio", "folder": str(tmp_path)},
            "nats": {"store_bytes": 2**28, "embedded_keys": False, "nodes": 3},
            "engine": {"kind": "simulated"},
        }
    )
    with RunFolder(config) as folder:
        servers = EmbeddedServers(config, folder, lambda line: None)
        async with servers.running(lambda reason: None):
            bus = await Bus.connect(servers.nats.url, "trio", Role.OBSERVER, "writer")
            await provision(bus, config.nats.store_bytes, 3)
            count = await write(bus, SyntheticRun("trio", 6, 2))
            await bus.close()
            out = tmp_path / "trio.hrr"
            words = ["record", str(out), "--nats", servers.nats.url, "--set", 'run.name="trio"']
            assert await asyncio.to_thread(main, words) == 0
    with Recording(out) as recording:
        assert sum(f.records for f in recording.index.streams.values()) == count
        assert all(msgspec.structs.asdict(f)["whole"] for f in recording.index.streams.values())
