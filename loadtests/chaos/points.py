"""Where a service is hit: between receiving, working, publishing, committing and acknowledging, as seen from outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loadtests.chaos.observer import Event, Picture, instance_of
from schemas.generation import GenerateRequest
from schemas.sandbox import SandboxReset
from schemas.trajectory import Episode

SERVER = "nats-server"
OWNED = ("admission", "trainer", "param_sync")  # one works, a second waits for its silence
OWNER_NAME = "owner"  # stands for whichever instance owns the role when it is hit
Sees = Callable[[Event, Picture], str]


@dataclass(frozen=True, kw_only=True)
class Point:
    """`sees` gives the label of the process to hit now, or an empty string. `after` reads as a sentence in reports."""

    service: str
    after: str
    sees: Sees

    @property
    def name(self) -> str:
        return f"{self.service}: {self.after}"


def _at(*words: str, label: str) -> Sees:
    """Any message on this subject family."""

    def sees(event: Event, _: Picture) -> str:
        return label if event.words[: len(words)] == words else ""

    return sees


def owner_label(service: str, picture: Picture) -> str:
    """The process that owns the role now, as its own record says."""
    record = picture.owners.get(service)
    return f"{service}-{'0' if record is None else record.instance}"


def _owner_at(*words: str, role: str) -> Sees:
    """Any message on this subject family hits whoever owns the role."""

    def sees(event: Event, picture: Picture) -> str:
        return owner_label(role, picture) if event.words[: len(words)] == words else ""

    return sees


def _lease_delivered(event: Event, picture: Picture) -> str:
    """Somebody asks for the sandboxes of a group that has no turn yet, so its lease has reached a rollouter."""
    if event.words[:3] != ("sbx", "req", "reset"):
        return ""
    message = event.message()
    if not isinstance(message, SandboxReset) or message.owner.split("/")[0] in picture.turned:
        return ""
    return f"rollouter-{instance_of(message.requester)}"


def _turn_journalled(event: Event, picture: Picture) -> str:
    if event.words[0] != "turn" or not event.words[-1].isdecimal() or event.words[1] not in picture.player:
        return ""
    return f"rollouter-{picture.player[event.words[1]]}"


def _last_sealed(event: Event, picture: Picture) -> str:
    if event.words[0] != "episode" or picture.sealed[event.words[1]] != picture.sizes.get(event.words[1]):
        return ""
    message = event.message()
    return f"rollouter-{instance_of(message.rollouter)}" if isinstance(message, Episode) else ""


def _last_judged(event: Event, picture: Picture) -> str:
    whole = event.words[0] == "verdict" and picture.judged[event.words[1]] == picture.sizes.get(event.words[1])
    return "bank-0" if whole else ""


def _some_judged(event: Event, picture: Picture) -> str:
    some = event.words[0] == "verdict" and picture.judged[event.words[1]] < picture.sizes.get(event.words[1], 0)
    return "bank-0" if some else ""


def _generating(event: Event, _: Picture) -> str:
    known = event.words[:2] == ("gen", "req") and isinstance(event.message(), GenerateRequest)
    return f"engine-{event.words[2]}" if known else ""


def _applying(event: Event, _: Picture) -> str:
    return f"engine-{event.words[2]}" if event.words[:2] == ("policy", "apply") else ""


def _commanding(event: Event, _: Picture) -> str:
    return f"sandbox-{event.words[3]}" if event.words[:3] == ("sbx", "req", "command") else ""


POINTS: tuple[Point, ...] = (
    Point(
        service="sampler", after="a batch is decided, the next lease is not out", sees=_at("ledger", "batch", label="sampler-0")
    ),
    Point(service="sampler", after="a lease is out", sees=_at("task", "lease", label="sampler-0")),
    Point(service="rollouter", after="a lease is delivered, no turn is journalled", sees=_lease_delivered),
    Point(service="rollouter", after="a turn is journalled", sees=_turn_journalled),
    Point(service="rollouter", after="the last sibling is sealed, its lease not acknowledged", sees=_last_sealed),
    Point(service="engine", after="a request is in flight", sees=_generating),
    Point(service="engine", after="an apply order is out", sees=_applying),
    Point(service="sandbox", after="a command is in flight", sees=_commanding),
    Point(service="sandbox", after="a reset is asked for", sees=_at("sbx", "req", "reset", label="sandbox-x0")),
    Point(service="verifier", after="an episode is sealed, it has no verdict", sees=_at("episode", label="verifier-0")),
    Point(service="verifier", after="a verdict is out, its episode not acknowledged", sees=_at("verdict", label="verifier-0")),
    Point(service="bank", after="the last verdict is in, the group is not ready", sees=_last_judged),
    Point(service="bank", after="a group has some of its verdicts", sees=_some_judged),
    Point(
        service="admission", after="a batch is demanded, none is decided", sees=_owner_at("train", "demand", role="admission")
    ),
    Point(service="admission", after="a batch is decided", sees=_owner_at("ledger", "batch", role="admission")),
    Point(
        service="trainer", after="a batch is decided, it is not trained on", sees=_owner_at("ledger", "batch", role="trainer")
    ),
    Point(
        service="trainer", after="a checkpoint is there, its step not announced", sees=_owner_at("checkpoint", role="trainer")
    ),
    Point(service="trainer", after="a step is announced", sees=_owner_at("train", "step", role="trainer")),
    Point(
        service="param_sync",
        after="a step is announced, no version is staged",
        sees=_owner_at("train", "step", role="param_sync"),
    ),
    Point(
        service="param_sync",
        after="a version is staged, not every engine has it",
        sees=_owner_at("policy", "staged", role="param_sync"),
    ),
    Point(service=SERVER, after="an episode is on its way", sees=_at("episode", label=SERVER)),
    Point(service=SERVER, after="a batch is on its way", sees=_at("ledger", "batch", label=SERVER)),
    Point(service=SERVER, after="a step is on its way", sees=_at("train", "step", label=SERVER)),
)
SERVICES: tuple[str, ...] = tuple(dict.fromkeys(point.service for point in POINTS))


def points_of(service: str) -> list[Point]:
    return [point for point in POINTS if point.service == service]


def point(name: str) -> Point:
    """A point by its name. Raises `KeyError` naming it."""
    for each in POINTS:
        if each.name == name:
            return each
    raise KeyError(f"no observed point {name!r}")
