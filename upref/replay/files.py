# SPDX-License-Identifier: Apache-2.0
"""Files to recorded batches: `.npz` and `.safetensors` of docs/dump.md here,
frameworks' own files by their readers.

A file is not trusted: its announced sizes are checked before anything is allocated, nothing
in it is run, and whatever its parser raises becomes one sentence.
"""

import io
import json
import math
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from upref.errors import InputError
from upref.files import require_file, write_atomically
from upref.pages import locate_page
from upref.replay.batch import make_batch, merge
from upref.replay.schema import (
    COLUMNS,
    LARGEST,
    MOST_SLOTS,
    PAGE,
    SCHEMA,
    TOKEN_INTEGERS,
    RecordedBatch,
)
from upref.replay.trainers import DumpReader, dump_readers

MOST_BYTES = 4 * 2**30  # that the columns of one file announce
MOST_FILES = 100_000
FACTS = ("schema", "step", "logged", "meta")  # beside the columns


@dataclass(frozen=True)
class Source:
    """One file: the step it is of, None where it names none, and what reads it."""

    path: Path
    step: int | None
    load: Callable[[Path], RecordedBatch]


def read(files: str | Path | Sequence[str | Path]) -> RecordedBatch:
    """Read one recorded step.

    Args:
        files: a file, or the files of one step (its ranks or micro-batches).

    Returns:
        The recorded batch.

    Raises:
        InputError: a file is missing, damaged or of no known format, or the files are
            of several steps.
    """
    many = [files] if isinstance(files, str | Path) else list(files)
    groups = _by_step(many)
    if len(groups) != 1:
        without_step = sum(source.step is None for group in groups for source in group)
        hint = f"; {without_step} of them name no step" if without_step else ""
        raise InputError(
            f"these files are of {len(groups)} steps{hint}: read one step, or use read_steps."
        )
    return _load(groups[0])


def read_steps(files: Iterable[str | Path]) -> Iterator[RecordedBatch]:
    """Read the steps that these files or folders hold, in order, one in memory at a
    time. What another program wrote into a folder is left out (`other_files`).

    Args:
        files: files or folders.

    Returns:
        An iterator over steps.

    Raises:
        InputError: as `read`; or there is no file at all.
    """
    for group in _by_step(list(files)):
        yield _load(group)


def _load(group: Sequence[Source]) -> RecordedBatch:
    """Read the files of one step and join them."""
    return merge([_call_parser(source.load, source.path) for source in group])


def _by_step(files: list[str | Path]) -> list[list[Source]]:
    """Return the files by step: those with a step number in its order, then each of the
    others as a step of its own. Folders are searched, and their files that are no
    recorded batches left out.

    Raises:
        InputError: there is no file, there are more than MOST_FILES, or one has no
            known format.
    """
    if not files:
        raise InputError("there is no file to read: the list of files is empty.")
    paths: list[Path] = []
    for path in map(Path, files):
        if path.is_dir():
            paths += [p for p in _batch_files_in(path) if _is_recorded(p)]
        else:
            paths.append(path)
    if not paths:
        raise InputError(
            f"there is no recorded batch ({', '.join(_suffixes())}) in {files[0]}."
        )
    if len(paths) > MOST_FILES:
        raise InputError(
            f"these are {len(paths):,} files: give at most {MOST_FILES:,}."
        )
    with_number: dict[int, list[Source]] = {}
    without_number: list[list[Source]] = []
    for path in paths:
        source = _identify_format(path)
        if source.step is None:
            without_number.append([source])
        else:
            with_number.setdefault(source.step, []).append(source)
    return [with_number[step] for step in sorted(with_number)] + without_number


def other_files(files: Iterable[str | Path]) -> list[Path]:
    """Name the files in these folders that `read_steps` leaves out: their names end as
    those of recorded batches do, and another program wrote them.

    Args:
        files: files or folders.
    """
    folders = [path for path in map(Path, files) if path.is_dir()]
    inside = (path for folder in folders for path in _batch_files_in(folder))
    return [path for path in inside if not _is_recorded(path)]


def _batch_files_in(folder: Path) -> list[Path]:
    """Return the files of a folder and of its folders that may be recorded batches by
    the ends of their names, sorted by path.
    """
    ends = _suffixes()
    return sorted(p for p in folder.rglob("*") if p.suffix in ends and p.is_file())


def _is_recorded(path: Path) -> bool:
    """Return whether a file is one of docs/dump.md or of a trainer that upref reads."""
    if path.suffix == ".npz":
        return bool(_call_parser(_npz_has_schema, path))
    if path.suffix == ".safetensors":
        return "schema" in _call_parser(_safetensors_metadata, path)
    return _find_reader(path) is not None


def _find_reader(path: Path) -> DumpReader | None:
    """Return the plugin that reads a trainer's own file; None where none does."""
    for reader in dump_readers():
        if path.suffix in reader.SUFFIXES and _call_parser(reader.recognizes, path):
            return reader
    return None


def _identify_format(path: Path) -> Source:
    """Return the file with its step and the function that reads its format.

    Raises:
        InputError: the file is missing, empty, damaged or of no known format.
    """
    require_file(path)
    if not path.stat().st_size:
        raise InputError(f"{path} is empty: its writer was stopped, or wrote nothing.")
    if path.suffix == ".npz":
        return Source(path, _call_parser(_npz_step, path), _read_npz)
    if path.suffix == ".safetensors":
        return Source(path, _call_parser(_safetensors_step, path), _read_safetensors)
    reader = _find_reader(path)
    if reader is not None:
        return Source(path, _call_parser(reader.step_of, path), reader.read)
    raise InputError(
        f"{path} is no recorded batch: give {', '.join(_suffixes())} as {locate_page(PAGE)} describes."
    )


def _suffixes() -> list[str]:
    """Return how the names of recorded batches may end, sorted."""
    return sorted(
        {".npz", ".safetensors"}.union(*(reader.SUFFIXES for reader in dump_readers()))
    )


Parsed = TypeVar("Parsed")


def _call_parser(work: Callable[[Path], Parsed], path: Path) -> Parsed:
    """Return work(path); whatever it raises becomes an InputError of one sentence."""
    try:
        return work(path)
    except InputError:
        raise
    except ModuleNotFoundError as e:
        raise InputError(
            f"{path} cannot be read without {e.name}: pip install {e.name}."
        ) from e
    except MemoryError as e:
        raise InputError(
            f"{path} does not fit into memory: split the step into several files."
        ) from e
    except pickle.UnpicklingError as e:
        raise InputError(
            f"{path} is damaged, or holds Python objects, a pickle that may run code: write numbers and texts."
        ) from e
    except Exception as e:  # a damaged file makes parsers raise what they like
        why = (str(e).splitlines() or [""])[0][:160]
        raise InputError(
            f"{path} is damaged or cut off ({type(e).__name__}: {why}): write it again."
        ) from e


# ---- .npz ----------------------------------------------------------------------------
def _refuse_npz_headers(path: Path) -> None:
    """Raise InputError by the headers of an archive, before anything is allocated,
    where columns are unknown or there twice, hold Python objects, or announce more than
    is allowed or another size than the archive holds.
    """
    total = 0
    with zipfile.ZipFile(path) as archive:
        names = [entry.filename for entry in archive.infolist()]
        for entry in archive.infolist():
            if names.count(entry.filename) > 1:
                raise InputError(
                    f"{path} holds {entry.filename} several times: write each column once."
                )
            name = entry.filename.removesuffix(".npy")
            if name not in COLUMNS and name not in FACTS and name != "offsets":
                raise InputError(
                    f"{path}: {name!r} is no column of docs/dump.md; leave it out, or put it into meta."
                )
            header = _read_npy_header(archive, entry, path)
            if header.dtype.hasobject:
                raise InputError(
                    f"{path}: {name} holds Python objects, a pickle that may run code: write numbers."
                )
            count = math.prod(header.shape)
            announced = count * header.dtype.itemsize
            total += announced
            if total > MOST_BYTES:
                raise InputError(
                    f"{path} announces {total / 2**30:,.1f} GiB, more than {MOST_BYTES >> 30} GiB: split it."
                )
            if count > MOST_SLOTS:
                raise InputError(
                    f"{path}: {name} announces {count:,} numbers, more than {MOST_SLOTS:,}: split the step."
                )
            if announced != entry.file_size - header.size:
                raise InputError(
                    f"{path} is damaged: {name} announces {announced:,} bytes and holds another number."
                )


class _NpyHeader(NamedTuple):
    """What an array of an archive announces."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    size: int  # bytes of the header itself


def _read_npy_header(
    archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path
) -> _NpyHeader:
    """Read the header of an array, and nothing behind it.

    Raises:
        InputError: it has an unknown version of the format.
    """
    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, _, dtype = np.lib.format.read_array_header_2_0(file)
        else:
            name = entry.filename.removesuffix(".npy")
            raise InputError(
                f"{path}: {name} has the array format {version}: write it with numpy.savez."
            )
        return _NpyHeader(shape, dtype, file.tell())


def _npz_has_schema(path: Path) -> bool:
    """Return whether the archive has the entry by which a recorded batch is known."""
    with zipfile.ZipFile(path) as archive:
        return "schema.npy" in archive.namelist()


def _npz_step(path: Path) -> int | None:
    """Return the number of the step, None where there is none; InputError where the
    headers show that the file must not be read.
    """
    _refuse_npz_headers(path)
    with np.load(path, allow_pickle=False) as archive:
        return _step_number(str(archive["step"]), path) if "step" in archive else None


def _read_npz(path: Path) -> RecordedBatch:
    """Read a file whose headers `_npz_step` has checked; InputError where its schema is
    another one, or a column is not as docs/dump.md says.
    """
    with np.load(path, allow_pickle=False) as archive:
        held = {name: archive[name] for name in archive.files}
    facts = {name: str(held.pop(name)) for name in FACTS if name in held}
    return make_batch(held, file=str(path), **_parse_facts(facts, path))


# ---- .safetensors --------------------------------------------------------------------
def _safetensors_metadata(path: Path) -> dict[str, str]:
    """Return the texts in the header of the file; {} where it has none."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}


def _safetensors_step(path: Path) -> int | None:
    """Return the number of the step, None where there is none; InputError where the
    file has more than MOST_BYTES.
    """
    if path.stat().st_size > MOST_BYTES:
        raise InputError(
            f"{path} is larger than {MOST_BYTES >> 30} GiB: split the step into several files."
        )
    metadata = _safetensors_metadata(path)
    return _step_number(metadata["step"], path) if "step" in metadata else None


def _read_safetensors(path: Path) -> RecordedBatch:
    """Read a file whose size `_safetensors_step` has checked; InputError where its
    schema is another one, or a column is not as docs/dump.md says. Metadata that are
    none of FACTS are left out.
    """
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        facts = {k: v for k, v in (file.metadata() or {}).items() if k in FACTS}
        held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dictionary
    return make_batch(held, file=str(path), **_parse_facts(facts, path))


def _parse_facts(written: dict[str, str], path: Path) -> dict[str, Any]:
    """Return step (None without one), logged and meta as arguments of `make_batch`.

    Args:
        written: the FACTS of a file as text; logged and meta are JSON objects.
        path: for messages.

    Raises:
        InputError: the schema is of another version, or a fact has another form.
    """
    schema = written.get("schema", "")
    if schema != str(SCHEMA):
        raise InputError(
            f"{path} has the schema version {schema or 'none'!r}; this upref reads {SCHEMA}."
        )
    logged = _json_object("logged", written, path)
    meta = _json_object("meta", written, path)
    for name, number in logged.items():
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise InputError(f"{path}: {name} under logged must be a number.")
        if abs(number) > LARGEST:
            raise InputError(f"{path}: {name} under logged is beyond float32.")
    step = None
    if "step" in written:
        step = _step_number(written["step"], path)
    return {
        "step": step,
        "logged": {name: float(number) for name, number in logged.items()},
        "meta": {name: str(text) for name, text in meta.items()},
    }


def _step_number(step: str, path: Path) -> int:
    """Return the step as a number; InputError where the text is no whole number."""
    try:
        return int(step)
    except ValueError:
        raise InputError(
            f"{path}: step is {step[:40]!r}; it must be a whole number."
        ) from None


def _json_object(name: str, written: dict[str, str], path: Path) -> dict[str, Any]:
    """Return the JSON object written[name], {} where it is missing; InputError where
    the text is none.
    """
    try:
        value = json.loads(written.get(name, "{}"))
    except (ValueError, RecursionError):
        raise InputError(f"{path}: {name} is no JSON.") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: {name} must be a JSON object.")
    return value


# ---- writing -------------------------------------------------------------------------
def write(path: str | Path, batch: RecordedBatch) -> None:
    """Write a batch as `.npz` of docs/dump.md: ragged, floats in float32, ids in int32,
    without the padding at the end of each response. An older file of that name is
    replaced. The file holds users' texts.

    Args:
        path: the file, which ends in .npz. Its folder must exist.
        batch: what to write.

    Raises:
        InputError: the path does not end in .npz.
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise InputError(f"{path}: a recorded batch is written as .npz.")
    width = batch.mask.shape[1]
    lengths = _lengths(batch)
    inside = np.arange(width)[None, :] < lengths[:, None]
    arrays: dict[str, Any] = {
        "schema": SCHEMA,
        "offsets": np.concatenate([[0], np.cumsum(lengths)]),
    }
    for name in batch.recorded:
        value = getattr(batch, name).numpy()
        if value.dtype.kind == "f":
            value = value.astype(np.float32)
        elif name in TOKEN_INTEGERS:
            value = value.astype(np.int32)
        arrays[name] = value[inside] if value.ndim == 2 else value
    if batch.step is not None:
        arrays["step"] = batch.step
    arrays["logged"] = json.dumps(dict(batch.logged))
    arrays["meta"] = json.dumps(dict(batch.meta))
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    write_atomically(path, content.getvalue())


def _lengths(batch: RecordedBatch) -> np.ndarray:
    """Return the number of slots of each response, [B], up to its last token that is
    not padding: a trained one, or an id other than 0. It is 1 where all is padding.
    """
    used = (batch.mask | (batch.ids != 0)).numpy()
    padding_behind = used[:, ::-1].argmax(1)
    return np.where(used.any(1), used.shape[1] - padding_behind, 1)
