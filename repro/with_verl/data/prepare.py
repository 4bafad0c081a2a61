# SPDX-License-Identifier: Apache-2.0
"""The paper's data sets as verl's parquet files, in runs/data.

    python -m repro.with_verl.data.prepare aime24 [dapo_math_17k ... | all] [--out DIR]
    python -m repro.with_verl.data.prepare math500 --from FILE     a file fetched by other means
    python -m repro.with_verl.data.prepare amc23 --revision COMMIT          another than the pinned one

A finished file of the same revision is left alone, so the command can be repeated. The
number of rows must be right; --accept-count N accepts another one, and the file says so
in its metadata. Exit status 2: something was not done.
"""

import argparse
import atexit
import hashlib
import json
import re
import shutil
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from repro import Parser
from repro.with_verl.data import schema
from repro.with_verl.data.sources import SOURCES, Source
from repro.with_verl.place import RUNS
from upref import InputError


def main(argv: list[str] | None = None) -> int:
    """Prepare the data sets that the options name; one that fails does not stop the
    others. Return 0; 2 if the options are wrong or one failed.
    """
    p = Parser(
        prog="prepare",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    p.add_argument(
        "names", nargs="+", metavar="NAME", help=f"all, or of {', '.join(SOURCES)}"
    )
    p.add_argument("--out", type=Path, default=RUNS / "data")
    p.add_argument(
        "--from", dest="file", type=Path, help="the upstream file, already here"
    )
    p.add_argument("--revision", help="full commit hash, in place of the pinned one")
    p.add_argument("--accept-count", type=int, metavar="N")
    args = p.parse_args(argv)
    failed = 0
    try:
        names = list(SOURCES) if args.names == ["all"] else args.names
        if unknown := [n for n in names if n not in SOURCES]:
            raise InputError(
                f"there is no data set named {unknown[0]!r}: choose all or of {', '.join(SOURCES)}."
            )
        if len(names) > 1 and (args.file or args.revision or args.accept_count):
            raise InputError(
                "--from, --revision and --accept-count are for one data set: name one."
            )
        args.out.mkdir(parents=True, exist_ok=True)
    except (InputError, OSError) as e:
        print(f"prepare: {e}", file=sys.stderr)
        return 2
    for name in names:  # one that fails does not keep the others
        try:
            source = SOURCES[name]
            how = args.file, args.revision, args.accept_count
            print(f"{name}: {prepare(source, args.out, *how)}", flush=True)
        except InputError as e:
            print(f"prepare: {name}: {e}", file=sys.stderr)
            failed = 2
    return failed


def prepare(
    s: Source,
    out: Path,
    file: Path | None = None,
    revision: str | None = None,
    accept: int | None = None,
) -> str:
    """Write OUT/NAME.parquet, unless it is there with this revision and number of rows.

    Args:
        s: the source.
        out: the folder.
        file: the upstream file, already here; None: it is fetched.
        revision: a full commit hash; None: the pinned one.
        accept: another number of rows than the source's that is right too.

    Returns:
        What was done, in words.

    Raises:
        InputError: the file cannot be fetched or read, or has another number of rows.
    """
    revision = revision or s.revision
    if not file and not re.fullmatch("[0-9a-f]{40}", revision):
        raise InputError(
            f"--revision {revision} is no full commit hash of 40 digits: a branch or tag may move."
        )
    path = out / f"{s.name}.parquet"
    told = {
        "repository": s.repository,
        "revision": str(file.resolve()) if file else revision,
    }
    if schema.facts(path).items() >= told.items():
        count = schema.check_file(path)
        if count in (s.count, accept):
            return f"{path} is there ({count} rows, {told['revision'][:12]})"
    upstream = file or fetch(s, revision)
    try:
        rows = s.convert(s, read(upstream))
    except InputError:
        raise
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, OSError) as e:
        raise InputError(
            f"has not the format of {s.repository} ({type(e).__name__}: {e}): is it the right file?"
        ) from e
    if len(rows) != (accept or s.count):
        raise InputError(
            f"has {len(rows)} rows and should have {accept or s.count} ({s.why}): is it the right file? --accept-count "
            f"{len(rows)} takes it as it is."
        )
    schema.write(path, rows, told | {"rows": str(len(rows)), "paper": str(s.count)})
    return f"{path}, {schema.check_file(path)} rows"


def fetch(s: Source, revision: str) -> Path:
    """Return the upstream file: in the hub's cache, which resumes what was interrupted,
    or, from GitHub, a temporary one.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()
    try:
        if s.blob:
            return from_github(s, revision)
        return Path(
            hf_hub_download(
                s.repository, s.files[0], repo_type="dataset", revision=revision
            )
        )
    except (
        Exception
    ) as e:  # the hub's errors, requests', httpx': offline, gone, refused
        raise InputError(
            f"could not be fetched ({type(e).__name__}): fetch {s.url(revision)} where there is a network and pass "
            "--from FILE."
        ) from e


def from_github(s: Source, revision: str) -> Path:
    """Fetch a file from GitHub into a temporary folder, which is removed at the end of
    the process. Raise OSError if its hash is not the pinned one; at another revision
    than the pinned one no hash is known.
    """
    with urllib.request.urlopen(s.url(revision), timeout=60) as answer:
        data = answer.read()
    digest = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # as git's
    if revision == s.revision and digest != s.blob:
        raise OSError("not the pinned file")
    path = Path(tempfile.mkdtemp()) / Path(s.files[0]).name
    atexit.register(shutil.rmtree, path.parent, ignore_errors=True)
    path.write_bytes(data)
    return path


def read(path: Path) -> Iterator[dict]:
    """Yield the rows of a .parquet, .arrow, .jsonl or .json file. Raise InputError
    where it cannot be read.
    """
    if not path.is_file():
        raise InputError(f"there is no file {path}.")
    try:
        yield from _rows(path)
    except (OSError, pa.ArrowInvalid, json.JSONDecodeError) as e:
        raise InputError(
            f"{path} cannot be read ({str(e).splitlines()[0][:100]}): fetch it again."
        ) from e


def _rows(path: Path) -> Iterator[dict]:
    """Yield the rows of a file, as `read` does, with the errors of its format."""
    if path.suffix == ".parquet":
        for batch in pq.ParquetFile(path).iter_batches(10_000):
            yield from batch.to_pylist()
    elif path.suffix == ".arrow":  # as datasets saves it
        with pa.memory_map(str(path)) as f:
            for batch in pa.ipc.open_stream(f):
                yield from batch.to_pylist()
    elif path.suffix == ".jsonl":
        with open(path, encoding="utf-8") as f:
            yield from map(json.loads, filter(str.strip, f))
    elif path.suffix == ".json":
        yield from json.loads(path.read_text(encoding="utf-8"))
    else:
        raise InputError(f"{path} is neither .parquet nor .arrow nor .jsonl nor .json.")


if __name__ == "__main__":
    sys.exit(main())
