"""Loops over whole segments, sixty-four elements at a time: which differ, which class each is of, where the n-th of a class is.

numba has no vector types, so a few operations are given to LLVM directly, which picks the instructions of the processor that it
compiles for. A mask has bit `j` for element `j` of the sixty-four. Imported only when a tensor is large enough to be worth it.
Nothing here checks its arrays' sizes: callers do.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import llvmlite.ir as ir
import numba
import numpy as np
from numba.core import cgutils, types

from param_sync.patch.compiled import IN16, IN32, IN64, OUT16, OUT32, OUT64, compiled, inlined, instruction

LANES = 64
NEVER = 1 << 40
_I64 = ir.IntType(64)


def _loaded(context: Any, builder: Any, kind: Any, array: Any, at: Any, bits: int) -> Any:
    """The 64 lanes from element `at` of an array, as an LLVM vector."""
    data = context.make_array(kind)(context, builder, array).data
    vector = ir.VectorType(ir.IntType(bits), LANES)
    start = builder.bitcast(builder.gep(data, [at]), ir.PointerType(vector))
    return builder.load(start, align=bits // 8)


def _splat(builder: Any, value: Any, bits: int) -> Any:
    """One number in all 64 lanes."""
    vector = ir.VectorType(ir.IntType(bits), LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(
        one, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    )


@instruction
def differ(typing_context: Any, old: Any, new: Any, at: Any) -> Any:
    """Mask of the 16-bit words `old[at : at + 64]` that differ from `new`'s."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b = (
            _loaded(context, builder, kind, array, arguments[2], 16)
            for kind, array in zip(signature.args, arguments[:2], strict=False)
        )
        return builder.bitcast(builder.icmp_unsigned("!=", a, b), _I64)

    return types.uint64(old, new, types.int64), generate


@instruction
def classify(typing_context: Any, words: Any, at: Any, shift: Any, top: Any, last: Any, classes: Any, to: Any) -> Any:
    """Set `classes[to : to + 64]` to `min(last, max(0, top - e))` for `e = (word & 0x7fff) >> shift`, from word `at` on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes = _loaded(context, builder, signature.args[0], arguments[0], arguments[1], 16)
        narrow = [builder.trunc(arguments[i], ir.IntType(16)) for i in (2, 3, 4)]
        by, highest, lowest = (_splat(builder, value, 16) for value in narrow)
        magnitude = builder.and_(lanes, ir.Constant(lanes.type, [0x7FFF] * LANES))
        exponent = builder.lshr(magnitude, by)
        above = builder.icmp_unsigned(">", exponent, highest)
        zero = ir.Constant(lanes.type, [0] * LANES)
        down = builder.select(above, zero, builder.sub(highest, exponent))
        found = builder.select(builder.icmp_unsigned(">", down, lowest), lowest, down)
        packed = builder.trunc(found, ir.VectorType(ir.IntType(8), LANES))
        data = context.make_array(signature.args[5])(context, builder, arguments[5]).data
        start = builder.gep(data, [arguments[6]])
        builder.store(packed, builder.bitcast(start, ir.PointerType(packed.type)), align=1)
        return context.get_dummy_value()

    return types.none(words, types.int64, types.int64, types.int64, types.int64, classes, types.int64), generate


@instruction
def equal(typing_context: Any, classes: Any, at: Any, one: Any) -> Any:
    """Mask of the bytes of `classes[at : at + 64]` that are `one`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes = _loaded(context, builder, signature.args[0], arguments[0], arguments[1], 8)
        wanted = _splat(builder, builder.trunc(arguments[2], ir.IntType(8)), 8)
        return builder.bitcast(builder.icmp_unsigned("==", lanes, wanted), _I64)

    return types.uint64(classes, types.int64, types.int64), generate


@instruction
def ones(typing_context: Any, mask: Any) -> Any:
    """How many bits of a mask are set."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


@instruction
def lowest(typing_context: Any, mask: Any) -> Any:
    """The number of a mask's lowest set bit; 64 for an empty mask."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], cgutils.false_bit)

    return types.int64(types.uint64), generate


@instruction
def _deposit(typing_context: Any, bit: Any, mask: Any) -> Any:
    """The bits of `bit` spread over the set bits of `mask` (x86 `pdep`)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_I64, (_I64, _I64))
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.bmi.pdep.64"), arguments)

    return types.uint64(types.uint64, types.uint64), generate


def _has_deposit() -> bool:
    """Whether the code is compiled for a processor with `pdep`; not where the target was chosen by hand."""
    chosen = numba.config.CPU_NAME or numba.config.CPU_FEATURES
    return not chosen and bool(llvmlite.binding.get_host_cpu_features().get("bmi2"))


@inlined
def _nth_by_deposit(mask: Any, n: Any) -> Any:
    return lowest(_deposit(np.uint64(1) << np.uint64(n), mask))


@inlined
def _nth_by_halves(mask: Any, n: Any) -> Any:
    at = numba.int64(0)
    for half in (32, 16, 8):
        below = ones(mask & ((numba.uint64(1) << numba.uint64(half)) - numba.uint64(1)))
        skip = numba.int64(n >= below)
        n -= below * skip
        mask >>= numba.uint64(half * skip)
        at += half * skip
    for _ in range(n):
        mask &= mask - numba.uint64(1)
    return at + lowest(mask)


nth = _nth_by_deposit if _has_deposit() else _nth_by_halves
"""The number of the set bit of a mask (first argument) that has so many (second) set bits below it; the mask has more."""


@compiled(IN16, IN16, OUT32, OUT16, OUT16)
def scan(old: Any, new: Any, positions: Any, olds: Any, news: Any) -> int:
    """Write each changed position with its old and its new word; return how many, or -1 when there is no room for all."""
    k, room, whole = 0, positions.size, old.size // 64 * 64
    for i in range(0, whole, 64):
        mask = differ(old, new, i)
        if mask:
            if k + ones(mask) > room:
                return -1
            while mask:
                j = i + lowest(mask)
                positions[k], olds[k], news[k] = j, old[j], new[j]
                k += 1
                mask &= mask - np.uint64(1)
    for j in range(whole, old.size):
        if old[j] != new[j]:
            if k == room:
                return -1
            positions[k], olds[k], news[k] = j, old[j], new[j]
            k += 1
    return k


@compiled(IN16, numba.i8, OUT64)
def sample_exponents(words: Any, shift: int, counts: Any) -> None:
    """Add to `counts` [256] how often each exponent occurs among one element in 128, every one of small segments."""
    stride = 8192 if words.size >= 1 << 16 else 64
    for i in range(0, words.size, stride):
        for j in range(i, min(i + 64, words.size)):
            counts[(words[j] & 0x7FFF) >> shift] += 1


@compiled(IN16, IN32, numba.i8, numba.i8, numba.i8, OUT64, OUT32)
def rank(old: Any, positions: Any, shift: int, top: int, classes: int, slots: Any, gaps: Any) -> None:
    """For each change, how many unchanged elements of its class lie between it and its class's previous one.

    `slots` [classes] says where in `gaps` each class begins, and is moved on: `gaps` [k] is grouped by class.
    """
    of, padded = np.empty(256, np.uint8), np.zeros(256, np.uint16)
    seen, last = np.zeros(classes, np.int64), np.full(classes, -1, np.int64)
    j: Any = 0
    k, whole = positions.size, old.size // 256 * 256
    for i in range(0, old.size, 256):
        if j == k:
            break
        if i < whole:
            for q in range(0, 256, 64):
                classify(old, i + q, shift, top, classes - 1, of, q)
        else:
            padded[: old.size - i] = old[i:]
            for q in range(0, 256, 64):
                classify(padded, q, shift, top, classes - 1, of, q)
        while j < k and np.int64(positions[j]) < i + 256:
            place = np.int64(positions[j]) - i
            mine = np.int64(of[place])
            at: Any = seen[mine]
            for q in range(0, 256, 64):
                low = (np.uint64(1) << np.uint64((place - q) & 63)) - np.uint64(1)
                at += ones(equal(of, q, mine) & (low if place - q < 64 else ~np.uint64(0))) * np.int64(place >= q)
            gaps[slots[mine]] = at - last[mine] - 1
            last[mine] = at
            slots[mine] += 1
            j += 1
        for c in range(classes):
            seen[c] += ones(equal(of, 0, c)) + ones(equal(of, 64, c)) + ones(equal(of, 128, c)) + ones(equal(of, 192, c))


@compiled(IN16, numba.i8, numba.i8, IN64, IN32, IN16, OUT32, OUT16)
def find(old: Any, shift: int, top: int, counts: Any, gaps: Any, steps: Any, positions: Any, values: Any) -> int:
    """The inverse of `rank`: fill positions [k] and the new words [k]; return how many fit into the segment.

    `counts` [classes] changes of each class; `gaps` and `steps` [k] grouped by class. Positions come out in order of their
    blocks of 256 elements, and within a block in order of class and then of position (`in_order` sorts them).
    """
    classes = counts.size
    of, padded = np.empty(256, np.uint8), np.zeros(256, np.uint16)
    next_, end, wait = np.empty(classes, np.int64), np.empty(classes, np.int64), np.full(classes, NEVER, np.int64)
    mine, before = np.empty(4, np.uint64), np.empty(4, np.int64)
    at: Any = np.int64(0)
    for c in range(classes):
        next_[c], end[c] = at, at + counts[c]
        if counts[c]:
            wait[c] = gaps[at]
        at = end[c]
    k, whole = 0, old.size // 256 * 256
    for i in range(0, old.size, 256):
        if i < whole:
            for q in range(0, 256, 64):
                classify(old, i + q, shift, top, classes - 1, of, q)
        else:
            padded[: old.size - i] = old[i:]
            for q in range(0, 256, 64):
                classify(padded, q, shift, top, classes - 1, of, q)
            of[old.size - i :] = 255  # of no class
        due: Any = np.uint64(0)  # the classes with a change among these elements; one test for all, since each is rare
        for c in range(classes):
            wait[c] -= ones(equal(of, 0, c)) + ones(equal(of, 64, c)) + ones(equal(of, 128, c)) + ones(equal(of, 192, c))
            due |= (np.uint64(wait[c]) >> np.uint64(63)) << np.uint64(c)
        while due:
            c = lowest(due)
            here: Any = np.int64(0)
            for q in range(4):
                mine[q], before[q] = equal(of, 64 * q, c), here
                here += ones(mine[q])
            n = wait[c] + here
            quarter = np.int64(n >= before[1]) + np.int64(n >= before[2]) + np.int64(n >= before[3])
            j = i + 64 * quarter + nth(mine[quarter], n - before[quarter])
            a, step = np.int32(old[j]), np.int32(steps[next_[c]])
            a ^= 0x8000 | (-(a >> 15) & 0x7FFF)
            negative, size = step & 1, (step >> 1) + 1
            b = (a + ((size ^ -negative) + negative)) & 0xFFFF
            positions[k], values[k] = j, b ^ (0x8000 | (((b >> 15) - 1) & 0x7FFF))
            k += 1
            next_[c] += 1
            wait[c] += np.int64(gaps[next_[c]]) + 1 if next_[c] < end[c] else NEVER
            due &= due - np.uint64(wait[c] >= 0)
    return k


@compiled(OUT32, OUT16)
def in_order(positions: Any, values: Any) -> None:
    """Sort what `find` wrote by position, in place: no element is far from its place."""
    for j in range(1, positions.size):
        position, value, to = positions[j], values[j], j
        while to > 0 and positions[to - 1] > position:
            positions[to], values[to] = positions[to - 1], values[to - 1]
            to -= 1
        positions[to], values[to] = position, value
