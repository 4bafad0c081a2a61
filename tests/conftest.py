# SPDX-License-Identifier: Apache-2.0
"""One thread to a process: the batches are small, and the threads of two workers on two
cores wait for each other.
"""

import gc
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start

import torch

# for this one, where a plug-in imported torch before
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


RECORD = Path(__file__).with_name(
    "seconds.tsv"
)  # `python -m benchmarks.tests --record`


def longest_first(items):
    """Return the tests that are recorded as slow, the longest first, and then the
    others as they were.

    A long test that begins last keeps one worker waiting for the other.
    """
    lines = RECORD.read_text(encoding="utf-8").splitlines()
    place = {line.partition("\t")[2]: n for n, line in enumerate(lines)}
    return sorted(items, key=lambda item: place.get(item.nodeid, len(place)))


def pytest_collection_modifyitems(config, items):
    """Deselect nightly tests unless -m asks for them, and put the longest tests first."""
    if "nightly" not in config.option.markexpr:
        nightly = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    items[:] = longest_first(items)


def pytest_collection_finish(session):
    """Let the garbage collector leave alone what is imported and collected, which lives
    until the end, and come less often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)
