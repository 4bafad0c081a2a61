# SPDX-License-Identifier: Apache-2.0
"""A framework in a folder and a process of its own, on one that is made here: what
drifts is said, what cannot run is one sentence, and nothing that it sees is fake or
comes from this environment. No network is used."""

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from docs.make import put
from repro import fork
from upref import InputError
from upref.files import locked
from upref_frameworks.audits import isolated
from upref_frameworks.audits.isolated.pin import Pin, place

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding.md").read_text(encoding="utf-8")
FILES = {
    b.split()[1]: b
    for b in re.findall(r"```python\n(.*?)```", PAGE, re.S)
    if b.startswith("# ")
}
LEDGER = (
    "[defaults.every]\nclip = 0.2\n\n" + re.search(r"```toml\n(.*?)```", PAGE, re.S)[1]
)
OWN = FILES["plainrl.py"].partition("\n")[2].lstrip("\n")
DIGEST = hashlib.sha256(OWN.encode()).hexdigest()[:32]
PIN = Pin(packages=("plainrl==1.0",), files={"plainrl.py": DIGEST})


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Return a copy of the library that knows the framework of docs/adding.md, with
    some stand-ins.
    """
    folder = tmp_path_factory.mktemp("library")
    known = FILES["upref_frameworks/plain/audit.py"].replace(
        "PIN = Pin(", 'PIN = Pin(stubs=("heavy",), decorators=("heavy.jit",), '
    )
    known = known.replace("sha256, its first 32 digits", DIGEST)
    put("upref_frameworks/plain/audit.py", known, folder)
    (folder / "upref_frameworks/plain/ledger.toml").write_text(LEDGER, encoding="utf-8")
    return folder


@pytest.fixture
def audited(library, tmp_path, monkeypatch):
    """Return a function that audits a working copy in which `new` is written in place
    of `old`.
    """
    monkeypatch.setattr(isolated, "LIBRARY", library)
    monkeypatch.setattr(isolated, "PYTHON", fork.executable())
    for name, value in fork.environment().items():
        monkeypatch.setenv(name, value)

    def audit(old="", new=""):
        assert old in OWN
        (tmp_path / "plainrl.py").write_text(OWN.replace(old, new), encoding="utf-8")
        return isolated.run("audit", "plain", PIN, source=str(tmp_path))

    return audit


def test_as_it_was_recorded(audited):
    table = audited()
    assert table and table.against_ledger == []


DRIFT = {
    "a changed default": (
        "clip: float = 0.2",
        "clip: float = 0.3",
        "ppo: the default of clip is 0.3 in",
        "and was 0.2",
    ),
    "a repaired bug": (
        "ref_log_probs) ** 2",
        "ref_log_probs) ** 2 / 2",
        "plain-kl-double is gone",
        "review the entry",
    ),
    "a renamed loss": (
        '"ppo": ppo',
        '"ppo_clip": ppo',
        "the loss ppo is gone",
        "has ppo_clip, vanilla",
    ),
}


@pytest.mark.parametrize("what", DRIFT)
def test_drift_turns_it_red_and_is_said(audited, what):
    """Change an audited library, and find the line that says how it differs from the
    ledger.
    """
    old, new, *said = DRIFT[what]
    table = audited(old, new)
    assert not table
    assert any(all(words in line for words in said) for line in table.against_ledger), (
        table.against_ledger
    )
    assert all(
        line.count("\n") == 0 and line in " ".join(str(table).split())
        for line in table.against_ledger[:1]
    )
    assert (table.unaudited == ["ppo_clip"]) == (what == "a renamed loss")
    assert ("UNEXPLAINED" in str(table)) == (what == "a changed default")


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "from dataclasses import dataclass",
            "import not_there",
            "does not import as upref expects .*not_there",
        ),
        ("LOSSES = {", "LOSES = {", "does not import as upref expects .*LOSSES"),
        (
            "from dataclasses import dataclass",
            "import os; os._exit(0)",
            "ended its process with 0 before a report",
        ),
        (
            "-(J * mask).sum()",
            "-(J * nobody).sum()",
            "does not run as upref expects .*nobody",
        ),
    ],
)
def test_what_cannot_run_is_one_sentence(audited, old, new, sentence):
    with pytest.raises(InputError, match=sentence) as e:
        audited(old, new)
    assert "\n" not in str(e.value)


def test_exit_status(library, tmp_path):
    """0, 1 and 2, as for verl; the sentence of a 2 stands alone on stderr."""

    def audit(*more):
        command = [*fork.executable(), "-m", "upref", "audit", "plain", *more]
        env = os.environ | fork.environment()
        return subprocess.run(
            command, cwd=library, env=env, capture_output=True, text=True, check=False
        )

    (tmp_path / "plainrl.py").write_text(OWN.replace("0.2", "0.3"), encoding="utf-8")
    assert audit("--source", str(tmp_path)).returncode == 1
    (tmp_path / "plainrl.py").unlink()
    none = audit("--source", str(tmp_path))
    assert none.returncode == 2 and none.stdout == "" and none.stderr.count("\n") == 1
    assert "is no working copy of plain: it has no plainrl.py" in none.stderr
    both = audit("--source", ".", "--version", "2.0")
    assert both.returncode == 2 and "not both" in both.stderr


@pytest.mark.nightly
def test_sigterm_ends_the_framework_too(library, tmp_path):
    """It is asked to end while the framework is imported, in a process of its own."""
    own = "import os, time, pathlib\npathlib.Path(__file__).with_name('pid').write_text(str(os.getpid()))\n"
    (tmp_path / "plainrl.py").write_text(own + "time.sleep(60)\n", encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "upref",
        "audit",
        "plain",
        "--source",
        str(tmp_path),
    ]
    run = subprocess.Popen(command, cwd=library, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert run.poll() is None
        time.sleep(0.02)
    run.terminate()
    said = run.communicate(timeout=300)[1]
    assert (
        run.returncode == 143
        and said == "upref audit: terminated; run the same command again.\n"
    )
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


SEEN = {
    "import mdurl; print(mdurl.PLACE)": "of PYTHONPATH",  # which rich needs
    "import other": "ModuleNotFoundError",
    # of the environment, and nothing that upref needs
    "import pytest": "ModuleNotFoundError",
    "import torch, numpy, plainrl; print('here')": "here",
    "import heavy.deep; heavy.deep.f(1)": "NotImplementedError: heavy.deep.f is a stand-in",
    "import heavy\ndel heavy.Base.__init__\nprint('patched')": "patched",
    "import heavy\nclass A(heavy.Base): pass\nprint('named')\nA()": "NotImplementedError: A derives from a stand-in",
    "import heavy\nclass A(heavy.Base[int]): pass\nclass B(A[int]): pass\nprint('generic')": "generic",
    "from heavy import jit\n@jit\ndef f(): return 1\nf()": "NotImplementedError: heavy.jit",
    "from heavy import jit\n@jit(fast=True)\ndef f(): return 1\nf()": "NotImplementedError: heavy.jit",
    "import heavy\nif heavy.flag: pass": "NotImplementedError: heavy.flag",
    "import heavy\nx: heavy.T | None = None\nprint(isinstance(1, heavy.T))": "False",
}


def test_nothing_it_sees_is_fake_or_of_this_environment(library, tmp_path, monkeypatch):
    """PYTHONPATH stays: some clusters have torch there. What upref does not need is not
    found there either.
    """
    monkeypatch.setattr(isolated, "LIBRARY", library)
    (tmp_path / "python" / "mdurl").mkdir(parents=True)
    (tmp_path / "python" / "mdurl" / "__init__.py").write_text(
        "PLACE = 'of PYTHONPATH'"
    )
    (tmp_path / "python" / "other.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "python"))
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "plainrl.py").write_text(OWN, encoding="utf-8")
    said = isolated.run(
        "scripts", "plain", PIN, source=str(tmp_path / "source"), texts=list(SEEN)
    )
    for script, answer, found in zip(SEEN, SEEN.values(), said, strict=True):
        assert answer in found, (script, found)


# ---- the folder ----------------------------------------------------------------------
def wheel(folder: Path, version: str, text: str):
    """Write a wheel of plainrl of that version into the folder, as pip takes it."""
    info = f"plainrl-{version}.dist-info"
    files = {
        "plainrl.py": text,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: plainrl\nVersion: {version}\nRequires-Dist: not-there\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }

    def digest(s):
        """Return the SHA-256 digest of a text as RECORD of a wheel has it."""
        return (
            base64.urlsafe_b64encode(hashlib.sha256(s.encode()).digest())
            .decode()
            .rstrip("=")
        )

    record = (
        "".join(f"{k},sha256={digest(v)},{len(v.encode())}\n" for k, v in files.items())
        + f"{info}/RECORD,,\n"
    )
    with zipfile.ZipFile(folder / f"plainrl-{version}-py3-none-any.whl", "w") as z:
        for name, content in (files | {f"{info}/RECORD": record}).items():
            z.writestr(name, content)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Make an index of two versions, and let pip have no network and an empty cache;
    return the index's folder.
    """
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel(wheels, "1.0", OWN)
    wheel(wheels, "2.0", OWN.replace("0.2", "0.3"))
    for key, value in {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "XDG_CACHE_HOME": str(tmp_path / "c"),
    }.items():
        monkeypatch.setenv(key, value)
    return wheels


def test_a_wheel_is_put_into_a_folder_of_its_own_once(index, monkeypatch):
    where = place("plain", PIN)
    assert (
        where.version == "1.0"
        and where.remarks == []
        and (Path(where.paths[0]) / "plainrl.py").exists()
    )
    shutil.rmtree(index)  # the second time nothing is fetched
    assert place("plain", PIN) == where
    other = [
        f for f in Path(where.paths[0]).parent.iterdir() if f.name.startswith(".half")
    ]
    assert other == []


def test_a_file_that_changed_after_the_installation_is_refused(index):
    """One that no pin names, too; a folder of an older version of upref, without its
    digest, is made again.
    """
    root = Path(place("plain", PIN).paths[0])
    info = root / "plainrl-1.0.dist-info" / "METADATA"
    info.write_text(info.read_text() + "one line more\n")
    with pytest.raises(
        InputError, match="have changed since they were installed: remove that folder"
    ):
        place("plain", PIN)
    (root / ".upref-digest").unlink()
    assert (
        Path(place("plain", PIN).paths[0]) == root
        and "one line more" not in info.read_text()
    )


def test_what_a_killed_installation_left_is_removed(index):
    root = Path(place("plain", PIN).paths[0])
    left, going = root.parent / ".half-x", root.parent / ".half-y"
    left.mkdir()
    going.mkdir()
    with locked(going):  # on another machine, maybe, whose process ids say nothing here
        place("plain", PIN, "2.0")
    assert not left.exists() and going.exists()


@pytest.mark.parametrize(
    "version", ["../../x", "--upload-pack=touch x", "", "a b", "-1"]
)
def test_a_version_is_no_path_and_no_option(index, version):
    if version:
        with pytest.raises(
            InputError, match="--version takes a version, a tag or a commit"
        ):
            place("plain", PIN, version)
    assert place("plain", PIN).version == "1.0"


def test_another_version_is_audited_and_said(index):
    for asked in ("2.0", "newest"):
        where = place("plain", PIN, asked)
        assert (
            where.version == "2.0"
            and "written against plain 1.0; this is 2.0" in where.remarks[0]
        )


def test_what_cannot_be_fetched_is_one_sentence(index, monkeypatch):
    """A missing version, a file with another digest or without one, an empty index and
    a folder that cannot be written are each refused.
    """
    with pytest.raises(
        InputError,
        match=r"plainrl==3.0 cannot be installed \(.*plainrl==3.0.*\): is there a network",
    ):
        place("plain", PIN, "3.0")
    with pytest.raises(
        InputError,
        match=f"is not the file that was audited .sha256 {DIGEST}, not 0{{32}}",
    ):
        place("plain", replace(PIN, files={"plainrl.py": "0" * 32}))
    with pytest.raises(
        InputError, match=r"is not what was audited: it has no moved.py"
    ):
        place("plain", replace(PIN, files={"moved.py": DIGEST}))
    shutil.rmtree(index)
    with pytest.raises(InputError, match="not-fetched==1 cannot be installed"):
        place("plain", replace(PIN, packages=("plainrl==1.0", "not-fetched==1")))
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    with pytest.raises(InputError, match=r"cannot write in .*XDG_CACHE_HOME"):
        place("plain", PIN)


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_a_pinned_commit(index, tmp_path):
    """A commit is fetched and named by nine digits; a checkout of it is taken as it is;
    an unknown commit is refused.
    """
    there = tmp_path / "there"
    there.mkdir()
    (there / "plainrl.py").write_text(OWN, encoding="utf-8")

    def git(*a):
        return subprocess.run(
            ["git", "-C", str(there), *a], capture_output=True, text=True, check=True
        ).stdout

    git("init", "--quiet")
    git("add", "-A")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "one")
    commit = git("rev-parse", "HEAD").strip()
    pin = replace(PIN, packages=(), repository=str(there), commit=commit)
    where = place("plain", pin)
    assert where.version == commit[:9] and where.remarks == []
    assert place("plain", pin, source=str(there)).version == commit[:9]
    with pytest.raises(
        InputError, match=r"at 000.* cannot be fetched .*--source CHECKOUT"
    ):
        place("plain", pin, "0" * 40)


def test_one_of_its_losses_is_checked_by_name(index, library):
    def check(loss):
        """Run `upref check` on this loss as ppo_clip, and return the completed process."""
        command = [*fork.executable(), "-m", "upref", "check", loss, "--as", "ppo_clip"]
        env = os.environ | fork.environment()
        return subprocess.run(
            command, cwd=library, env=env, capture_output=True, text=True, check=False
        )

    right, unknown = check("plain:ppo"), check("plain:nobody")
    assert right.returncode == 0 and right.stdout.startswith("ppo_clip: agrees"), (
        right.stderr
    )
    assert (
        unknown.returncode == 2
        and "plain has no loss 'nobody': choose ppo, vanilla." in unknown.stderr
    )
