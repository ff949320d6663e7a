"""The trainer on one rank, with real DeepSpeed on the CPU, at every ZeRO stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tiny_model import VOCABULARY, bits_of, make_row, make_rows, write_tiny_model

from services.device import ComputeDtype, choose_device
from services.engine.hf_models import load_causal_lm
from trainer.batch import TrainRow, padding_row
from trainer.config import ObjectiveConfig, OptimizerConfig, TrainerConfig
from trainer.deepspeed_engine import EngineError
from trainer.deepspeed_trainer import DeepSpeedTrainer
from trainer.scorer import TokenScorer, micro_batch

pytestmark = pytest.mark.timeout(120)

# With epsilon 1 an Adam update is nearly proportional to the gradient, so tiny differences stay tiny.
PROPORTIONAL = OptimizerConfig(learning_rate=0.3, epsilon=1.0)
STAGES = [(0, "float32"), (1, "float32"), (2, "float32"), (3, "float32"), (1, "bfloat16"), (2, "bfloat16"), (3, "bfloat16")]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """DeepSpeed wants RANK and the like in the environment; nothing of it may reach other tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "DS_ACCELERATOR"):
            patch.delenv(name, raising=False)
        yield
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "DS_ACCELERATOR"):
            patch.delenv(name, raising=False)


class Make:
    """Makes trainers and closes them."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self.made: list[DeepSpeedTrainer] = []

    def __call__(self, *, compute: ComputeDtype = "float32", **changes: Any) -> DeepSpeedTrainer:
        settings: dict[str, Any] = {
            "model_dir": str(self.model_dir),
            "optimizer": PROPORTIONAL,
            "micro_batch_tokens": 128,
        } | changes
        trainer = DeepSpeedTrainer(TrainerConfig(**settings), choose_device("cpu", threads=1, compute_dtype=compute))
        self.made.append(trainer)
        return trainer


@pytest.fixture
def make(model_dir: Path) -> Iterator[Make]:
    maker = Make(model_dir)
    yield maker
    for trainer in maker.made:
        trainer.close()


def weights_of(trainer: DeepSpeedTrainer) -> dict[str, npt.NDArray[np.uint16]]:
    return dict(trainer.policy_bits())


def assert_same(left: dict[str, npt.NDArray[np.uint16]], right: dict[str, npt.NDArray[np.uint16]]) -> None:
    assert left.keys() == right.keys()
    for name, bits in left.items():
        np.testing.assert_array_equal(bits, right[name], err_msg=name)


def assert_close(left: dict[str, npt.NDArray[np.uint16]], right: dict[str, npt.NDArray[np.uint16]]) -> None:
    """Equal up to one bfloat16 step, and nearly all exactly equal."""
    for name, values in bits_of(left).items():
        np.testing.assert_allclose(values, bits_of(right)[name], rtol=2**-7, atol=1e-6, err_msg=name)
    different = sum(int((bits != right[name]).sum()) for name, bits in left.items())
    assert different < 0.001 * sum(bits.size for bits in left.values())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_next_token_at_the_sampling_temperature(make: Make, temperature: float) -> None:
    """Token t is scored by the logits at t - 1, whatever the batch around it."""
    trainer = make(temperature=temperature)
    rows = make_rows(0, 7)
    reference = load_causal_lm(make.model_dir, "bfloat16", "cpu").to(torch.float32)  # type: ignore[arg-type]
    for row, scored in zip(rows, trainer.log_probs(rows), strict=True):
        with torch.no_grad():
            logits = reference(input_ids=torch.from_numpy(row.ids.astype(np.int64))[None]).logits[0].double() / temperature
        table = torch.log_softmax(logits, -1).numpy()
        for t in range(row.length):
            expected = table[t - 1, row.ids[t]] if row.mask[t] else 0.0
            assert scored[t] == pytest.approx(expected, abs=2e-5), (t, row.mask[t])
    assert trainer.log_probs([]) == []


def test_gradient_comes_from_action_tokens_only(tmp_path: Path) -> None:
    """With untied embeddings and distinct ids, only inputs before the last sampled token move."""
    model = load_causal_lm(write_tiny_model(tmp_path / "untied", tied=False), "float32", "cpu")
    scorer = TokenScorer(model, 1.0)
    ids = np.arange(10, 20, dtype=np.int32)
    mask = np.zeros(10, dtype=np.bool_)
    mask[[4, 6]] = True
    row = TrainRow(ids=ids, mask=mask, logprobs=np.zeros(10, np.float32), advantage=1.0)
    batch = micro_batch([row], "cpu")
    assert batch.contexts.tolist() == [3, 5] and batch.targets.tolist() == [14, 16]
    states: list[torch.Tensor] = []
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda _module, inputs, _output: states.append(inputs[0]))
    logprobs, _ = scorer(batch.ids, batch.contexts, batch.targets)
    logprobs.sum().backward()
    assert states[0].shape[0] == 2, "the output layer ran on the scored positions only"
    gradient = model.get_input_embeddings().weight.grad
    moved = set(torch.nonzero(gradient.abs().sum(-1)).flatten().tolist())
    assert moved == {10, 11, 12, 13, 14, 15}


@pytest.mark.parametrize(("stage", "compute"), STAGES)
def test_one_step_per_mini_batch_and_exact_resume(make: Make, tmp_path: Path, stage: Any, compute: ComputeDtype) -> None:
    """Steps = mini-batches given, however many rows; after a reload the next step gives the same bits and the same metrics."""
    trainer = make(zero_stage=stage, compute=compute)
    before = weights_of(trainer)
    metrics = trainer.train_batch([make_rows(1, 9), make_rows(2, 4), [*make_rows(3, 3), padding_row()]])
    assert metrics.optimizer_steps == trainer.optimizer_steps == 3
    assert [update.rows for update in metrics.updates] == [9, 4, 3]
    assert any((bits != before[name]).any() for name, bits in weights_of(trainer).items())
    trainer.save_state(tmp_path / "state")
    torch.manual_seed(99)
    more = [make_rows(4, 6), make_rows(5, 6)]
    first = trainer.train_batch(more)
    after = weights_of(trainer)

    resumed = make(zero_stage=stage, compute=compute)
    resumed.load_state(tmp_path / "state")
    assert resumed.optimizer_steps == 3
    second = resumed.train_batch(more)
    assert_same(weights_of(resumed), after)
    for left, right in zip(first.updates, second.updates, strict=True):
        assert (left.loss, left.gradient_norm, left.entropy) == (right.loss, right.gradient_norm, right.entropy)


def test_micro_batching_and_stage_do_not_change_the_gradient(make: Make) -> None:
    rows = make_rows(6, 12)
    results = {}
    for name, changes in {
        "one row at a time": {"micro_batch_tokens": 40},
        "a few": {"micro_batch_tokens": 128},
        "all at once": {"micro_batch_tokens": 4096},
        "gradients partitioned": {"micro_batch_tokens": 64, "zero_stage": 2},
        "weights partitioned": {"micro_batch_tokens": 64, "zero_stage": 3},
        "nothing partitioned": {"micro_batch_tokens": 64, "zero_stage": 0},
        "checkpointed": {"micro_batch_tokens": 128, "activation_checkpointing": True},
    }.items():
        trainer = make(**changes)
        update = trainer.train_batch([rows]).updates[0]
        results[name] = (update, weights_of(trainer))
    base, base_weights = results["all at once"]
    for name, (update, weights) in results.items():
        assert update.loss == pytest.approx(base.loss, rel=1e-5), name
        assert update.gradient_norm == pytest.approx(base.gradient_norm, rel=1e-5), name
        assert update.drift == pytest.approx(base.drift, rel=1e-5) and update.tokens == base.tokens, name
        assert_close(weights, base_weights)


def test_a_step_equals_plain_torch(make: Make) -> None:
    """The whole path against a few lines: HF logits, the formula, torch's AdamW, bfloat16 rounding."""
    rows = make_rows(7, 5)
    trainer = make(gradient_clipping=0.5, zero_stage=1)
    metrics = trainer.train_batch([rows, rows])

    model: Any = load_causal_lm(make.model_dir, "bfloat16", "cpu").to(torch.float32)  # type: ignore[arg-type]
    masters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=0.3, betas=(0.9, 0.95), eps=1.0, weight_decay=0.0)
    for update in metrics.updates:
        loss = torch.zeros(())
        for row in rows:
            logits = model(input_ids=torch.from_numpy(row.ids.astype(np.int64))[None]).logits[0]
            table = torch.log_softmax(logits, -1)
            for t in np.flatnonzero(row.mask):
                ratio = torch.exp(table[t - 1, row.ids[t]] - float(row.logprobs[t]))
                advantage = row.advantage or 0.0
                loss = loss - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) / len(rows)
        model.zero_grad()
        loss.backward()
        assert update.loss == pytest.approx(float(loss.detach()), rel=1e-4)
        for name, p in model.named_parameters():
            masters[name].grad = p.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(masters.values(), 0.5)
        assert update.gradient_norm == pytest.approx(float(norm), rel=1e-4)
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name].bfloat16())
    plain = {name: p.detach().bfloat16().view(torch.uint16).numpy() for name, p in model.named_parameters()}
    assert_close(weights_of(trainer), plain)


@pytest.mark.parametrize(("stage", "compute"), [(0, "float32"), (1, "float32"), (3, "float32"), (1, "bfloat16")])
def test_masters_gather_steps_too_small_for_bfloat16(make: Make, stage: Any, compute: ComputeDtype) -> None:
    """Steps of 2e-5 move few weights above 0.1 (spacing 5e-4 and more) at once, but thirty of them do."""
    trainer = make(zero_stage=stage, compute=compute, optimizer=OptimizerConfig(learning_rate=2e-5, betas=(0.0, 0.0)))
    rows = [dataclasses.replace(row, advantage=1.0) for row in make_rows(8, 2, longest=12)]
    start = weights_of(trainer)
    large = {name: np.abs(bits_of(start)[name]) > 0.1 for name in start}

    def moved() -> int:
        return sum(int((bits != start[name])[large[name]].sum()) for name, bits in weights_of(trainer).items())

    trainer.sft_step(rows, 2e-5)
    assert moved() < 0.1 * sum(int(part.sum()) for part in large.values())
    early = moved()
    for _ in range(29):
        trainer.sft_step(rows, 2e-5)
    assert moved() > 5 * early + 100


def test_log_probs_are_of_the_served_bits(make: Make, tmp_path: Path) -> None:
    """A model built from `policy_bits` scores exactly like the trainer, after training."""
    trainer = make(optimizer=OptimizerConfig(learning_rate=1e-3))
    trainer.train_batch([make_rows(9, 6)])
    served: Any = load_causal_lm(make.model_dir, "float32", "cpu")
    served.load_state_dict(
        {name: torch.from_numpy(values) for name, values in bits_of(weights_of(trainer)).items()}, strict=False
    )
    scorer = TokenScorer(served, 1.0)
    row = make_rows(10, 1)[0]
    batch = micro_batch([row], "cpu")
    with torch.no_grad():
        expected, _ = scorer(batch.ids, batch.contexts, batch.targets)
    np.testing.assert_allclose(trainer.log_probs([row])[0][row.mask], expected.numpy(), atol=1e-6)


def test_tied_weights_come_once_under_the_checkpoints_name(make: Make) -> None:
    names = [name for name, _ in make().policy_bits()]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert len(names) == len(set(names))


def test_censored_rows_padding_and_zero_advantages_change_nothing(make: Make) -> None:
    generator = np.random.default_rng(11)
    rows = [*make_rows(11, 6), make_row(generator, 20, advantage=0.0)]
    extra = [*rows, make_row(generator, 30, advantage=None), padding_row()]
    plain, more, skipping = make(), make(), make(skip_zero_advantage=True)
    base = plain.train_batch([rows]).updates[0]
    for trainer in (more, skipping):
        update = trainer.train_batch([extra]).updates[0]
        assert update.gradient_norm == pytest.approx(base.gradient_norm, rel=1e-5)
        assert update.rows == 7 and update.zero_advantage_rows == pytest.approx(1 / 7)
        assert_close(weights_of(trainer), weights_of(plain))


def test_a_batch_without_any_loss_still_takes_its_step(make: Make) -> None:
    trainer = make()
    before = weights_of(trainer)
    update = trainer.train_batch([[padding_row(), padding_row()]]).updates[0]
    assert (update.rows, update.loss, update.gradient_norm, trainer.optimizer_steps) == (0, 0.0, 0.0, 1)
    assert_same(weights_of(trainer), before)


@pytest.mark.parametrize(
    ("stage", "compute"), [(0, "float32"), (1, "float32"), (3, "float32"), (1, "bfloat16"), (2, "bfloat16")]
)
def test_a_gradient_that_is_not_finite_stops_and_changes_nothing(make: Make, stage: Any, compute: ComputeDtype) -> None:
    trainer = make(zero_stage=stage, compute=compute)
    rows = make_rows(12, 4)
    bad = dataclasses.replace(rows[0], logprobs=np.where(rows[0].mask, np.float32(-3e4), 0).astype(np.float32), advantage=-1.0)
    before = weights_of(trainer)
    with pytest.raises(EngineError, match="gradient norm"):
        trainer.train_batch([[bad, *rows[1:]]])
    assert trainer.optimizer_steps == 0
    assert_same(weights_of(trainer), before)
    fresh = make(zero_stage=stage, compute=compute)
    assert trainer.train_batch([rows]).updates[0].loss == fresh.train_batch([rows]).updates[0].loss
    assert_same(weights_of(trainer), weights_of(fresh))


def test_decoupled_proximal_policy_is_taken_at_batch_start(make: Make) -> None:
    """In the first step the ratio to the proximal policy is 1: nothing is clipped, though the behaviour policy is far away."""
    rows = [
        dataclasses.replace(row, logprobs=np.where(row.mask, row.logprobs - 1.0, 0).astype(np.float32))
        for row in make_rows(13, 6)
    ]
    coupled = make()
    assert coupled.train_batch([rows]).updates[0].clip_tokens > 0.1
    decoupled = make(
        objective=ObjectiveConfig(proximal="batch_start", weight_max=1.5), optimizer=OptimizerConfig(learning_rate=2e-2)
    )
    first, second = decoupled.train_batch([rows, rows]).updates
    assert first.clip_tokens == 0.0 and first.capped_tokens > 0.5
    assert second.clip_tokens > 0.0


def test_reference_penalty_pulls_to_the_reference(make: Make) -> None:
    """With no advantage and the start as reference: no gradient at the start, a pull back after moving away."""
    rows = [dataclasses.replace(row, advantage=0.0) for row in make_rows(14, 6)]
    objective = ObjectiveConfig(name="reinforce_kl", kl="reference", kl_coefficient=1.0)
    trainer = make(objective=objective, reference_dir=str(make.model_dir), optimizer=OptimizerConfig(learning_rate=5e-3))
    start = trainer.log_probs(rows)
    assert trainer.train_batch([rows]).updates[0].gradient_norm == pytest.approx(0.0, abs=1e-5)
    for _ in range(5):
        trainer.sft_step(rows, 5e-3)

    def distance() -> float:
        now = trainer.log_probs(rows)
        return float(np.mean([np.abs(a - b)[r.mask].mean() for a, b, r in zip(start, now, rows, strict=True)]))

    away = distance()
    trainer.train_batch([rows] * 12)
    assert distance() < 0.7 * away


def test_policy_gradient_raises_what_is_rewarded(make: Make) -> None:
    generator = np.random.default_rng(15)
    good, bad = make_row(generator, 24, advantage=1.0), make_row(generator, 24, advantage=-1.0)
    trainer = make(optimizer=OptimizerConfig(learning_rate=2e-3))
    rows = [dataclasses.replace(r, logprobs=lp) for r, lp in zip((good, bad), trainer.log_probs([good, bad]), strict=True)]
    start = [float(row.logprobs.sum()) for row in rows]
    trainer.train_batch([rows] * 3)
    now = [float(values.sum()) for values in trainer.log_probs(rows)]
    assert now[0] > start[0] + 0.1 and now[1] < start[1] - 0.1
    assert VOCABULARY == 64


def test_bfloat16_without_partitioning_is_refused_with_the_way_out(make: Make) -> None:
    with pytest.raises(EngineError, match=r"zero_stage: 0.*use stage 1"):
        make(zero_stage=0, compute="bfloat16")


def test_shared_memory_collectives_without_a_compiler_say_so(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(EngineError, match=r"shared_memory_collectives: no C\+\+ compiler"):
        make(shared_memory_collectives=True)
