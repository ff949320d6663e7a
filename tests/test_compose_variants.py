"""The files that are laid over the compose stack: a server with keys, and a cluster of three."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas.permissions import ADMIN
from schemas.table import Role
from services.cli import parser
from services.nats_server import Cluster, binary, configuration

COMPOSE = Path(__file__).parent.parent / "compose"


def services(name: str) -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load((COMPOSE / name).read_text())["services"])


BASE, KEYS, CLUSTER, TLS = map(services, ("docker-compose.yml", "keys.yml", "cluster.yml", "tls.yml"))
NODES = ("nats", "nats-2", "nats-3")


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Source by target."""
    found = re.findall(r"(?m)^(\$\{[^}]*\}[^:]*|[^:]+):([^:]+)(?::ro)?$", "\n".join(service["volumes"]))
    assert len(found) == len(service["volumes"])
    return {target: source for source, target in found}


def identity_of(name: str) -> str:
    """The identity that a service of the stack has."""
    words = BASE[name]["command"]
    return str(Role(parser().parse_args(words).service)) if words[0] == "run" else str(Role.OBSERVER)


def test_every_service_gets_its_own_key_and_no_other() -> None:
    assert set(KEYS) == {*BASE, "provision"}
    for name in set(BASE) - {"nats"}:
        (target, source), *rest = mounts(KEYS[name]).items()
        assert not rest
        assert target == f"/etc/headrace/keys/{identity_of(name)}.nk"
        assert source == f"${{HEADRACE_KEYS}}/keys/{identity_of(name)}.nk"
        assert set(KEYS[name]) == {"volumes"}, "everything else is as in the stack"


def test_the_server_reads_the_made_configuration_and_keeps_its_store() -> None:
    over, base = mounts(KEYS["nats"]), mounts(BASE["nats"])
    assert over["/etc/nats/nats.conf"].endswith("/nats.conf")
    assert over["/data"] == base["/data"]
    assert set(over) == set(base)


def test_one_short_job_creates_the_streams_under_the_admins_key() -> None:
    job = KEYS["provision"]
    options = parser().parse_args(job["command"])
    assert (options.nats, options.config) == ("nats://nats:4222", "/etc/headrace/run.toml")
    assert f"/etc/headrace/keys/{ADMIN}.nk" in mounts(job)
    assert job["restart"] == "on-failure"
    assert not [name for name in set(KEYS) - {"provision"} if any(ADMIN in volume for volume in KEYS[name]["volumes"])]


def test_a_cluster_has_three_nodes_with_stores_of_their_own_under_one_name() -> None:
    assert set(CLUSTER) == set(NODES)
    stores = [mounts(CLUSTER[name])["/data"] for name in NODES]
    assert len(set(stores)) == 3
    assert set(yaml.safe_load((COMPOSE / "cluster.yml").read_text())["volumes"]) == {"nats-2", "nats-3"}
    names = [CLUSTER[name]["environment"]["NAME"] for name in NODES]
    assert names == ["nats-1", "nats-2", "nats-3"]
    reachable = [{name, *CLUSTER[name]["networks"]["default"]["aliases"]} for name in NODES]
    for name, answers in zip(names, reachable, strict=True):
        assert {"nats", name} <= answers  # services call `nats`, the other nodes its own name
    for name in NODES[1:]:
        for key in ("image", "command", "restart", "healthcheck", "stop_grace_period"):
            assert CLUSTER[name][key] == BASE["nats"][key]


def test_with_tls_servers_have_the_certificates_and_services_the_authority_alone() -> None:
    assert set(TLS) == {*BASE, "provision"}
    for name, service in TLS.items():
        assert set(service) == {"volumes"}, "everything else is as in the stack"
        ((target, source),) = mounts(service).items()
        if name == "nats":
            assert (target, source.rpartition("}")[2]) == ("/etc/nats/tls", "/tls")
        else:
            assert (target, source) == ("/etc/headrace/ca.pem", "${HEADRACE_KEYS}/tls/ca.pem")
    for name in NODES[1:]:
        assert mounts(CLUSTER[name])["/etc/nats/tls"].startswith("${HEADRACE_TLS:-")


def test_the_clusters_configuration_is_that_of_the_embedded_servers() -> None:
    own = (COMPOSE / "nats-cluster.conf").read_text()
    routes = ("nats-1:6222", "nats-2:6222", "nats-3:6222")
    cluster = Cluster(listen="0.0.0.0:6222", routes=routes, secret="s")
    made = configuration(
        store=Path("/data"),
        port=4222,
        max_file_bytes=1,
        host="0.0.0.0",
        name="$NAME",
        monitor="127.0.0.1:8222",
        cluster=cluster,
    )
    for line in made.replace("route:s@", "").splitlines():
        if not line.strip().startswith(("max_file", "authorization")):  # without keys there is no secret to keep either
            assert line in own.splitlines(), f"compose/nats-cluster.conf lacks {line.strip()!r}"


@pytest.mark.parametrize("name", ["nats.conf", "nats-cluster.conf"])
def test_the_server_accepts_the_configuration(name: str) -> None:
    command = [binary(), "-t", "-c", str(COMPOSE / name)]
    tried = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "NAME": "nats-1"}, check=False
    )
    assert tried.returncode == 0, tried.stderr
