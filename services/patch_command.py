"""`headrace patch`: the sparse patch between any two safetensors checkpoints, its application, and what a file holds.

No run and no server is needed. A checkpoint that a patch is made from counts as version 0, its successor as version 1; what
counts as the right base is the digest of all the weights.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from param_sync.patch import codec, frame
from param_sync.patch.bits import DTYPES, Bits
from param_sync.patch.container import Header, decode_header, level_of
from param_sync.patch.errors import PatchError
from param_sync.patch.snapshot import Snapshot

# The dtype names of safetensors and ours.
_NAMES = {name.upper(): name for name in DTYPES} | {"F8_E4M3": "f8_e4m3", "F8_E5M2": "f8_e5m2"}
_OURS = {ours: theirs for theirs, ours in _NAMES.items()}
_MAX_HEADER_BYTES = 100 * 2**20
FORMS = ("absolute", "xor", "sparse xor", "steps", "gaps", "ranks")


class PatchCommandError(ValueError):
    """A file that cannot be read, written or used; the text says which and why."""


def run(options: argparse.Namespace) -> int:
    """Carry out one action and print its report. Raises `PatchCommandError`; then nothing was written."""
    if options.action != "inspect":
        options.workers = options.workers or os.cpu_count() or 1
    action = {"diff": _diff, "apply": _apply, "inspect": _inspect}[options.action]
    try:
        report = action(options)
    except PatchError as error:
        raise PatchCommandError(f"patch {options.action}: {error}") from error
    except OSError as error:
        raise PatchCommandError(f"patch {options.action}: {error.filename or ''}: {error.strerror or error}") from error
    if options.json:
        json.dump(report, sys.stdout, indent=2)
        print()
    else:
        print("\n".join(_lines(report)))
    return 0


def _diff(options: argparse.Namespace) -> dict[str, Any]:
    before, _ = read_checkpoint(options.old)
    after, _ = read_checkpoint(options.new)
    old = Snapshot.of(before, version=0, incarnation=0)
    new = Snapshot.of(after, version=1, incarnation=0)
    patch = codec.encode(old, new, workers=options.workers, level=options.level)
    with written_whole(options.out) as file:
        for part in patch.parts:
            file.write(part)
    raw = sum(bits.data.nbytes for bits in after.values())
    sizes = {"bytes": patch.nbytes, "checkpoint_bytes": raw, "ratio": patch.nbytes / raw if raw else None}
    return {"patch": str(options.out), **_summary(patch.header, options.level), **sizes}


def _apply(options: argparse.Namespace) -> dict[str, Any]:
    before, metadata = read_checkpoint(options.old)
    data = np.memmap(options.patch, np.uint8, "r").data if options.patch.stat().st_size else memoryview(b"")
    header, _ = decode_header(data)
    version = header.base_version or 0
    old = Snapshot.of(before, version=version, incarnation=header.incarnation)
    made = codec.apply(old, data, workers=options.workers)
    write_checkpoint(options.out, made, metadata)
    return {"checkpoint": str(options.out), **_summary(header, level_of(data))}


def _inspect(options: argparse.Namespace) -> dict[str, Any]:
    data = options.patch.read_bytes()
    header, at = decode_header(data)
    level, tensors = level_of(memoryview(data)), []
    for entry in header.tensors:
        forms: dict[str, int] = {}
        end, changed = at + entry.body_bytes, 0
        while at < end:
            try:
                found = frame.parse(memoryview(data)[at:end], level)
            except PatchError as error:
                raise type(error)(error.reason, tensor=entry.name, offset=at) from error
            forms[FORMS[found.form]] = forms.get(FORMS[found.form], 0) + 1
            changed += found.changed
            at += frame.frame_bytes(memoryview(data)[at:])
        row = {"name": entry.name, "dtype": entry.dtype, "shape": list(entry.shape), "bytes": entry.body_bytes}
        tensors.append(row | {"changed": changed, "forms": forms, "whole": not entry.base_digest})
    return {"file": str(options.patch), "bytes": len(data), **_summary(header, level), "tensors": tensors}


def _summary(header: Header, level: int) -> dict[str, Any]:
    return {
        "level": level,
        "kind": "anchor" if header.is_anchor else "patch",
        "version": header.version,
        "incarnation": header.incarnation,
        "digest": header.digest,
        "base_version": header.base_version,
        "base_digest": header.base_digest,
        "tensors_changed": len(header.tensors),
        "removed": list(header.removed),
    }


def _lines(report: dict[str, Any]) -> Iterator[str]:
    for key, value in report.items():
        if key == "tensors":
            for row in value:
                forms = ", ".join(f"{n} {form}" for form, n in row["forms"].items()) or "no frames"
                yield f"  {row['name']}  {row['dtype']}{row['shape']}  {row['changed']} changed  {row['bytes']} bytes  {forms}"
        elif value not in (None, []):
            yield f"{key.replace('_', ' ')}: {f'{value:.4f}' if isinstance(value, float) else value}"


def read_checkpoint(path: Path) -> tuple[dict[str, Bits], dict[str, str]]:
    """(tensors, metadata) of a safetensors file, mapped and not read. Raises `PatchCommandError` when it is none."""
    size = path.stat().st_size
    if size < 8:
        raise PatchCommandError(f"{path}: not a safetensors file: it has {size} bytes")
    data = np.memmap(path, np.uint8, "r")
    header_bytes = int.from_bytes(data[:8].tobytes(), "little")
    if header_bytes > min(size - 8, _MAX_HEADER_BYTES):
        raise PatchCommandError(f"{path}: not a safetensors file: it announces a header of {header_bytes} bytes")
    body, tensors = data[8 + header_bytes :], {}
    try:
        header = json.loads(data[8 : 8 + header_bytes].tobytes())
        metadata = header.pop("__metadata__", None) or {}
        for name, place in header.items():
            begin, end = place["data_offsets"]
            if not 0 <= begin <= end <= body.size:
                raise PatchCommandError(f"{path}: tensor {name!r} lies outside of the file, which may be cut")
            if place["dtype"] not in _NAMES:
                raise PatchCommandError(f"{path}: tensor {name!r} has dtype {place['dtype']}, which has no place here")
            tensors[name] = Bits(_NAMES[place["dtype"]], tuple(place["shape"]), body[begin:end])
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PatchCommandError(f"{path}: not a safetensors file: its header is malformed") from error
    except PatchError as error:
        raise PatchCommandError(f"{path}: {error}") from error
    return tensors, {str(key): str(value) for key, value in metadata.items()}


def write_checkpoint(path: Path, weights: Snapshot, metadata: dict[str, str]) -> None:
    """A safetensors file of the weights, in order of name, without a copy of them together."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    # Wide words first, so that every tensor lies at a multiple of its word.
    order = sorted(weights.tensors.items(), key=lambda item: (-item[1].data.itemsize, item[0]))
    at = 0
    for name, bits in order:
        place = [at, at + bits.data.nbytes]
        header[name] = {"dtype": _OURS[bits.dtype], "shape": list(bits.shape), "data_offsets": place}
        at += bits.data.nbytes
    coded = json.dumps(header, separators=(",", ":")).encode()
    coded += b" " * (-len(coded) % 8)
    with written_whole(path) as file:
        file.write(len(coded).to_bytes(8, "little") + coded)
        for _, bits in order:
            file.write(bits.data.data if bits.data.size else b"")


@contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """A file beside `path` that takes its place once the block has ended well and the bytes are on disk; else it goes."""
    descriptor, aside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, 0o666 & ~_umask())
        os.replace(aside, path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
