"""A headless Chromium, driven through its debugging pipe (DevTools protocol: JSON objects that end with a zero byte)."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def browser_path():
    """Returns the path of a Chromium; None if no Chromium is installed."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page in a browser whose profile is the folder `profile`; `events`: the events that it has sent."""

    def __init__(self, path, profile):
        to_us, theirs_out = os.pipe()
        theirs_in, from_us = os.pipe()
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")
        command = [path, *options, f"--user-data-dir={profile}", "--no-first-run", "about:blank"]
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command], pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = from_us, to_us
        self._numbers, self._rest = itertools.count(1), b""
        self.events: list[dict] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """The result of a DevTools method of the page."""
        return self._call(method, self._session, **parameters)

    def open(self, url):
        """Loads a page."""
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def run(self, script):
        """The value of an expression in the page; raises AssertionError if it throws."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, script, seconds=30):
        """Waits until an expression is true, and returns its value."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"{script} did not come true: {self.run('document.body.innerText')!r}"
            time.sleep(0.05)
        return value

    def close(self):
        """Ends the browser process."""
        self.process.kill()
        self.process.wait()
        os.close(self._in)
        os.close(self._out)

    def _call(self, method, session=None, **parameters):
        number = next(self._numbers)
        os.write(
            self._in, json.dumps({"id": number, "method": method, "params": parameters, **(session or {})}).encode() + b"\0"
        )
        while True:
            message = self._read()
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def _read(self, seconds=60):
        while b"\0" not in self._rest:
            assert select.select([self._out], [], [], seconds)[0], "the browser says nothing"
            part = os.read(self._out, 1 << 16)
            assert part, "the browser has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)
