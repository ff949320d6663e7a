"""What a person can get wrong: one line that names the word and the fix, an exit code that is not 0, and no traceback."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from recorded_run import STEPS, configuration, finished, recording_of

from admission import recorded
from schemas.ledger import BatchEntry
from schemas.table import Stream
from services.cli import main
from services.recorded_range import Range, RangeError
from services.recording_reader import RecordingReader

pytestmark = pytest.mark.timeout(240)
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def recording(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run with bodies left out."""
    path = tmp_path_factory.mktemp("errors") / "run.hrrec"

    async def make() -> None:
        config = configuration("errors", nats_url)
        async with finished(nats_url, config):
            await recording_of(config, path)

    asyncio.run(make())
    return path


CASES = (
    (
        ["replay", "{f}", "--set", "admission.max_lagg=1"],
        "admission.max_lagg: unknown setting; did you mean admission.max_lag?",
    ),
    (["replay", "{f}", "--set", "admission.max_lag=-1"], "admission.max_lag: Input should be greater than or equal to 0"),
    (["replay", "{f}", "--set", "admission.max_lag=much"], "admission.max_lag: Input should be a valid integer"),
    (["replay", "{f}", "--set", "admission.max_lag"], "write it like admission.max_lag=1"),
    (["replay", "{f}", "--set", "window.max_groups=0"], "window.max_groups: Input should be greater than or equal to 1"),
    (["replay", "{f}", "--set", "in_flight=regenarate"], "did you mean regenerate?"),
    (["replay", "{f}", "--sweep", "admission.max_lag="], "--sweep admission.max_lag=: write it like admission.max_lag=0,1,2,4"),
    (["replay", "{f}", "--sweep", "admision.max_lag=1,2"], "did you mean admission.max_lag?"),
    (["replay", "{f}", "--sweep", "admission.max_lag=0", "--svg", "{d}/no/out.svg"], "--svg {d}/no/out.svg: cannot be written"),
    (["replay", "{f}", "--verify", "--json", "{d}/no/out.json"], "--json {d}/no/out.json: cannot be written"),
    (["replay", "{f}", "--verify", "--set", "admission.max_lag=1"], "--verify does not go with --set and --sweep"),
    (["replay", "{d}/nothing", "--verify"], "{d}/nothing: cannot be read: No such file"),
    (["replay", "{d}", "--verify"], "{d}: cannot be read: Is a directory"),
    (["replay", "{d}/garbage", "--verify"], "{d}/garbage: is not a recording; `headrace record` makes one"),
    (["replay", "{d}/empty", "--verify"], "{d}/empty: is not a recording"),
    (["replay", "{d}/torn", "--verify"], "it is torn, record it again"),
    (["replay", "{d}/torn", "--set", "admission.max_lag=1"], "it is torn, record it again"),
    (["replay", "{d}/flipped", "--verify"], "its bytes do not match its digest; the file is corrupted"),
    (["replay", "{f}", "--break", "step=two"], "--break step=two: a step is a number"),
    (["replay", "{f}", "--break", "reason=stail"], "did you mean stale?"),
    (["replay", "{f}", "--break", "stream=LEGDER"], "did you mean LEDGER?"),
    (["replay", "{f}", "--into", "nats://127.0.0.1:1", "--streams", "READY,TRIAN"], "'TRIAN' is none of"),
    (["replay", "{f}", "--into", "nats://127.0.0.1:1", "--speed", "-1"], "--speed -1: give a number from 0 on"),
    (["replay", "{f}", "--into", "nats://127.0.0.1:1", "--speed", "nan"], "--speed nan: give a number from 0 on"),
    (["explain", "group", "g00009999", "--recording", "{f}"], "group g00009999: nothing tells of it; groups are named like"),
    (["explain", "trajectory", "{g}/7", "--recording", "{f}"], "the group has slots [0, 1]"),
    (["explain", "token", "{g}/0@999", "--recording", "{f}"], "the trajectory has positions 0 to 4"),
    (["explain", "step", "99", "--recording", "{f}"], "step 99: nothing tells of it; steps are numbered from 0"),
    (["explain", "stap", "1", "--recording", "{f}"], "explain one of group, trajectory, step, token"),
    (["explain", "step", "1", "--recording", "{d}/garbage"], "is not a recording"),
    (["explain", "step", "1", "--recording", "{f}", "--html", "{d}/no/p.html"], "--html {d}/no/p.html: cannot be written"),
    (["explain", "step", "1", "--run-folder", "{d}/no"], "no configuration file at {d}/no"),
    (["quarantine", "list", "--reason", "stail", "--recording", "{f}"], "did you mean stale?"),
    (["quarantine", "show", "--recording", "{f}"], "needs a group; `headrace quarantine list` shows them"),
    (["quarantine", "show", "g00009999", "--recording", "{f}"], "group g00009999: nothing tells of it"),
    (["quarantine", "list", "g00000001", "--recording", "{f}"], "write `headrace quarantine show g00000001`"),
    (["record", "{d}/out", "--from-step", "-1", "--nats", "nats://127.0.0.1:1"], "--from-step -1: steps are numbered from 0"),
    (["record", "{d}/out", "--from-step", "3", "--to-step", "1", "--nats", "nats://127.0.0.1:1"], "give the lower one first"),
    (["record", "{d}/out", "--since", "yesterday", "--nats", "nats://127.0.0.1:1"], "--since yesterday: is no time; write it"),
    (["record", "{d}/out", "--seq", "REDY=1-2", "--nats", "nats://127.0.0.1:1"], "--seq REDY=1-2: write STREAM=FIRST-LAST"),
)


@pytest.mark.parametrize(("words", "said"), CASES, ids=[" ".join(words[:1] + words[2:])[:60] for words, _ in CASES])
def test_what_is_wrong_is_said_with_its_fix(
    recording: Path, tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = recording.read_bytes()
    (tmp_path / "garbage").write_bytes(os.urandom(4096))
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "torn").write_bytes(whole[: 2 * len(whole) // 3])
    middle = len(whole) // 2
    (tmp_path / "flipped").write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    with RecordingReader(recording) as reader:
        group = next(e.groups[0].group for _, e in recorded.ledger(reader) if isinstance(e, BatchEntry))
    given = [word.format(f=recording, d=tmp_path, g=group) for word in words]
    code = main(given)
    err = capsys.readouterr().err
    assert code == 2, err
    assert err.startswith("headrace: ")
    assert said.format(d=tmp_path) in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_a_process_ends_with_its_code_and_without_a_traceback(tmp_path: Path) -> None:
    """The same through a process of its own, as a script would run it."""
    (tmp_path / "garbage").write_bytes(b"HRRECORD" + bytes(100))
    words = [sys.executable, "-m", "services.cli", "replay", str(tmp_path / "garbage"), "--verify"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert re.fullmatch(r"headrace: .*garbage: .*\n", done.stderr)


def test_a_breakpoint_that_nothing_meets_is_said(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(recording), "--break", "group=g00009999"]) == 1
    assert "no message has group=g00009999" in capsys.readouterr().out


async def test_a_range_that_could_not_be_decided_again_is_refused(nats_url: str, run_name: str, tmp_path: Path) -> None:
    """What the ledger was decided from must be in it; the text says how far that reaches."""
    config = configuration(run_name, nats_url)
    async with finished(nats_url, config):
        for asked, said in (
            (
                Range(seqs={_stream("READY"): (1, 3)}),
                r"--seq READY=1-3: the ledger's entries were decided from READY up to \d+",
            ),
            (Range(seqs={_stream("TRAIN"): (1, 1)}), "give TRAIN=1-"),
            (Range(seqs={_stream("TASKS"): (1, 4)}), "leases are always recorded"),
            (Range(from_step=STEPS), f"the ledger has batches 0 to {STEPS - 1}; give --from-step and --to-step among them"),
        ):
            with pytest.raises(RangeError, match=said):
                await recording_of(config, tmp_path / "none", asked=asked)
        assert not list(tmp_path.iterdir())
        folder = tmp_path / "folder"
        folder.mkdir()
        with pytest.raises(ValueError, match="it is a folder; give a file"):
            await recording_of(config, folder)


def _stream(name: str) -> Stream:
    return Stream(name)
