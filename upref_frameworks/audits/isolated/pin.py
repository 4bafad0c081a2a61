# SPDX-License-Identifier: Apache-2.0
"""Which files of a framework are audited, and the folder of packages in which it runs:
its own, because no two of them can be installed together."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from upref.errors import InputError
from upref.files import is_locked, locked

NEWEST = "newest"  # the --version that means whatever is out
# of a package, or a commit or tag: no path and no option
VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,99}")
DIGEST = ".upref-digest"  # of all other files of a folder, written when it was made


@dataclass(frozen=True)
class Pin:
    """Which files of a framework are audited, exactly.

    torch, numpy and what upref itself needs come from the running environment.

    Attributes:
        files: path of each file that holds what is audited, as it is imported -> the
            first 32 digits of its sha256.
        packages: requirements, installed without their dependencies; the framework's
            own first, unless it is on no index. With a repository: what the framework
            imports.
        repository: of a framework on no package index.
        commit: of the repository.
        date: of the commit.
        root: the folder of a checkout that its packages are imported from.
        skip_init: packages whose __init__ is skipped.
        stubs: modules that do not exist here; a call of anything in them raises an
            error.
        decorators: callables of stubs that may be called while the framework is
            imported; a call of what they decorate raises an error.
        env: environment variables of its process.
    """

    files: dict[str, str]
    packages: tuple[str, ...] = ()
    repository: str = ""
    commit: str = ""
    date: str = ""
    root: str = ""
    skip_init: tuple[str, ...] = ()
    stubs: tuple[str, ...] = ()
    decorators: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """Return nine digits of the commit, or the version of the first package."""
        return (
            self.commit[:9] if self.repository else self.packages[0].partition("==")[2]
        )


@dataclass(frozen=True)
class Installation:
    """Where a framework was put.

    Attributes:
        paths: folders for sys.path.
        version: what was found there.
        remarks: sentences that an audit of it prints.
    """

    paths: list[str]
    version: str
    remarks: list[str]


def place(name: str, pin: Pin, version: str = "", source: str = "") -> Installation:
    """Put a framework into a folder of its own, if it is not there yet.

    Args:
        name: the framework.
        pin: what is audited.
        version: another version than the pinned one, a tag or a commit, or `newest`.
        source: path of a working copy, which is used as it is.

    Returns:
        Where it is. Of another version than the pinned one a remark says so; of the
        pinned one, each audited file has its recorded hash.

    Raises:
        InputError: both `version` and `source` are given, or it cannot be installed or
            fetched, or a file is missing or has changed.
    """
    if version and source:
        raise InputError(
            "give --version or --source, not both: a working copy has its own version."
        )
    if version and not VERSION.fullmatch(version):
        raise InputError(
            f"--version takes a version, a tag or a commit, got {version[:60]!r}."
        )
    # what the framework imports; installed into a folder of its own where the framework
    # is a checkout
    beside = pin.packages if pin.repository else pin.packages[1:]
    if source:
        copy = Path(source).expanduser().resolve()
        _check_files(
            name, pin, copy / pin.root, missing=f"{source} is no working copy of {name}"
        )
        paths = [str(copy / pin.root)]
        if beside:
            paths.append(str(_installed_packages(name, "beside", beside)))
        said = f"{name} is the working copy {source}; the ledger was written for {pin.version}."
        return Installation(paths, _commit(copy), [said])
    # else the pinned version, or another one: a checkout, or packages of an index
    if pin.repository:
        commit = version or pin.commit
        copy = _checkout(name, pin.repository, "HEAD" if version == NEWEST else commit)
        paths = [str(copy / pin.root)]
        found = _commit(copy)
        root = copy / pin.root
        if beside:
            paths.append(str(_installed_packages(name, "beside", beside)))
    else:
        package = pin.packages[0].partition("==")[0]
        first = {"": pin.packages[0], NEWEST: package}.get(
            version, f"{package}=={version}"
        )
        root = _installed_packages(name, version or pin.version, (first, *beside))
        paths = [str(root)]
        found = _version_in(root, package)
    if found != pin.version:
        return Installation(
            paths,
            found,
            [f"upref was written against {name} {pin.version}; this is {found}."],
        )
    _check_files(name, pin, root, exact=f"remove {root} and try again")
    return Installation(paths, found, [])


# ---- the folder ----------------------------------------------------------------------
def cache() -> Path:
    """Return the folder of the installations: $XDG_CACHE_HOME/upref/frameworks.

    Returns:
        A path below ~/.cache where the variable is not set. The folder need not exist.
    """
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "upref"
        / "frameworks"
    )


def _installed_packages(name: str, version: str, packages: tuple[str, ...]) -> Path:
    """Return a folder with these packages, without their dependencies; install them if
    it is not there yet.
    """
    digest = hashlib.sha256(" ".join(packages).encode()).hexdigest()[:8]
    folder = cache() / f"{name}-{version}-{digest}"
    if version != NEWEST and _is_whole(folder):
        return folder
    with _filled_or_absent(folder) as unfinished:
        options = [
            "--quiet",
            "--disable-pip-version-check",
            "--no-input",
            "--retries",
            "1",
            "--timeout",
            "20",
        ]
        options += ["--ignore-requires-python"]  # of it only its losses are run
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--no-compile",
            "--only-binary",
            ":all:",
        ]
        result = _run([*command, *options, "--target", str(unfinished), *packages])
        if result.returncode:
            errors = [
                x for x in result.stderr.splitlines() if x.startswith("ERROR: ")
            ] or result.stderr.splitlines()[-1:]
            if errors:
                why = errors[-1].removeprefix("ERROR: ").strip()
            else:
                why = f"pip ended with {result.returncode}"
            raise InputError(
                f"{', '.join(packages)} cannot be installed ({why}): is there a network and such a version? "
                "--source CHECKOUT audits a working copy."
            )
    return folder


def _checkout(name: str, repository: str, commit: str) -> Path:
    """Return a folder with a commit of a repository, without its history; fetch it if
    it is not there yet.
    """
    folder = cache() / f"{name}-{commit[:9]}"
    if commit != "HEAD" and _is_whole(folder):
        return folder
    if not shutil.which("git"):
        raise InputError(
            f"{name} is not on a package index; fetching it needs git, which is not installed."
        )
    with _filled_or_absent(folder) as unfinished:
        fetch = [
            "fetch",
            "--quiet",
            "--depth",
            "1",
            "--end-of-options",
            repository,
            commit,
        ]
        for command in (
            ["init", "--quiet"],
            fetch,
            ["checkout", "--quiet", "FETCH_HEAD"],
        ):
            result = _run(["git", "-C", str(unfinished), *command])
            if result.returncode:
                error = (
                    result.stderr.strip().splitlines()
                    or [f"git ended with {result.returncode}"]
                )[-1]
                raise InputError(
                    f"{repository} at {commit} cannot be fetched ({error}): is there a network? "
                    "--source CHECKOUT audits a working copy."
                )
    return folder


@contextmanager
def _filled_or_absent(folder: Path) -> Iterator[Path]:
    """Yield a folder to be filled under another name, and rename it to `folder` at the
    end, so that `folder` is whole or not there. If the filling raises, nothing is left.
    Raise InputError where the folder above cannot be written.
    """
    installing = ExitStack()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.parent):
            for leftover in folder.parent.glob(".half-*"):
                if not is_locked(leftover):  # its installation was killed
                    shutil.rmtree(leftover, ignore_errors=True)
            unfinished = Path(tempfile.mkdtemp(prefix=".half-", dir=folder.parent))
            installing.enter_context(locked(unfinished))
    except OSError as e:
        raise InputError(
            f"cannot write in {folder.parent} ({e.strerror}): set XDG_CACHE_HOME."
        ) from e
    try:
        yield unfinished
        (unfinished / DIGEST).write_text(_digest(unfinished), encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        installing.close()


def _digest(folder: Path) -> str:
    """Return one sha256 of the names and contents of all files, except compiled ones
    and git's own.
    """
    total = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        is_left_out = bool({"__pycache__", ".git"} & set(file.parts))
        if file.is_file() and file.name != DIGEST and not is_left_out:
            digest_of_file = hashlib.sha256(file.read_bytes()).hexdigest()
            total.update(
                f"{file.relative_to(folder).as_posix()} {digest_of_file}\n".encode()
            )
    return total.hexdigest()


def _is_whole(folder: Path) -> bool:
    """Return whether the folder is there as it was installed.

    Raises InputError where a file has changed since.
    """
    if not (folder / DIGEST).is_file():
        return False
    if (folder / DIGEST).read_text(encoding="utf-8") != _digest(folder):
        raise InputError(
            f"files in {folder} have changed since they were installed: remove that folder and try again."
        )
    return True


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command, in which git asks for no password; return its exit status and
    output. A status that is not 0 raises nothing.
    """
    quiet = {"GIT_TERMINAL_PROMPT": "0"}
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | quiet, check=False
    )


# ---- what is in it -------------------------------------------------------------------
def _check_files(
    name: str, pin: Pin, root: Path, missing: str = "", exact: str = ""
) -> None:
    """Raise InputError where a file of the pin is missing or, if `exact` is given, is
    not the one that was audited.

    `missing` begins the message of a missing file, and `exact` ends that of another
    file.
    """
    for file, digest in pin.files.items():
        if not (root / file).is_file():
            raise InputError(
                f"{missing or f'{name} {pin.version} is not what was audited'}: it has no {file}."
            )
        found = hashlib.sha256((root / file).read_bytes()).hexdigest()[:32]
        if exact and found != digest:
            raise InputError(
                f"{file} of {name} {pin.version} is not the file that was audited (sha256 {found}, not "
                f"{digest or 'recorded'}): {exact}."
            )


def normalize(package: str) -> str:
    """Return a package's name as PEP 503 normalizes it.

    Args:
        package: as an index or a dist-info folder spells it.

    Returns:
        Lower case, with one hyphen for each run of hyphens, underscores and dots.
    """
    return re.sub(r"[-_.]+", "-", package).lower()


def _version_in(folder: Path, package: str) -> str:
    """Return the version of the package that the folder holds. Raise InputError where
    it does not hold it.
    """
    for info in folder.glob("*.dist-info"):
        installed_name, _, version = info.name.removesuffix(".dist-info").rpartition(
            "-"
        )
        if normalize(installed_name) == normalize(package):
            return version
    raise InputError(f"{folder} does not hold {package}: remove it and try again.")


def _commit(copy: Path) -> str:
    """Return nine digits of the commit that a copy of a repository has; "a working
    copy" where git knows none.
    """
    if shutil.which("git"):
        result = _run(["git", "-C", str(copy), "rev-parse", "HEAD"])
    else:
        result = None
    if result and result.returncode == 0:
        return result.stdout.strip()[:9]
    return "a working copy"
