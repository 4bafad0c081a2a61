# SPDX-License-Identifier: Apache-2.0
"""The processes of a check listen on the loopback interface alone, as SECURITY.md
promises.
"""

import sys
from pathlib import Path

import pytest

from tests.support.daily import daily
from tests.support.ports import on_a_network

ROOT = Path(__file__).parents[2]
HEAD = """
import sys
from pathlib import Path
from unittest.mock import patch
import torch
from tests.support.ports import listening

def told(*_, **__):
    with open(sys.argv[1], "a") as file:
        file.write("".join(f"{address}\\n" for address in listening()))
"""
IN = {
    "check_logprobs with ranks": """
import upref
from upref.hidden import token_log_probs
def kernel(logits, tokens):
    if torch.distributed.is_initialized():
        told()
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
try:
    upref.check_logprobs(kernel, ranks=2)
except upref.InputError:
    pass
""",
    "a group of one rank": """
from upref_frameworks.steps.host import process_group
with process_group("a trainer", "a_trainer"):
    told()
""",
    "a group of two ranks": """
from upref_frameworks.steps.host import spawn_ranks
if __name__ == "__main__":
    with spawn_ranks(2, told, None, [0, 1], 1.0, {}):
        told()
""",
}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", daily(IN, 3))
def test_only_this_machine_can_connect(name, tmp_path):
    (tmp_path / "program.py").write_text(HEAD + IN[name])
    out = tmp_path / "addresses"
    env = ["env", f"PYTHONPATH={ROOT}"]
    done = on_a_network(
        *env, sys.executable, str(tmp_path / "program.py"), str(out), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    addresses = out.read_text().split()
    assert len(addresses) >= (1 if "one" in name else 2)
    assert {address.split(":")[0] for address in addresses} == {"0100007F"}, addresses
