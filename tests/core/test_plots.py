# SPDX-License-Identifier: Apache-2.0
"""The pictures show the functions they name, without a backend, and say so where they
cannot.
"""

import io
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import upref
from upref.cli import main
from upref.weights.atlas import groups
from upref.weights.capacity import capacity
from upref.weights.plots import Panel, cap_map, cap_panels, weights


def texts(fig):
    return [t.get_text() for ax in fig.axes for t in [*ax.texts, ax.title]] + [
        t.get_text() for t in fig.texts
    ]


def drawn(fig):
    fig.savefig(io.BytesIO(), format="svg")
    return fig


def my_loss(lp, lp_old, A, mask, eps=0.2):
    r = (lp - lp_old).exp()
    return -(r * A).minimum(r.clamp(1 - eps, 1 + eps) * A).mean()


def test_matplotlib_is_imported_late_and_pyplot_never():
    code = "import sys, upref, upref.weights.plots as p; late = 'matplotlib' not in sys.modules; "
    code += "p.cap_map('dapo'); p.weights('dapo'); assert late and 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("adv", [1, -1, 0])
def test_cap_map_shows_capacity(adv):
    fig = drawn(cap_map("dapo", "up_dapo", adv=adv, c=3))
    assert len(fig.axes) == 3  # two panels, one color bar
    n = 400
    x = (np.arange(n) + 0.5) / n
    mu, p = np.meshgrid(x, x)
    for ax, name in zip(fig.axes, ["dapo", "up_dapo"], strict=False):
        (image,) = ax.images
        assert image.get_clim() == (0, 1)
        assert list(image.get_extent()) == [0, 1, 0, 1] and image.origin == "lower"
        np.testing.assert_array_equal(
            image.get_array().filled(0), capacity(name, p, mu, adv, c=3)
        )


def test_dead_regions_are_named_as_in_the_paper():
    regions = {"Upper Clip", "Lower Clip", "Dual Clip"}
    assert regions & set(texts(cap_map("dapo"))) == {"Upper Clip"}
    assert regions & set(texts(cap_map("up_dapo"))) == set()
    assert regions & set(texts(cap_map("dapo", adv=-1))) == {"Lower Clip"}
    assert regions & set(texts(cap_map("dapo", adv=-1, c=3))) == {
        "Lower Clip",
        "Dual Clip",
    }
    # no room for the other name
    assert regions & set(texts(cap_map("dapo", adv=-1, c=40))) == {"Lower Clip"}


def test_labels_lie_inside_their_region():
    fig = cap_map("dapo", adv=-1, c=3)
    for text in fig.axes[0].texts:
        if "Clip" in text.get_text():
            mu, p = text.get_position()
            assert capacity("dapo", p, mu, -1, c=3) == 0
            assert (p > mu) == (text.get_text() == "Dual Clip")


def test_cap_map_of_a_user_loss():
    """Find that a map of a user's function is that of GRPO, and that its title names
    the function.
    """
    fig = drawn(
        cap_panels(
            [
                Panel("mine", my_loss, 1, {"eps": 0.3}),
                Panel("grpo", "grpo", 1, {"eps": 0.3}),
            ],
            n=60,
        )
    )
    mine, grpo = (ax.images[0].get_array().filled(0) for ax in fig.axes[:2])
    np.testing.assert_allclose(mine, grpo, atol=1e-9)
    assert "my_loss\n" in texts(cap_map(my_loss))


def test_advantages_one_a_response_in_small_batches():
    def loss(lp, lp_old, advantages, mask):
        rows.append(len(mask))
        return my_loss(lp, lp_old, advantages[:, None], mask)

    rows: list[int] = []
    mine, grpo = (
        cap_map(what).axes[0].images[0].get_array() for what in (loss, "grpo")
    )
    np.testing.assert_allclose(mine, grpo)
    assert max(rows) <= 1000  # not the 160,000 cells of the map


def test_weights_of_a_user_loss_have_its_scale():
    fig = drawn(weights(my_loss, "grpo", eps=0.3))
    for ax in fig.axes[:2]:
        mine, grpo = (line.get_ydata() for line in ax.lines[:2])
        np.testing.assert_allclose(mine, grpo, atol=1e-9)


def test_the_axis_holds_all_curves():
    """A curve may be highest before the end of the axis, or have the wrong sign."""

    def peaked(lp, lp_old, A, mask):
        r = (lp - lp_old).exp()
        return -(A * r * (2.67 - r.clamp(max=2.67).detach())).sum()

    def reversed_above_2(lp, lp_old, A, mask):
        r = (lp - lp_old).exp()
        return -(A * r * (1 - 2 * (r > 2))).sum()

    highest = []
    for loss in (peaked, reversed_above_2, "is_pg"):
        for ax in weights("dapo", loss).axes[:2]:
            low, high = ax.get_ylim()
            drawn = np.concatenate([line.get_ydata() for line in ax.lines[:2]])
            assert low < drawn.min() and drawn.max() < high
            highest.append(abs(drawn).max())
    assert highest[0] == pytest.approx(1.78, abs=0.01) and highest[2] > 5


def test_a_steep_curve_leaves_the_others_readable():
    def steep(lp, lp_old, A, mask):
        return -(A * (3 * (lp - lp_old)).exp()).sum()

    assert weights("dapo", steep).axes[0].get_ylim()[1] < 7


def test_hyperparameters_go_where_they_are_known():
    """Find a hyperparameter in the map's texts, and refuse unknown and wrong ones."""
    fig = cap_map("dapo", "up_dapo", eps_high=0.4)
    assert any("0.4" in t for t in texts(fig))
    with pytest.raises(
        upref.InputError, match="none of dapo, up_dapo has a hyperparameter 'eps'"
    ):
        cap_map("dapo", "up_dapo", eps=0.2)
    with pytest.raises(upref.InputError, match="at least one"):
        cap_map()
    with pytest.raises(upref.InputError, match="eps_high must be"):
        weights("dapo", eps_high=-1)
    with pytest.raises(upref.InputError, match="whole batch"):
        weights("m2po")


def test_weights_are_the_weights():
    chosen = ["dapo", "up_dapo", "sapo", "dppo_tv", "topr", "gmpo"]
    fig = drawn(weights(*chosen, mu=0.05))
    for ax, A in zip(fig.axes, (1.0, -1.0), strict=True):
        for name, line in zip(chosen, ax.lines, strict=False):
            r, w = line.get_data()
            o = upref.get(name)
            expected = o.weight(
                r[:, None], 0 * r[:, None] + A, mu=0.05, mask=np.ones((len(r), 1), bool)
            )
            line_of = np.broadcast_to(expected, (len(r), 1))[:, 0]
            # numpy rounds by the width of SIMD
            np.testing.assert_allclose(w, line_of, rtol=1e-15)
        assert set(chosen) <= set(texts(fig))


def test_jumps_are_vertical_and_narrow_windows_fill_the_axis():
    (r, w) = weights("dapo").axes[0].lines[0].get_data()
    jump = np.flatnonzero((w[:-1] > 1) & (w[1:] == 0))
    assert r[jump] == pytest.approx(1.28, abs=1e-8) and r[jump + 1] == pytest.approx(
        1.28, abs=1e-8
    )
    low, high = weights("gspo").axes[0].get_xlim()  # in 1e-4
    assert -20 < low < -3 and 4 < high < 20
    assert weights("gspo", "dapo").axes[0].get_xlim()[1] > 2


@pytest.mark.parametrize(
    "chosen",
    [["dapo"], ["dapo", "up_dapo", "grpo", "aspo", "cispo", "sapo", "dppo_tv", "gmpo"]],
)
def test_labels_do_not_touch(chosen):
    """Find that the labels of the lines do not overlap and lie within the figure."""
    fig = drawn(weights(*chosen))
    renderer = (
        fig.canvas.get_renderer() if hasattr(fig.canvas, "get_renderer") else None
    )
    for ax in fig.axes:
        boxes = [t.get_window_extent(renderer) for t in ax.texts]
        assert len(boxes) == len(chosen)
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
        assert all(
            fig.bbox.x0 <= b.x0 and b.x1 <= fig.bbox.x1 and b.y1 <= fig.bbox.y1
            for b in boxes
        )


def test_atlas_orders_by_cap():
    pairs, absent = groups(upref.names())
    caps = [float(capacity(g[0], 0.01, 0.01)) for g in pairs]
    assert all(a >= b - 1e-9 for a, b in itertools.pairwise(caps))
    assert sorted(o.name for g in pairs for o in g) + sorted(absent) == sorted(
        upref.names(), key=lambda n: (n in absent, n)
    )
    assert {"dr_grpo", "grpo", "ppo_clip"} <= {
        o.name for g in pairs if g[0].name == "grpo" for o in g
    }


def test_tables_and_pictures_say_what_holds_for_one_token_only(capsys):
    words = "gspo: of a response of one token, where s = r"
    for verb in ("weights", "cap"):
        assert main([verb, "gspo", "dapo"]) == 0
        assert words in capsys.readouterr().out.splitlines()
        assert main([verb, "gspo", "dapo", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["measured"] == words
    assert words in texts(weights("gspo", "dapo"))
    assert not any("one token" in text for text in texts(weights("gspo")))


@pytest.mark.nightly
def test_a_cap_map_says_what_holds_for_one_token_only():
    words = "gspo: of a response of one token, where s = r"
    assert words in texts(cap_map("gspo", "dapo"))


def test_a_cap_map_on_logarithmic_scales():
    fig = cap_map("dapo", log=True)
    image = fig.axes[0].images[0]
    cap, n = image.get_array(), image.get_array().shape[0]
    x = 1e-4 ** (1 - (np.arange(n) + 0.5) / n)
    i, j = n // 5, n // 2
    assert cap[i, j] == pytest.approx(capacity("dapo", x[i], x[j], 1.0), rel=1e-12)
    assert (
        image.norm(1e-4) == 0
        and image.norm(1e-2) == pytest.approx(0.5)
        and cap.mask[-1, 0]
    )


@pytest.mark.parametrize(
    "words",
    [
        ["cap", "-o", "cap.svg", "dapo"],
        ["weights", "-o", "weights.svg", "dapo"],
        ["replay", str(Path(__file__)), "-o", "sheet.html"],
    ],
)
def test_without_matplotlib_a_picture_is_refused_in_one_sentence(
    words, monkeypatch, capsys
):
    """Nothing else needs it: the extra plot installs it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(words) == 2
    assert (
        "a picture needs matplotlib: pip install matplotlib" in capsys.readouterr().err
    )
