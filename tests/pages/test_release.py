# SPDX-License-Identifier: Apache-2.0
"""The sdist and the wheel, built and installed into an environment of their own, do
what README shows.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

import upref
from upref.cli import main

pytest.importorskip(
    "hatchling", reason="`repro/venv.sh` installs what builds the wheel"
)
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build the sdist, and the wheel from the sdist, as `python -m build` does; return
    their folder.
    """
    folder = tmp_path_factory.mktemp("dist")
    quiet = {"check": True, "capture_output": True}
    # the wheel gets it from the sdist
    named = os.environ | {"UPREF_REPOSITORY": "someone/upref"}
    build = [sys.executable, "-m", "hatchling", "build", "-d", folder]
    subprocess.run([*build, "-t", "sdist"], cwd=ROOT, env=named, **quiet)
    (sdist,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(sdist, folder / "unpacked")
    (source,) = (folder / "unpacked").iterdir()
    subprocess.run([*build, "-t", "wheel"], cwd=source, **quiet)
    return folder


def test_the_wheel_holds_the_whole_library_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    ask = ["git", "ls-files", "upref", "upref_frameworks", "upref_course"]
    kept = subprocess.run(
        ask, cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    assert names == {*kept.split()} or not kept
    assert wheel.name.startswith(f"upref_rl-{upref.__version__}-")


@pytest.mark.nightly
def test_the_installed_wheel_judges_a_loss(built, tmp_path):
    """In a fresh environment whose only other packages are the ones it depends on."""
    (wheel,) = built.glob("*.whl")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True
    )
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        str(tmp_path / "env/bin/python"),
    ]
    subprocess.run(
        [*pip, "install", "-q", "--no-deps", "--no-index", str(wheel)], check=True
    )
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site = tmp_path / "env/lib" / version / "site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    block = next(
        b
        for b in re.findall(r"```python\n(.*?)```", README, re.S)
        if b.startswith("# my.py")
    )
    (tmp_path / "my.py").write_text(block)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def said(*words, status=0):
        """Run the installed command, assert its exit status, and return its stdout."""
        done = subprocess.run(
            [tmp_path / "env/bin/upref", *words],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    assert "check" in said("-h")
    assert said("--version") == f"upref {upref.__version__}\n"
    assert said("check", "my.py:loss", "--as", "dapo", status=1).startswith(
        "NOT dapo: 1 failure"
    )
    assert said("check", "my.py:loss", "--as", "no_such", status=2) == ""
    (tmp_path / "odd.py").write_text("def loss(batch, model): return 0\n")
    odd = subprocess.run(
        [tmp_path / "env/bin/upref", "check", "odd.py:loss", "--as", "dapo"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    address = "https://someone.github.io/upref/howto/wrap-your-loss.html"
    assert odd.returncode == 2 and f"{address} has examples" in odd.stderr
    assert "lesson01.py: written" in said("learn", "1")
    assert said("recipe", "dapo", "--in", "verl").startswith("# dapo in verl")
    for other in ("upref_frameworks", "upref_course"):
        shutil.rmtree(site / other)
    assert said("check", "my.py:loss", "--as", "dapo", status=1).startswith(
        "NOT dapo: 1 failure"
    )
    assert (
        said("learn", "1", status=2)
        == said("recipe", "dapo", "--in", "verl", status=2)
        == ""
    )
    where = [tmp_path / "env/bin/python", "-c", "import upref; print(upref.__file__)"]
    assert (
        str(tmp_path)
        in subprocess.run(
            where, cwd=tmp_path, env=env, capture_output=True, text=True
        ).stdout
    )


def test_one_version_everywhere():
    changes = re.findall(
        r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M
    )
    cited = re.search(
        r"^version: (.*)", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M
    )
    assert changes[0] == upref.__version__ == cited[1]


def test_the_install_lines_are_true():
    """What README installs is there: the extras by their names, the distribution by its
    own.
    """
    extras = set(
        re.findall(
            r"pip install[^\n]*?\[([\w,-]+)\]",
            README + (ROOT / "docs/trl.md").read_text(),
        )
    )
    assert {e for group in extras for e in group.split(",")} <= {
        *PROJECT["optional-dependencies"]
    }
    texts = [
        p.read_text(encoding="utf-8")
        for kind in ("md", "yml")
        for p in (ROOT / "docs").rglob(f"*.{kind}")
    ]
    assert not [t for t in (README, *texts) if re.search(r"pip install '?upref", t)], (
        "it is on no index yet"
    )
    assert (
        "`upref-rl`" in README
        and PROJECT["name"] == "upref-rl"
        and PROJECT["scripts"]["upref"] == "upref.cli:main"
    )


def test_the_page_on_the_index_has_whole_links(built):
    """README.md's links and pictures point into the repository, at the tag of this
    version.
    """
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as z:
        (name,) = [n for n in z.namelist() if n.endswith("/METADATA")]
        head, _, page = z.read(name).decode().partition("\n\n")
    targets = re.findall(r"\]\(([^)]+)\)", page)
    assert len(targets) == len(re.findall(r"\]\(([^)]+)\)", README)) > 10
    assert all(t.startswith(("https://", "#")) for t in targets), targets
    home, tag = "https://github.com/someone/upref", f"v{upref.__version__}"
    assert (
        f"{home}/raw/{tag}/figures/cap.svg" in page
        and f"{home}/blob/{tag}/docs/" in page
    )
    assert head.count("Project-URL: ") == 4 and head.count(f", {home}") == 3
    assert "Project-URL: Documentation, https://someone.github.io/upref/" in head
    assert "Description-Content-Type: text/markdown" in head


def test_without_an_address_there_is_no_dead_link(tmp_path):
    """A build that is not told the repository has the text of each link, no picture and
    no project URL.
    """
    bare = {k: v for k, v in os.environ.items() if k != "UPREF_REPOSITORY"}
    shown = [sys.executable, "-m", "hatchling", "metadata"]
    about = json.loads(
        subprocess.run(
            shown, cwd=ROOT, env=bare, check=True, capture_output=True, text=True
        ).stdout
    )
    page = about["readme"]["text"]
    assert (
        "urls" not in about
        and "[" in README
        and not re.search(r"\]\((?!https?:|#)", page)
    )
    assert (
        "[Course](docs/course/README.md)" in README
        and "Course ·" in page
        and "![" not in page
    )
    wrong = subprocess.run(
        shown,
        cwd=ROOT,
        env=bare | {"UPREF_REPOSITORY": "upref"},
        capture_output=True,
        text=True,
    )
    assert wrong.returncode and "give the owner and the name" in wrong.stderr


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github/ISSUE_TEMPLATE").iterdir()), ids=lambda p: p.name
)
def test_the_parts_of_an_issue_form_have_names(form):
    """GitHub refuses a form in which an id is no string; YAML reads `true` and `on` as
    something else.
    """
    ids = re.findall(r"^ +id: (.*)$", form.read_text(encoding="utf-8"), re.M)
    assert ids and all(re.fullmatch(r"[a-z][a-z_-]*", i) for i in ids)
    assert not {"true", "false", "yes", "no", "on", "off", "null", "y", "n"} & {*ids}


@pytest.mark.parametrize(
    "workflow", sorted((ROOT / ".github/workflows").iterdir()), ids=lambda p: p.name
)
def test_a_workflow_is_pinned_bounded_and_may_do_little(workflow):
    text = workflow.read_text(encoding="utf-8")
    used = re.findall(r"uses: (.*)", text)
    assert used and all(
        re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", action) for action in used
    ), used
    assert (
        text.count("timeout-minutes: ") == text.count("runs-on: ")
        and "\npermissions:\n  contents: read\n" in text
    )


def test_what_is_published_is_built_by_pinned_packages():
    """An isolated build took the newest hatchling; and the newest of everything ran
    beside the files, before these were uploaded."""
    text = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    jobs = dict(
        re.findall(
            r"^  (\w+):\n((?:    .*\n|\n)+)", text.partition("\njobs:\n")[2], re.M
        )
    )
    build = jobs["build"]
    assert (
        "build --no-isolation" in build
        and build.count("pip install") == 1
        and "--require-hashes" in build
    )
    assert (
        "matrix" not in build
        and "upload-artifact" in build
        and "download-artifact" not in jobs["newest"]
    )
    assert (
        "tests/matrix.py python newest" in jobs["newest"]
        and "needs: [build, newest]" in jobs["publish"]
    )
    pins = (ROOT / "repro/requirements/release.txt").read_text(encoding="utf-8")
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "build-system"
    ]["requires"]
    assert all(
        re.search(rf"^{re.split('[<>=]', package)[0]}==", pins, re.M)
        for package in requires
    )


def test_the_workflow_runs_what_contributing_names():
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    for command in ("bash tests/run.sh", "bash docs/build.sh"):
        assert f"{command}\n" in workflow
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert (
        "bash tests/run.sh" in page
        and "bash docs/build.sh" in page
        and len(page.splitlines()) <= 85
    )


def test_it_is_said_whose_code_runs_as_whom(capsys):
    """In the help of the command, in README, in the guide for CI and in SECURITY.md."""
    with pytest.raises(SystemExit):
        main(["check", "-h"])
    help_ = " ".join(capsys.readouterr().out.split())
    assert (
        "imported and run with your rights" in help_
        and "in a container without network and secrets" in help_
    )
    assert "`upref check` runs your file, as you ([security](SECURITY.md))" in README
    guide = (ROOT / "docs/howto/check-in-ci.md").read_text(encoding="utf-8")
    assert "--network none" in guide and "never `pull_request_target`" in guide
    security = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert "They are no sandbox" in security and "private report form" in security
