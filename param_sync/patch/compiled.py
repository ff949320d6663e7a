"""How kernels are compiled: once, ahead of the first call, from a cache on disk where one can be written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

IN8, IN16, IN32 = (numba.types.Array(t, 1, "C", readonly=True) for t in (numba.u1, numba.u2, numba.u4))
OUT8, OUT16, OUT32, OUT64 = (numba.types.Array(t, 1, "C") for t in (numba.u1, numba.u2, numba.u4, numba.i8))
I64 = numba.i8

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(*signature: Any) -> Callable[[_Function], _Function]:
    """Compile for these argument types now, without the interpreter lock. The cache lies beside the source, else in
    `NUMBA_CACHE_DIR` or the user's cache folder; where none can be written, the code lives in memory alone."""

    def decorate(function: _Function) -> _Function:
        options = {"nogil": True, "error_model": "numpy"}
        result: _Function
        try:
            result = numba.njit([signature], cache=True, **options)(function)
        except (RuntimeError, OSError):
            result = numba.njit([signature], **options)(function)
        return result

    return decorate
