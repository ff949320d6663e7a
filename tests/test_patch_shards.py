"""The weights leave DeepSpeed's ranks in shards: two real ranks, at every ZeRO stage, make the patch that one rank makes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shards_rank
from shards_rank import FROZEN, LEVELS, RESTARTED, STAGES
from tiny_model import write_tiny_model

from param_sync.patch import codec, frame
from param_sync.patch.bits import Bits
from param_sync.patch.container import decode_header
from param_sync.patch.snapshot import Snapshot
from services.device import choose_device
from services.nats_server import free_port
from trainer.slices import Slice, cut, deal, homes

pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow]
Results = list[dict[str, Any]]


def launch(ranks: int, folder: Path, model_dir: Path, weights: Path | None = None) -> Results:
    """Start the ranks, wait, return what each wrote."""
    here = Path(__file__).parent
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
    environment |= choose_device("cpu", threads=1).environment()
    environment |= {"PYTHONPATH": f"{here.parent}{os.pathsep}{here}", "WORLD_SIZE": str(ranks)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    for rank in range(ranks):
        command = [sys.executable, "-W", "ignore", str(here / "shards_rank.py"), str(model_dir)]
        command += [str(folder / f"{ranks}-{rank}.npz"), str(folder / f"state{ranks}")]
        command += [] if weights is None else [str(weights)]
        own = environment | {"RANK": str(rank), "LOCAL_RANK": "0"}
        with (folder / f"{ranks}-{rank}.log").open("wb") as log:
            processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=log))
    try:
        codes = [process.wait(1000) for process in processes]
    finally:
        for process in processes:
            process.kill()
    texts = "\n".join((folder / f"{ranks}-{rank}.log").read_text()[-2000:] for rank in range(ranks))
    assert codes == [0] * ranks, texts
    return [dict(np.load(folder / f"{ranks}-{rank}.npz")) for rank in range(ranks)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def trained(folder: Path, model_dir: Path) -> Results:
    """What two ranks made while they trained."""
    return launch(2, folder, model_dir)


@pytest.fixture(autouse=True)
def small_frames() -> Iterator[None]:
    before = frame.SEGMENT_ELEMENTS, frame.RANKED_FROM
    shards_rank.small_frames()
    yield
    frame.SEGMENT_ELEMENTS, frame.RANKED_FROM = before


def snapshot(result: dict[str, Any], key: str, version: int) -> Snapshot:
    prefix = f"{key}/weights/{version}/"
    tensors = {name.removeprefix(prefix): words for name, words in result.items() if name.startswith(prefix)}
    return Snapshot.of({n: Bits("bf16", w.shape, w) for n, w in tensors.items()}, version=version, incarnation=0)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("level", LEVELS)
def test_two_ranks_make_the_patch_of_the_whole_weights(trained: Results, stage: int, level: int) -> None:
    """The reference is made here, from both whole sets of weights. No rank gathered any (see `no_gathers`)."""
    first, second = trained
    key = f"{stage}/{level}"
    old = snapshot(first, key, 0)
    total = sum(bits.data.size for bits in old.tensors.values())
    for version in (1, 2):
        new = snapshot(first, key, version)
        assert new.digest != old.digest
        assert first[f"{key}/digest/{version}"] == second[f"{key}/digest/{version}"] == new.digest
        file = first[f"{key}/patch/{version}"].tobytes()
        assert file == codec.encode(old, new, level=level).tobytes()
        header = decode_header(file)[0]
        assert header.base_digest == old.digest
        changed = {entry.name for entry in header.tensors}
        assert len(changed) > 10 and FROZEN in old.tensors.keys() - changed, "what is not trained does not travel"
        assert codec.apply(old, file).digest == new.digest
        for rank in trained:  # the parts, the finished frames and the digests; no weights
            assert int(rank[f"{key}/sent/{version}"]) < 2 * len(file) + 8192
        old = new
    assert first[f"{key}/anchor"].tobytes() == codec.encode_anchor(old).tobytes()
    assert f"{key}/patch/1" not in second
    owned = [int(rank[f"{key}/owned"]) for rank in trained]
    assert sum(owned) == total and min(owned) > total // 3
    largest = max(bits.data.size for bits in old.tensors.values())
    for rank in trained:  # twice its share, give or take a tensor that cannot be halved
        assert int(rank[f"{key}/shadow"]) <= total + largest


def test_one_rank_makes_the_same_patches_from_the_same_weights(trained: Results, folder: Path, model_dir: Path) -> None:
    (alone,) = launch(1, folder, model_dir, folder / "2-0.npz")
    files = [name for name in trained[0] if "/patch/" in name or name.endswith("/anchor")]
    assert len(files) == 3 * len(STAGES) * len(LEVELS)
    for name in files:
        np.testing.assert_array_equal(alone[name], trained[0][name], err_msg=name)


@pytest.mark.parametrize("stage", STAGES)
def test_after_a_restart_the_next_patch_is_the_same(trained: Results, stage: int) -> None:
    expected = trained[0][f"{stage}/{RESTARTED}/next"]
    assert expected.size
    np.testing.assert_array_equal(trained[0][f"{stage}/{RESTARTED}/after restart"], expected)


def test_the_level_is_left_to_the_models_size_unless_it_is_chosen() -> None:
    assert [codec.level_for(0, n) for n in (0, codec.LEVEL_2_FROM - 1, codec.LEVEL_2_FROM)] == [1, 1, 2]
    assert [codec.level_for(chosen, n) for chosen in (1, 2) for n in (0, 2**40)] == [1, 1, 2, 2]


def test_tensors_are_cut_where_the_ranks_partitions_end() -> None:
    layout = [("a", 0, 5), ("b", 6, 10), ("c", 16, 4)]  # padded between a and b
    found = list(cut(layout, 7))
    assert found == [Slice("a", 0, 5, 0), Slice("b", 0, 1, 0), Slice("b", 1, 7, 1), Slice("b", 8, 2, 2), Slice("c", 0, 4, 2)]
    assert homes(found, 3) == {"a": 0, "b": 1, "c": 2}  # b goes to the owner with the least


def test_whole_tensors_are_dealt_evenly_and_the_same_everywhere() -> None:
    sizes = [("a", 9), ("b", 5), ("c", 5), ("d", 1)]
    dealt = list(deal(sizes, 2))
    assert dealt == list(deal(sizes[::-1], 2))
    assert {part.name: part.rank for part in dealt} == {"a": 0, "b": 1, "c": 1, "d": 0}
    assert homes(dealt, 2) == {"a": 0, "b": 1, "c": 1, "d": 0}
