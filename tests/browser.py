"""A real browser for tests: headless Chromium, driven over its own debugging protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--remote-debugging-port=0", "--window-size=1280,1600"),
)
_START_S, _ANSWER_S = 60.0, 60.0


def chromium() -> str | None:
    """Where a Chromium is installed, if one is."""
    return next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)


class Page:
    """One open page. `problems`: what it wrote to the console, and errors."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.problems: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._loaded = False

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One call of the protocol."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(_ANSWER_S):
            while True:
                answer = await self._socket.receive_json()
                self._note(answer)
                if answer.get("id") == number:
                    assert "error" not in answer, answer
                    return dict(answer["result"])

    async def load(self, file: Path) -> None:
        """Show a file, and wait until it is there."""
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=file.as_uri())
        async with asyncio.timeout(_ANSWER_S):
            while not self._loaded:
                self._note(await self._socket.receive_json())

    async def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"]["value"]

    async def screenshot(self) -> bytes:
        """A PNG of what is to be seen."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])

    def _note(self, message: dict[str, Any]) -> None:
        method = message.get("method")
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.problems.append(str(message["params"]))


@asynccontextmanager
async def opened(file: Path, profile: Path) -> AsyncIterator[Page]:
    """A browser of our own that shows `file`; it is ended with everything that it started."""
    path = chromium()
    assert path is not None, "no Chromium is installed"
    command = [path, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        port = await _port(profile / "DevToolsActivePort")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                target = next(page for page in await answer.json() if page["type"] == "page")
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                await page.load(file)
                yield page
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its own session: it and its helpers, nobody else
        await process.wait()


async def _port(file: Path) -> int:
    """The port that it chose; it writes it into its profile."""
    async with asyncio.timeout(_START_S):
        while not (file.is_file() and file.read_text().strip()):
            await asyncio.sleep(0.1)
    return int(file.read_text().splitlines()[0])
