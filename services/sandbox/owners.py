"""Who each sandbox of a host belongs to: one per slot, that of its newest attempt."""

from __future__ import annotations

from services.sandbox.refusals import SandboxConflict


class Owners:
    """Owner labels `<group>/<slot>/<attempt>` by sandbox. A sandbox with another label, or none, belongs to nobody here."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[str, int]] = {}  # sandbox -> slot, attempt

    def admit(self, sandbox_id: str, owner: str) -> tuple[str, ...]:
        """Note a new sandbox; gives those of older attempts at its slot, whose owners are gone.

        Raises `SandboxConflict` if the slot has gone on to a newer attempt: whoever asks has lost it.
        """
        slot, _, number = owner.rpartition("/")
        if not slot or not number.isascii() or not number.isdigit():
            return ()
        attempt = int(number)
        same = {name: held for name, (of, held) in self._held.items() if of == slot and name != sandbox_id}
        if newer := [held for held in same.values() if held > attempt]:
            raise SandboxConflict(f"sandbox {sandbox_id}: slot {slot} is in attempt {max(newer)} here, beyond {attempt}")
        self._held[sandbox_id] = (slot, attempt)
        return tuple(name for name, held in same.items() if held < attempt)

    def drop(self, sandbox_id: str) -> None:
        """The sandbox is gone. Idempotent."""
        self._held.pop(sandbox_id, None)
