# SPDX-License-Identifier: Apache-2.0
"""The committed figures are what the code draws now, and the comparison would notice if
they were not.
"""

import importlib.util
import io
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import resvg_py
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

import upref
from tests.support.daily import daily
from upref import catalog

FIGURES = Path(__file__).parents[2] / "figures"
spec = importlib.util.spec_from_file_location("figures_make", FIGURES / "make.py")
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)

SAME = 0.01  # root mean square of the difference, black to white being 1


@pytest.fixture(scope="module")
def atlas():
    return make.atlas()


@pytest.fixture(scope="module")
def fresh(atlas, tmp_path_factory):
    """Draw every figure into a new folder, and return it."""
    folder = tmp_path_factory.mktemp("figures")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "atlas", lambda: atlas)  # drawn once
        make.main(folder)
    return folder


def pixels(path):
    png = resvg_py.svg_to_bytes(svg_path=str(path), dpi=96, background="#ffffff")
    return np.asarray(Image.open(io.BytesIO(bytes(png))).convert("RGB"), float) / 255


def distance(a, b):
    a, b = pixels(a), pixels(b)
    return np.sqrt(((a - b) ** 2).mean()) if a.shape == b.shape else np.inf


@pytest.mark.parametrize("name", ["cap.svg", "atlas.svg"])
def test_committed_figure_is_what_the_code_draws(fresh, name):
    assert distance(fresh / name, FIGURES / name) < SAME, (
        "run `python figures/make.py` and look at the result"
    )


@pytest.mark.nightly
def test_figures_are_small_and_carry_no_date(fresh):
    for path in fresh.iterdir():
        assert path.stat().st_size < 800_000
        assert "dc:date" not in path.read_text()
    assert {p.name for p in fresh.iterdir()} == {p.name for p in FIGURES.glob("*.svg")}


def test_the_command_explains_itself_and_refuses_what_is_no_folder(tmp_path, capsys):
    for arguments, status in ((["--help"], 0), ([str(tmp_path / "none")], 2)):
        with pytest.raises(SystemExit) as end:
            make.command(arguments)
        assert end.value.code == status
    said = capsys.readouterr()
    assert "FOLDER" in said.out and "there is no folder" in said.err
    assert not list(tmp_path.iterdir())


def test_same_code_same_bytes(fresh, tmp_path):
    make.save(make.cap(), tmp_path / "cap.svg")
    assert (tmp_path / "cap.svg").read_bytes() == (fresh / "cap.svg").read_bytes()


@pytest.mark.parametrize(
    "changed",
    daily([{"eps_high": 0.4}, {"eps_high": 0.2}, {"c": 5}, {"eps_low": 0.3}], 2),
)
def test_a_changed_figure_is_noticed(tmp_path, changed):
    make.save(make.cap(**changed), tmp_path / "cap.svg")
    assert distance(tmp_path / "cap.svg", FIGURES / "cap.svg") > 2 * SAME


def test_a_changed_objective_is_noticed(monkeypatch, tmp_path):
    """One objective's window in the atlas, a hundredth of the page."""
    from dataclasses import replace

    from upref import definition

    wrong = replace(
        upref.get("gspo"), closed_form=lambda s, A, *, eps_low, eps_high: A * s
    )
    monkeypatch.setitem(definition.OBJECTIVES, "gspo", wrong)
    make.save(make.atlas(), tmp_path / "atlas.svg")
    assert distance(tmp_path / "atlas.svg", FIGURES / "atlas.svg") > 2 * SAME


def test_the_picture_is_not_blank(fresh):
    for name in ("cap.svg", "atlas.svg"):
        assert pixels(fresh / name).std() > 0.05


@pytest.mark.nightly
def test_atlas_has_every_objective_and_no_two_texts_touch(atlas):
    """Every objective of the first tier is named, no two texts overlap by more than a
    point, and none leaves the figure.
    """
    fig = atlas
    FigureCanvasAgg(fig).draw()
    words = " ".join(t.get_text() for t in fig.texts).replace("(", " ").split()
    assert set(catalog.first_tier()) <= set(words)
    renderer = fig.canvas.get_renderer()
    boxes = [t.get_window_extent(renderer) for t in fig.texts if t.get_text()]
    for ax in fig.axes:
        labels = [
            ax.xaxis.label,
            ax.yaxis.label,
            *ax.get_xticklabels(),
            *ax.get_yticklabels(),
        ]
        boxes += [t.get_window_extent(renderer) for t in labels if t.get_text()]
    smaller = [box.padded(-1) for box in boxes]
    for a, b in combinations(smaller, 2):
        assert not b.overlaps(a), (a, b)
    for box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0
        assert box.x1 <= fig.bbox.x1 and box.y1 <= fig.bbox.y1
