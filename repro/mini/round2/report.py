# SPDX-License-Identifier: Apache-2.0
"""What the second round says: `python -m repro.mini.round2.report`, from results/runs.jsonl; runs nothing."""

from pathlib import Path

from repro.mini.study.results import Record


def write(records: dict[str, Record], folder: Path) -> None:
    """Later."""
