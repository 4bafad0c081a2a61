# SPDX-License-Identifier: Apache-2.0
"""One thread to a process: the batches are small, and the threads of two workers on two
cores wait for each other.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start

import torch

# for this one, where a plug-in imported torch before
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_collection_modifyitems(config, items):
    """What is nightly runs only where it is asked for: -m nightly."""
    if "nightly" not in config.option.markexpr:
        left = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
