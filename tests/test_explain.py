"""Explain: one item's whole life, the same from a recording, a smaller one and a run; and a page that a browser can show."""

from __future__ import annotations

import asyncio
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from admission_stage import make_ready, with_siblings
from browser import Page, chromium, opened

from admission.explain_command import explain
from admission.explain_page import page
from admission.explain_source import BusSource, RecordingSource, Source
from admission.explain_text import as_data
from admission.recorded import messages
from admission.step_story import gradient_mass
from admission.story import Event, Story
from schemas.table import Role, Stream
from schemas.trajectory import Episode, TurnRecord
from services.bus import Bus
from services.cli import main
from services.config import check, load
from services.recording import Recording, RecordingError
from services.stopped_run import served
from tests.recorded_run import FIRST_STEP, LATER, MAX_LAG, SIZE, STALE, TRAINED, lean, short_run, whole
from trainer.credit import advantages

__all__ = ["lean", "whole"]  # fixtures
pytestmark = pytest.mark.timeout(300)


async def story_of(path: Path, what: str, name: str) -> Story:
    with Recording(path) as recording:
        return await explain(RecordingSource(recording), what, name, advantages)


def events_of(story: Story, what: str) -> list[Event]:
    return [event for event in story.events if event.what == what]


async def test_why_a_group_was_dropped_is_the_first_line(whole: Path) -> None:
    story = await story_of(whole, "group", STALE[0])
    bound = f"lag {FIRST_STEP + 1 - 3} exceeds {MAX_LAG}"
    assert story.answer == (f"{STALE[0]} was dropped: quarantined as stale at version {FIRST_STEP + 1}, because: {bound}")
    (decision,) = events_of(story, "decision")
    assert decision.details["lag"] == 3 and decision.details["oldest_version"] == 3
    assert not events_of(story, "step")


def test_the_command_says_it(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "group", STALE[0], "--recording", str(whole)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{STALE[0]} was dropped: quarantined as stale")
    assert "waits in the bank for" in said


async def test_a_trained_group_from_lease_to_version(whole: Path) -> None:
    """Every station in its order, and what the streams themselves say at each."""
    story = await story_of(whole, "group", TRAINED[0])
    with Recording(whole) as recording:
        turns = [m for _, m in messages(recording, Stream.TURNS) if isinstance(m, TurnRecord) and m.group == TRAINED[0]]
    assert story.answer.startswith(f"{TRAINED[0]} was trained on: it entered step {FIRST_STEP} with lag 2 of at most {MAX_LAG}")
    whats = [event.what for event in story.events]
    assert {"lease", "holder", "reset", "turn", "sandbox", "sealed", "verdict", "ready", "wait", "decision"} <= set(whats)
    assert {"demand", "step", "version"} <= set(whats)
    order = [whats.index(what) for what in ("lease", "turn", "sealed", "ready", "decision", "version")]
    assert order == sorted(order)
    shown = events_of(story, "turn")
    assert len(shown) == len(turns)
    for turn in turns:
        (event,) = [e for e in shown if e.lane == f"slot {turn.slot}" and e.details["turn"] == turn.turn]
        assert (event.at_ns, event.until_ns) == (turn.started_ns, turn.generated_ns)
        assert (event.details["engine"], event.details["versions"]) == ("e0", _spans(turn))
    assert len(events_of(story, "sandbox")) == sum(bool(turn.command_id) for turn in turns)
    assert [event.text for event in events_of(story, "version")] == [
        f"version {FIRST_STEP + 1} is staged (patch), digest d{FIRST_STEP + 1}",
        f"e0 serves version {FIRST_STEP + 1}, after a pause of 0.000 s",
    ]
    assert [row["slot"] for row in story.rows] == list(range(SIZE))


def _spans(turn: TurnRecord) -> str:
    names = [(f"v{span.version}", span) for span in turn.versions]
    return names[0][0] if len(names) == 1 else " ".join(f"{name}[{s.start}:{s.end}]" for name, s in names)


async def test_every_token_knows_its_engine_and_version(whole: Path) -> None:
    """Invariant 2, as a person asks it: against the episode's own spans, token by token."""
    with Recording(whole) as recording:
        episodes = [m for _, m in messages(recording, Stream.EPISODES) if isinstance(m, Episode)]
        episode = next(e for e in episodes if e.group == LATER[0] and e.slot == 1)
        mask, versions, ids = episode.mask.numpy(), episode.token_versions(), episode.ids.numpy()
        source = RecordingSource(recording)
        for position in range(len(ids)):
            story = await explain(source, "token", f"{LATER[0]}/1/{position}", advantages)
            assert story.facts["sampled"] is bool(mask[position]), position
            assert story.facts["token id"] == int(ids[position])
            if mask[position]:
                assert (story.facts["version"], story.facts["engine"]) == (int(versions[position]), "e0")
                assert f"was sampled by engine e0 under version {versions[position]}" in story.answer
            else:
                assert "was not sampled" in story.answer
        made = await explain(source, "token", f"{LATER[0]}/1/{int(mask.nonzero()[0][-1])}", advantages)
    assert made.facts["version made by"] == f"step {FIRST_STEP}, digest d{FIRST_STEP + 1}"


async def test_a_step_with_its_groups_and_its_gradient(whole: Path) -> None:
    story = await story_of(whole, "step", str(FIRST_STEP))
    assert story.answer == f"step {FIRST_STEP} trained on 2 groups, lag 2 to 2 and made version {FIRST_STEP + 1}"
    assert [row["group"] for row in story.rows] == list(TRAINED)
    assert all(row["waited s"] is not None and float(row["waited s"]) >= 0 for row in story.rows)
    assert story.facts["digest"] == f"d{FIRST_STEP + 1}"


def test_gradient_mass_follows_credit_and_reduction() -> None:
    """By hand, RLOO of two siblings with rewards 0 and 1: advantages -1 and 1, weighted by their tokens."""
    one, two = make_ready(1), with_siblings(make_ready(2), 1, sampled_tokens=9)
    flat = with_siblings(make_ready(3), 1, reward=0.0)
    summed = check({"engine": {"kind": "simulated"}})
    assert gradient_mass([one, two, flat], summed, advantages) == {
        one.group: pytest.approx(6 / 18),
        two.group: pytest.approx(12 / 18),
        flat.group: 0.0,
    }
    normalized = check({"engine": {"kind": "simulated"}, "trainer": {"reduction": "length_normalized"}})
    assert gradient_mass([one, two, flat], normalized, advantages)[two.group] == pytest.approx(0.5)


QUESTIONS = [("group", STALE[1]), ("group", TRAINED[1]), ("trajectory", f"{LATER[1]}/1"), ("step", str(FIRST_STEP + 1))]


async def test_a_run_a_recording_and_a_smaller_one_give_the_same_story(whole: Path, lean: Path) -> None:
    folder = short_run()
    async with served(load(folder / "config.toml"), folder) as config:
        bus = await Bus.connect(config.nats.url, config.run.name, Role.OBSERVER, "test")
        try:
            with Recording(whole) as one, Recording(lean) as other:
                for what, name in QUESTIONS:
                    sources: list[Source] = [BusSource(bus, config), RecordingSource(one), RecordingSource(other)]
                    told = [as_data(await explain(source, what, name, advantages)) for source in sources]
                    assert told[0] == told[1] == told[2], (what, name)
        finally:
            await bus.close()


def test_a_run_folder_is_explained_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, html = tmp_path / "s.json", tmp_path / "s.html"
    files = ["--json", str(out), "--html", str(html)]
    assert main(["explain", "trajectory", f"{TRAINED[0]}/0", "--run-folder", str(short_run()), *files]) == 0
    story = json.loads(out.read_text())
    assert story["answer"] == capsys.readouterr().out.splitlines()[0]
    assert {event["lane"] for event in story["events"]} == {"group", "slot 0", "trainer", "weights"}
    assert html.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["group", "g00000099"], "g00000099: nothing here names it"),
        (["group", "42"], "explain group '42': name a group, as in g00000042"),
        (["trajectory", f"{TRAINED[0]}/7"], f"{TRAINED[0]} has slots [0, 1] here"),
        (["token", f"{TRAINED[0]}/0/99999"], "the row has positions 0 to"),
        (["token", TRAINED[0]], "name a group, a slot and a position"),
        (["step", "900"], "step 900: nothing here names it"),
    ],
)
def test_what_is_not_there_is_said(words: list[str], said: str, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *words, "--recording", str(whole)]) == 2
    assert said in capsys.readouterr().err


def test_the_index_spares_the_other_blocks(whole: Path) -> None:
    """Of a run of many blocks only those that the index names are read."""
    with Recording(whole) as recording:
        other = msgspec.structs.replace(recording.index.blocks[0], groups=[2 * 77], steps=[77])
        recording.index.blocks.append(msgspec.structs.replace(other, offset=10**12))
        story = asyncio.run(explain(RecordingSource(recording), "group", TRAINED[0], advantages))
        assert story.events
        with pytest.raises(RecordingError, match="lies outside of the file"):
            asyncio.run(explain(RecordingSource(recording), "group", "g00000077", advantages))


# -- the page ----------------------------------------------------------------------------------------------------------------


class _Outside(HTMLParser):
    """Everything that a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and value not in ("data:,",):
                self.loads.append(f"{tag} {name}={value}")
        if tag in ("script", "iframe", "object"):
            self.loads.append(tag)


async def test_the_page_loads_nothing_and_quotes_what_agents_wrote(whole: Path) -> None:
    story = await story_of(whole, "group", TRAINED[0])
    story.events[0] = saying(story.events[0], '<script>alert("x")</script><img src=http://x/>')
    outside = _Outside()
    text = page(story)
    outside.feed(text)
    assert outside.loads == []
    assert "url(" not in text and "@import" not in text


def saying(event: Event, text: str) -> Event:
    return Event(at_ns=event.at_ns, until_ns=event.until_ns, lane=event.lane, what=event.what, text=text)


LOOK = """(() => {
  const box = (e) => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
  const svg = document.getElementById('timeline');
  return {
    answer: document.getElementById('answer').innerText,
    svg: box(svg),
    bars: [...svg.querySelectorAll('rect.bar')].map(e => ({ box: box(e), what: e.classList[1],
      title: e.querySelector('title').textContent, fill: getComputedStyle(e).fill })),
    names: [...svg.querySelectorAll('text.name')].map(e => ({ box: box(e), text: e.textContent })),
    ticks: [...svg.querySelectorAll('text:not(.name)')].map(e => box(e)),
    rows: document.querySelectorAll('#events tr').length,
    wide: document.documentElement.scrollWidth, view: document.documentElement.clientWidth,
    loaded: performance.getEntriesByType('resource').map(e => e.name),
  };
})()"""


@pytest.mark.skipif(chromium() is None, reason="no Chromium here; Debian's package is `chromium`")
@pytest.mark.parametrize(("what", "name"), [("group", TRAINED[0]), ("step", str(FIRST_STEP))])
async def test_a_browser_shows_the_timeline(what: str, name: str, whole: Path, tmp_path: Path) -> None:
    story = await story_of(whole, what, name)
    file = tmp_path / "page.html"
    file.write_text(page(story), encoding="utf-8")
    async with opened(file, tmp_path / "profile") as shown:
        seen = await shown.evaluate(LOOK)
        await _check(shown, seen, story)


async def _check(shown: Page, seen: dict[str, Any], story: Story) -> None:
    """What a person would see: every event as a bar in its own lane, in order, inside the picture, and nothing overlapping."""
    assert shown.problems == [], "the console is silent"
    assert seen["loaded"] == [] and seen["answer"] == story.answer
    assert seen["wide"] <= seen["view"], "the page does not scroll sideways"
    left, top, right, bottom = seen["svg"]
    assert right - left > 600
    assert len(seen["bars"]) == len(story.events) == seen["rows"] - 1
    for bar in seen["bars"]:
        a, b, c, d = bar["box"]
        assert left - 1 <= a < c <= right + 1 and top <= b < d <= bottom, bar
        assert c - a >= 1.5, "also a moment can be seen"
        assert re.fullmatch(r"rgb\(\d+, \d+, \d+\)", bar["fill"]) and bar["fill"] != "rgb(0, 0, 0)", bar
    names = {entry["text"]: entry["box"] for entry in seen["names"]}
    assert list(names) == story.lanes()
    for (_, one), (_, below) in zip(list(names.items()), list(names.items())[1:], strict=False):
        assert one[3] <= below[1] + 1, "names of lanes do not overlap"
    for bar in seen["bars"]:
        lane = names[bar["title"].split(":")[0]]
        assert lane[1] - 8 <= (bar["box"][1] + bar["box"][3]) / 2 <= lane[3] + 8, "a bar stands beside its lane's name"
        assert lane[2] <= bar["box"][0] + 1, "and does not cover it"
    for one, after in zip(seen["ticks"], seen["ticks"][1:], strict=False):
        assert one[2] <= after[0], "marks of the axis do not overlap"
    turns = [event for event in story.events if event.what in ("turn", "wait") and event.until_ns]
    begin = min(event.at_ns for event in story.events)
    placed = {bar["title"]: bar["box"][0] for bar in seen["bars"]}
    ordered = sorted(turns, key=lambda event: event.at_ns - begin)
    places = [placed[f"{e.lane}: {e.text} ({e.seconds:.3f} s)"] for e in ordered]
    assert places == sorted(places), "time runs to the right"
    picture = await shown.screenshot()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
