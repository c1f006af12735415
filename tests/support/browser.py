"""A real Chromium, driven by its DevTools protocol over a WebSocket; no driver is installed.

Waits poll a condition until a deadline. `evaluate` is not subject to a page's content security policy, and does not
weaken it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0")
WAIT_SECONDS = 30.0


class Tab:
    """One page of the browser.

    Attributes:
        events: What the browser has told, such as requests, console messages and exceptions.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.events: list[dict[str, Any]] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            else:
                self.events.append(told)

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        told = await asyncio.wait_for(answer, WAIT_SECONDS)
        assert "error" not in told, told
        return told["result"]

    async def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, awaited if it is a promise."""
        told = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def wait_for(self, expression: str, seconds: float = WAIT_SECONDS) -> Any:
        """Return the expression's value once it is true."""
        deadline = time.monotonic() + seconds
        while not (value := await self.evaluate(expression)):
            assert time.monotonic() < deadline, f"never true: {expression}\n{self.faults()}"
            await asyncio.sleep(0.05)
        return value

    async def open(self, url: str, *, width: int = 1400, height: int = 900, dark: bool = False) -> None:
        """Load a page in a window of that size."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Emulation.setFocusEmulationEnabled", enabled=True)  # a tab behind another has no focus
        await self.resize(width, height, dark=dark)
        await self.call("Page.navigate", url=url)

    async def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window, and the colours that its user prefers."""
        is_phone = width < 600
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone}
        await self.call("Emulation.setDeviceMetricsOverride", **metrics)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def press(self, key: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    async def picture(self, *, whole: bool = False) -> bytes:
        """Return the window, or the whole page, as a PNG."""
        told = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(told["data"])

    def faults(self) -> list[str]:
        """Return exceptions, and messages of the console and the network that tell of errors."""
        found = []
        for event in self.events:
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"].get("exception", {}).get("description")))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(params["entry"]["text"])
        return found

    def bytes_received(self) -> int:
        """Return the bytes that the page has taken from the wire, headers included."""
        finished = [e["params"]["encodedDataLength"] for e in self.events if e["method"] == "Network.loadingFinished"]
        streams = {e["params"]["requestId"]: 0 for e in self.events if e["method"] == "Network.requestWillBeSent"}
        done = {e["params"]["requestId"] for e in self.events if e["method"] == "Network.loadingFinished"}
        for event in self.events:
            params = event["params"]
            if event["method"] == "Network.dataReceived" and params["requestId"] not in done:
                streams[params["requestId"]] += params["dataLength"]
        return int(sum(finished) + sum(streams.values()))

    async def close(self) -> None:
        self._reader.cancel()
        await self._socket.close()


@contextlib.asynccontextmanager
async def browser(directory: Path) -> AsyncIterator[Callable[[], Awaitable[Tab]]]:
    """Run a browser for the block, which gets a function that opens tabs.

    Args:
        directory: For its profile and its log.
    """
    assert CHROMIUM is not None, "no chromium here"
    said = directory / "chromium.log"
    with said.open("wb") as file:
        process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={directory / 'profile'}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    tabs: list[Tab] = []
    try:
        port = await _port(said, process)
        async with aiohttp.ClientSession() as session:

            async def tab() -> Tab:
                async with session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer:
                    where = (await answer.json())["webSocketDebuggerUrl"]
                tabs.append(Tab(await session.ws_connect(where, max_msg_size=2**26)))
                return tabs[-1]

            yield tab
            for each in tabs:
                await each.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def _port(said: Path, process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + WAIT_SECONDS
    while "DevTools listening on ws://" not in (text := said.read_text(errors="replace")):
        assert process.poll() is None, f"Chromium ended with code {process.returncode}:\n{text[-2000:]}"
        assert time.monotonic() < deadline, f"Chromium hangs; its threads wait in {_waits(process)}:\n{text[-2000:]}"
        await asyncio.sleep(0.05)
    return int(text.split("DevTools listening on ws://127.0.0.1:")[1].split("/")[0])


def _waits(process: subprocess.Popen[bytes]) -> list[str]:
    """Return the name of each of the process's threads, and the kernel function in which it waits."""
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return [f"{(task / 'comm').read_text().strip()}: {(task / 'wchan').read_text()}" for task in tasks]
