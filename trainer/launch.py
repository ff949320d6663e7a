"""Ranks of one trainer: started here on one machine, or by an external launcher that sets `RANK` and `WORLD_SIZE`.

A rank that dies takes the others along: rank 0 looks after the processes that it started twice a second, and they hold the
reading end of a pipe whose other end only rank 0 has, so they end when it does, however it ends. Under an external launcher
that is the launcher's part; a rank that waits for a dead one in a collective ends with the collective's error.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from types import TracebackType

import structlog

from services.child import LIFELINE
from services.config import Config, to_toml
from services.nats_server import free_port

log = structlog.get_logger()


def rank_of(config: Config) -> tuple[int, int]:
    """(rank, ranks) as the launcher says, or rank 0 of the configured number."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", str(config.trainer.ranks)))


class Followers:
    """The processes of ranks 1 … n-1, when this process is the one to start them. They end with it."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lifeline = -1  # closed by nobody but the kernel, when this process ends

    def __enter__(self) -> Followers:
        if "RANK" in os.environ or self._config.trainer.ranks == 1:
            return self
        ranks = self._config.trainer.ranks
        os.environ.update(
            WORLD_SIZE=str(ranks), RANK="0", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())
        )
        path = self._config.run_folder() / "ranks.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_toml(self._config), encoding="utf-8")
        followers_end, self._lifeline = os.pipe()
        for rank in range(1, ranks):
            command = [sys.executable, "-m", "services.cli", "run", "trainer", "--instance", f"0-r{rank}"]
            command += ["--config", str(path), "--nats", self._config.nats.url]
            environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), LIFELINE: str(followers_end)}
            self._processes.append(
                subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, pass_fds=(followers_end,))
            )
        os.close(followers_end)
        return self

    async def watch(self, draining: asyncio.Event, ended: asyncio.Event) -> None:
        """Pass a drain on to the followers; end this process as soon as a follower ends before we are done."""
        told = False
        while self._processes and not ended.is_set():
            if draining.is_set() and not told:
                told = True
                for process in self._processes:
                    process.terminate()
            for rank, process in enumerate(self._processes, start=1):
                if process.poll() is not None and not told:
                    log.error("a rank ended", rank=rank, exit_code=process.returncode)
                    os._exit(1)  # a collective that waits for it cannot be interrupted; the supervisor restarts us whole
            await asyncio.sleep(0.5)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
