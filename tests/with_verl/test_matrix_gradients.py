# SPDX-License-Identifier: Apache-2.0
"""The gradients that the matrix of GPU settings records: a right step agrees with
float64, a wrong one does not.
"""

import pytest

NEED = "`repro/venv.sh verl` installs what verl's engine needs"
pytest.importorskip("verl.trainer.ppo.core_algos", reason=NEED)
transformers = pytest.importorskip("transformers", reason=NEED)
pytest.importorskip("verl.workers.engine.base", reason=NEED, exc_type=ImportError)
import torch  # noqa: E402
from tensordict import TensorDict  # noqa: E402

import upref  # noqa: E402
from repro.with_verl.cpu import toy  # noqa: E402
from repro.with_verl.trials import gradients  # noqa: E402
from upref.step.rows import Padded  # noqa: E402

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]


def mini_batch(net, responses=((7, 5, 6), (8, 9), (5, 7, 7, 1), (6,))):
    """As verl hands it to its engine: nested tensors, without padding."""
    prompt, generator = [2, 5, 3], torch.Generator().manual_seed(0)
    old, adv = [], []
    for i, response in enumerate(responses):
        lp = net(torch.tensor([[*prompt, *response]])).logits.log_softmax(-1)[0, 2:-1]
        lp = lp.gather(1, torch.tensor(response)[:, None])[:, 0].detach()
        old.append(lp - 0.3 * torch.randn(len(response), generator=generator))
        # a norm that the clip leaves alone
        adv.append(torch.full((len(response),), 0.1 * (-1.0) ** i))
    nested = lambda rows: torch.nested.as_nested_tensor(
        [torch.as_tensor(r) for r in rows], layout=torch.jagged
    )
    fields = {"prompts": nested([prompt] * len(responses)), "responses": nested(responses), "advantages": nested(adv),
              "response_mask": nested([[1] * len(r) for r in responses]), "old_log_probs": nested(old)}  # fmt: skip
    return TensorDict(fields, batch_size=[len(responses)])


class Engine:
    """verl's interface: one optimizer step of a mini-batch, whose gradient is `factor`
    of the right one.
    """

    def __init__(self, net, factor):
        self.module, self.factor = net, factor
        self.optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)

    def train_batch(self, data, loss_function):
        rows = gradients.rows_of(data)
        b = Padded.of(rows)
        lp = torch.zeros(b.mask.shape, dtype=torch.float32)
        for i, row in enumerate(rows):
            n = len(row.response)
            x = self.module(torch.tensor([row.ids])).logits.log_softmax(-1)[
                0, -n - 1 : -1
            ]
            lp[i, :n] = x.gather(1, torch.tensor(row.response)[:, None])[:, 0]
        J = upref.get("up_dapo").J(lp, b.old.float(), b.adv.float(), b.mask)
        self.optimizer.zero_grad()
        (-self.factor * J).backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()


@pytest.mark.parametrize(("factor", "agrees"), [(1.0, True), (1.1, False)])
def test_a_step_is_recorded_and_compared(factor, agrees, tmp_path, monkeypatch):
    monkeypatch.setenv("UPREF_GRADIENTS", str(tmp_path / "gradients"))
    monkeypatch.setattr(gradients, "_taken", 0)
    toy.make_model(tmp_path / "model")
    load = lambda: transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32
    )
    engine = Engine(load(), factor)
    train_batch = gradients.recorded(Engine.train_batch)
    for _ in range(2):
        train_batch(engine, mini_batch(engine.module), None)
    report, count = gradients.compared(tmp_path / "gradients", load(), "up_dapo", None)
    assert (bool(report), count) == (agrees, 2)
    if not agrees:
        assert report.error == pytest.approx(0.1, rel=1e-3)
