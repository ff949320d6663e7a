"""Which arrays each message carries, by dtype and number of dimensions; the codec refuses a message whose arrays are others."""

from __future__ import annotations

from collections.abc import Mapping

from schemas.arrays import Array
from schemas.generation import GenerateRequest, GenerateResult
from schemas.message import Message
from schemas.trajectory import Episode, TurnRecord

_IDS, _MASK, _LOGPROBS = ("int32", 1), ("bool", 1), ("float32", 1)
ARRAYS: Mapping[type[Message], Mapping[str, tuple[str, int]]] = {
    GenerateRequest: {"prompt_ids": _IDS},
    GenerateResult: {"sampled_ids": _IDS, "logprobs": _LOGPROBS, "raw_logprobs": _LOGPROBS},
    TurnRecord: {"prompt_ids": _IDS, "sampled_ids": _IDS, "logprobs": _LOGPROBS, "raw_logprobs": _LOGPROBS},
    Episode: {"ids": _IDS, "mask": _MASK, "logprobs": _LOGPROBS, "raw_logprobs": _LOGPROBS, "turn_starts": _IDS},
}


def check_arrays(message: Message) -> None:
    """Raises `ArrayError` naming the field unless every array is of its kind and holds the bytes that its shape needs."""
    for field, (dtype, ndim) in ARRAYS.get(type(message), {}).items():
        values = getattr(message, field)
        if isinstance(values, Array):
            values.of_kind(field, dtype, ndim)
