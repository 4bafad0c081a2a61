# SPDX-License-Identifier: Apache-2.0
"""One thread to a process: the batches are small, and the threads of two workers on two cores wait for each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start

import torch

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # for this one, where a plug-in imported torch before
