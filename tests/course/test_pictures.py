# SPDX-License-Identifier: Apache-2.0
"""The pictures of the course are what the code draws now, and the lessons show them
all.
"""

import io
import re
from pathlib import Path

import numpy as np
import pytest
import resvg_py
from PIL import Image

from docs.course import draw

pytestmark = pytest.mark.slow

SAME = 0.01  # root mean square of the difference, black to white being 1


def pixels(path):
    png = resvg_py.svg_to_bytes(svg_path=str(path), dpi=96, background="#ffffff")
    return np.asarray(Image.open(io.BytesIO(bytes(png))).convert("RGB"), float) / 255


@pytest.mark.parametrize("name", draw.PICTURES)
def test_it_is_what_the_code_draws(tmp_path, name):
    draw.main(name, folder=tmp_path)
    a, b = pixels(tmp_path / f"{name}.svg"), pixels(draw.FOLDER / f"{name}.svg")
    assert a.shape == b.shape and np.sqrt(((a - b) ** 2).mean()) < SAME, (
        f"run `python -m docs.course.draw {name}`"
    )
    assert a.std() > 0.05 and (draw.FOLDER / f"{name}.svg").stat().st_size < 200_000


def test_a_changed_picture_is_noticed(tmp_path, monkeypatch):
    from upref import advantages

    monkeypatch.setattr(advantages, "group_norm", advantages.group_mean)
    draw.main("02-advantage", folder=tmp_path)
    a, b = (
        pixels(tmp_path / "02-advantage.svg"),
        pixels(draw.FOLDER / "02-advantage.svg"),
    )
    assert a.shape != b.shape or np.sqrt(((a - b) ** 2).mean()) > 2 * SAME


def test_all_are_shown():
    pages = "".join(
        p.read_text(encoding="utf-8") for p in Path(draw.__file__).parent.glob("*.md")
    )
    files = sorted(p.stem for p in draw.FOLDER.iterdir())
    assert (
        files
        == sorted(draw.PICTURES)
        == sorted(re.findall(r"\(pictures/(\S+)\.svg\)", pages))
    )
