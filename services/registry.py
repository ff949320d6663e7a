"""Which coroutine serves a role. Import paths are text, loaded on demand: this layer imports none of the services above it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from schemas.table import Role
from services.config import Config

if TYPE_CHECKING:
    from services.runtime import Serve

SERVE: dict[Role, str] = {
    Role.SAMPLER: "rollouter.sampler_service:serve",
    Role.ROLLOUTER: "rollouter.service:serve",
    Role.ENGINE: "services.engine.service:serve",
    Role.SANDBOX: "services.sandbox.service:serve",
    Role.VERIFIER: "services.verifier.service:serve",
    Role.BANK: "admission.bank_service:serve",
    Role.ADMISSION: "admission.service:serve",
    Role.TRAINER: "trainer.service:serve",
    Role.PARAM_SYNC: "param_sync.service:serve",
}
_SLOW_FIRST = (Role.ENGINE, Role.TRAINER)  # they load models; the others are up in a second and wait for them


def load_serve(role: Role) -> Serve:
    """The `serve` coroutine function of a role. Raises `KeyError` for a role that is no service (the observer)."""
    module, _, name = SERVE[role].partition(":")
    return cast("Serve", getattr(importlib.import_module(module), name))


def instances(config: Config) -> list[tuple[Role, str]]:
    """Every service process of a local run as (role, instance), in the order to start them. An evaluation has no trainer."""
    many = {Role.ENGINE: config.engine.names, Role.SANDBOX: config.sandbox.names}
    roles = [*_SLOW_FIRST, *(role for role in SERVE if role not in _SLOW_FIRST)]
    if config.run.evaluate_only:
        roles.remove(Role.TRAINER)
    return [(role, instance) for role in roles for instance in many.get(role, ("0",))]
