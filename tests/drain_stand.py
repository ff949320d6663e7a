"""Every service as a process of its own, without a supervisor: how each one ends can be seen, and nobody starts it again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from loadtests.chaos.settings import CONFIG, ROOT, overrides
from schemas.health import Heartbeat
from schemas.table import Role, Stream
from services.bus import Bus
from services.child import signal_group
from services.config import load, to_toml
from services.consume import read_latest
from services.provision import provision
from services.registry import instances
from tests.conftest import NatsServer, eventually
from tests.press_stand import SETTINGS, WITHIN_S, picture, remove_sandboxes

ENDS_WITHIN_S = 60.0
_PATIENT = ("fencing.cut_off_s=30", "fencing.ttl_s=10", "fencing.trainer_ttl_s=15")  # none ends over a short silence


class Service:
    """One service's processes, one after another, and their log."""

    def __init__(self, role: Role, instance: str, config: Path, folder: Path) -> None:
        self.role = role
        self.instance = instance
        self._config = config
        self.log = folder / f"{role}-{instance}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "services.cli", "run", str(self.role), "--instance", self.instance]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        more = {"DS_ACCELERATOR": "cpu"} if self.role is Role.TRAINER else {}
        self.log.write_bytes(b"")
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, "--config", str(self._config)],
                cwd=ROOT,
                env={**os.environ, **threads, **more, "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None and self.process.poll() is None, self.tail()
        self.process.send_signal(number)

    async def says(self, event: str) -> None:
        """Wait until the log has this event."""
        words = f'"event": "{event}"'
        await eventually(
            lambda: words in self.log.read_text(errors="replace"), within_s=WITHIN_S, what=f"{event}\n{self.tail()}"
        )

    async def ended(self) -> int:
        """Its exit code, once it has ended."""
        process = self.process
        assert process is not None
        await eventually(lambda: process.poll() is not None, within_s=ENDS_WITHIN_S, what=f"the end of\n{self.tail()}")
        return int(process.returncode)

    def sweep(self) -> None:
        if self.process is not None:
            signal_group(self.process.pid, signal.SIGCONT)
            signal_group(self.process.pid, signal.SIGKILL)
            self.process.wait(20)

    def tail(self, lines: int = 12) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return f"--- {self.log.name}\n" + "\n".join(text.splitlines()[-lines:])


class Floor:
    """All services of a run, each by role; one instance of each."""

    def __init__(self, folder: Path, sandboxes: Path) -> None:
        (folder / "server").mkdir()
        self.server = NatsServer(folder / "server")
        settings = overrides(
            (*SETTINGS, *_PATIENT, f'nats.url="{self.server.url}"', f'sandbox.root="{sandboxes}"'), "floor", folder
        )
        self.config = load(CONFIG, settings)
        file = folder / "config.toml"
        file.write_text(to_toml(self.config), encoding="utf-8")
        self.services = {role: Service(role, instance, file, folder) for role, instance in instances(self.config)}

    @asynccontextmanager
    async def bus(self) -> AsyncIterator[Bus]:
        bus = await Bus.connect(self.server.url, self.config.run.name, Role.OBSERVER, f"look-{os.getpid()}")
        try:
            await provision(bus, self.config.nats.store_bytes)
            yield bus
        finally:
            await bus.close()

    @contextmanager
    def silent_server(self) -> Iterator[None]:
        """The server stands still while the block runs: connections stay, and nobody gets an answer."""
        process = self.server._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    async def flows(self, bus: Bus, steps: int = 1) -> None:
        """Wait until so many further steps are committed."""
        wanted = len((await picture(bus)).steps) + steps

        async def there() -> bool:
            ended = [
                service.tail() for service in self.services.values() if service.process and service.process.poll() is not None
            ]
            assert not ended, "\n".join(ended)
            await asyncio.sleep(0.2)
            return len((await picture(bus)).steps) >= wanted

        try:
            await eventually(there, within_s=WITHIN_S, what=f"{wanted} committed steps")
        except AssertionError as error:
            tails = "\n".join(service.tail(5) for service in self.services.values())
            raise AssertionError(f"{error}\n{tails}") from None

    async def last_beat(self, bus: Bus, role: Role) -> Heartbeat:
        (item,) = await read_latest(bus, Stream.REGISTRY, f"reg.service.{role}.{self.services[role].instance}")
        return item.decode(Heartbeat)


@contextmanager
def running_floor(folder: Path) -> Iterator[Floor]:
    """All services at work while the block runs; no process of theirs afterwards."""
    sandboxes = Path(tempfile.mkdtemp(prefix="hr-sbx-"))
    sandboxes.chmod(0o711)  # a sandbox's own user must reach it
    floor = Floor(folder, sandboxes)
    floor.server.start()
    try:
        for service in floor.services.values():
            service.start()
        yield floor
    finally:
        for service in floor.services.values():
            service.sweep()
        floor.server.kill()
        remove_sandboxes(sandboxes)
