"""What can be wrong with a patch. Every error names the tensor and the byte offset where it knows them."""

from __future__ import annotations


class PatchError(ValueError):
    """A patch, an anchor, or what they are applied to breaks a rule; the text says which."""

    def __init__(self, reason: str, *, tensor: str | None = None, offset: int | None = None) -> None:
        where = [] if tensor is None else [f"tensor {tensor!r}"]
        where += [] if offset is None else [f"byte {offset}"]
        super().__init__(f"{', '.join(where)}: {reason}" if where else reason)
        self.reason = reason
        self.tensor = tensor
        self.offset = offset


class WrongBase(PatchError):
    """The patch starts at another version or other bits than the receiver holds. Nothing was changed."""


class Truncated(PatchError):
    """The bytes end before the structure they announce."""


class Corrupt(PatchError):
    """A checksum, a size or a field contradicts another. Nothing was changed."""


class TooLarge(PatchError):
    """The patch announces more memory than the receiver's limits allow. Nothing was allocated."""


class DigestMismatch(Corrupt):
    """The decoded bits are not the announced ones. Nothing was changed."""
