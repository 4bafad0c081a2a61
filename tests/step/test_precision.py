# SPDX-License-Identifier: Apache-2.0
"""The precision of products: off TF32 while a step runs, and as it was afterwards. A
program may have set it by torch's one name or by the newer names, which torch refuses
to mix.
"""

import subprocess
import sys

import pytest

from tests.support.daily import daily

SETTINGS = {
    "nothing": "",
    "the one name": "torch.set_float32_matmul_precision('high')",
    "the newer names": "matmul.fp32_precision = cudnn.rnn.fp32_precision = 'tf32'",
}
PROGRAM = """
import torch, upref
from upref.step.compare.ranks import without_tf32

matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
if not hasattr(matmul, "fp32_precision"):
    raise SystemExit
{}

def now():
    return [x.fp32_precision for x in (matmul, cudnn.rnn, cudnn.conv)]

before = now()
with without_tf32():
    assert "tf32" not in now(), now()
assert now() == before, now()

def loss(log_prob, old_log_prob, advantages, mask):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    return -torch.minimum(r * A, r.clamp(0.8, 1.28) * A).sum() / mask.sum()

assert upref.check(loss, "dapo")
assert now() == before, now()
"""


@pytest.mark.parametrize("setting", daily(reversed(SETTINGS), 3))
def test_the_precision_of_products_is_restored(setting):
    code = PROGRAM.format(SETTINGS[setting])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
