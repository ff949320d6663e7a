"""One item's life: what the real services did is told again, from a live run, a recording, or a page in a browser."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import msgspec
import numpy as np
import pytest
from admission_stage import make_episode, make_lease, make_verdict
from recorded_run import configuration, finished, recording_of

from admission import recorded
from admission.explain import explain, question
from admission.explain_page import page
from admission.life import Life, Unexplained
from admission.slim import slim
from schemas.actions import Finish, ToolCall
from schemas.arrays import Array
from schemas.attempts import AttemptOpened, AttemptPlayed, GroupClaim, GroupRelease
from schemas.codec import digest, encode
from schemas.ledger import AbandonEntry, BatchEntry, QuarantineEntry
from schemas.message import Message
from schemas.table import Stream
from schemas.trajectory import TurnEffect, TurnRecord, VersionSpan
from services.cli import main
from services.recording import Form, Record
from services.recording_reader import RecordingReader

pytestmark = pytest.mark.timeout(240)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


async def test_why_a_group_was_dropped_is_one_command_on_a_run_and_on_its_recording(
    nats_url: str, run_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configuration(run_name, nats_url)
    async with finished(nats_url, config):
        path = await recording_of(config, tmp_path / "r")
        with RecordingReader(path) as reader:
            entries = [entry for _, entry in recorded.ledger(reader)]
        live = ["--nats", nats_url, "--set", f"run.name={run_name}"]
    capsys.readouterr()
    quarantined = next(entry for entry in entries if isinstance(entry, QuarantineEntry))
    abandoned = next(entry for entry in entries if isinstance(entry, AbandonEntry))
    batch = next(entry for entry in entries if isinstance(entry, BatchEntry) and entry.step == 2)
    trained = batch.groups[0]
    answers = {
        quarantined.group: f"{quarantined.group} was quarantined because {quarantined.reason}: {quarantined.detail}",
        abandoned.group: f"{abandoned.group} was abandoned because {abandoned.reason}: {abandoned.detail}",
        trained.group: f"{trained.group} was trained on in step 2 with lag {trained.lag}, which made version 3",
    }
    for group, answer in answers.items():
        told = []
        for source in (["--recording", str(path)], live):
            assert await in_thread(["explain", "group", group, "--json", str(tmp_path / "j"), *source]) == 0
            assert capsys.readouterr().out.splitlines()[1] == answer
            told.append(json.loads((tmp_path / "j").read_text()))
        assert told[0] == told[1], "a recording tells what the run tells"
        assert any(event["lane"] == "bank" for event in told[0]["events"])
    assert await in_thread(["explain", "step", "2", "--json", "-", "--recording", str(path)]) == 0
    step = json.loads(capsys.readouterr().out)
    assert [g["group"] for g in step["facts"]["groups"]] == [m.group for m in batch.groups]
    assert [g["lag"] for g in step["facts"]["groups"]] == [m.lag for m in batch.groups]
    assert "made version 3" in step["answer"]


async def in_thread(arguments: list[str]) -> int:
    """A command with an event loop of its own."""
    return await asyncio.to_thread(main, arguments)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["token", "g1"], "write `headrace explain token g00000042/3@17`"),
        (["step", "seven"], "write `headrace explain step 7`"),
        (["grup", "g1"], "explain one of group, trajectory, step, token"),
    ],
)
def test_a_question_that_is_none_says_how_to_ask(words: list[str], said: str) -> None:
    with pytest.raises(Unexplained, match=said):
        question(words[0], words[1:])


class Told:
    """Records of one group that was lost by its first holder, with a weight change in the middle of a turn."""

    def __init__(self) -> None:
        self.records: list[tuple[Stream, Record]] = []
        self.at = 1_000_000_000
        lease = make_lease(42, group_size=1)
        mask = np.array([False, True, True, False, True, True, True])
        self.episode = make_episode(
            lease,
            0,
            ids=Array.of(np.arange(7, dtype=np.int32)),
            mask=Array.of(mask),
            logprobs=Array.of(np.where(mask, -0.5, 0.0).astype(np.float32)),
            versions=(VersionSpan(1, 3, 3), VersionSpan(4, 6, 3), VersionSpan(6, 7, 4)),
            turn_starts=Array.of(np.array([1, 4], dtype=np.int32)),
            turns=2,
            engines=("e0", "e1"),
            sealed_ns=9_000_000_000,
        )
        self.add(Stream.TASKS, "task.lease.42", lease)
        for number, holder in enumerate(("r0", "r1")):
            claim = GroupClaim(run="t", group=lease.group, number=number, rollouter=holder, at_ns=0)
            self.add(Stream.TURNS, f"turn.{lease.group}.claim.{number}.taken", claim)
        opened = AttemptOpened(
            run="t", group=lease.group, slot=0, attempt=0, claim=0, rollouter="r0", sandbox="s", executor="x0", state_hash="h",
            started_ns=self.at,
        )  # fmt: skip
        self.add(Stream.TURNS, f"turn.{lease.group}.0.0.open", opened)
        self.turn(0, "e0", (VersionSpan(0, 2, 3),), ToolCall(name="shell", arguments={}), None)
        ran = TurnEffect(lane="command", exit_code=1)
        self.turn(1, "e1", (VersionSpan(0, 2, 3), VersionSpan(2, 3, 4)), Finish(), ran)
        self.add(Stream.EPISODES, f"episode.{lease.group}.0", self.episode)
        self.add(
            Stream.EPISODES,
            f"verdict.{lease.group}.0",
            make_verdict(self.episode, digest(encode(self.episode)), started_ns=self.at),
        )

    def add(self, stream: Stream, name: str, message: Message) -> None:
        self.at += 1_000_000_000
        self.records.append((stream, Record(len(self.records) + 1, self.at, name, Form.WHOLE, encode(message))))

    def turn(
        self, k: int, engine: str, versions: tuple[VersionSpan, ...], action: ToolCall | Finish, before: TurnEffect | None
    ) -> None:
        count = versions[-1].end
        turn = TurnRecord(
            run="t", group="g00000042", slot=0, attempt=0, turn=k, task_id="task-42", manifest="m0", engine=engine,
            prompt_ids=Array.of(np.zeros(1, np.int32)), sampled_ids=Array.of(np.zeros(count, np.int32)),
            logprobs=Array.of(np.zeros(count, np.float32)), versions=versions, action=action, previous=before,
            command_id="c" if isinstance(action, ToolCall) else "", executor="x0", started_ns=self.at + 300_000_000,
            generated_ns=self.at + 500_000_000,
        )  # fmt: skip
        self.add(Stream.TURNS, f"turn.g00000042.0.0.{k}", turn)

    def ask(self, *words: str) -> Life:
        return explain(
            question(words[0], words[1:]), lambda names, streams: [r for r in self.records if r[0] in tuple(streams)]
        )


def test_holders_turns_and_waits_are_told() -> None:
    life = Told().ask("trajectory", "g00000042/0")
    said = [f"{event.lane}: {event.what}" for event in life.events]
    assert "holder: is leased by rollouter r0" in said
    assert "holder: is taken over (claim 1) by rollouter r1" in said
    assert "slot 0: turn 0: 2 tokens by e0, version 3; call shell" in said
    assert "slot 0: turn 1: 3 tokens by e1, versions 3 (2 tokens), 4 (1 tokens); finish" in said
    assert "slot 0: turn 0: command in x0, lane command, exit 1" in said
    assert (
        life.answer
        == "g00000042/0 ended as agent_finish; g00000042 is open: all siblings are judged, and the bank has not written it"
    )


def test_a_holder_that_comes_back_and_the_last_command_are_told() -> None:
    """A rollouter that was killed takes its group up again; what the last command did stands behind its turn."""
    told = Told()
    again = GroupClaim(run="t", group="g00000042", number=2, rollouter="r1", at_ns=0, delivery="$JS.ACK.x")
    told.add(Stream.TURNS, "turn.g00000042.claim.2.taken", again)
    told.turn(2, "e0", (VersionSpan(0, 1, 4),), ToolCall(name="shell", arguments={}), None)
    played = AttemptPlayed(run="t", group="g00000042", slot=0, attempt=0, last=TurnEffect(lane="command", exit_code=7))
    told.add(Stream.TURNS, "turn.g00000042.0.0.played", played)
    sealed = msgspec.structs.replace(told.episode, sealed_ns=told.at + 9_000_000_000)
    told.records = [(s, r) for s, r in told.records if not r.name.startswith("episode.")]
    told.add(Stream.EPISODES, "episode.g00000042.0", sealed)
    said = [f"{event.lane}: {event.what}" for event in told.ask("group", "g00000042").events]
    assert "holder: is taken up again (claim 2) by rollouter r1, which had lost it" in said
    assert "slot 0: turn 2: command in x0, lane command, exit 7" in said


@pytest.mark.parametrize(
    ("position", "answer"),
    [
        (1, "position 1 is token 0 of turn 0, sampled by engine e0 under version 3"),
        (5, "position 5 is token 1 of turn 1, sampled by engine e1 under version 3"),
        (6, "position 6 is token 2 of turn 1, sampled by engine e1 under version 4"),
        (3, "position 3 was not sampled: it is prompt or observation, and no gradient enters it"),
    ],
)
def test_a_token_knows_its_version_and_its_engine(position: int, answer: str) -> None:
    """Invariant 2, asked for one token."""
    assert Told().ask("token", f"g00000042/0@{position}").answer == answer


def test_what_is_not_there_is_said() -> None:
    told = Told()
    for words, said in (
        (("group", "g00000099"), "nothing tells of it"),
        (("trajectory", "g00000042/5"), r"the group has slots \[0\]"),
        (("token", "g00000042/0@7"), "has positions 0 to 6"),
        (("step", "3"), "nothing tells of it"),
    ):
        with pytest.raises(Unexplained, match=said):
            told.ask(*words)


def test_without_a_body_the_same_is_told() -> None:
    """Slim records and whole ones give one life."""
    whole, small = Told(), Told()
    packed = []
    for stream, record in small.records:
        message = recorded.message_of(record)
        if stream in (Stream.EPISODES, Stream.TURNS) and not isinstance(message, GroupClaim | GroupRelease | AttemptOpened):
            data = msgspec.msgpack.encode(slim(message, "g00000042", 0, record.seq, record.digest))
            record = Record(record.seq, record.time_ns, record.name, Form.SLIM, data, bytes.fromhex(record.digest))
        packed.append((stream, record))
    small.records = packed
    for words in (("group", "g00000042"), ("token", "g00000042/0@6")):
        assert whole.ask(*words) == small.ask(*words)


def test_the_page_shows_its_timeline_in_a_browser(tmp_path: Path) -> None:
    """Laid out by a real browser: every lane has its row, and bars are where their times say."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        assert not os.environ.get("REQUIRE_BROWSER"), "no browser is installed, and none may be missing; run `setup.sh browser`"
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed, so no page can be looked at; run `setup.sh browser`")
    life = Told().ask("group", "g00000042")
    probe = (
        "<script>document.title = JSON.stringify({rows: document.querySelectorAll('svg text').length - 6,"
        " bars: document.querySelectorAll('rect').length, outside: [...document.querySelectorAll('rect, circle')]"
        ".filter(m => { const a = m.getBoundingClientRect(), b = document.querySelector('svg').getBoundingClientRect();"
        " return a.width <= 0 || a.left < b.left || a.right > b.right + 4; }).length})</script>"
    )
    (tmp_path / "page.html").write_text(page(life).replace("</body>", probe + "</body>"), encoding="utf-8")
    shot = tmp_path / "page.png"
    words = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    target = (tmp_path / "page.html").as_uri()
    done = subprocess.run([*words, "--dump-dom", target], capture_output=True, text=True, timeout=120, check=True)
    title = done.stdout.split("<title>")[1].split("</title>")[0].replace("&quot;", '"')
    measured = json.loads(title)
    lanes = {event.lane for event in life.events}
    assert measured["rows"] == len(lanes)
    assert measured["bars"] == sum(event.until_ns > event.at_ns for event in life.events)
    assert measured["outside"] == 0
    subprocess.run([*words, f"--screenshot={shot}", target], capture_output=True, timeout=120, check=True)
    assert shot.stat().st_size > 5000


def test_the_page_needs_nothing_else() -> None:
    """No reference leaves it, and what a task is called cannot become markup."""
    told = Told()
    life = told.ask("group", "g00000042")
    life.facts["task"] = "<script>alert(1)</script>"
    written = page(life)
    assert "<script>" not in written
    assert "http" not in written
    life.facts["groups"] = [{"group": "<b>g1</b>", "lag": 0}, {"group": "g2", "lag": None}]
    assert "<tr><td>&lt;b&gt;g1&lt;/b&gt;</td><td>0</td></tr><tr><td>g2</td><td>none</td></tr>" in page(life)
    assert written.count("<rect") == sum(event.until_ns > event.at_ns for event in life.events)
