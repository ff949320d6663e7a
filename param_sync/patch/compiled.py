"""Ahead-of-time compilation of the inner loops, from a cache on disk where there can be one.

The cache lies in `__pycache__` beside the source, else in the user's cache folder; `NUMBA_CACHE_DIR` names another. Its key is
the source file's time and size, so a loop and all that it inlines live in one file. A cache that cannot be read or written
costs the time of compiling, never the result.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba.extending import intrinsic

IN8, IN16, IN32 = (numba.types.Array(t, 1, "C", readonly=True) for t in (numba.u1, numba.u2, numba.u4))
IN64 = numba.types.Array(numba.i8, 1, "C", readonly=True)
OUT8, OUT16, OUT32 = (numba.types.Array(t, 1, "C") for t in (numba.u1, numba.u2, numba.u4))
OUT64 = numba.types.Array(numba.i8, 1, "C")
OUT8_2, OUT16_2, OUT64_2 = (numba.types.Array(t, 2, "C") for t in (numba.u1, numba.u2, numba.i8))

_Function = TypeVar("_Function", bound=Callable[..., Any])

# what a folder that is read-only, missing or full, or a damaged file in it, ends in
_CACHE_ERRORS = (RuntimeError, OSError, EOFError, pickle.UnpicklingError, ValueError)


def compiled(*signature: Any) -> Callable[[_Function], _Function]:
    """Compile now for these arguments. The loop releases the interpreter lock and divides as the processor does."""

    def decorate(function: _Function) -> _Function:
        made: _Function
        try:
            made = numba.njit([signature], nogil=True, cache=True, error_model="numpy")(function)
        except _CACHE_ERRORS:
            made = numba.njit([signature], nogil=True, error_model="numpy")(function)
        return made

    return decorate


def inlined(function: _Function) -> _Function:
    """A piece of a loop, which is compiled with it."""
    made: _Function = numba.njit(inline="always", error_model="numpy")(function)
    return made


def instruction(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that writes LLVM instructions (`numba.extending.intrinsic`); loops call it without the typing context."""
    made: Callable[..., Any] = intrinsic(function)
    return made
