"""The configuration tree: unknown keys, overrides, contradictions, and TOML out and back in."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from services.config import Config, ConfigError, load, to_toml


def test_defaults_are_valid_and_every_field_is_documented() -> None:
    for name, field in Config.model_fields.items():
        assert field.annotation is not None
        for key, info in field.annotation.model_fields.items():
            assert info.description, f"{name}.{key} has no documentation"


def test_resolved_toml_reads_back_to_the_same_tree(tmp_path: Path) -> None:
    config = load(None, ["engine.vllm={tensor_parallel_size=2}", 'engine.names=["a", "b"]', "trainer.betas=[0.8, 0.9]"])
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    assert load(file) == config
    assert config.engine.vllm == {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("admission.max_lagg=1", "did you mean admission.max_lag?"),
        ("admision.max_lag=1", "did you mean admission?"),
        ("run.name=Main_1", "run.name"),
        ("admission.max_lag=-1", "admission.max_lag"),
        ("max_lag", "an override looks like section.field=value"),
        ("window.max_groups=2", "no batch could ever fill"),
        ("rollout.group_size=1", "exceeds rollout.group_size"),
        ("trainer.credit=magic", "trainer.credit"),
        ("run=3", "an override looks like"),
        ("engine.names=['a', 'a']", "engine.names: ['a', 'a'] names one service twice"),
        ("trainer.learning_rate=inf", "trainer.learning_rate"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_field_and_the_fix(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(None, [override])


def test_overrides_win_over_the_file_and_keep_its_other_settings(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[run]\nname = 'one'\nseed = 3\n[sft]\nanything = 1\n")
    config = load(file, ["run.name=two", "trainer.learning_rate=2e-5", "run.evaluate_only=true"])
    assert (config.run.name, config.run.seed, config.run.evaluate_only) == ("two", 3, True)
    assert config.trainer.learning_rate == 2e-5


def test_a_missing_and_a_broken_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no configuration file"):
        load(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(broken)


def test_the_example_configurations_are_valid() -> None:
    files = sorted((Path(__file__).parent.parent / "examples").glob("*/*.toml"))
    for file in files:
        tree = tomllib.loads(file.read_text())
        if set(tree) & set(Config.model_fields):
            load(file)
