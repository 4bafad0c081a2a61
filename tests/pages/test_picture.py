# SPDX-License-Identifier: Apache-2.0
"""The field of docs/howto/find-your-picture.md draws the tokens that Python's replay
compares, with replay's numbers; a damaged file gets one sentence; nothing is loaded or
sent.
"""

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from docs import gallery
from docs.site import picture
from tests.support.browser import chromium, needs_chromium
from upref.errors import InputError
from upref.replay import gap, read
from upref.replay.batch import make_batch
from upref.replay.files import write
from upref_course.explorer import script

NEMO_RL = Path(__file__).parents[1] / "replay" / "files" / "train_data_step12.jsonl"
NUMBERS = ("mean", "mean_abs", "largest", "rho_mean", "rho_se", "k3", "effective")
# in none of these Python undoes a cause, so its gap is that of the columns as they are
AS_THEY_ARE = (
    "healthy_bfloat16",
    "stale_by_four",
    "nucleus_cut",
    "before_temperature",
    "tool_output_nan",
)


# ---- in V8 ---------------------------------------------------------------------------
@pytest.fixture(scope="session")
def js():
    """Yield a function that evaluates JavaScript beside what the page computes with,
    and returns what JSON can hold of it.
    """
    mini_racer = pytest.importorskip("py_mini_racer")
    with mini_racer.MiniRacer() as v8:
        v8.eval(picture.data() + script(picture.PURE, picture.HERE))
        v8.eval(
            """
            const bytesFrom = (text) => Uint8Array.from(text.match(/../g) ?? [], (two) => parseInt(two, 16));
            const arraysOf = (bytes) => new Map([...entriesOf(bytes)].map(([name, entry]) => [name, stored(entry)]));
            const told = (work) => {
              try { const step = work(); return { ...step, x: [...step.x], y: [...step.y], gap: gapOf(step) }; }
              catch (e) { if (!(e instanceof InputError)) throw e; return { wrong: e.message }; }
            };
            """
        )
        yield lambda code: json.loads(v8.eval(f"JSON.stringify({code})"))


def saved(**arrays) -> bytes:
    """Return the bytes of a .npz whose arrays are stored as they are."""
    out = io.BytesIO()
    np.savez(out, **{"schema": 1, **arrays})
    return out.getvalue()


def from_npz(js, content: bytes) -> dict:
    """What the page makes of a .npz."""
    return js(f"told(() => npzStep(arraysOf(bytesFrom('{content.hex()}'))))")


def tokens_of(batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of the tokens that train and that the sampler drew:
    by the trainer, by the sampler.
    """
    drawn = batch.mask & batch.sampler.isfinite()
    return batch.trainer()[drawn], batch.sampler[drawn]


def assert_same(found: dict, batch) -> None:
    """Assert that the page's tokens and gap are those of Python, which undid no cause."""
    x, y = tokens_of(batch)
    assert (found["x"], found["y"]) == (x.tolist(), y.tolist())
    expected = gap(batch)
    assert found["gap"]["tokens"] == expected.tokens == len(x)
    for name in NUMBERS:
        assert found["gap"][name] == pytest.approx(getattr(expected, name), rel=1e-9)


@pytest.mark.parametrize("fault", AS_THEY_ARE)
def test_tokens_and_gap_are_those_of_replay(js, fault):
    held = gallery.columns(fault)
    found = from_npz(js, saved(**{k: v.numpy() for k, v in held.items()}))
    assert_same(found, make_batch(held, file=fault))


@pytest.mark.parametrize("fault", ["shifted", "probabilities", "retokenized_with_ids"])
def test_tokens_are_drawn_as_they_are_where_replay_undoes_a_fault(js, fault):
    held = gallery.columns(fault)
    found = from_npz(js, saved(**{k: v.numpy() for k, v in held.items()}))
    x, y = tokens_of(make_batch(held, file=fault))
    assert (found["x"], found["y"]) == (x.tolist(), y.tolist())
    ids = held.get("sampler_ids", held["ids"])
    assert found["other"] == int(((ids != held["ids"]) & held["mask"]).sum())


def test_nemo_rls_own_file_is_read_as_python_reads_it(js):
    text = json.dumps(NEMO_RL.read_text(encoding="utf-8"))
    found = js(f"told(() => jsonlStep({text}, {NEMO_RL.name!r}))")
    assert found["step"] == "12"
    assert_same(found, read(NEMO_RL))


@pytest.mark.parametrize("kind", ["<f2", "<f4", "<f8", ">f4"])
def test_arrays_of_any_float_and_order(js, tmp_path, kind):
    old = np.asfortranarray(-np.arange(1.0, 13.0).reshape(3, 4) / 8)
    arrays = {
        "ids": np.arange(12).reshape(3, 4),
        "mask": np.asfortranarray(np.tril(np.ones((3, 4), dtype=bool))),
        "old": old.astype(kind),
        "sampler": (old - 0.25).astype(kind),
    }
    (tmp_path / "a.npz").write_bytes(saved(**arrays))
    found = from_npz(js, saved(**arrays))
    x, y = tokens_of(read(tmp_path / "a.npz"))
    assert (found["x"], found["y"]) == (x.tolist(), y.tolist())


def test_ragged_columns_are_read(js):
    arrays = {
        "ids": np.arange(5),
        "mask": np.array([0, 1, 1, 1, 1]),
        "now": np.array([0.0, -1.0, -2.0, -3.0, 0.0005]),
        "sampler": np.array([0.0, -1.5, np.nan, -np.inf, -0.5], dtype=np.float32),
        "offsets": np.array([0, 3, 5]),
        "group": np.array(["a", "b"]),
    }
    found = from_npz(js, saved(**arrays, meta=json.dumps({"framework": "mine"})))
    assert (found["x"], found["y"]) == ([-1, 0], [-1.5, -0.5])
    assert found["trained"] == 4


def test_half_precision_numbers(js):
    """Every number of float16, and bfloat16's of its own bits."""
    bits = np.arange(2**16, dtype=np.uint16)
    expected = {
        "half": bits.view(np.float16).astype(np.float64),
        "wide": torch.from_numpy(bits.view(np.int16))
        .view(torch.bfloat16)
        .double()
        .numpy(),
    }
    for name, values in expected.items():
        found = js(f"Array.from({{ length: 65536 }}, (_, i) => {name}(i))")
        told = [float(x) if np.isfinite(x) else None for x in values]
        assert [None if x is None else float(x) for x in found] == told


def changed(name: str, value) -> bytes:
    """Return the bytes of a small file with another column, or without one (None)."""
    arrays = {
        "ids": np.ones((1, 2), dtype=int),
        "mask": np.ones((1, 2), dtype=bool),
        "old": -np.ones((1, 2)),
        "sampler": -np.ones((1, 2)),
    }
    arrays[name] = value
    return saved(**{k: v for k, v in arrays.items() if v is not None})


REFUSED = {
    "needs the column sampler": ("sampler", None),
    "needs the column old": ("old", None),
    "old is NaN at response 0, token 1": ("old", np.array([[-1.0, np.nan]])),
    "old is 0.5000 > 0 at response 0, token 0": ("old", np.array([[0.5, -1.0]])),
    "sampler is inf at response 0, token 0": ("sampler", np.array([[np.inf, -1.0]])),
    "mask must hold 0 and 1": ("mask", np.array([[2, 1]])),
    "no token trains": ("mask", np.zeros((1, 2))),
    "old has shape [2], expected [1,2]": ("old", -np.ones(2)),
    "schema version 2": ("schema", 2),
    "weights is no column": ("weights", np.ones(2)),
    "Python objects": ("old", np.array([[None, None]])),
    "mask has shape [2]": ("mask", np.ones(2)),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_file_that_replay_refuses_gets_one_sentence(js, tmp_path, sentence):
    content = changed(*REFUSED[sentence])
    assert sentence in from_npz(js, content)["wrong"]
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(InputError):
        gap(read(tmp_path / "a.npz"))


def test_a_cut_or_altered_file_is_refused_at_every_place(js):
    """Cut a file at 60 places, and alter a byte at each of them."""
    content = changed("step", 3)
    step = max(1, len(content) // 60)
    for length in range(0, len(content), step):
        found = from_npz(js, content[:length])
        assert "damaged or cut off" in found["wrong"], length
    refused = 0
    for place in range(0, len(content), step):
        altered = bytearray(content)
        altered[place] ^= 0x55
        refused += "wrong" in from_npz(js, bytes(altered))
    assert refused > 30  # the others are times and flags, which say nothing of a column


# ---- in Chromium ---------------------------------------------------------------------
def test_one_file_that_loads_nothing(tmp_path):
    """Find no address in the page, and a policy that allows only its own script and
    style.
    """
    picture.write(tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://", text)
    policy = re.search(r'Content-Security-Policy" content="(.*)"', text)
    assert policy and {x.strip() for x in policy[1].split(";")} == {
        "default-src 'none'",
        "script-src 'unsafe-inline'",
        "style-src 'unsafe-inline'",
        "base-uri 'none'",
        "form-action 'none'",
    }
    assert "/*style*/" not in text and "/*script*/" not in text
    files = {file.stem for file in picture.HERE.glob("*.js")}
    assert files == set(picture.SCRIPTS)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "picture.html"
    picture.write(file)
    return file


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("chromium")) as session:
        yield session


READY = "document.getElementById('file') !== null"
TOLD = "['drawn', 'refused'].includes(document.getElementById('state').textContent)"
STEP = """({...picture.step, x: [...picture.step.x], y: [...picture.step.y], gap: picture.gap})"""


@needs_chromium
@pytest.mark.parametrize("fault", AS_THEY_ARE)
def test_a_chosen_file_is_drawn(browser, page, tmp_path, fault):
    """A file as upref itself writes it: deflated, ragged, in float32."""
    write(tmp_path / "step.npz", make_batch(gallery.columns(fault), file="", step=7))
    browser.open(page, READY)
    browser.keys("#file", str(tmp_path / "step.npz"))
    browser.until(TOLD)
    batch = read(tmp_path / "step.npz")
    assert_same(browser.js(STEP), batch)
    said = browser.js("document.getElementById('numbers').textContent")
    assert f"E[ρ] {gap(batch).rho_mean:.4f} ± {gap(batch).rho_se:.4f}" in said
    dark = """(() => { const c = document.getElementById('picture');
      const seen = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
      let points = 0;
      for (let i = 0; i < seen.length; i += 4) points += seen[i + 2] > seen[i] + 40;
      return points; })()"""
    assert browser.js(dark) > 300  # pixels of the points' blue


@needs_chromium
def test_a_dropped_file_is_drawn(browser, page):
    content = base64.b64encode(NEMO_RL.read_bytes()).decode()
    browser.open(page, READY)
    browser.js(
        f"""void (() => {{
          const given = new DataTransfer();
          given.items.add(new File([atob({content!r})], {NEMO_RL.name!r}));
          dispatchEvent(new DragEvent('drop', {{ dataTransfer: given, cancelable: true }}));
        }})()"""
    )
    browser.until(TOLD)
    assert_same(browser.js(STEP), read(NEMO_RL))


@needs_chromium
def test_safetensors_are_drawn(browser, page, tmp_path):
    from safetensors.torch import save_file

    held = gallery.columns("stale_by_four")
    held |= {name: held[name].bfloat16() for name in ("old", "sampler")}
    held |= {name: held[name].contiguous() for name in held}
    save_file(held, tmp_path / "a.safetensors", metadata={"schema": "1", "step": "3"})
    browser.open(page, READY)
    browser.keys("#file", str(tmp_path / "a.safetensors"))
    browser.until(TOLD)
    assert_same(browser.js(STEP), read(tmp_path / "a.safetensors"))


@needs_chromium
@pytest.mark.parametrize(
    ("name", "sentence"),
    [("a.pt", "this page reads .npz"), ("a.npz", "damaged"), ("a.jsonl", "NeMo-RL")],
)
def test_another_file_is_refused_in_one_sentence(
    browser, page, tmp_path, name, sentence
):
    (tmp_path / name).write_text("not a recorded batch")
    browser.open(page, READY)
    browser.keys("#file", str(tmp_path / name))
    browser.until(TOLD)
    assert sentence in browser.js("document.getElementById('wrong').textContent")
    assert browser.js("document.getElementById('found').hidden")


@needs_chromium
def test_the_page_may_open_no_connection(browser, page):
    browser.open(page, READY)
    browser.js(
        "void (window.sent = null, fetch('http://127.0.0.1:9/').then(() => (sent = 'yes'), (e) => (sent = String(e))))"
    )
    browser.js(
        "void addEventListener('securitypolicyviolation', (e) => (window.refused = e.effectiveDirective))"
    )
    browser.js("void fetch('http://127.0.0.1:9/').catch(() => 0)")
    browser.until("window.refused !== undefined")
    assert browser.js("refused") == "connect-src"


@needs_chromium
@pytest.mark.parametrize("width", [320, 390, 1280])
def test_nothing_is_wider_than_the_screen(browser, page, width):
    browser.open(page, READY, width=width)
    assert browser.js("document.documentElement.scrollWidth") <= width
