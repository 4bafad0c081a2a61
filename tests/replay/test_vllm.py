# SPDX-License-Identifier: Apache-2.0
"""A real vLLM's own log-probabilities, raw and processed, cut and whole: replay names
each for what it is.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.replay import engine
from upref.replay import gap, read

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.smoke,
    pytest.mark.skipif(
        not importlib.util.find_spec("vllm"),
        reason="`repro/venv.sh smoke` installs vLLM",
    ),
]
TRUTH = {  # logprobs_mode -> name of the draw -> what may be named
    "raw_logprobs": {
        "cool": ("raw_temperature",),
        "cool_cut": ("raw_temperature",),  # of before the temperature and the cut
        # docs/dump.md: two columns that agree do not show how tokens were drawn
        "plain_cut": ("agree",),
    },
    "processed_logprobs": {
        "cool": ("agree",),
        "cool_cut": ("cut", "cut_or_divided"),
        "plain_cut": ("cut", "cut_or_divided"),
    },
}


@pytest.mark.parametrize("mode", TRUTH)
def test_replay_names_what_vllm_reports(mode, tmp_path):
    """In each mode of vLLM's log-probabilities, the cause of the gap is the one that
    the way of drawing has.
    """
    command = [sys.executable, "-m", "tests.replay.engine", mode, str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    named = {name: gap(read(tmp_path / f"{name}.npz")) for name in engine.DRAWS}
    for name, truth in TRUTH[mode].items():
        assert named[name].cause in truth, (name, str(named[name].findings))
        assert named[name]  # no failure: the engine does what it was asked to
    if mode == "processed_logprobs":
        assert named["cool"].mean_abs < 1e-5  # float32 on both sides
        assert named["cool_cut"].rho_mean < 1  # the mass that the cut keeps
