"""Instructions that Python cannot say, for the compiled loops: 64 words compared at once, and bits counted and found.

Each becomes one or two machine instructions where there are wide vectors, and correct plain code where there are none. The
kernels' cache does not notice a change of this file: change theirs as well.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES, CLASSES = 64, 8
_WORD, _MASK = ir.IntType(16), ir.IntType(64)
_VECTOR, _MASKS = ir.VectorType(_WORD, LANES), ir.VectorType(_MASK, CLASSES)


def _load(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.load(builder.bitcast(builder.gep(data, [at]), _VECTOR.as_pointer()), align=2)


@intrinsic  # type: ignore[untyped-decorator]
def differ(typing: Any, old: Any, new: Any, at: Any) -> Any:
    """Bit i of the result: `old[at + i] != new[at + i]`, for 64 words that exist."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        one, two = (_load(context, builder, signature.args[i], arguments[i], arguments[2]) for i in (0, 1))
        return builder.bitcast(builder.icmp_unsigned("!=", one, two), _MASK)

    return types.uint64(old, new, types.int64), generate


def _below(context: Any, builder: Any, kinds: Any, arguments: Any) -> list[Any]:
    """For each of eight limits, a mask of the 64 words whose magnitude is below it; the last limit is above all."""
    words = _load(context, builder, kinds[0], arguments[0], arguments[1])
    magnitudes = builder.and_(words, ir.Constant(_VECTOR, [0x7FFF] * LANES))
    limits = _eight(context, builder, kinds[2], arguments[2], ir.VectorType(_WORD, CLASSES))
    limit = builder.load(limits, align=2)
    masks = []
    for c in range(CLASSES - 1):
        splat = builder.shuffle_vector(limit, limit, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [c] * LANES))
        masks.append(builder.bitcast(builder.icmp_unsigned("<", magnitudes, splat), _MASK))
    return [*masks, ir.Constant(_MASK, -1)]


def _eight(context: Any, builder: Any, kind: Any, array: Any, vector: Any) -> Any:
    return builder.bitcast(context.make_array(kind)(context, builder, array).data, vector.as_pointer())


def _ones(builder: Any, masks: Any) -> Any:
    kind = ir.FunctionType(_MASKS, [_MASKS])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.ctpop.v{CLASSES}i64"), [masks])


def _gather(builder: Any, masks: list[Any]) -> Any:
    vector = ir.Constant(_MASKS, ir.Undefined)
    for c, mask in enumerate(masks):
        vector = builder.insert_element(vector, mask, ir.Constant(ir.IntType(32), c))
    return vector


@intrinsic  # type: ignore[untyped-decorator]
def count_below(typing: Any, words: Any, at: Any, limits: Any, masks: Any, counts: Any) -> Any:
    """For c of 8: `masks[c]` u64 = which of the 64 words from `at` have a magnitude below `limits[c]` u16; `limits[7]` is taken
    as above all. Their number is added to `counts[c]` i64, whose former values are left in `counts[8 + c]`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = signature.args
        found = _gather(builder, _below(context, builder, kinds, arguments))
        builder.store(found, _eight(context, builder, kinds[3], arguments[3], _MASKS), align=8)
        place = _eight(context, builder, kinds[4], arguments[4], _MASKS)
        before = builder.load(place, align=8)
        builder.store(builder.add(before, _ones(builder, found)), place, align=8)
        builder.store(before, builder.gep(place, [ir.Constant(ir.IntType(64), 1)]), align=8)
        return context.get_dummy_value()

    return types.void(words, types.int64, limits, masks, counts), generate


@intrinsic  # type: ignore[untyped-decorator]
def pass_classes(typing: Any, words: Any, at: Any, limits: Any, masks: Any, rest: Any) -> Any:
    """For c of 8: `masks[c]` u64 = which of the 64 words from `at` have a magnitude below `limits[c]` u16 and not below the
    limit before; `limits[7]` is taken as above all. Their number is taken from `rest[c]` i64.

    Bit c of the result: `rest[c]` is now negative.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds, zeros = signature.args, ir.Constant(_MASKS, [0] * CLASSES)
        upper = _gather(builder, _below(context, builder, kinds, arguments))
        order = ir.Constant(ir.VectorType(ir.IntType(32), CLASSES), [CLASSES, *range(CLASSES - 1)])
        lower = builder.shuffle_vector(upper, zeros, order)
        mine = builder.and_(upper, builder.not_(lower))
        builder.store(mine, _eight(context, builder, kinds[3], arguments[3], _MASKS), align=8)
        place = _eight(context, builder, kinds[4], arguments[4], _MASKS)
        left = builder.sub(builder.load(place, align=8), _ones(builder, mine))
        builder.store(left, place, align=8)
        negative = builder.icmp_signed("<", left, zeros)
        return builder.zext(builder.bitcast(negative, ir.IntType(CLASSES)), _MASK)

    return types.uint64(words, types.int64, limits, masks, rest), generate


@intrinsic  # type: ignore[untyped-decorator]
def ones(typing: Any, bits: Any) -> Any:
    """How many bits of a u64 are set."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def first_one(typing: Any, bits: Any) -> Any:
    """The lowest set bit of a u64; 64 where none is."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def leading_zeros(typing: Any, bits: Any) -> Any:
    """Zero bits above the highest set bit of a u64; 64 where none is."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def copy_words(typing: Any, target: Any, source: Any, at: Any, count: Any) -> Any:
    """`target[at : at + count] = source[at : at + count]`, which exist and do not overlap; 16-bit words."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        ends = []
        for kind, array in zip(signature.args[:2], arguments[:2], strict=True):
            data = context.make_array(kind)(context, builder, array).data
            ends.append(builder.gep(data, [arguments[2]]))
        cgutils.raw_memcpy(builder, *ends, arguments[3], 2)
        return context.get_dummy_value()

    return types.void(target, source, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def read64(typing: Any, data: Any, at: Any) -> Any:
    """The eight bytes from byte `at` of a u8 array as a u64, lowest first; they must exist."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.load(builder.bitcast(builder.gep(data, [arguments[1]]), _MASK.as_pointer()), align=1)

    return types.uint64(data, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def write64(typing: Any, data: Any, at: Any, value: Any) -> Any:
    """Put a u64 into the eight bytes from byte `at` of a u8 array, lowest first; they must exist."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        builder.store(arguments[2], builder.bitcast(builder.gep(data, [arguments[1]]), _MASK.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(data, types.int64, types.uint64), generate


def _has_deposit() -> bool:
    try:
        return bool(llvm.get_host_cpu_features().get("bmi2"))
    except RuntimeError:  # an unknown processor: plain code
        return False


_DEPOSIT = _has_deposit()


@intrinsic  # type: ignore[untyped-decorator]
def bit_of_rank(typing: Any, mask: Any, rank: Any) -> Any:
    """The set bit of a u64 before which `rank` (i64, 0 to 63) others are set, alone; 0 where there is none."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        mask, rank = arguments
        if _DEPOSIT:
            kind = ir.FunctionType(_MASK, [_MASK, _MASK])
            deposit = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.bmi.pdep.64")
            return builder.call(deposit, [builder.shl(ir.Constant(_MASK, 1), rank), mask])
        left = cgutils.alloca_once_value(builder, mask)
        with cgutils.for_range(builder, rank):
            value = builder.load(left)
            builder.store(builder.and_(value, builder.sub(value, ir.Constant(_MASK, 1))), left)
        value = builder.load(left)
        return builder.and_(value, builder.neg(value))

    return types.uint64(types.uint64, types.int64), generate
