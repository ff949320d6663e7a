"""Who owns a role that may have one worker: admission, trainer, param_sync. Producer: the owner (`reg.service.<role>.owner`).

Each record replaces the one before by compare-and-set on the subject's sequence, so owners follow one another and never overlap
in the log. No clock of another machine is compared: whoever waits measures silence by its own.
"""

from __future__ import annotations

from schemas.message import Message

OWNER = "owner"  # stands where an instance's name stands in the registry's subjects


class Owner(Message, frozen=True, kw_only=True, tag="owner"):
    """The present owner, renewed every second or so; `released`: it has ended and nobody need wait for its silence."""

    run: str
    role: str
    instance: str
    host: str
    pid: int
    process: str  # names the process for good on its machine; empty where that cannot be told
    token: str  # of this process alone
    epoch: int  # one more with every owner
    renewals: int
    since_ns: int  # wall clock of the owner's host, for people
    released: bool = False
