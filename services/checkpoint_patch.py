"""`headrace patch`: make, apply and read weight patches between any two checkpoint files (safetensors), without a run.

A file that is written stands under its name only when it is whole and verified: it is written aside and renamed.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from param_sync.patch import codec
from param_sync.patch.bits import DTYPES, MAX_DIMENSIONS, Bits
from param_sync.patch.container import Header, decode_header
from param_sync.patch.decoding import check_entry, frames_of
from param_sync.patch.snapshot import Snapshot

MAX_HEADER_BYTES = 100 * 2**20
_SAFETENSORS = {name.upper(): name for name in DTYPES}
"""safetensors' dtype names to ours."""
_FORMS = ("absolute", "xor", "sparse xor", "sparse steps", "ranked steps")


class CheckpointError(ValueError):
    """A checkpoint file that cannot be read or written; the text names it and says why."""


def diff(old: Path, new: Path, out: Path, *, level: int, workers: int) -> dict[str, Any]:
    """Write the patch from one checkpoint to another to `out`, and report on it. Raises `CheckpointError`, `PatchError`."""
    before = Snapshot.of(_read(old)[0], version=0, incarnation=0)
    after = Snapshot.of(_read(new)[0], version=1, incarnation=0)
    made = codec.encode(before, after, level=level, workers=workers)
    with _written(out) as file:
        file.writelines(made.parts)
    return describe(out)


def apply(old: Path, patch: Path, out: Path, *, workers: int) -> dict[str, Any]:
    """Write the checkpoint that the patch makes of `old`, verified, with the metadata of `old`. Raises as `diff` does."""
    file = _mapped(patch)
    header, _ = decode_header(file)
    state, metadata = _read(old)
    base = None
    if not header.is_anchor:
        base = Snapshot.of(state, version=header.base_version or 0, incarnation=header.incarnation)
    made = codec.apply(base, file, workers=workers)
    _write(out, made, metadata)
    return {"out": str(out), "digest": made.digest, "tensors": len(made.tensors), "changed": len(header.tensors)}


def describe(patch: Path) -> dict[str, Any]:
    """What a patch says about itself, every checksum verified. Needs no base. Raises `CheckpointError`, `PatchError`."""
    file = _mapped(patch)
    header, at = decode_header(file)
    tensors = []
    for entry in header.tensors:
        check_entry(entry, codec.DEFAULT_LIMITS.tensor_bytes)
        frames = [parsed for parsed, _ in frames_of(entry, file[at : at + entry.body_bytes], at)]
        at += entry.body_bytes
        tensors.append(
            {
                "name": entry.name,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "elements": math.prod(entry.shape),
                "changed": sum(parsed.changed for parsed in frames),
                "bytes": entry.body_bytes,
                "forms": sorted({_FORMS[parsed.form] for parsed in frames}),
                "base_digest": entry.base_digest.hex(),
                "digest": entry.digest.hex(),
            }
        )
    return {**_summary(header, file), "tensors": tensors, "removed": list(header.removed)}


def _summary(header: Header, file: memoryview) -> dict[str, Any]:
    return {
        "kind": "anchor" if header.is_anchor else "patch",
        "format": int.from_bytes(file[8:10], "little"),
        "level": int.from_bytes(file[10:12], "little"),
        "bytes": len(file),
        "incarnation": header.incarnation,
        "version": header.version,
        "digest": header.digest,
        "base_version": header.base_version,
        "base_digest": header.base_digest,
    }


def lines(report: dict[str, Any]) -> Iterator[str]:
    """A description for people: the whole, then a line for each tensor."""
    changed, listed = sum(t["changed"] for t in report["tensors"]), len(report["tensors"])
    bits = f", {8 * report['bytes'] / changed:.2f} bits each" if changed else ""
    yield f"{report['kind']}, format {report['format']}, level {report['level']}, {report['bytes']} bytes"
    if report["base_digest"]:
        yield f"from    {report['base_digest']}"
    yield f"to      {report['digest']}"
    yield f"{changed} elements of {listed} tensors{bits}; {len(report['removed'])} tensors removed"
    for t in report["tensors"]:
        share = f"{t['changed'] / t['elements']:8.3%}" if t["elements"] else "       -"
        yield f"{share} {t['bytes']:>12} bytes  {', '.join(t['forms']) or 'empty'}  {t['dtype']}{t['shape']}  {t['name']}"
    for name in report["removed"]:
        yield f" removed  {name}"


def _mapped(path: Path) -> memoryview:
    """The file's bytes, without reading them. Raises `CheckpointError`."""
    try:
        if not path.stat().st_size:
            raise CheckpointError(f"{path}: the file is empty")
        return np.memmap(path, np.uint8, "r").data
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error


def _read(path: Path) -> tuple[dict[str, Bits], dict[str, str]]:
    """The tensors, as views of the file, and its metadata. Raises `CheckpointError`."""
    data = _mapped(path)
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(MAX_HEADER_BYTES, len(data) - 8):
        raise CheckpointError(f"{path}: not a safetensors file, or cut off in its header")
    try:
        header = json.loads(bytes(data[8 : 8 + size]))
        metadata = header.pop("__metadata__", {})
        state = {name: _tensor(data[8 + size :], entry) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file: {error!r}") from error
    return state, {str(key): str(value) for key, value in metadata.items()}


def _tensor(data: memoryview, entry: dict[str, Any]) -> Bits:
    start, end = entry["data_offsets"]
    if not 0 <= start <= end <= len(data) or len(entry["shape"]) > MAX_DIMENSIONS:
        raise ValueError(f"a tensor of {entry['shape']} at {start} to {end} does not fit into {len(data)} bytes")
    return Bits(_SAFETENSORS[entry["dtype"]], tuple(entry["shape"]), np.frombuffer(data[start:end], np.uint8))


def _write(path: Path, snapshot: Snapshot, metadata: dict[str, str]) -> None:
    """A safetensors file: tensors by falling width, so that each is aligned, then by name."""
    names = {ours: theirs for theirs, ours in _SAFETENSORS.items()}
    order = sorted(snapshot.tensors.items(), key=lambda item: (-DTYPES[item[1].dtype][0], item[0]))
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, bits in order:
        header[name] = {
            "dtype": names[bits.dtype],
            "shape": list(bits.shape),
            "data_offsets": [at, at + bits.data.nbytes],
        }
        at += bits.data.nbytes
    coded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    coded += b" " * (-len(coded) % 8)
    with _written(path) as file:
        file.write(len(coded).to_bytes(8, "little") + coded)
        file.writelines(_chunks(bits for _, bits in order))


def _chunks(tensors: Iterable[Bits]) -> Iterator[memoryview]:
    for bits in tensors:
        if bits.data.size:
            yield bits.data.view(np.uint8).data


@contextmanager
def _written(path: Path) -> Iterator[BinaryIO]:
    """A file beside `path` that takes its name when the block ends, and is removed if it raises."""
    try:
        handle, aside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, 0o666 & ~_umask())
        os.replace(aside, path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    finally:
        Path(aside).unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
