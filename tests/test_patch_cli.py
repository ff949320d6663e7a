"""`headrace patch` on checkpoint files: what it writes is right and whole, or there is no file and one clear line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from services.cli import main

pytestmark = pytest.mark.timeout(110)


def state(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {
        "w": (torch.randn(300, 40, generator=made) * 0.02).to(torch.bfloat16),
        "norm": torch.ones(40, dtype=torch.float32),
        "steps": torch.tensor(7, dtype=torch.int64),
        "mask": torch.tensor([True, False, True]),
        "half": torch.randn(9, generator=made).to(torch.float16),
        "eight": torch.randn(9, generator=made).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 4, dtype=torch.bfloat16),
        "dropped": torch.zeros(2, dtype=torch.bfloat16),
    }


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    old = state(0)
    new = {name: tensor.clone() for name, tensor in old.items() if name != "dropped"}
    new["w"].view(torch.int16)[torch.rand(300, 40) < 0.05] += 1
    new["w"][0, 0] = float("nan")
    new["steps"] += 1
    new["fresh"] = torch.randn(5)
    old_file, new_file = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    save_file(old, old_file, {"format": "pt"})
    save_file(new, new_file, {"format": "pt"})
    return old_file, new_file


def same(left: Path, right: Path) -> bool:
    a, b = load_file(left), load_file(right)

    def raw(tensor: torch.Tensor) -> bytes:
        return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    return a.keys() == b.keys() and all((a[n].dtype, a[n].shape, raw(a[n])) == (b[n].dtype, b[n].shape, raw(b[n])) for n in a)


@pytest.mark.parametrize("level", ["1", "2"])
def test_diff_and_apply_give_the_new_checkpoint(
    files: tuple[Path, Path], level: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = map(str, files)
    patch, out = str(tmp_path / "step.patch"), str(tmp_path / "out.safetensors")
    assert main(["patch", "diff", old, new, "-o", patch, "--level", level, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kind"] == "patch" and report["removed"] == ["dropped"]
    assert {t["name"] for t in report["tensors"]} == {"w", "steps", "fresh"}
    changed = int((load_file(old)["w"].view(torch.int16) != load_file(new)["w"].view(torch.int16)).sum())
    assert next(t["changed"] for t in report["tensors"] if t["name"] == "w") == changed
    assert main(["patch", "apply", old, patch, "-o", out, "--workers", "2"]) == 0
    assert same(Path(out), files[1])
    with safe_open(out, "pt") as written:
        assert written.metadata() == {"format": "pt"}
    capsys.readouterr()
    assert main(["patch", "inspect", patch]) == 0
    text = capsys.readouterr().out
    assert f"to      {report['digest']}" in text and "removed  dropped" in text and "sparse steps" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["old.safetensors", "new.safetensors", "step.patch", "out.safetensors"]
    )


def test_equal_checkpoints_make_a_patch_that_changes_nothing(files: tuple[Path, Path], tmp_path: Path) -> None:
    old, patch, out = str(files[0]), str(tmp_path / "p"), tmp_path / "out.safetensors"
    assert main(["patch", "diff", old, old, "-o", patch]) == 0
    assert main(["patch", "apply", old, patch, "-o", str(out)]) == 0
    assert same(files[0], out)


def refused(arguments: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("headrace: ") and shown.err.count("\n") == 1
    assert said in shown.err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_wrong_bases_and_damaged_files_leave_no_output(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = map(str, files)
    patch, out = tmp_path / "step.patch", str(tmp_path / "out.safetensors")
    assert main(["patch", "diff", old, new, "-o", str(patch)]) == 0
    capsys.readouterr()
    refused(["patch", "apply", new, str(patch), "-o", out], "the patch starts at", tmp_path, capsys)
    whole = patch.read_bytes()
    for cut in (0, 5, 39, 200, len(whole) - 1):
        patch.write_bytes(whole[:cut])
        said = "the file is empty" if cut == 0 else "got" if cut < 40 else "the"
        refused(["patch", "apply", old, str(patch), "-o", out], said, tmp_path, capsys)
    for at in range(0, len(whole), 211):
        damaged = bytearray(whole)
        damaged[at] ^= 4
        patch.write_bytes(damaged)
        refused(["patch", "apply", old, str(patch), "-o", out], "", tmp_path, capsys)
        refused(["patch", "inspect", str(patch)], "", tmp_path, capsys)
    patch.write_bytes(whole)
    refused(["patch", "apply", old, old, "-o", out], "not a weights file", tmp_path, capsys)
    refused(["patch", "apply", old, "/nowhere", "-o", out], "/nowhere: No such file", tmp_path, capsys)
    refused(["patch", "diff", old, new, "-o", "/nowhere/p"], "/nowhere/p: No such file", tmp_path, capsys)


def test_checkpoints_that_are_none_are_named(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, bad, out = str(files[0]), tmp_path / "bad.safetensors", str(tmp_path / "p")
    whole = files[0].read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])

    def headed(entries: object) -> bytes:
        coded = json.dumps(entries).encode()
        return len(coded).to_bytes(8, "little") + coded + whole[8 + size :]

    lies = [
        b"1234567",
        b"\xff" * 64,
        whole[:-1],
        whole[: 8 + size // 2],
        headed([]),
        headed({"w": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 9]}}),
        headed({"w": {"dtype": "BF16", "shape": [2**62, 4], "data_offsets": [0, 8]}}),
        headed({"w": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}),
        headed({**header, "w": {**header["w"], "data_offsets": [-8, 24000]}}),
        headed({**header, "w": {"dtype": "BF16"}}),
    ]
    for lie in lies:
        bad.write_bytes(lie)
        refused(["patch", "diff", old, str(bad), "-o", out], f"{bad}: ", tmp_path, capsys)


def test_a_file_that_is_already_there_is_replaced_only_by_a_whole_one(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = map(str, files)
    patch = tmp_path / "p"
    patch.write_bytes(b"precious")
    refused(["patch", "diff", old, str(patch), "-o", str(patch)], "safetensors", tmp_path, capsys)
    assert patch.read_bytes() == b"precious"
    assert main(["patch", "diff", old, new, "-o", str(patch)]) == 0
    assert main(["patch", "apply", old, str(patch), "-o", old]) == 0  # over its own base
    assert same(files[0], files[1])
    assert np.all(load_file(files[0])["steps"].numpy() == 8)
