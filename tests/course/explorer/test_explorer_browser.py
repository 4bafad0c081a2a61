# SPDX-License-Identifier: Apache-2.0
"""The page in Chromium, where there is one: by mouse, by keyboard, on a narrow screen,
in the dark, taken away as SVG.

Driven through chromedriver's own protocol, so that no package is needed for it.
"""

import json
import shutil
import socket
import subprocess
import time
import urllib.request
import xml.etree.ElementTree as ET

import pytest

from upref_course import explorer

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no chromium with chromedriver on this machine"
)
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --force-prefers-reduced-motion"""
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {"up": "\ue013", "right": "\ue014", "shift": "\ue008"}


class Browser:
    """A session of chromedriver: `js` evaluates, `keys` types into an element, `drag`
    presses and moves the mouse.
    """

    def __init__(self, url: str, flags: list[str]):
        self.url = url
        options = {"binary": CHROMIUM, "args": flags}
        made = self.ask(
            "POST",
            "/session",
            {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}},
        )
        self.url += f"/session/{made['sessionId']}"

    def ask(self, method: str, path: str, body: dict | None = None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def js(self, code: str):
        return self.ask(
            "POST", "/execute/sync", {"script": f"return {code};", "args": []}
        )

    def open(self, file, hash_: str = "", width: int = 1280):
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
        self.until("document.querySelectorAll('.map svg text').length > 0")

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
        """From one place to another of an element, in parts of its width and height."""
        self.js(f"document.querySelector({css!r}).scrollIntoView({{block: 'center'}})")
        box = self.js(
            f"document.querySelector({css!r}).getBoundingClientRect().toJSON()"
        )
        part = lambda s, i: start[i] + (end[i] - start[i]) * s
        at = lambda s: {
            "type": "pointerMove",
            "duration": 20,
            "x": round(box["x"] + box["width"] * part(s, 0)),
            "y": round(box["y"] + box["height"] * part(s, 1)),
        }
        moves = [
            at(0),
            {"type": "pointerDown", "button": 0},
            *(at((i + 1) / steps) for i in range(steps)),
        ]
        mouse = {
            "type": "pointer",
            "id": "m",
            "actions": [*moves, {"type": "pointerUp", "button": 0}],
        }
        self.ask("POST", "/actions", {"actions": [mouse]})


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return explorer.write(tmp_path_factory.mktemp("page") / "explorer.html")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
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
        flags = [
            *FLAGS.split(),
            f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
        ]
        session = Browser(f"http://127.0.0.1:{port}", flags)
        yield session
    finally:
        if session:
            session.ask("DELETE", "")
        driver.terminate()
        driver.wait(30)


def test_dragged_by_mouse_and_by_keyboard(browser, page):
    """The state follows, the words follow, the address follows; the work of a frame is
    less than 33 ms.
    """
    browser.open(page)
    browser.js("void (explorer.spent.length = 0)")
    browser.drag(".map", (0.4, 0.7), (0.6, 0.2))
    state = browser.js("explorer.state()")
    assert state["mu"] == pytest.approx((60 - 9) / 89, abs=0.01) and state[
        "p"
    ] == pytest.approx(1 - (20 - 2) / 89, abs=0.01)
    assert "Upper Clip" in browser.js("document.querySelector('.verdict').textContent")
    slider = '.card input[type="range"]'
    browser.drag(slider, (0.2, 0.5), (0.6, 0.5))
    moved = browser.js("explorer.state().o.map(o => o.hp.eps_low)")
    # one letter, one value
    assert moved[0] == pytest.approx(0.6, abs=0.03) and moved[0] == moved[1]
    work = browser.js("explorer.spent")
    # a busy machine stretches the others
    assert len(work) > 5 and sorted(work)[len(work) // 4] < 33
    browser.keys(".map", KEYS["up"] * 2 + KEYS["right"])
    after = browser.js("explorer.state()")
    assert after["p"] == pytest.approx(state["p"] + 0.01) and after[
        "mu"
    ] == pytest.approx(state["mu"] + 0.005)
    browser.keys(slider, KEYS["right"])
    assert browser.js("explorer.state().o[0].hp.eps_low") == pytest.approx(
        moved[0] + 0.01
    )
    browser.until(f"location.hash.includes('p={after['p']}')")
    browser.ask("POST", "/refresh", {})
    browser.until("document.querySelectorAll('.map svg text').length > 0")
    assert browser.js("explorer.state().p") == after["p"]


@pytest.mark.parametrize(
    "hash_", ["", "o=dppo_tv;bandpo_chi2;up(sapo);gspo;gmpo;dppo_kl&A=-1"]
)
def test_on_a_narrow_screen_nothing_is_wider_than_it(browser, page, hash_):
    browser.open(page, hash_, 390)
    assert (
        browser.js("innerWidth")
        == browser.js("document.documentElement.scrollWidth")
        == 390
    )
    wide = "filter(e => e.getBoundingClientRect().right > 391 && !e.closest('svg')).map(e => e.outerHTML.slice(0, 80))"
    assert browser.js(f"[...document.body.querySelectorAll('*')].{wide}") == []


def test_objectives_come_and_go_the_policy_plays_and_it_is_dark(browser, page):
    browser.open(page, "o=dapo&t=0")
    browser.js("void document.querySelector('#add').click()")
    browser.until("document.querySelectorAll('.card .map').length === 2")
    browser.js("void document.querySelector('.card .up').click()")
    browser.until("explorer.state().o[0].name === 'up(dapo)'")
    browser.js("void document.querySelector('#play').click()")
    browser.until("explorer.state().flow.t > 10")
    browser.js("void document.querySelector('#play').click()")
    paper = lambda: browser.js("getComputedStyle(document.body).backgroundColor")
    light = paper()
    browser.js("void document.querySelector('#theme').click()")
    assert paper() != light


def test_panels_have_one_scale_and_every_bar_its_number(browser, page):
    """The labels of the axes are the same; a nat is as long under DAPO as under UP."""
    browser.open(page)
    texts = "e.querySelectorAll('svg')[n].querySelectorAll('text[text-anchor=end]')"
    ticks = f"(e, n) => [...{texts}].map(t => t.textContent)"
    flows = browser.js(
        f"[...document.querySelectorAll('.card.flow')].map(e => ({ticks})(e, 0))"
    )
    assert len(flows) == 2 and flows[0] == flows[1] and len(flows[0]) > 3
    bars = browser.js(
        """[...document.querySelectorAll('.card.flow')].map(e => [
        [...e.querySelectorAll('svg')[1].querySelectorAll('rect')].map(r => Number(r.getAttribute('width'))),
        [...e.querySelectorAll('.number')].map(t => t.textContent)])"""
    )
    scales = []
    for widths, numbers in bars:
        assert len(widths) == len(numbers) == 10
        values = [abs(float(x.replace("−", "-"))) for x in numbers]
        scales += [w / v for w, v in zip(widths, values, strict=True) if v > 0.2]
    assert max(scales) < 1.1 * min(scales)
    up, down = browser.js(
        f"[0, 1].map(i => ({ticks})(document.getElementById('curves').children[i], 0))"
    )
    assert len({x.lstrip("−") for x in (up[-1], down[0])}) == 1, (up, down)


def test_the_svg_stands_by_itself(browser, page):
    resvg = pytest.importorskip("resvg_py")
    browser.open(page, "o=dapo~eps_high:0.5;up(sapo);gspo&A=-1&mu=0.4&p=0.3")
    svg = browser.js("explorer.figure()")
    root = ET.fromstring(svg)
    text = " ".join(root.itertext())
    assert (
        "up(sapo)" in text
        and "Lower Clip" in text
        and browser.js("explorer.python()") in text
    )
    assert (
        len(root.findall(".//{http://www.w3.org/2000/svg}image")) == 3
        and "var(" not in svg
        and "[object" not in svg
    )
    assert "A < 0" in text and "0.5" in text
    assert len(bytes(resvg.svg_to_bytes(svg_string=svg))) > 10_000
