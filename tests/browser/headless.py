"""A headless Chromium, spoken to over a pipe: open a page at a width, ask it, take its picture, print it."""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time

# Chromium reads from 3 and writes to 4; a fork that did this here would not go well with JAX's threads
_WIRED = """import os, sys
ends = [os.dup2(int(end), 100 + i) for i, end in enumerate(sys.argv[1:3])]
os.dup2(ends[0], 3); os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
NAMES = ("chromium", "chromium-browser", "google-chrome")


def executable():
    """Chromium's path, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One Chromium without a network; use it as a context."""

    def __enter__(self):
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        from_us, self._write = os.pipe()
        self._read, to_us = os.pipe()
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
        offline = ("--proxy-server=127.0.0.1:9", "--disable-background-networking", "--no-first-run")

        profile = f"--user-data-dir={self._profile.name}"
        command = [executable(), *flags, *offline, profile, "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WIRED, str(from_us), str(to_us), *command],
            pass_fds=(from_us, to_us),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(to_us)
        self._ids, self._buffer, self.events = itertools.count(1), b"", []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = None
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(self, *error):
        self._process.terminate()
        self._process.wait(timeout=20)
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    _session = None

    def ask(self, method, **parameters):
        """The browser's answer to one command."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _receive(self, seconds=30):
        until = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            assert ready, "Chromium does not answer"
            self._buffer += os.read(self._read, 1 << 20)
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, path, *, width, dark=False):
        """Load a file at this width; what was complained about is in `complaints`."""
        self.events = []
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())
        self.evaluate("document.fonts.ready.then(() => 1)")

    def complaints(self):
        """Errors, warnings and log lines of the page, and whatever it asked the network for."""
        told = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        found = [event for event in self.events if event["method"] in told]
        asked = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return found + [event for event in asked if not event["params"]["request"]["url"].startswith("file:")]

    def evaluate(self, expression):
        """The value of an expression in the page."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, path):
        """The whole page as a PNG."""
        data = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def printed(self, path):
        """The page as a PDF."""
        path.write_bytes(base64.b64decode(self.ask("Page.printToPDF", printBackground=True)["data"]))
