# SPDX-License-Identifier: Apache-2.0
"""The site builds from this checkout without a warning, and no link of it is dead."""

import subprocess
import sys
from pathlib import Path

import pytest

from docs.site import links

pytest.importorskip("sphinx", reason="`repro/venv.sh docs` installs what the site is built with")
ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.site]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; a page that fails, a warning or a dead link fails the build."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run([sys.executable, "-m", "docs.site", folder], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "html"


def test_every_page_of_the_repository_is_there(site):
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / name).exists() or page.parent.name == "site", name


def test_a_dead_link_is_seen(tmp_path):
    (tmp_path / "a.html").write_text(
        '<h1 id="here"></h1><a href="b.html"></a><a href="#there"></a><a href="#here"></a>'
    )
    (tmp_path / "c.html").write_text(
        '<script src="https://cdn.example/x.js"></script><a href="https://example.org"></a>'
    )
    said = links.dead(tmp_path)
    assert [line.partition(":")[0] for line in said[:2]] == ["b.html leads nowhere", "#there has no such heading"]
    assert len(said) == 3 and "is fetched from a network" in said[2]
