"""The import graph: layers point one way, heavy packages have one door each, numpy-only cores stay free of torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("schemas", "services", "admission", "param_sync", "rollouter", "trainer")
ROLES = ("admission", "param_sync", "rollouter", "trainer")
LEAF = "param_sync.patch"  # the patch codec: numpy and nothing of ours; engines and trainer both need it
DOORS = {
    "vllm": {"services/engine/vllm_engine.py", "services/engine/vllm_plugin.py"},
    "deepspeed": {"trainer/deepspeed_engine.py"},
    "transformers": {"services/engine/hf_models.py"},
}
WITHOUT_TORCH = (
    "schemas.codec",
    "services.bus",
    "services.consume",
    "services.feed",
    "services.runtime",
    "services.suites",
    "admission.assembly",
    "admission.bank_service",
    "admission.conservation",
    "admission.gates",
    "admission.joining",
    "admission.replay",
    "admission.service",
    "param_sync.patch.codec",
    "rollouter.curriculum",
    "rollouter.evaluation",
    "rollouter.manifest",
    "rollouter.sampler",
    "rollouter.sampler_service",
    "trainer.packing",
)


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of ours, by dotted name."""
    for layer in LAYERS:
        for path in sorted((ROOT / layer).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    """Everything that a file imports, anywhere in it; type-checking blocks and functions included."""
    package = path.relative_to(ROOT).parent.parts
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *((node.module,) if node.module else ())))
            found += [f"{module}.{alias.name}" for alias in node.names]
    return tuple(found)


@cache
def late_imports_of(path: Path) -> tuple[str, ...]:
    """Modules that a file imports by their name as text, when asked to."""
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    late = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "import_module"]
    return tuple(
        arg.value for call in late for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
    )


def allowed(layer: str, imported: str) -> bool:
    """May a module of `layer` import `imported`?"""
    target = imported.split(".", 1)[0]
    if target not in LAYERS or target == layer or imported == LEAF or imported.startswith(f"{LEAF}."):
        return True
    if layer == "schemas":
        return False
    if layer == "services":
        return target == "schemas"
    return target not in ROLES


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_one_way(layer: str) -> None:
    """schemas ← services ← {admission, param_sync, rollouter, trainer}, which meet only on the bus."""
    wrong = [
        f"{name} imports {imported}"
        for name, path in modules()
        if name.split(".", 1)[0] == layer and not is_leaf(name)
        for imported in imports_of(path)
        if not allowed(layer, imported)
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_composition_root_names_upper_modules_as_text() -> None:
    """The command line and the registry start services of every layer without importing them; nobody else reaches around."""
    wrong = [
        f"{name} imports {imported}"
        for name, path in modules()
        if name not in ("services.cli", "services.registry")
        for imported in late_imports_of(path)
        if not allowed(name.split(".", 1)[0], imported)
    ]
    assert not wrong, "\n".join(wrong)


def is_leaf(name: str) -> bool:
    return name == LEAF or name.startswith(f"{LEAF}.")


def test_the_leaf_imports_nothing_of_ours() -> None:
    """So that importing it from anywhere brings no layer along."""
    wrong = [
        f"{name} imports {imported}"
        for name, path in modules()
        if is_leaf(name)
        for imported in imports_of(path)
        if imported.split(".", 1)[0] in LAYERS and not is_leaf(imported)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", DOORS)
def test_a_heavy_package_has_one_door(package: str) -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for _, path in modules()
        if any(imported.split(".", 1)[0] == package for imported in (*imports_of(path), *late_imports_of(path)))
    }
    assert found <= DOORS[package], f"{package} is imported outside of its door by {sorted(found - DOORS[package])}"


def test_cores_import_without_torch() -> None:
    """In a fresh process: none of these brings torch or a heavy package along, not even through another module."""
    code = (
        "import importlib, sys\n"
        f"for name in {WITHOUT_TORCH!r}:\n"
        "    importlib.import_module(name)\n"
        f"    found = {{'torch', *{sorted(DOORS)!r}}} & set(sys.modules)\n"
        "    assert not found, f'{name} brings {sorted(found)} along'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-1000:]


def test_nobody_else_spells_a_subject() -> None:
    """Subjects come out of the table; a literal `hr.` prefix anywhere else would be a second spelling."""
    wrong = []
    for name, path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and node.value.startswith("hr.") and name != "schemas.table":
                wrong.append(f"{name}: {node.value!r}")
    assert not wrong, "\n".join(wrong)


def test_no_file_is_named_for_nothing() -> None:
    vague = {"utils", "util", "helpers", "common", "manager", "base", "misc"}
    assert not [name for name, _ in modules() if name.rsplit(".", 1)[-1] in vague]
