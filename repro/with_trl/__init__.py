# SPDX-License-Identifier: Apache-2.0
"""A training run in TRL, of a model and data that are on this machine."""

import os

# Here, because huggingface_hub reads it once, when it is imported: without a network
# each file waits for a time-out.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
