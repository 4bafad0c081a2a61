# SPDX-License-Identifier: Apache-2.0
"""The lessons show all pictures of the course, and the one that is made of a record is
what the record says now.
"""

import io
import re

import numpy as np
import pytest
import resvg_py
from PIL import Image

from docs.course import memory

PICTURES = memory.FILE.parent
SAME = 0.01  # root mean square of the difference, black to white being 1


def pixels(path):
    png = resvg_py.svg_to_bytes(svg_path=str(path), dpi=96, background="#ffffff")
    return np.asarray(Image.open(io.BytesIO(bytes(png))).convert("RGB"), float) / 255


@pytest.mark.slow
def test_the_memory_is_that_of_the_record(tmp_path):
    memory.main(tmp_path / "memory.svg")
    a, b = pixels(tmp_path / "memory.svg"), pixels(memory.FILE)
    assert a.shape == b.shape and np.sqrt(((a - b) ** 2).mean()) < SAME, (
        "run `python -m docs.course.memory`"
    )


def test_all_are_shown():
    pages = "".join(p.read_text(encoding="utf-8") for p in PICTURES.parent.glob("*.md"))
    files = sorted(PICTURES.iterdir())
    shown = sorted(re.findall(r"\(pictures/(\S+)\.svg\)", pages))
    assert [file.stem for file in files] == shown
    assert all(file.stat().st_size < 200_000 for file in files)
