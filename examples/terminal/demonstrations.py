"""Demonstrations for the warm start, laid out token by token as the agent loop lays out a real episode.

Only training templates appear, with seeds that no split offers. Most rows are clean runs of the oracle, whose outputs the
families declare. Some rows hold a slip that is repaired (its tokens are not trained on, only the way out of it is), and a
share set by `wrong_share` holds a mistake that is trained on: see `mistakes.py`.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rollouter.actions import TokensParser, error_text
from rollouter.chat import ChatRenderer, observation_text
from schemas.actions import InvalidAction

from .drill import drill
from .families import Case
from .mistakes import mistaken
from .shell import run, write_files
from .suite import SHELL, TRAIN_SEEDS, suite

DEMONSTRATION_SEEDS = range(TRAIN_SEEDS.stop, 9000)
PREMATURE_SHARE = 0.25  # of the wrong rows: finish too early
RECOVERY_SHARE = 0.5  # of the failed commands: try again rightly


@dataclass(frozen=True, kw_only=True)
class SftRow:
    """One training row. `mask` is True on the tokens that the policy should have sampled, closing stop token included."""

    ids: npt.NDArray[np.int32]  # [T]
    mask: npt.NDArray[np.bool_]  # [T]


@dataclass(frozen=True, kw_only=True)
class Turn:
    ids: tuple[int, ...]
    observation: str = ""
    trained: bool = True


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Shares of rows, and how often each family is drawn."""

    copy: float  # of all rows: the copy drill
    wrong: float  # of the others: a trained mistake
    slip: float  # of the clean ones: a repaired slip
    family_weights: Mapping[str, float]  # families left out weigh 1


class Writer:
    """Writes episodes as rows with one model folder's renderer."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self.renderer = renderer
        self.parser = TokensParser(renderer, (SHELL,))
        self._shell, self._finish, self._end = (renderer.token_id(f"<|{mark}|>") for mark in ("shell", "finish", "end"))

    def command(self, text: str, observation: str, *, trained: bool = True) -> Turn:
        return Turn(ids=(self._shell, *self.renderer.encode_text(text), self._end), observation=observation, trained=trained)

    def finish(self) -> Turn:
        return Turn(ids=(self._finish, self._end))

    def slip(self, command: str, rng: random.Random) -> Turn:
        """A turn that breaks the format, with the error that the real parser reports for it."""
        right = self.command(command, "").ids
        cut = rng.randrange(1, len(right) - 1)
        finish_reason, ids = rng.choice(
            (
                ("length", right[:-1] + right[1 : 1 + cut]),
                ("stop", (self._shell, self._end)),
                ("stop", (self._end,)),
                ("stop", right[:cut] + right),
                ("stop", right[1:]),
                ("stop", (self.renderer.token_id("<|tool|>"), *right[1:])),
            )
        )
        action = self.parser.parse(self.renderer.decode(ids), ids, finish_reason)
        assert isinstance(action, InvalidAction), f"a slip must be no valid action: {self.renderer.decode(ids)!r}"
        return Turn(ids=ids, observation=error_text(action), trained=False)

    def row(self, instruction: str, turns: Sequence[Turn]) -> SftRow:
        opening = self.renderer.opening("", instruction, (SHELL,))
        pieces, masks = [opening], [np.zeros(len(opening), dtype=np.bool_)]
        for index, turn in enumerate(turns):
            pieces.append(np.asarray(turn.ids, dtype=np.int32))
            masks.append(np.full(len(turn.ids), turn.trained))
            if index + 1 < len(turns):
                glue = self.renderer.after_turn(turn.ids, "tool", turn.observation)
                pieces.append(glue)
                masks.append(np.zeros(len(glue), dtype=np.bool_))
        return SftRow(ids=np.concatenate(pieces), mask=np.concatenate(masks))


def rows(
    model_dir: str | Path,
    *,
    count: int | None = None,
    seed: int,
    wrong_share: float = 0.0,
    copy_share: float = 0.2,
    slip_share: float = 0.05,
    family_weights: Mapping[str, float] | None = None,
) -> Iterator[SftRow]:
    """`count` rows, or endless ones; a pure function of the arguments and the model folder's tokenizer and template."""
    writer = Writer(ChatRenderer(model_dir))
    mix = Mix(wrong=wrong_share, copy=copy_share, slip=slip_share, family_weights=family_weights or {})
    for instruction, turns in episodes(writer, count=count, seed=seed, mix=mix):
        yield writer.row(instruction, turns)


def episodes(writer: Writer, *, count: int | None, seed: int, mix: Mix) -> Iterator[tuple[str, list[Turn]]]:
    """Instruction and turns of each row."""
    rng = random.Random(f"demonstrations {seed}")
    templates = [template for template in suite.templates.values() if not template.heldout]
    if unknown := set(mix.family_weights) - {template.family for template in templates}:
        raise ValueError(f"family_weights: no family is called {sorted(unknown)}")
    weights = [mix.family_weights.get(template.family, 1.0) for template in templates]
    for _ in itertools.count() if count is None else range(count):
        if rng.random() < mix.copy:
            yield _drill(writer, rng)
            continue
        template = rng.choices(templates, weights)[0]
        case = template.case(rng.choice(DEMONSTRATION_SEEDS))
        if rng.random() < mix.wrong:
            turns = _wrong(writer, case, rng)
        else:
            turns = _clean(writer, case, rng, mix.slip)
        yield template.wording.format_map(dict(case.slots)), turns


def _drill(writer: Writer, rng: random.Random) -> tuple[str, list[Turn]]:
    task = drill(rng)
    turns = [writer.command(task.look[0], task.look[1])] if task.look else []
    return task.instruction, [*turns, writer.command(task.command, "")]


def _clean(writer: Writer, case: Case, rng: random.Random, slip_share: float) -> list[Turn]:
    turns = _oracle(writer, case)
    if rng.random() < slip_share:
        at = rng.randrange(len(turns))
        turns.insert(at, _failed(writer, case, at, rng) if rng.random() < 0.5 else writer.slip(case.oracle[at], rng))
    return [*turns, writer.finish()]


def _failed(writer: Writer, case: Case, at: int, rng: random.Random) -> Turn:
    """A wrong command that failed and changed nothing, in place of the oracle's command `at`."""
    command = mistaken(case.oracle[at], rng)
    *_, (observation, exit_code) = _observe(case, [*case.oracle[:at], command])
    if exit_code == 0:  # it did something: such a state is not the oracle's any more
        return writer.slip(case.oracle[at], rng)
    return writer.command(command, observation, trained=False)


def _wrong(writer: Writer, case: Case, rng: random.Random) -> list[Turn]:
    """A run with one trained mistake: it ends too early, or one command is wrong, noticed or not."""
    at = rng.randrange(len(case.oracle))
    before, after = list(case.oracle[:at]), list(case.oracle[at + 1 :])
    if rng.random() < PREMATURE_SHARE:
        return [*_oracle(writer, case)[:at], writer.finish()]
    command = mistaken(case.oracle[at], rng)
    observations = _observe(case, [*before, command, *after])
    _, exit_code = observations[at]
    commands = [*before, command, *after]
    turns = [writer.command(text, observation) for text, (observation, _) in zip(commands, observations, strict=True)]
    if exit_code:
        turns = turns[: at + 1]
        if rng.random() < RECOVERY_SHARE:
            turns += _oracle(writer, case)[at:]
    return [*turns, writer.finish()]


def _oracle(writer: Writer, case: Case) -> list[Turn]:
    pairs = zip(case.oracle, case.outputs, strict=True)
    return [writer.command(command, observation_text(output.encode(), b"", 0, False)) for command, output in pairs]


def _observe(case: Case, commands: Sequence[str]) -> list[tuple[str, int]]:
    """Observation and exit code of each command, really run: nobody foresees what a mistake prints."""
    with tempfile.TemporaryDirectory(prefix="headrace-demo-") as name:
        folder = Path(name)
        write_files(folder, {path: content.encode() for path, content in case.files.items()})
        results = [run(folder, command) for command in commands]
    return [(observation_text(r.stdout, r.stderr, r.exit_code, False), r.exit_code) for r in results]
