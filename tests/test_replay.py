"""Replay: recorded decisions come out again bit for bit, a changed one is named, and other settings give other runs."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from admission_stage import STORE_BYTES, Stage, make_episode, make_lease, make_ready, make_verdict, with_siblings
from conftest import NatsServer, eventually

import admission.bank_service
import admission.service
from admission.assembly import Assembly, decide
from admission.gates import Eligible, judge
from admission.joining import Bank, EpisodeFact, episode_fact, verdict_fact
from admission.losses import lost_entries
from admission.recorded import configurations, ledger, messages
from admission.republish import Break, Republish
from admission.service import gate_settings
from admission.verify import BankDifference, lines_of, verify
from admission.whatif import simulate
from admission.whatif_report import recorded_outcome, rejudged
from admission.whatif_settings import Setting, changed, recorded
from admission.whatif_trace import GroupTrace, StepTrace, Trace, trace_of
from loadtests.replay_speed import generate
from schemas.codec import decode, encode
from schemas.codec import digest as digest_of
from schemas.group import ReadyGroup
from schemas.ledger import AbandonEntry, BatchEntry, LostItem, QuarantineEntry
from schemas.message import Message
from schemas.table import Role, Stream
from schemas.training import BatchDemand
from services.bus import Bus
from services.cli import main
from services.config import Config, ConfigError, check, to_toml
from services.consume import read_all
from services.recording import HOLE, WIRE, Header, Record, Recording, RecordingError, group_key
from services.recording_writer import RecordingWriter
from tests.recorded_run import FIRST_STEP, LATER, RUN, STALE, TRAINED, lean, rewritten, whole

__all__ = ["lean", "whole"]  # fixtures
pytestmark = pytest.mark.timeout(300)


# -- verification ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bodies", [True, False])
def test_a_real_run_gives_its_own_decisions_again(bodies: bool, whole: Path, lean: Path) -> None:
    """Invariant 9, from the recorded episodes to the last ledger entry."""
    with Recording(whole if bodies else lean) as recording:
        found = verify(recording)
    assert found.holds, lines_of(found.difference) if found.difference else ""
    assert (found.groups, found.skipped, found.entries) == (6, 0, 4)
    assert (found.batches, found.quarantined, found.abandoned) == (2, 2, 0)


def with_message(record: Record, message: msgspec.Struct) -> Record:
    data = encode(message)  # type: ignore[arg-type]
    return msgspec.structs.replace(record, data=data, digest=bytes.fromhex(digest_of(data)), size=len(data))


def test_an_altered_decision_is_named_with_its_inputs(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def alter(stream: Stream, record: Record) -> Record:
        if record.subject != f"ledger.quarantine.{STALE[0]}":
            return record
        entry = decode(record.data, QuarantineEntry)
        return with_message(record, msgspec.structs.replace(entry, lag=2))

    path = rewritten(whole, tmp_path / "altered.hrr", alter)
    assert main(["replay", str(path), "--verify"]) == 1
    said = capsys.readouterr().out
    assert "FIRST DIFFERENCE" in said
    assert f"LEDGER 2, quarantine of {STALE[0]}: lag: recorded 2, replayed 3" in said
    assert f"demand    TRAIN 3: step {FIRST_STEP + 1}, version {FIRST_STEP + 1}, 2 groups" in said
    assert '"max_lag":2' in said
    assert f"READY 3      {STALE[0]}  versions 3 to 4  rewards 1 1" in said


def test_an_altered_ready_group_is_named_with_its_facts(lean: Path, tmp_path: Path) -> None:
    def alter(stream: Stream, record: Record) -> Record:
        if record.subject != f"ready.{TRAINED[1]}":
            return record
        return with_message(record, with_siblings(decode(record.data, ReadyGroup), 1, reward=0.25))

    with Recording(rewritten(lean, tmp_path / "altered.hrr", alter)) as recording:
        found = verify(recording)
    assert isinstance(found.difference, BankDifference)
    assert (found.difference.group, found.difference.seq) == (TRAINED[1], 2)
    assert found.difference.why == "slot 1: reward: recorded 0.25, replayed 1.0"
    assert any(line.startswith("  slot 1: EPISODES ") for line in lines_of(found.difference))


def test_a_decision_out_of_its_place_is_a_difference(whole: Path, tmp_path: Path) -> None:
    """The other group of the stale pair first: in completion order it comes second."""
    names = {f"ledger.quarantine.{STALE[0]}": STALE[1], f"ledger.quarantine.{STALE[1]}": STALE[0]}
    with Recording(whole) as recording:
        held = {record.subject: record.data for record, _ in ledger(recording)}

    def swap(stream: Stream, record: Record) -> Record:
        if record.subject not in names:
            return record
        name = f"ledger.quarantine.{names[record.subject]}"
        entry = decode(held[name], QuarantineEntry)
        return msgspec.structs.replace(with_message(record, entry), subject=name)

    with Recording(rewritten(whole, tmp_path / "swapped.hrr", swap)) as recording:
        found = verify(recording)
    assert found.difference is not None and f"group: recorded '{STALE[1]}', replayed '{STALE[0]}'" in found.difference.why


def test_a_run_under_unknown_settings_says_so_and_takes_them(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config_file = tmp_path / "config.toml"
    with Recording(whole) as recording:
        config_file.write_text(recording.header.configs[0], encoding="utf-8")
        header = msgspec.structs.replace(recording.header, configs=())
        recording.header = header
        found = verify(recording)
    assert found.difference is not None and "which are not among []" in found.difference.why
    assert main(["replay", str(whole), "--verify", "--config", str(config_file), "--json", str(tmp_path / "v.json")]) == 0
    assert json.loads((tmp_path / "v.json").read_text())["holds"] is True


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("generated") / "run.hrr"
    generate(path, 300, 2, 2)
    return path


def test_a_generated_run_with_many_quarantined_verifies(generated: Path) -> None:
    with Recording(generated) as recording:
        found = verify(recording)
    assert found.holds and found.groups == 300 and found.quarantined > 10


# -- other settings ----------------------------------------------------------------------------------------------------------

POINT = Setting(
    groups_per_batch=2,
    max_lag=2,
    versions="mixed",
    zero_variance="keep",
    min_rewards=1,
    window=8,
    demand_ahead=0,
    in_flight="continue",
)


def trace(
    groups: int = 40,
    length_s: float = 4.0,
    step_s: float = 1.0,
    *,
    busy: float = 100.0,
    sync_s: float = 0.5,
    spread: float = 0.0,
) -> Trace:
    """Groups of two siblings, one of half the length, each of two turns; with `spread`, some are longer."""
    played = []
    for ordinal in range(groups):
        seconds = length_s * (1 + spread * (ordinal % 5))
        turns = tuple(((0.1, part * 0.4), (part * 0.5, part)) for part in (seconds - 0.5, seconds / 2))
        played.append(GroupTrace(f"g{ordinal:08d}", "files", "learnable", 0.0, seconds, make_ready(ordinal), turns))
    steps = [StepTrace(n, 3.0 * n, 3.0 * n + 2, 3.0 * n + 3, 2, (0, 1), step_s) for n in range(groups // 2)]
    strata = {group.group: ("files", "learnable") for group in played}
    out = Trace(groups=played, steps=steps, strata=strata, sync_s=sync_s, busy=busy, has_turns=True)
    out.leased = Counter(strata.values())
    return out


def every_setting() -> Iterator[Setting]:
    for max_lag in (0, 1, 4):
        for window in (2, 5, 16):
            for in_flight in ("finish_old", "continue", "regenerate", "restart"):
                for ahead in (0, 1):
                    yield msgspec.convert(
                        {
                            "groups_per_batch": 2,
                            "max_lag": max_lag,
                            "versions": "mixed",
                            "zero_variance": "keep",
                            "min_rewards": 1,
                            "window": window,
                            "demand_ahead": ahead,
                            "in_flight": in_flight,
                        },
                        Setting,
                    )


@pytest.mark.parametrize("setting", list(every_setting()), ids=str)
def test_nothing_vanishes_in_a_modelled_run_and_no_lag_exceeds_its_bound(setting: Setting) -> None:
    """Invariants 3 and 7 hold in virtual time as well."""
    out = simulate(trace(), setting)
    assert out.leased.total() == out.trained.total() + out.turned_away.total() + out.open
    assert out.leased.total() == 40
    assert max(out.lags) <= setting.max_lag
    assert out.trained.total() == out.lags.total() == 2 * out.steps


def test_without_lag_the_model_is_synchronous() -> None:
    """Each batch is played after the version before it is served: 4 s of play, 1 s a group of training, 0.5 s to the fleet."""
    out = simulate(trace(groups=10), _point(max_lag=0))
    assert dict(out.lags) == {0: 10}
    assert out.waits[1:] == pytest.approx([4.5] * 4)
    assert not out.turned_away


def _point(**changes: object) -> Setting:
    return replace(POINT, **changes)  # type: ignore[arg-type]


def test_a_wider_window_does_not_generate_faster_than_was_seen() -> None:
    """Four groups in play were the most; sixteen take four times as long, so nothing is gained."""
    narrow = simulate(trace(busy=4.0, step_s=0.01), _point(max_lag=100, window=4))
    wide = simulate(trace(busy=4.0, step_s=0.01), _point(max_lag=100, window=16))
    free = simulate(trace(busy=100.0, step_s=0.01), _point(max_lag=100, window=16))
    assert wide.seconds == pytest.approx(narrow.seconds, rel=0.1)
    assert free.seconds < 0.5 * narrow.seconds


def test_in_flight_modes_cost_what_they_throw_away() -> None:
    """Thrown away turns make groups later and fresher; a restart loses most and keeps nothing old."""
    played = trace(groups=200, step_s=0.3, sync_s=0.1, spread=0.31)
    runs = {mode: simulate(played, _point(max_lag=6, window=12, in_flight=mode)) for mode in MODES}
    mean = {mode: sum(lag * n for lag, n in out.lags.items()) / out.lags.total() for mode, out in runs.items()}
    assert runs["restart"].seconds > runs["regenerate"].seconds > runs["continue"].seconds
    assert mean["restart"] < mean["regenerate"] <= mean["continue"]


MODES = ("continue", "regenerate", "restart")


def test_stricter_gates_turn_away_what_they_say() -> None:
    mixed = trace(step_s=0.3, sync_s=0.1)
    out = simulate(mixed, _point(max_lag=6, window=12, versions="homogeneous"))
    reasons = {reason for reason, _, _ in out.turned_away}
    assert reasons == {"mixed_versions"}
    same = [with_siblings(with_siblings(g.ready, 0, reward=1.0), 1, reward=1.0) for g in mixed.groups]
    for group, ready in zip(mixed.groups, same, strict=True):
        group.ready = ready
    assert simulate(mixed, _point(zero_variance="skip")).trained.total() == 0


def test_decisions_taken_again_are_counted_exactly(generated: Path) -> None:
    """Against a count by hand: every recorded hand-over is judged with its own version."""
    with Recording(generated) as recording:
        found = trace_of(recording)
        groups = {m.group: m for _, m in messages(recording, Stream.READY) if isinstance(m, ReadyGroup)}
        entries = [entry for _, entry in ledger(recording)]
    strict = _point(max_lag=1, min_rewards=1).gates()
    now_stale = sum(
        not isinstance(judge(groups[m.group], e.version, (), strict), Eligible)
        for e in entries
        if isinstance(e, BatchEntry)
        for m in e.groups
    )
    assert now_stale > 0
    assert rejudged(found, strict) == {"trained on -> stale": now_stale}
    loose = rejudged(found, _point(max_lag=100, min_rewards=1).gates())
    assert loose == {"stale -> eligible": sum(isinstance(e, QuarantineEntry) for e in entries)}
    assert rejudged(found, _point(max_lag=2, min_rewards=1).gates()) == {}


def test_the_recorded_column_is_the_recording(generated: Path) -> None:
    with Recording(generated) as recording:
        out = recorded_outcome(trace_of(recording))
        entries = [entry for _, entry in ledger(recording)]
    batches = [entry for entry in entries if isinstance(entry, BatchEntry)]
    assert out.lags == Counter(m.lag for entry in batches for m in entry.groups)
    assert out.turned_away.total() == len(entries) - len(batches)
    assert out.leased.total() == 300 == out.trained.total() + out.turned_away.total() + out.open


CONFIG = check({"engine": {"kind": "simulated"}})


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("admission.max_lagg=1", "did you mean admission.max_lag?"),
        ("window.max_group=4", "did you mean window.max_groups?"),
        ("trainer.learning_rate=1", "trainer.learning_rate: a replay cannot say what this would have changed"),
        ("in_flight=regenrate", "'regenrate' is none of finish_old, continue, regenerate, restart; did you mean regenerate?"),
        ("admission.max_lag=-1", "admission.max_lag: Input should be greater than or equal to 0"),
        ("admission.versions=mixd", "admission.versions: Input should be 'mixed' or 'homogeneous'"),
        ("window.max_groups=2", "smaller than admission.groups_per_batch"),
        ("admission.max_lag", "write section.field=value"),
    ],
)
def test_a_setting_that_cannot_be_varied_names_the_nearest(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r".") as caught:
        changed(recorded(CONFIG), CONFIG, [override])
    assert said in str(caught.value)


def test_settings_are_taken_over() -> None:
    point = changed(
        recorded(CONFIG), CONFIG, ["admission.max_lag=7", "param_sync.mode=continue_recompute", "in_flight=restart"]
    )
    assert (point.max_lag, point.in_flight) == (7, "restart")
    assert changed(recorded(CONFIG), CONFIG, []) == recorded(CONFIG)


def test_the_command_says_of_each_figure_how_it_came_about(
    generated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    words = ["replay", str(generated), "--set", "admission.max_lag=1", "--set", "in_flight=regenerate", "--json", str(out)]
    assert main(words) == 0
    said = capsys.readouterr().out
    table = [line for line in said.splitlines() if line.startswith("  batch wait s")]
    assert len(table) == 3 and all(line.count("recorded") == 1 and line.count("modelled") == 2 for line in table)
    assert "replayed  trained on -> stale" in said
    data = json.loads(out.read_text())
    assert (data["recorded"]["how"], data["changed"]["how"]) == ("recorded", "modelled")


def test_a_sweep_is_a_table_and_a_picture(generated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    picture = tmp_path / "sweep.svg"
    assert main(["replay", str(generated), "--sweep", "admission.max_lag=0,1,4", "--plot", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["0", "1", "4"]
    assert all("modelled" in line for line in lines[2:])
    drawn = picture.read_text()
    assert drawn.lstrip().startswith("<?xml") and "<svg" in drawn and 'href="http' not in drawn


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--verify", "--set", "admission.max_lag=1"], "are three different replays; give one"),
        (["--into", "nats://127.0.0.1:1", "--set", "admission.max_lag=1"], "are three different replays; give one"),
        (["--sweep", "admission.max_lag"], "write section.field=A,B,C"),
        (["--plot", "x.svg"], "--plot draws a sweep"),
        (["--once"], "belong to --into URL"),
        (["--into", "nats://127.0.0.1:1", "--break", "grp=1"], "write group=g00000042, step=7 or reason=stale"),
        (["--into", "nats://127.0.0.1:1", "--speed", "0"], "write a number above 0, or max"),
        (["--into", "nats://127.0.0.1:1", "--live", "banq"], "--live banq: is no service"),
    ],
)
def test_a_command_that_cannot_be_is_one_clear_line(
    words: list[str], said: str, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(whole), *words]) == 2
    assert said in capsys.readouterr().err


# -- into a live server ------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server that knows nothing of the run yet."""
    server = NatsServer(tmp_path)
    server.start()
    yield server
    server.kill()


def target(recording: Recording, url: str) -> Config:
    config = configurations(recording)[0]
    return config.model_copy(update={"nats": config.nats.model_copy(update={"url": url, "store_bytes": STORE_BYTES})})


async def test_live_services_decide_a_recording_as_it_was_decided(own_server: NatsServer, whole: Path) -> None:
    """Bank and admission of their own read what is published, and write the very bytes that were recorded."""
    with Recording(whole) as recording:
        config = target(recording, own_server.url)
        async with Stage(own_server.url, config) as stage:
            bus = await stage.bus(Role.OBSERVER)
            await stage.start(Role.BANK, admission.bank_service.serve)
            await stage.start(Role.ADMISSION, admission.service.serve)
            live = frozenset({Role.BANK, Role.ADMISSION})
            republish = Republish(recording, config, live=live, speed=float("inf"), breaks=(), once=False)
            assert await asyncio.wait_for(republish.run(), 120) == 0

            async def all_there() -> bool:
                return len(await read_all(bus, Stream.LEDGER)) == 4

            await eventually(all_there, within_s=60)
            for stream in (Stream.READY, Stream.LEDGER, Stream.EPISODES, Stream.TURNS, Stream.TASKS, Stream.TRAIN):
                found = [(item.seq, item.digest) for item in await read_all(bus, stream)]
                assert found == [(r.seq, r.digest.hex()) for r in recording.records(stream)], stream
        again = Republish(recording, config, live=live, speed=1.0, breaks=(), once=True)
        with pytest.raises(Exception, match="replay into a server that does not know this run"):
            await again.run()


@pytest.mark.parametrize(
    ("text", "next_subject"),
    [
        ("reason=stale", f"ledger.quarantine.{STALE[0]}"),
        (f"step={FIRST_STEP + 1}", f"train.demand.{FIRST_STEP + 1}"),
        (f"group={LATER[0]}", "task.lease.4"),
    ],
)
async def test_a_break_stops_before_what_it_names(
    text: str, next_subject: str, own_server: NatsServer, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Recording(whole) as recording:
        config = target(recording, own_server.url)
        republish = Republish(recording, config, live=frozenset(), speed=float("inf"), breaks=(Break.of(text),), once=True)
        assert await asyncio.wait_for(republish.run(), 60) == 0
        said = capsys.readouterr().out
        first = said.splitlines()[0]
        assert first.startswith(f"break at {text}: ") and f"  {next_subject}" in first
        assert said.count("\n  20") == 5, "the next five are shown"
        bus = await Bus.connect(own_server.url, RUN, Role.OBSERVER, "test")
        streams = [Stream.TASKS, Stream.LEDGER, Stream.TRAIN]
        stored = {item.subject.removeprefix(bus.subjects.prefix) for s in streams for item in await read_all(bus, s)}
        await bus.close()
    assert stored and next_subject not in stored


async def test_enter_goes_on_after_a_break(own_server: NatsServer, whole: Path) -> None:
    asked: list[int] = []

    def enter() -> str:
        asked.append(1)
        return ""

    with Recording(whole) as recording:
        config = target(recording, own_server.url)
        breaks = (Break.of("reason=stale"), Break.of(f"group={LATER[1]}"))
        republish = Republish(recording, config, live=frozenset(), speed=float("inf"), breaks=breaks, once=False, ask=enter)
        assert await asyncio.wait_for(republish.run(), 60) == 0
        bus = await Bus.connect(own_server.url, RUN, Role.OBSERVER, "test")
        assert len(await read_all(bus, Stream.LEDGER)) == recording.facts(Stream.LEDGER).records
        await bus.close()
    assert len(asked) == 2


async def test_the_rhythm_is_the_recorded_one(own_server: NatsServer, whole: Path) -> None:
    """Stored never sooner than the recorded time over the speed; how much later depends on the machine."""
    with Recording(whole) as recording:
        config = target(recording, own_server.url)
        times = sorted(r.time_ns for s in (Stream.TASKS, Stream.TRAIN, Stream.LEDGER) for r in recording.records(s))
        speed = max(1.0, (times[-1] - times[0]) / 1e9 / 3.0)
        republish = Republish(recording, config, live=frozenset(), speed=speed, breaks=(), once=False)
        assert await asyncio.wait_for(republish.run(), 120) == 0
        bus = await Bus.connect(own_server.url, RUN, Role.OBSERVER, "test")
        leases, ledger_items = await read_all(bus, Stream.TASKS), await read_all(bus, Stream.LEDGER)
        await bus.close()
        before = [r.time_ns for r in recording.records(Stream.TASKS)]
        last = list(recording.records(Stream.LEDGER))[-1].time_ns
    took, recorded_s = (ledger_items[-1].time_ns - leases[0].time_ns) / 1e9, (last - before[0]) / 1e9
    assert took >= 0.9 * recorded_s / speed


def test_a_recording_without_bodies_cannot_be_published(lean: Path) -> None:
    with Recording(lean) as recording:
        config = target(recording, "nats://127.0.0.1:1")
        republish = Republish(recording, config, live=frozenset(), speed=1.0, breaks=(), once=True)
        with pytest.raises(RecordingError, match="was made without bodies, so TURNS cannot be published"):
            asyncio.run(republish.run())


# -- losses ------------------------------------------------------------------------------------------------------------------


def lossy(path: Path, *, missing: bool) -> Path:
    """A run of one group that lost the episode of slot 1: missing when the bank looked, or gone after READY named it."""
    lease = make_lease(0, group_size=2)
    bank, state = Bank(), Assembly()
    bank.lease(lease, 1)
    gates = gate_settings(CONFIG)
    header = Header(run="t", made_ns=0, bodies=True, selection="", configs=(to_toml(CONFIG),))
    with RecordingWriter(path, header) as writer:
        count: Counter[Stream] = Counter()

        def put(stream: Stream, name: str, message: Message, *, lost: bool = False) -> tuple[int, str]:
            count[stream] += 1
            data = encode(message)
            record = Record(count[stream], count[stream], name, hashlib.sha256(data).digest(), len(data), WIRE, data)
            if lost:
                record = Record(count[stream], 0, "", b"", count[stream], HOLE, b"deleted")
            writer.add(stream, record, {group_key(lease.group)}, set())
            return count[stream], digest_of(data)

        put(Stream.TASKS, "task.lease.0", lease)
        ready = None
        for slot in range(2):
            gone, episode = slot == 1, make_episode(lease, slot)
            seq, digest = put(Stream.EPISODES, f"episode.{lease.group}.{slot}", episode, lost=gone)
            if not (gone and missing):
                bank.episode(episode_fact(lease.group, slot, seq, digest, episode))
                verdict = make_verdict(episode, digest)
                at, of = put(Stream.EPISODES, f"verdict.{lease.group}.{slot}", verdict)
                ready = bank.verdict(verdict_fact(lease.group, slot, at, of, verdict))
        if missing:
            for fact in bank.lost(leases_done=1, episodes_done=4):
                assert isinstance(fact, EpisodeFact)
                ready = bank.episode(fact)
        assert ready is not None
        state.lease(lease)
        state.ready(put(Stream.READY, f"ready.{lease.group}", ready)[0], ready)
        demand = BatchDemand(run="t", step=0, version=0, incarnation=0, groups=1)
        state.demand(put(Stream.TRAIN, "train.demand.0", demand)[0], demand)
        if not missing:
            sibling = ready.siblings[1]
            state.lose(lease.group, LostItem(str(Stream.EPISODES), sibling.episode_seq, sibling.episode_digest))
        (entry,) = lost_entries(state, "t", gates.hash()) or decide(state, gates)
        assert isinstance(entry, AbandonEntry) and entry.reason == "lost_item"
        put(Stream.LEDGER, f"ledger.abandon.{lease.group}", entry)
    return path


def test_a_group_that_the_bank_ended_for_a_missing_item_comes_out_again(tmp_path: Path) -> None:
    with Recording(lossy(tmp_path / "lost.hrr", missing=True)) as recording:
        found = verify(recording)
    assert found.holds, lines_of(found.difference) if found.difference else ""
    assert (found.groups, found.abandoned) == (1, 1)


def test_a_loss_after_the_group_was_ready_is_looked_up(tmp_path: Path) -> None:
    """The item is a hole in the recording as well; where it stands there after all, the entry is refuted."""
    path = lossy(tmp_path / "lost.hrr", missing=False)
    lease = make_lease(0, group_size=2)
    data = encode(make_episode(lease, 1))
    with Recording(path) as recording:
        found = verify(recording)
    assert found.holds, lines_of(found.difference) if found.difference else ""
    assert (found.groups, found.skipped, found.abandoned) == (0, 1, 1), "the bank cannot make it again without the item"

    def stands(stream: Stream, record: Record) -> Record:
        if record.form != HOLE:
            return record
        name = f"episode.{lease.group}.1"
        return Record(record.seq, 0, name, hashlib.sha256(data).digest(), len(data), WIRE, data)

    with Recording(rewritten(path, tmp_path / "stands.hrr", stands)) as recording:
        found = verify(recording)
    assert found.difference is not None and "holds the item" in found.difference.why
