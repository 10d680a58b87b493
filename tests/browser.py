"""A headless Chromium for tests, driven over its DevTools protocol."""

import base64
import contextlib
import importlib.util
import itertools
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import websocket

START_LIMIT = 30.0
ANSWER_LIMIT = 20.0


class Browser:
    """One page. `complaints`: its console warnings and errors, and exceptions of its scripts."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self._folder = tempfile.mkdtemp(prefix="browser-")
        program = shutil.which("chromium") or shutil.which("chromium-browser")
        assert program, "there is no chromium; tests/tools.sh installs it"
        words = [
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--remote-debugging-port=0", "--remote-allow-origins=*", f"--user-data-dir={self._folder}",
            "--window-size=1280,1500", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._numbers = itertools.count(1)
        try:
            self._socket = websocket.create_connection(self._page(), timeout=ANSWER_LIMIT)
            for domain in ("Runtime", "Log", "Page", "Network"):
                self._call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self, url: str) -> None:
        """Navigate to the URL; returns when the page is loaded."""
        self._call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def value(self, script: str) -> Any:
        """Evaluate a JavaScript expression in the page, and wait for it if it is a promise."""
        result = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)["result"]
        assert result.get("subtype") != "error", result
        return result.get("value")

    def wait_for(self, script: str, limit: float = 120.0) -> Any:
        """Wait until the expression is true; returns its value."""
        end, tries = time.monotonic() + limit, 1
        while not (found := self.value(script)):
            if time.monotonic() >= end:
                page = self.value("document.body.innerText")
                raise AssertionError(f"not within {limit} s, {tries} tries: {script}; {self.complaints}; {page}")
            time.sleep(0.05)
            tries += 1
        return found

    def resize(self, width: int, height: int = 1500, *, dark: bool = False) -> None:
        """Show the page in a window of this size, in light or dark mode."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def violations(self) -> list[str]:
        """The serious and critical findings of axe-core about the page's accessibility."""
        package = importlib.util.find_spec("axe_playwright_python")  # holds axe-core; its Playwright is not used
        assert package is not None and package.origin is not None, "make .venv/.test installs axe-core"
        self.value(Path(package.origin).with_name("axe.min.js").read_text() + "; 0")
        run = "axe.run({resultTypes: ['violations']}).then(all => JSON.stringify(all.violations))"
        found = json.loads(self.value(run))
        return [
            f"{one['id']}: {', '.join(str(node['target']) for node in one['nodes'][:5])}"
            for one in found
            if one["impact"] in ("serious", "critical")
        ]

    def screenshot(self, path: Path) -> None:
        """Save an image of the whole page as PNG."""
        answer = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        """End the browser."""
        with contextlib.suppress(AttributeError, OSError):
            self._socket.close()
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _page(self) -> str:
        """The page's DevTools endpoint."""
        end = time.monotonic() + START_LIMIT
        while True:
            with contextlib.suppress(OSError, IndexError, ValueError):
                port = int(Path(self._folder, "DevToolsActivePort").read_text().split()[0])
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=5) as answer:
                    targets = json.load(answer)
                return str(next(one for one in targets if one["type"] == "page")["webSocketDebuggerUrl"])
            assert time.monotonic() < end and self._process.poll() is None, "chromium does not start"
            time.sleep(0.05)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            self._hear(message)
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])

    def _hear(self, message: dict[str, Any]) -> None:
        fields = message.get("params", {})
        match message.get("method"):
            case "Runtime.consoleAPICalled" if fields["type"] in ("warning", "error", "assert"):
                self.complaints.append(json.dumps(fields["args"]))
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(fields["exceptionDetails"]))
            case "Log.entryAdded" if fields["entry"]["level"] in ("warning", "error"):
                self.complaints.append(f"{fields['entry']['text']} {fields['entry'].get('url', '')}")
