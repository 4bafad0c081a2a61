# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct, a pretrained language model, trained by the miniature's loop."""

import os

# Here, because each is read once, when a library is loaded. Nothing is looked for on a
# network; and a thread that waits for another sleeps: on a busy machine it would take
# several times the processor's time to wait.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
