"""Publishing a recording again: the same messages on the same sequences, stops where asked, and a live admission that decides
from them as the recorded one did."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest
from admission_stage import Stage, items
from conftest import NatsServer, eventually
from recorded_run import configuration, finished, recording_of

import admission.service
from admission.republish import breaks_of, in_time
from schemas.codec import decode_any
from schemas.ledger import QuarantineEntry
from schemas.table import Role, Stream
from services.bus import Bus
from services.cli import main
from services.config import ConfigError
from services.recording import RECORDED
from services.recording_reader import RecordingReader

pytestmark = pytest.mark.timeout(240)


async def command(*words: str) -> int:
    return await asyncio.to_thread(main, ["replay", *words])


async def test_a_recording_is_published_again_and_decided_again_live(
    nats_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configuration(run_name, nats_url)
    async with finished(nats_url, config) as bus:
        path = await recording_of(config, tmp_path / "r", bodies=True)
        ledger = [item.digest for item in await items(bus, Stream.LEDGER)]
        dropped = next(e for i in await items(bus, Stream.LEDGER) if isinstance(e := decode_any(i.data), QuarantineEntry))
    fresh = NatsServer(tmp_path)
    fresh.start()
    try:
        assert await command(str(path), "--into", fresh.url, "--speed", "0") == 0
        copy = await Bus.connect(fresh.url, run_name, Role.OBSERVER, "look")
        with RecordingReader(path) as reader:
            for stream in RECORDED:
                held = [(item.seq, item.digest) for item in await items(copy, stream)]
                assert held == [(record.seq, record.digest) for record in reader.records(stream)], stream
        await copy.close()
        assert await command(str(path), "--into", fresh.url, "--speed", "0") == 2
        assert "is not empty; replay into a fresh server, or under --as-run NAME" in capsys.readouterr().err
    finally:
        fresh.kill()

    (tmp_path / "second").mkdir()
    fresh = NatsServer(tmp_path / "second")
    fresh.start()
    try:
        streams = "TASKS,EPISODES,READY,TRAIN"
        assert await command(str(path), "--into", fresh.url, "--speed", "0", "--streams", streams) == 0
        async with Stage(fresh.url, configuration(run_name, fresh.url)) as stage:
            copy = await stage.bus(Role.OBSERVER)
            await stage.start(Role.ADMISSION, admission.service.serve)

            async def decided() -> bool:
                return len(await items(copy, Stream.LEDGER)) >= len(ledger)

            await eventually(decided, within_s=60)
            assert [item.digest for item in await items(copy, Stream.LEDGER)] == ledger
    finally:
        fresh.kill()

    capsys.readouterr()
    assert await command(str(path), "--break", f"reason={dropped.reason}", "--once") == 0
    said = capsys.readouterr().out
    assert f"reason={dropped.reason}: LEDGER" in said
    assert f"ledger.quarantine.{dropped.group}" in said
    assert "then" in said
    assert "ended at a breakpoint: 0 messages published" in said
    monkeypatch.setattr("sys.stdin", io.StringIO("\n\n\n"))
    assert await command(str(path), "--break", "step=1") == 0
    stops = [line.split(": ", 1)[1] for line in capsys.readouterr().out.splitlines() if line.startswith("stopped at")]
    assert [stop.split()[1] for stop in stops] == ["TRAIN", "LEDGER", "TRAIN"], "demand, batch, commit"
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert await command(str(path), "--break", f"group={dropped.group}") == 0
    said = capsys.readouterr().out
    assert said.count("Enter goes on") == 2, "one line was typed, and then the input ended"
    assert f"group={dropped.group}: TASKS" in said
    assert "ended at a breakpoint" in said


async def test_the_timing_is_the_recorded_one(nats_url: str, run_name: str, tmp_path: Path) -> None:
    """At speed 2 nothing is stored before half of its recorded time has passed."""
    config = configuration(run_name, nats_url)
    async with finished(nats_url, config):
        path = await recording_of(config, tmp_path / "r")
    fresh = NatsServer(tmp_path)
    fresh.start()
    try:
        assert await command(str(path), "--into", fresh.url, "--speed", "2", "--streams", "TASKS,READY,LEDGER,TRAIN") == 0
        copy = await Bus.connect(fresh.url, run_name, Role.OBSERVER, "look")
        with RecordingReader(path) as reader:
            told = list(in_time(reader, (Stream.TASKS, Stream.READY, Stream.LEDGER, Stream.TRAIN)))
        stored = {}
        for stream in (Stream.TASKS, Stream.READY, Stream.LEDGER, Stream.TRAIN):
            stored |= {(stream, item.seq): item.time_ns for item in await items(copy, stream)}
        await copy.close()
    finally:
        fresh.kill()
    assert len(stored) == len(told)
    first = told[0]
    began = stored[first[0], first[1].seq]
    for stream, record in told:
        due = began + (record.time_ns - first[1].time_ns) / 2
        assert stored[stream, record.seq] >= due - 50_000_000, (
            "not before its time, but for the server's own delay of the first"
        )


def test_a_breakpoint_that_is_none_says_how_to_write_it() -> None:
    with pytest.raises(ConfigError, match="write one of group=g00000042, step=7, reason=stale, stream=LEDGER"):
        breaks_of(["grup=x"])
