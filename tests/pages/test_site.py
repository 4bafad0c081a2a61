# SPDX-License-Identifier: Apache-2.0
"""The site builds from this checkout without a warning, and no link of it is dead."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs.site import __main__ as command, gather, links, prose
from upref import get, names

pytest.importorskip(
    "sphinx", reason="`repro/venv.sh docs` installs what the site is built with"
)
ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.site]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site, and return its folder; a page that fails, a warning or a dead
    link fails the build.
    """
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "docs.site", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "html"


def test_every_page_of_the_repository_is_there(site):
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / name).exists() or page.parent.name == "site", name


def test_the_field_that_draws_a_file_is_on_its_page_without_rights(site):
    text = (site / "howto" / "find-your-picture.html").read_text(encoding="utf-8")
    assert 'src="../picture/index.html"' in text and 'sandbox="allow-scripts"' in text
    assert (site / "picture" / "index.html").is_file()


def test_each_objective_is_introduced_in_words():
    from docs.site.objectives import ABOUT

    assert list(ABOUT) == sorted(ABOUT) and set(ABOUT) == set(names())
    assert all(called and about.endswith(".") for called, about in ABOUT.values())


def test_indices_are_set_low_and_papers_have_names():
    from docs.site.prose import papers, typeset

    assert all(paper.authors and paper.year for paper in papers().values())
    assert not [key for key, paper in papers().items() if paper.authors == key]
    text = "# π_θ\nπ_θ(o_t), `π_θ`, $\\pi_θ$, [ε_low](a.md#ε_low), lp_old, ratio_low; `yu2025dapo`"
    assert typeset(text) == (
        "# π_θ\nπ<sub>θ</sub>(o<sub>t</sub>), `π_θ`, $\\pi_θ$, "
        "[ε<sub>low</sub>](a.md#ε_low), lp_old, ratio_low; "
        "[Yu et al. 2025](https://arxiv.org/abs/2503.14476)"
    )


def test_formulas_have_their_indices_and_powers():
    from docs.site.tex import equation

    assert equation("W^c1 e^(c2 W)") == r"W^{c_{1}} e^{(c_{2} W)}"
    assert equation("p_i^old e^-ε") == (r"p_{i}^{\mathrm{old}} e^{-\varepsilon}")
    assert equation("1-ε_f_low") == r"1-\varepsilon _{f,\mathrm{low}}"
    assert equation("M of dppo_tv\nβ1 r") == r"M \text{ of dppo_tv}\\ \beta_{1} r"


def test_no_formula_is_an_error():
    """Two indices of one letter, or two powers, are none."""
    from docs.site.tex import equation

    for name in names():
        text = equation(get(name).equation)
        assert not re.search(r"([_^])\{[^{}]*(\{[^{}]*\}[^{}]*)*\}\1", text), name


def test_the_list_shows_names_formulas_and_weights(site):
    text = (site / "objectives.html").read_text(encoding="utf-8")
    rows = re.findall(r'<tr class="row-.*?</tr>', text, re.DOTALL)
    named = [row for row in rows if "objectives/" in row]
    assert len(named) == len(names()) and "DAPO</span>" in named[0]
    assert sum("small-weight" in row for row in named) > 40
    assert "yu2025dapo" not in text and "Yu et al. 2025" in text


def test_a_dead_link_is_seen(tmp_path):
    (tmp_path / "a.html").write_text(
        '<h1 id="here"></h1><a href="b.html"></a><a href="#there"></a><a href="#here"></a>'
    )
    (tmp_path / "c.html").write_text(
        '<script src="https://cdn.example/x.js"></script><a href="https://example.org"></a>'
    )
    said = links.dead(tmp_path)
    assert [line.partition(":")[0] for line in said[:2]] == [
        "b.html leads nowhere",
        "#there has no such heading",
    ]
    assert len(said) == 3 and "is fetched from a network" in said[2]


@pytest.mark.parametrize("fence", ["text", "{code-block} none", "{eval-rst}"])
def test_no_index_is_set_low_in_code_or_restructured_text(fence):
    """Sphinx escapes a tag there, so that a reader would see `<sub>`."""
    kept = f"```{fence}\nKL(π_θ ‖ π_ref)\n```\n"
    text = gather.outside_code(f"π_θ\n\n{kept}", prose.typeset)
    assert text == f"π<sub>θ</sub>\n\n{kept}"


def test_killed_at_any_moment_it_leaves_the_site_of_before(tmp_path, monkeypatch):
    """It dies at its first touch of the disk, then at its second, ...; a build that
    fails comes after each.
    """
    wrong, html = [], tmp_path / "html" / "index.html"

    def sphinx(argv):
        Path(argv[-1]).mkdir()
        (Path(argv[-1]) / "index.html").write_text("a site")
        return len(wrong)

    monkeypatch.setattr("sphinx.cmd.build.build_main", sphinx)
    monkeypatch.setattr(gather, "gather", lambda source: source.mkdir())
    monkeypatch.setattr(command.explorer, "write", Path.touch)
    monkeypatch.setattr(command.picture, "write", Path.touch)
    monkeypatch.setattr(links, "dead", lambda html: [])
    assert command.build(tmp_path) == []
    for deaths in range(20):
        left = [deaths]

        def touch(*args, real, left=left, **kwargs):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            for owner, name in ((Path, "rename"), (shutil, "rmtree")):
                real = getattr(owner, name)
                patch.setattr(
                    owner, name, lambda *a, real=real, **k: touch(*a, real=real, **k)
                )
            try:
                command.build(tmp_path)
                break
            except KeyboardInterrupt:
                pass
        wrong.append(1)
        assert (
            command.build(tmp_path) == ["Sphinx had warnings or errors, above."]
            and html.read_text() == "a site"
        )
        wrong.clear()
    assert deaths >= 5


def test_what_follows_the_explorers_address_is_a_state_and_no_heading(tmp_path):
    for name in ("explorer", "course"):
        (tmp_path / name).mkdir()
    (tmp_path / "explorer/index.html").write_text("<p>maps</p>")
    (tmp_path / "course/b.html").write_text("<p>no heading</p>")
    page = tmp_path / "course/a.html"
    page.write_text('<iframe src="../explorer/index.html#o=dapo&A=1"></iframe>')
    assert links.dead(tmp_path) == []
    page.write_text('<a href="b.html#o=dapo">b</a>')
    assert links.dead(tmp_path) == ["b.html#o=dapo has no such heading: course/a.html"]
