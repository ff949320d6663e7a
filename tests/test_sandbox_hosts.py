"""When a sandbox host counts as gone: by heartbeats alone, and never while the registry itself stands still."""

from __future__ import annotations

from rollouter.hosts import Hosts
from schemas.table import Role
from services.bus import Bus
from services.health import Health


async def hosts_of(url: str, run: str, gone: list[tuple[str, str]], *, silent_s: float, period_s: float) -> tuple[Bus, Hosts]:
    bus = await Bus.connect(url, run, Role.ROLLOUTER, "0")
    health = Health(bus, period_s)
    return bus, Hosts(bus, health, lambda host, why: gone.append((host, why)), silent_s=silent_s, period_s=period_s)


async def test_silence_is_counted_in_our_own_heartbeats(nats_url: str, run_name: str) -> None:
    gone: list[tuple[str, str]] = []
    bus, hosts = await hosts_of(nats_url, run_name, gone, silent_s=10.0, period_s=2.0)
    now = 100.0
    hosts.heard("x0", 1)
    hosts.heard("x1", 1)
    for beat in range(2, 7):
        assert not gone and hosts.gone("x0") == ""
        hosts.heard("x1", beat)
        hosts.counted(now := now + 2.0)
    assert gone == [("x0", "sandbox host x0 is silent for 10 s")]
    assert hosts.gone("x0") and not hosts.gone("x1") and not hosts.gone("unheard-of")
    hosts.counted(now := now + 2.0)
    assert len(gone) == 1, "it is said once"
    hosts.heard("x0", 1)
    assert hosts.gone("x0"), "a heartbeat that is not newer brings nobody back"
    hosts.heard("x0", 9)
    assert not hosts.gone("x0") and hosts.names() == ("x0", "x1")
    await bus.close()


async def test_a_stall_of_the_server_is_nobodys_silence(nats_url: str, run_name: str) -> None:
    """Nothing is stored for a minute; then our heartbeats come first, and several at once."""
    gone: list[tuple[str, str]] = []
    bus, hosts = await hosts_of(nats_url, run_name, gone, silent_s=10.0, period_s=2.0)
    hosts.heard("x0", 1)
    hosts.counted(100.0)
    for late in range(20):
        hosts.counted(160.0 + late / 100)
    assert not gone
    hosts.heard("x0", 2)
    for beat in range(4):
        hosts.counted(162.0 + 2 * beat)
    assert not gone
    hosts.counted(170.0)
    assert len(gone) == 1
    await bus.close()


async def test_a_slow_heartbeat_gets_three_chances(nats_url: str, run_name: str) -> None:
    gone: list[tuple[str, str]] = []
    bus, hosts = await hosts_of(nats_url, run_name, gone, silent_s=10.0, period_s=30.0)
    hosts.heard("x0", 1)
    for beat in range(1, 4):
        assert not gone
        hosts.counted(30.0 * beat)
    assert gone == [("x0", "sandbox host x0 is silent for 90 s")]
    await bus.close()
