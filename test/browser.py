"""A real browser for page tests: headless Chromium over its debugging pipe, no driver needed."""

import json
import os
import select
import shutil
import subprocess
import tempfile
import time

CHROMIUM = next((path for path in map(shutil.which, (
    "chromium", "chromium-browser", "google-chrome", "chrome")) if path), None)
DEADLINE_S = 60.0


class Browser:
    """One page; `troubles` are console errors, exceptions and requests that failed.

    Use it as a context. Source of the protocol: chromedevtools.github.io/devtools-protocol.
    """

    def __init__(self, width=1280, height=900):
        self.troubles, self.requests = [], []
        self._size = (width, height)
        self._number = 0
        self._rest = b""

    def __enter__(self):
        self._profile = tempfile.TemporaryDirectory(prefix="browser_", ignore_cleanup_errors=True)
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()

        def connect():                      # Chromium reads from 3 and writes to 4
            os.dup2(to_browser, 63)         # out of the way first: a pipe may be 3 or 4 itself
            os.dup2(from_browser, 64)
            os.dup2(63, 3)
            os.dup2(64, 4)

        width, height = self._size
        self._process = subprocess.Popen(
            [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
             "--disable-dev-shm-usage", "--remote-debugging-pipe", "--hide-scrollbars",
             f"--user-data-dir={self._profile.name}", f"--window-size={width},{height}",
             "about:blank"],
            preexec_fn=connect, close_fds=False, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = None
        self._session = self._call("Target.attachToTarget", targetId=target,
                                   flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(self, *exception):
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)
        self._profile.cleanup()

    def open(self, path):
        """Load a file and wait until it is there."""
        self._loaded = False
        self._call("Page.navigate", url=f"file://{path}")
        end_s = time.monotonic() + DEADLINE_S
        while not self._loaded:
            assert time.monotonic() < end_s, "the page did not load"
            self._handle(self._receive())

    def run(self, expression):
        """The value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def _call(self, method, **parameters):
        self._number += 1
        session = getattr(self, "_session", None)
        message = {"id": self._number, "method": method, "params": parameters,
                   **({"sessionId": session} if session else {})}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._handle(answer)

    def _receive(self):
        end_s = time.monotonic() + DEADLINE_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(end_s - time.monotonic(), 0.0))
            assert ready, "the browser does not answer"
            piece = os.read(self._in, 1 << 16)
            assert piece, "the browser ended"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def _handle(self, message):
        method, what = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.troubles.append(what["exceptionDetails"].get("text", "exception"))
        elif method == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning"):
            self.troubles.append(str([a.get("value") for a in what["args"]]))
        elif method == "Log.entryAdded" and what["entry"]["level"] in ("error", "warning"):
            self.troubles.append(what["entry"]["text"])
        elif method == "Network.loadingFailed":
            self.troubles.append(f"not loaded: {what.get('errorText')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(what["request"]["url"])
