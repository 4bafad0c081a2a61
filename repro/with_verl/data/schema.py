# SPDX-License-Identifier: Apache-2.0
"""One row as verl reads it, and the check of a whole file."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from upref import InputError
from upref.files import write_atomically

STRING = pa.string()
SCHEMA = pa.schema(
    [
        ("data_source", STRING),
        ("prompt", pa.list_(pa.struct([("role", STRING), ("content", STRING)]))),
        ("ability", STRING),
        ("reward_model", pa.struct([("style", STRING), ("ground_truth", STRING)])),
        (
            "extra_info",
            pa.struct([("index", pa.int64()), ("split", STRING), ("protocol", STRING)]),
        ),
    ]
)
IMAGES = pa.list_(pa.struct([("bytes", pa.binary()), ("path", STRING)]))


def row(
    source: str, index: int, content: str, answer: str, protocol: str, split: str
) -> dict[str, Any]:
    """Return one row in the columns that verl reads, with the prompt as one message of
    the user.

    Args:
        source: name of the data set.
        index: number of the row.
        content: the prompt.
        answer: the right one.
        protocol: how it is scored, one of repro.with_verl.reward.score.PROTOCOLS.
        split: train or test.
    """
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": index, "split": split, "protocol": protocol},
    }


def write(path: Path, rows: list[dict[str, Any]], facts: dict[str, str]) -> None:
    """Write rows to a parquet file, whole or not at all.

    Args:
        path: of the file.
        rows: at least one; all or none of them have images.
        facts: for the metadata of the file.
    """
    schema = (
        SCHEMA.append(pa.field("images", IMAGES)) if "images" in rows[0] else SCHEMA
    )
    table = pa.Table.from_pylist(rows, schema=schema.with_metadata(facts))
    content = pa.BufferOutputStream()
    pq.write_table(table, content)
    write_atomically(path, content.getvalue().to_pybytes())


def facts(path: Path) -> dict[str, str]:
    """Return the metadata that `write` was given; {} if the file is missing or no
    parquet file.
    """
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (OSError, pa.ArrowInvalid):
        return {}
    return {key.decode(): value.decode() for key, value in metadata.items()}


def check_file(path: Path) -> int:
    """Return the number of rows of a data file.

    Args:
        path: of a parquet file.

    Raises:
        InputError: it cannot be read, lacks a column, is empty, or a row has no prompt
            or answer.
    """
    try:
        table = pq.read_table(path, columns=[*SCHEMA.names])
    except (OSError, pa.ArrowInvalid, KeyError) as e:
        raise InputError(
            f"{path} is no data file of verl ({str(e).splitlines()[0][:100]}): prepare it again."
        ) from e
    if missing := set(SCHEMA.names) - set(table.column_names):
        raise InputError(
            f"{path} has no column {', '.join(sorted(missing))}: prepare it again."
        )
    if not len(table):
        raise InputError(f"{path} has no rows: prepare it again.")
    for i, r in enumerate(table.to_pylist()):
        messages = r["prompt"] or []
        answer = (r["reward_model"] or {}).get("ground_truth")
        are_whole = all(m["role"] and m["content"] for m in messages)
        if not messages or not are_whole or not answer:
            raise InputError(
                f"{path}, row {i}: an empty prompt or answer: prepare it again."
            )
    return len(table)
