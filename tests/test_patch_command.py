"""`headrace patch` on real safetensors files: the other checkpoint's bits come out, and no mistake leaves a file behind."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from param_sync.patch import classed
from services.cli import main

pytestmark = pytest.mark.timeout(120)
assert classed  # compiled before any test's time begins


@pytest.fixture
def checkpoints(tmp_path: Path) -> tuple[Path, Path]:
    """Two checkpoints a small step apart, the second with one more tensor and one less."""
    torch.manual_seed(0)
    weight = torch.randn(300, 300) * 0.02
    moved = weight + torch.randn(300, 300) * 5e-7
    ids = torch.arange(7)
    old = {
        "layer.weight": weight.bfloat16(),
        "norm": torch.ones(33).bfloat16(),
        "ids": ids,
        "scale": torch.tensor(3.0),
        "flag": torch.tensor([True, False]),
        "half": torch.randn(5).half(),
        "gone": torch.zeros(2),
    }
    new = {**old, "layer.weight": moved.bfloat16(), "scale": torch.tensor(-3.5), "fresh": torch.randn(3, 0, 2)}
    del new["gone"]
    save_file(old, tmp_path / "old.safetensors", metadata={"format": "pt"})
    save_file(new, tmp_path / "new.safetensors", metadata={"format": "pt"})
    return tmp_path / "old.safetensors", tmp_path / "new.safetensors"


def same_bits(left: Path, right: Path) -> bool:
    a, b = load_file(left), load_file(right)
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and a[k].numpy(force=True).tobytes() == b[k].numpy().tobytes()
        if a[k].dtype != torch.bfloat16
        else b[k].dtype == torch.bfloat16 and torch.equal(a[k].view(torch.int16), b[k].view(torch.int16))
        for k in a
    )


@pytest.mark.parametrize("level", [1, 2])
def test_diff_then_apply_gives_the_other_checkpoint(
    checkpoints: tuple[Path, Path], level: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = checkpoints
    patch, out = tmp_path / "p", tmp_path / "out.safetensors"
    assert main(["patch", "diff", str(old), str(new), "-o", str(patch), "--level", str(level), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["level"] == level and made["bytes"] == patch.stat().st_size and made["removed"] == ["gone"]
    assert made["ratio"] < 0.05
    assert main(["patch", "apply", str(old), str(patch), "-o", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] == made["digest"]
    assert same_bits(out, new)
    assert main(["patch", "inspect", str(patch), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["digest"] == made["digest"] and seen["bytes"] == made["bytes"]
    rows = {row["name"]: row for row in seen["tensors"]}
    assert rows.keys() == {"layer.weight", "scale", "fresh"}
    assert rows["layer.weight"]["forms"] == {"gaps" if level == 1 else "ranks": 1}
    before, after = (load_file(f)["layer.weight"].view(torch.int16) for f in (old, new))
    assert rows["layer.weight"]["changed"] == int((before != after).sum())
    assert rows["fresh"]["whole"]
    assert main(["patch", "inspect", str(patch)]) == 0
    assert "layer.weight  bf16[300, 300]" in capsys.readouterr().out


def fails(arguments: list[str], text: str, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on standard error, exit code 2, and the folder as it was."""
    before = {path: path.read_bytes() for path in out.parent.iterdir() if path.is_file()}
    assert main(["patch", *arguments, "-o", str(out)]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1, error
    assert {path: path.read_bytes() for path in out.parent.iterdir() if path.is_file()} == before


def test_no_mistake_leaves_a_file_behind(
    checkpoints: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = checkpoints
    patch, out = tmp_path / "p", tmp_path / "out.safetensors"
    assert main(["patch", "diff", str(old), str(new), "-o", str(patch)]) == 0
    capsys.readouterr()
    data, bad = patch.read_bytes(), tmp_path / "bad"
    for text, content in (
        ("a file begins with 40 bytes, got 0", b""),
        ("the file must have", data[:-1]),
        ("the header ends at", data[:60]),
        ("checksum does not match", data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]),
        ("not a weights file", old.read_bytes()),
        ("format 9 at level 1 is unknown", data[:8] + b"\x09" + data[9:]),
    ):
        bad.write_bytes(content)
        fails(["apply", str(old), str(bad)], text, out, capsys)
    fails(["apply", str(new), str(patch)], "the patch starts at", out, capsys)
    fails(["apply", str(patch), str(patch)], "not a safetensors file", out, capsys)
    fails(["apply", str(tmp_path / "absent"), str(patch)], "No such file", out, capsys)
    fails(["diff", str(old), str(tmp_path / "absent")], "No such file", out, capsys)
    short = tmp_path / "short.safetensors"
    short.write_bytes(new.read_bytes()[:-8])
    fails(["diff", str(old), str(short)], "lies outside of the file", out, capsys)
    out.write_bytes(b"as it was")
    fails(["apply", str(new), str(patch)], "the patch starts at", out, capsys)
    assert out.read_bytes() == b"as it was"


def test_a_header_that_lies_is_a_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "f.safetensors", tmp_path / "out"
    for header in (b"[]", b"{", b'{"a": 1}', b'{"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 1]}}', b"\xff"):
        file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
        fails(["diff", str(file), str(file)], str(file), out, capsys)
    file.write_bytes(np.array([2**62], np.uint64).tobytes() + b"{}")
    fails(["diff", str(file), str(file)], "announces a header", out, capsys)
