# SPDX-License-Identifier: Apache-2.0
"""Chromium, where there is one, driven through chromedriver's own protocol, so that no
package is needed for it.
"""

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_chromium = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no chromium with chromedriver on this machine"
)
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --force-prefers-reduced-motion"""
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """A session of chromedriver: `js` evaluates, `keys` types into an element, `drag`
    presses and moves the mouse.
    """

    def __init__(self, url: str, flags: list[str]):
        """Begin a session with chromedriver at this address; `url` becomes the
        session's.
        """
        self.url = url
        options = {"binary": CHROMIUM, "args": flags}
        made = self.ask(
            "POST",
            "/session",
            {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}},
        )
        self.url += f"/session/{made['sessionId']}"

    def ask(self, method: str, path: str, body: dict | None = None):
        """Send one request of the WebDriver protocol, and return the value of the
        answer. It raises an error of urllib where chromedriver refuses.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def js(self, code: str):
        """Evaluate an expression of JavaScript on the page, and return its value."""
        return self.ask(
            "POST", "/execute/sync", {"script": f"return {code};", "args": []}
        )

    def open(self, file: Path, ready: str, hash_: str = "", width: int = 1280):
        """Open a file at this width, and wait until a condition of it is true."""
        size = {
            "width": width,
            "height": 1000,
            "deviceScaleFactor": 1,
            "mobile": width < 500,
        }
        self.ask(
            "POST",
            "/goog/cdp/execute",
            {"cmd": "Emulation.setDeviceMetricsOverride", "params": size},
        )
        self.ask("POST", "/url", {"url": "about:blank"})
        self.ask("POST", "/url", {"url": f"{file.as_uri()}#{hash_}"})
        self.until(ready)

    def until(self, condition: str, seconds: float = 30):
        end = time.monotonic() + seconds
        while not self.js(condition):
            assert time.monotonic() < end, condition
            time.sleep(0.05)

    def keys(self, css: str, text: str):
        found = self.ask("POST", "/element", {"using": "css selector", "value": css})[
            ELEMENT
        ]
        self.ask("POST", f"/element/{found}/value", {"text": text})

    def drag(self, css: str, start: tuple, end: tuple, steps: int = 40):
        """Press the mouse at one place of an element, move it to another in steps, and
        release it. Places are shares of the element's width and height.
        """
        self.js(f"document.querySelector({css!r}).scrollIntoView({{block: 'center'}})")
        box = self.js(
            f"document.querySelector({css!r}).getBoundingClientRect().toJSON()"
        )

        def move_to(share):
            """Return the event that moves to this share of the way."""
            x, y = (a + (b - a) * share for a, b in zip(start, end, strict=True))
            return {
                "type": "pointerMove",
                "duration": 20,
                "x": round(box["x"] + box["width"] * x),
                "y": round(box["y"] + box["height"] * y),
            }

        moves = [
            move_to(0),
            {"type": "pointerDown", "button": 0},
            *(move_to((i + 1) / steps) for i in range(steps)),
        ]
        mouse = {
            "type": "pointer",
            "id": "m",
            "actions": [*moves, {"type": "pointerUp", "button": 0}],
        }
        self.ask("POST", "/actions", {"actions": [mouse]})


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """Yield a session of Chromium, whose profile is in an empty folder; end it and
    chromedriver afterwards.

    It waits some ten seconds for chromedriver to listen.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(
        [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    session = None
    try:
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        flags = [*FLAGS.split(), f"--user-data-dir={folder}"]
        session = Browser(f"http://127.0.0.1:{port}", flags)
        yield session
    finally:
        if session:
            session.ask("DELETE", "")
        driver.terminate()
        driver.wait(300)
