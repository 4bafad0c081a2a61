# SPDX-License-Identifier: Apache-2.0
"""The page in Chromium, where there is one: by mouse, by keyboard, on a narrow screen,
in the dark, taken away as SVG.
"""

import xml.etree.ElementTree as ET

import pytest

import upref
from tests.support.browser import chromium, needs_chromium
from upref_course import explorer

pytestmark = needs_chromium
KEYS = {"up": "\ue013", "right": "\ue014", "shift": "\ue008"}
READY = "document.querySelectorAll('.map svg text').length > 0"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return explorer.write(tmp_path_factory.mktemp("page") / "explorer.html")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("chromium")) as session:
        yield session


def test_dragged_by_mouse_and_by_keyboard(browser, page):
    """The state follows, the words follow, the address follows."""
    browser.open(page, READY)
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
    browser.until(READY)
    assert browser.js("explorer.state().p") == after["p"]


@pytest.mark.nightly  # a busy machine takes longer
def test_the_work_of_a_frame_takes_less_than_33_ms(browser, page):
    browser.open(page, READY)
    browser.js("void (explorer.spent.length = 0)")
    browser.drag(".map", (0.4, 0.7), (0.6, 0.2))
    work = browser.js("explorer.spent")
    assert len(work) > 5 and sorted(work)[len(work) // 4] < 33


@pytest.mark.parametrize(
    "hash_", ["", "o=dppo_tv;bandpo_chi2;up(sapo);gspo;gmpo;dppo_kl&A=-1"]
)
def test_on_a_narrow_screen_nothing_is_wider_than_it(browser, page, hash_):
    browser.open(page, READY, hash_, 390)
    assert (
        browser.js("innerWidth")
        == browser.js("document.documentElement.scrollWidth")
        == 390
    )
    # the examples are one row, which scrolls by itself
    outside = "!e.closest('svg') && !e.parentElement?.closest('#presets')"
    wide = f"filter(e => e.getBoundingClientRect().right > 391 && {outside}).map(e => e.outerHTML.slice(0, 80))"
    assert browser.js(f"[...document.body.querySelectorAll('*')].{wide}") == []


def test_on_a_phone_the_map_comes_first_and_the_sliders_stay(browser, page):
    """A map is on the first screen, and while a map is on the screen the sliders of the
    token are too."""
    browser.open(page, READY, "", 390)

    def top(css):
        return browser.js(
            f"document.querySelector('{css}').getBoundingClientRect().top"
        )

    assert 0 <= top(".map") < 400
    assert 0 <= top("#shared") < 1000
    assert top("#presets") > top(".map") and top(".lead.more") > top(".map")
    assert top(".try") < top(".map")  # what to try is read before it is tried
    browser.js("void scrollTo(0, document.querySelectorAll('.map')[1].offsetTop)")
    second_map = "document.querySelectorAll('.map')[1].getBoundingClientRect().top"
    assert -50 < browser.js(second_map) < 400
    assert 0 <= top("#shared") < 1000


def test_the_question_to_begin_with_has_the_answer_of_the_library(browser, page):
    browser.open(page, READY)
    said = browser.js("document.querySelector('.try').textContent")
    edge = 0.05 * (1 + upref.get("dapo").hyperparameters["eps_high"])
    assert f"{edge:.3g}" in said and 0.06 < edge < 0.5
    assert upref.capacity("up_dapo", pi=0.06, pi_old=0.05) > 0.5 - 0.06
    assert upref.capacity("dapo", pi=0.06, pi_old=0.05) < 0.5 - 0.06
    browser.js("void document.querySelector('#try').click()")
    browser.until("explorer.state().mu === 0.05 && explorer.state().p === 0.06")


def test_the_token_of_the_question_is_above_the_sliders_of_a_phone(browser, page):
    browser.open(page, READY, "", 390)
    browser.js("void document.querySelector('.try summary').click()")
    browser.js("void document.querySelector('#try').click()")
    browser.until("explorer.state().mu === 0.05")
    token = "document.querySelector('.map circle').getBoundingClientRect().bottom"
    sliders = "document.querySelector('#token').getBoundingClientRect().top"
    browser.until(f"0 < {token} && {token} < Math.min({sliders}, 667)")


def test_objectives_come_and_go_the_policy_plays_and_it_is_dark(browser, page):
    """Click the buttons that add an objective, make it its UP, play the policy and
    change the theme.
    """
    browser.open(page, READY, "o=dapo&t=0")
    browser.js("void document.querySelector('#add').click()")
    browser.until("document.querySelectorAll('.card .map').length === 2")
    browser.js("void document.querySelector('.card .up').click()")
    browser.until("explorer.state().o[0].name === 'up(dapo)'")
    browser.js("void document.querySelector('#play').click()")
    browser.until("explorer.state().flow.t > 10")
    browser.js("void document.querySelector('#play').click()")

    def paper():
        return browser.js("getComputedStyle(document.body).backgroundColor")

    light = paper()
    browser.js("void document.querySelector('#theme').click()")
    assert paper() != light


def test_panels_have_one_scale_and_every_bar_its_number(browser, page):
    """The labels of the axes are the same; a nat is as long under DAPO as under UP."""
    browser.open(page, READY)
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
    """The exported figure has its texts, maps and code, no variable of the page's
    style, and another program draws it.
    """
    resvg = pytest.importorskip("resvg_py")
    browser.open(page, READY, "o=dapo~eps_high:0.5;up(sapo);gspo&A=-1&mu=0.4&p=0.3")
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
