"""Pages in headless Chromium, by its DevTools protocol; the machine's own, or tests are skipped."""

import base64
import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome", "chrome")
     if (found := shutil.which(name))), None,
)  # fmt: skip

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium on this machine: apt-get install chromium"
)

_DEADLINE_S = 60.0


@dataclass
class Browser:
    """One tab."""

    socket: Any
    # Errors and warnings of the console, exceptions, and violations of the page's policy.
    complaints: list[str] = field(default_factory=list)
    # Addresses of other machines that were asked for.
    requests: list[str] = field(default_factory=list)
    _number: int = 0

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        self.socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.complaints.append(str(parameters["args"]))
        elif method == "Log.entryAdded":
            self.complaints.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            address = parameters["request"]["url"]
            self.requests += [] if address.startswith(("file:", "data:")) else [address]

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript, of a promise what it becomes."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + _DEADLINE_S
        while not self.evaluate(expression):
            assert time.monotonic() < end, f"{expression} has not become true"
            time.sleep(0.05)

    def open(self, page: Path, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        """Open a page and wait until its charts are drawn."""
        self.resize(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.wait_for("document.documentElement?.dataset.ready === 'yes'")

    def resize(self, width: int, height: int = 900) -> None:
        """Make the window another size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    def key(self, name: str) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if name == "Enter" and kind == "keyDown" else {}
            codes = {"Enter": 13, "Escape": 27, "Tab": 9}
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=name, code=name,
                windowsVirtualKeyCode=codes[name], **text,
            )  # fmt: skip

    def screenshot(self, file: Path, *, whole: bool = False) -> bytes:
        """Write what is seen, or the whole page, as PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(shot["data"]))
        return file.read_bytes()


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with a profile of its own, which ends with the block."""
    websocket = pytest.importorskip("websocket")
    command = [
        str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--no-first-run", "--disable-dev-shm-usage", "--disable-background-networking",
        "--disable-component-update", "--disable-extensions", "--remote-debugging-port=0",
        "--remote-allow-origins=*", f"--user-data-dir={folder / 'chromium'}", "about:blank",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port = _port(folder / "chromium" / "DevToolsActivePort", process)
        socket = websocket.create_connection(_tab(port), timeout=_DEADLINE_S)
        tab = Browser(socket)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        yield tab
        socket.close()
    finally:
        process.terminate()
        process.wait(timeout=30)


def _port(file: Path, process: "subprocess.Popen[bytes]") -> int:
    end = time.monotonic() + _DEADLINE_S
    while time.monotonic() < end:
        assert process.poll() is None, "Chromium ended before it listened"
        lines = file.read_text().splitlines() if file.exists() else []
        if len(lines) >= 2:
            return int(lines[0])
        time.sleep(0.05)
    raise AssertionError("Chromium does not listen")


def _tab(port: int) -> str:
    from urllib.request import ProxyHandler, build_opener

    with build_opener(ProxyHandler({})).open(f"http://127.0.0.1:{port}/json/list") as answer:
        tabs = json.load(answer)
    return str(next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"))
