"""The weights on their way out of the ranks: each encodes what it owns against its own shadow, and nobody gathers the model.

A tensor that one rank owns is encoded there. One that ZeRO cut is encoded in parts, each by its owner, and the parts, which are
patch bytes and no weights, are put together at the tensor's home, one of the owners. So a rank keeps the previous bits of what
it owns and of the tensors that it is home to, about twice its share of the model at most. Rank 0 gets the finished frames.

Weights themselves travel once, when training begins or a checkpoint is read: the pieces of cut tensors to their homes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import torch

from param_sync.patch import frame
from param_sync.patch.bits import Bits, Words, count_of
from param_sync.patch.codec import level_for
from param_sync.patch.container import Encoded, assemble
from param_sync.patch.digest import Entry, state_digest, tensor_digest
from param_sync.patch.parts import Part, encode_part, settle
from param_sync.patch.tensor import TensorEntry, TensorPatch, encode_full, encode_tensor
from trainer.slices import Slice, homes

_BUCKET_BYTES = 256 * 2**20
_DTYPE = "bf16"
Exchange = Callable[[Sequence[bytes]], list[bytes]]
"""Send the n-th to rank n, get what each rank sent here (`trainer.ranks.exchange`)."""


@dataclass(frozen=True, slots=True)
class Name:
    """What one set of weights is called."""

    version: int
    incarnation: int
    digest: str


class Shards(Protocol):
    """A model whose tensors are spread over ranks (`trainer.deepspeed_engine.ShardedModel`)."""

    rank: int
    ranks: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor, by name."""

    def slices(self) -> list[Slice]:
        """What each rank owns, of all ranks, each element once."""

    def words(self, part: Slice) -> torch.Tensor:
        """The bfloat16 weights [elements] of a slice of this rank, in memory of the caller's own."""


class _Sent(msgspec.Struct, frozen=True, array_like=True):
    """A finished tensor on its way to rank 0."""

    entry: TensorEntry
    body: bytes


class WeightShards:
    """One rank's shadow of the published bits. Every rank must call every method, in the same order.

    `level` of the patches; 0: by the size of the model.
    """

    def __init__(self, model: Shards, exchange: Exchange, *, level: int) -> None:
        self._model, self._exchange = model, exchange
        self._shapes, self._slices = model.shapes(), model.slices()
        self._level = level_for(level, sum(map(count_of, self._shapes.values())))
        self._homes = homes(self._slices, model.ranks)
        self._own = [part for part in self._slices if part.rank == model.rank]
        self._held: dict[str, Bits] = {}  # tensors that this rank is home to, whole
        self._pieces: dict[str, Words] = {}  # this rank's slices of cut tensors
        self._entries: dict[str, Entry] = {}  # of every tensor

    def read(self) -> str:
        """Take the weights as they stand for published; gives their state digest."""
        self._held, self._pieces = {}, {}
        for names in self._buckets():
            self._read(names)
        return self._agreed({name: (_DTYPE, bits.shape, tensor_digest(bits.data)) for name, bits in self._held.items()})

    def step(self, base: Name, version: int) -> tuple[Name, Encoded | None]:
        """Take the weights as they stand for version `version`; gives its name and, on rank 0, the patch from `base` to it.

        `base` names what was taken before. Nothing but patch bytes leaves a rank.
        """
        patches: list[TensorPatch] = []
        entries: dict[str, Entry] = {}
        outgoing: list[list[Part]] = [[] for _ in range(self._model.ranks)]
        for part in self._own:
            new, shape = self._words(part), self._shapes[part.name]
            if self._whole(part):
                entry, patch = self._advance(part.name, Bits(_DTYPE, shape, new))
                entries[part.name] = entry
                patches += [] if patch is None else [patch]
            else:
                old = self._pieces[part.name]
                made = encode_part(part.name, _DTYPE, shape, old, new, start=part.start, level=self._level)
                outgoing[self._homes[part.name]].append(made)
                self._pieces[part.name] = new
        arrived = self._exchange([msgspec.msgpack.encode(parts) for parts in outgoing])
        cut: dict[str, list[Part]] = {}
        for message in arrived:
            for piece in msgspec.msgpack.decode(message, type=list[Part]):
                cut.setdefault(piece.name, []).append(piece)
        for tensor, pieces in cut.items():
            settled = settle(self._held[tensor], self._entries[tensor][2], pieces, level=self._level)
            assert settled.words is not None
            self._held[tensor] = Bits(_DTYPE, self._shapes[tensor], settled.words)
            entries[tensor] = settled.entry
            patches += [] if settled.patch is None else [settled.patch]
        made_by_all = self._collected(patches)
        name = Name(version, base.incarnation, self._agreed(entries))
        if made_by_all is None:
            return name, None
        return name, assemble(
            made_by_all,
            version=version,
            incarnation=base.incarnation,
            digest=name.digest,
            base_version=base.version,
            base_digest=base.digest,
        )

    def anchor(self, name: Name) -> Encoded | None:
        """The full snapshot of the weights that were taken last, which are called `name`; on rank 0."""
        parts: list[TensorPatch] = []
        for names in self._buckets():
            held = [(tensor, bits) for tensor, bits in self._held.items() if tensor in names]
            parts += self._collected([encode_full(n, bits, self._entries[n][2]) for n, bits in held]) or []
        if self._model.rank != 0:
            return None
        return assemble(parts, version=name.version, incarnation=name.incarnation, digest=name.digest)

    def _advance(self, name: str, new: Bits) -> tuple[Entry, TensorPatch | None]:
        digest = tensor_digest(new.data)
        before = self._entries[name][2]
        patch = encode_tensor(name, self._held[name], new, old_digest=before, digest=digest, level=self._level)
        self._held[name] = new
        return (_DTYPE, new.shape, digest), patch

    def _words(self, part: Slice) -> Words:
        words: Words = self._model.words(part).view(torch.uint16).numpy()
        return words

    def _whole(self, part: Slice) -> bool:
        return part.elements == count_of(self._shapes[part.name])

    def _buckets(self) -> Iterator[set[str]]:
        """All tensors' names, in portions of bounded size; the same on every rank."""
        names, size = set[str](), 0
        for part in self._slices:
            if part.name not in names and size > _BUCKET_BYTES:
                yield names
                names, size = set(), 0
            names.add(part.name)
            size += 2 * part.elements
        yield names

    def _read(self, names: set[str]) -> None:
        """Read this rank's slices of these tensors, and bring the pieces of cut ones to their homes."""
        outgoing: list[list[bytes]] = [[] for _ in range(self._model.ranks)]
        for part in self._own:
            if part.name not in names:
                continue
            words = self._words(part)
            if self._whole(part):
                self._held[part.name] = Bits(_DTYPE, self._shapes[part.name], words)
            else:
                self._pieces[part.name] = words
                outgoing[self._homes[part.name]].append(words.tobytes())
        arrived = self._exchange([b"".join(pieces) for pieces in outgoing])
        ends = [0] * self._model.ranks
        for part in self._slices:  # each rank sent its pieces in this order
            if part.name not in names or self._whole(part) or self._homes[part.name] != self._model.rank:
                continue
            shape, at = self._shapes[part.name], ends[part.rank]
            ends[part.rank] = at + 2 * part.elements
            if part.name not in self._held:
                self._held[part.name] = Bits(_DTYPE, shape, np.empty(count_of(shape), np.uint16))
            piece = np.frombuffer(arrived[part.rank], "<u2", part.elements, at)
            self._held[part.name].data[part.start : part.start + part.elements] = piece

    def _agreed(self, entries: dict[str, Entry]) -> str:
        """The state digest out of every rank's entries of the tensors that it is home to."""
        for message in self._exchange([msgspec.msgpack.encode(entries)] * self._model.ranks):
            self._entries.update(msgspec.msgpack.decode(message, type=dict[str, Entry]))
        return state_digest(self._entries)

    def _collected(self, patches: list[TensorPatch]) -> list[TensorPatch] | None:
        """Every rank's finished tensors, on rank 0; elsewhere None."""
        message = msgspec.msgpack.encode([_Sent(patch.entry, patch.body) for patch in patches])
        arrived = self._exchange([message, *[b""] * (self._model.ranks - 1)])
        if self._model.rank != 0:
            return None
        sent = [each for data in arrived for each in msgspec.msgpack.decode(data, type=list[_Sent])]
        return [TensorPatch(each.entry, each.body, frame.level_of(each.body)) for each in sent]
