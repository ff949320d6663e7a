"""The whole pipeline on real parts, once per engine, with K = 0: what came out is held against the invariants by number."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from schemas.codec import decode_any
from schemas.group import ReadyGroup
from schemas.lease import GroupLease
from schemas.ledger import AbandonEntry, BatchEntry, QuarantineEntry
from schemas.policy import EngineState
from schemas.table import Stream
from schemas.training import StepCommit
from schemas.trajectory import Episode, TurnRecord, Verdict
from services.bus import Bus
from services.consume import read_all
from services.engine.registry import vllm_available
from tests.finished_run import ROOT, FinishedRun, logs_of, run_up, weights_by_version
from tests.synchronous import SynchronousTrainer, floats, model_at, token_logprobs

STEPS, BATCH, SIBLINGS = 10, 2, 6
SETTINGS = [
    f"run.max_steps={STEPS}",
    f"admission.groups_per_batch={BATCH}",
    f"rollout.group_size={SIBLINGS}",
    "admission.max_lag=0",
    "window.max_groups=4",
    "eval.every_steps=0",
    "eval.at_start=false",
    "eval.at_end=false",
    "trainer.checkpoint_every=4",
]
TOLERANCE = 2e-3  # nats: float32 on both sides, other kernels and another order of sums


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    kind = request.param
    if kind == "vllm" and not vllm_available()[0]:
        pytest.skip("vLLM is not installed")
    folder = tmp_path_factory.mktemp(f"pipeline-{kind}")
    result = run_up(folder, "examples/terminal/run.toml", [*SETTINGS, f"run.name={kind[:8]}", f"engine.kind={kind}"], 540)
    run_folder = folder / kind[:8]
    assert result.returncode == 0, f"{result.stdout[-3000:]}\n{result.stderr[-3000:]}\n{logs_of(run_folder)}"
    return FinishedRun(run_folder)


async def _episodes(bus: Bus, entry: BatchEntry) -> list[list[tuple[Episode, float | None]]]:
    """A batch's groups as (episode, reward), by the sequences that the ledger and READY name."""
    groups = []
    for named in entry.groups:
        ready = (await bus.get(Stream.READY, named.ready_seq)).decode(ReadyGroup)
        group = []
        for sibling in sorted(ready.siblings, key=lambda sibling: sibling.slot):
            item = await bus.get(Stream.EPISODES, sibling.episode_seq)
            assert item.digest == sibling.episode_digest
            group.append((item.decode(Episode), sibling.reward))
        groups.append(group)
    return groups


async def _steps(bus: Bus) -> list[StepCommit]:
    return [item.decode(StepCommit) for item in await read_all(bus, Stream.TRAIN, "train.step.*")]


async def _batches(bus: Bus) -> dict[int, BatchEntry]:
    entries = [item.decode(BatchEntry) for item in await read_all(bus, Stream.LEDGER, "ledger.batch.*")]
    return {entry.step: entry for entry in entries}


@pytest.mark.timeout(600)
async def test_conservation_and_exactly_once(run: FinishedRun) -> None:
    """Invariants 3 and 4: every leased group has one fate, and every committed group stands in one step and one
    ledger entry."""
    async with run.bus() as bus:
        leased = {item.decode(GroupLease).group for item in await read_all(bus, Stream.TASKS)}
        batches = await _batches(bus)
        consumed = [group.group for entry in batches.values() for group in entry.groups]
        quarantined = {i.decode(QuarantineEntry).group for i in await read_all(bus, Stream.LEDGER, "ledger.quarantine.*")}
        abandoned = {i.decode(AbandonEntry).group for i in await read_all(bus, Stream.LEDGER, "ledger.abandon.*")}
        steps = await _steps(bus)
    assert [step.step for step in steps] == list(range(STEPS))
    assert len(consumed) == len(set(consumed)) == STEPS * BATCH
    assert not set(consumed) & quarantined and not set(consumed) & abandoned and not quarantined & abandoned
    assert set(consumed) | quarantined | abandoned <= leased
    for step in steps:
        assert step.groups == tuple(group.group for group in batches[step.step].groups)


@pytest.mark.timeout(120)
async def test_lag_is_zero(run: FinishedRun) -> None:
    """Invariant 7 at its strictest: with K = 0 every trained token was sampled by the very version that it updates."""
    async with run.bus() as bus:
        for entry in (await _batches(bus)).values():
            assert entry.max_lag == 0
            for group in await _episodes(bus, entry):
                for episode, _ in group:
                    versions = episode.token_versions()[episode.mask.numpy()]
                    assert set(versions.tolist()) == {entry.version}


@pytest.mark.timeout(120)
async def test_rows_are_the_sampled_tokens(run: FinishedRun) -> None:
    """Invariant 1: an episode is its journal, end to end, and nothing else; versions, mask and log-probs line up."""
    async with run.bus() as bus:
        turns: dict[tuple[str, int, int], list[TurnRecord]] = defaultdict(list)
        for item in await read_all(bus, Stream.TURNS):
            turn = decode_any(item.data)
            if isinstance(turn, TurnRecord):
                turns[turn.group, turn.slot, turn.attempt].append(turn)
        episodes = [item.decode(Episode) for item in await read_all(bus, Stream.EPISODES, "episode.*.*")]
    assert len(episodes) >= STEPS * BATCH * SIBLINGS
    for episode in episodes:
        journal = sorted(turns[episode.group, episode.slot, episode.attempt], key=lambda turn: turn.turn)
        assert len(journal) == episode.turns
        ids = np.concatenate([part for t in journal for part in (t.prompt_ids.numpy(), t.sampled_ids.numpy())])
        mask = np.concatenate(
            [part for t in journal for part in (np.zeros(t.prompt_ids.shape[0]), np.ones(t.sampled_ids.shape[0]))]
        )
        np.testing.assert_array_equal(episode.ids.numpy()[: len(ids)], ids)
        np.testing.assert_array_equal(episode.mask.numpy()[: len(ids)], mask.astype(bool))
        assert not episode.mask.numpy()[len(ids) :].any()
        sampled = np.concatenate([turn.logprobs.numpy() for turn in journal])
        np.testing.assert_array_equal(episode.logprobs.numpy()[episode.mask.numpy()], sampled)


@pytest.mark.timeout(240)
async def test_logprobs_are_those_of_the_named_version(run: FinishedRun) -> None:
    """Invariant 2: recomputed under the weights that its version names, each token has the log-probability it carries."""
    async with run.bus() as bus:
        weights = await weights_by_version(bus, run.config)
        batches = await _batches(bus)
        for step in (0, STEPS // 2, STEPS - 1):
            model = model_at(str(ROOT / run.config.policy.model), weights[batches[step].version])
            for group in await _episodes(bus, batches[step]):
                for episode, _ in group:
                    with torch.no_grad():
                        expected = token_logprobs(model, episode.ids.numpy()).numpy()
                    mask = episode.mask.numpy()
                    np.testing.assert_allclose(episode.logprobs.numpy()[mask], expected[mask], atol=TOLERANCE)


@pytest.mark.timeout(120)
async def test_engines_serve_the_trainers_weights(run: FinishedRun) -> None:
    """Invariants 5 and 10: after each of the ten versions both engines confirm, by read-back, the trainer's digest."""
    async with run.bus() as bus:
        steps = await _steps(bus)
        weights = await weights_by_version(bus, run.config)
        confirmed: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for item in await read_all(bus, Stream.POLICY, "policy.engine.*"):
            state = item.decode(EngineState)
            if state.phase == "serving" and state.version >= 0:
                confirmed[state.engine][state.version].add(state.digest)
    assert len({step.digest for step in steps}) >= STEPS // 2, "training moves the weights"
    for step in steps:
        assert weights[step.version].digest == step.digest
        for engine in run.config.engine.names:
            if step.version < STEPS:  # the last version may be published after the run's end was decided
                assert confirmed[engine][step.version] == {step.digest}, f"{engine} at version {step.version}"


@pytest.mark.timeout(240)
async def test_equals_the_synchronous_trainer(run: FinishedRun) -> None:
    """Invariant 12: the same batches through a plain loop give the same losses, gradient norms and weights, step after step."""
    settings = run.config.trainer
    async with run.bus() as bus:
        batches, steps = await _batches(bus), await _steps(bus)
        weights = await weights_by_version(bus, run.config)
        plain = SynchronousTrainer(
            str(ROOT / run.config.policy.model),
            weights[0],
            rate=settings.learning_rate,
            clip=settings.clip_low,
            betas=settings.betas,
            max_norm=settings.max_grad_norm,
        )
        leases = [item.decode(GroupLease) for item in await read_all(bus, Stream.TASKS)]
        for step in steps[:6]:
            expected_groups = {lease.group for lease in leases[step.step * BATCH : (step.step + 1) * BATCH]}
            assert set(step.groups) == expected_groups, "at K = 0 a batch is exactly the groups leased for its version"
            loss, norm = plain.step(await _episodes(bus, batches[step.step]))
            assert step.metrics["loss"] == pytest.approx(loss, abs=2e-4)
            assert step.metrics["grad_norm"] == pytest.approx(norm, rel=2e-3, abs=1e-5)
            for name, values in plain.weights().items():
                found = floats(weights[step.version].tensors[name])
                off = np.abs(found - values) > np.abs(values) * 2**-7 + 1e-6  # more than one bfloat16 step apart
                assert off.mean() < 2e-3, f"{name} after step {step.step}"


@pytest.mark.timeout(120)
async def test_every_episode_is_judged_once(run: FinishedRun) -> None:
    async with run.bus() as bus:
        episodes = [item.subject.split(".", 3)[3] for item in await read_all(bus, Stream.EPISODES, "episode.*.*")]
        verdicts = [item.subject.split(".", 3)[3] for item in await read_all(bus, Stream.EPISODES, "verdict.*.*")]
        judged = [item.decode(Verdict) for item in await read_all(bus, Stream.EPISODES, "verdict.*.*")]
    assert len(set(episodes)) == len(episodes) and len(set(verdicts)) == len(verdicts)
    assert set(verdicts) <= set(episodes)
    assert all((verdict.reward is not None) == (verdict.status == "graded") for verdict in judged)


def test_run_folder_is_readable(run: FinishedRun) -> None:
    """The folder holds the resolved configuration, one metrics line per step, samples, checkpoints and a log per service."""
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    assert len([line for line in lines if '"step"' in line]) >= STEPS
    assert list((run.folder / "trajectories").iterdir())
    assert any((run.folder / "checkpoints").iterdir())
    assert {"nats-server.log", "trainer-0.log", "engine-e0.log"} <= {path.name for path in (run.folder / "logs").iterdir()}
    assert Path(run.config.run.folder).exists()
