# SPDX-License-Identifier: Apache-2.0
"""What other packages add by entry points, and what is left where they are not
installed.
"""

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

import upref
from docs.make import put
from repro import fork
from upref import plugins

ROOT = Path(__file__).parents[2]
PAGE = (
    (ROOT / "docs" / "adding.md")
    .read_text(encoding="utf-8")
    .partition("## A package of your own")[2]
)
README = (ROOT / "README.md").read_text(encoding="utf-8")
MY_LOSS = next(
    b
    for b in re.findall(r"```python\n(.*?)```", README, re.S)
    if b.startswith("# my.py")
)


@pytest.fixture
def said(tmp_path):
    """Return a function that runs a command in a folder whose packages come first, and
    returns its exit status and what it prints on both streams.
    """

    def run(*argv):
        """Run a program with these arguments; return its exit status and what it
        printed.
        """
        done = subprocess.run(
            [*fork.executable(), *argv],
            cwd=tmp_path,
            env=run.env,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr

    run.env = os.environ | fork.environment() | {"PYTHONPATH": str(tmp_path)}
    return run


def test_a_package_of_ones_own_adds_names_and_verbs(said, tmp_path):
    """The package of docs/adding.md, installed with the entry points that the page
    shows.
    """
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    (points,) = re.findall(r"```toml\n(.*?)```", PAGE, re.S)
    put("mytrainer/for_upref.py", code, tmp_path)
    info = tmp_path / "mytrainer-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: mytrainer\nVersion: 1.0\n"
    )
    group = re.sub(r'\[project\.entry-points\."([\w.]+)"\]', r"[\1]", points)
    (info / "entry_points.txt").write_text(group.replace('"', ""))
    status, out = said("-m", "upref", "check", "mytrainer:clipped", "--as", "dapo")
    assert status == 0 and out.startswith("dapo: agrees"), out
    assert said("-m", "upref", "mytrainer-version") == (0, "mytrainer 1.0\n")
    status, out = said("-m", "upref", "check", "mytrainer:other", "--as", "dapo")
    assert (status, out) == (
        2,
        "upref: mytrainer has no loss 'other': choose clipped.\n",
    )
    asked = "import upref; print(upref.identify('mytrainer:clipped'))"
    assert "mytrainer:clipped is dapo" in said("-c", asked)[1]
    (tmp_path / "mytrainer/for_upref.py").write_text("import no_such_module\n")
    status, out = said("-m", "upref", "list")
    assert (
        status == 0
        and "ModuleNotFoundError: No module named 'no_such_module'" in out
        and "up_dapo" in out
    )


# No editable installation is read (-S), so that of the packages of this checkout only
# the copy of upref is there.
ALONE = """import sys
site, dependencies, *sys.argv = sys.argv[1:]
sys.path[:0], sys.path[len(sys.path):] = [site], [dependencies]
if sys.argv[0] == "-c":
    exec(sys.argv[1])
else:
    from upref.cli import main
    sys.exit(main(sys.argv))
"""


@pytest.fixture
def alone(said, tmp_path):
    """Return that function for a copy of `upref` alone: the other two packages of the
    distribution are not there.
    """
    site, packages = tmp_path / "site", Path(upref.__file__).parents[1]
    shutil.copytree(
        packages / "upref", site / "upref", ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "my.py").write_text(MY_LOSS)
    (tmp_path / "alone.py").write_text(ALONE)
    dependencies = sysconfig.get_paths()["purelib"]
    return lambda *argv: said("-S", "alone.py", str(site), dependencies, *argv)


STEP = """import importlib.util, torch, upref
assert not importlib.util.find_spec("upref_frameworks") and not importlib.util.find_spec("upref_course")

def step(model, rows):
    for r in rows:
        z = model(torch.tensor([r.ids]))[0, len(r.prompt) - 1 : -1] / 0.7
        lp = z.log_softmax(-1).gather(-1, torch.tensor(r.response)[:, None])[:, 0]
        ratio = (lp - torch.tensor(r.old)).exp()
        J = torch.minimum(ratio * r.adv, ratio.clamp(0.8, 1.28) * r.adv) * torch.tensor(r.trains)
        (-J.sum() / sum(sum(x.trains) for x in rows)).backward()

model = torch.nn.Sequential(torch.nn.Embedding(48, 8), torch.nn.Linear(8, 48))
print(*(bool(upref.check_step(step, model, o, temperature=0.7)) for o in ("dapo", "up_dapo")))
"""


@pytest.mark.nightly
def test_upref_alone_checks_and_compares_steps(alone):
    status, out = alone("check", "my.py:loss", "--as", "dapo")
    assert status == 1 and out.startswith("NOT dapo: 1 failure"), out
    status, out = alone("identify", "my.py:loss")
    assert "meant as dapo" in out, out
    assert alone("-c", STEP) == (0, "True False\n")


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (
            ["learn", "1"],
            "learn is a verb of upref_course, and upref_course is not in this installation",
        ),
        (
            ["audit", "verl"],
            "audit is a verb of upref_frameworks, and upref_frameworks is not in this installation",
        ),
        (["claims"], "claims is a verb of `python -m paper`, in a checkout."),
        (
            ["check", "liger:dapo", "--as", "dapo"],
            "upref_frameworks is not in this installation: install upref-rl whole",
        ),
    ],
)
def test_what_upref_alone_lacks_is_one_sentence(argv, sentence, alone):
    status, out = alone(*argv)
    assert (
        status == 2
        and sentence in out
        and out.count("\n") == 1
        and "Traceback" not in out
    ), out


def test_an_older_installation_is_told_so():
    assert "was installed before it was: install upref-rl again" in plugins.absent(
        "upref_course"
    )
