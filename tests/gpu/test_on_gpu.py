# SPDX-License-Identifier: Apache-2.0
"""What upref computes on a GPU beside what it computes on the CPU. Without a GPU these
tests skip; `UPREF_TEST_DEVICE=cpu` runs them on the CPU, to try the tests themselves.
"""

import copy
import os
from dataclasses import fields
from functools import partial

import pytest
import torch

import upref
from benchmarks.gpu.steps import Recurrent
from upref import advantages, hidden, logprobs
from upref.step import check_recorded, record_step
from upref.weights.batches import OFF_EDGES, batch

DEVICE = os.environ.get("UPREF_TEST_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU"
)
T = 0.7


def there(b):
    """Return a batch on the device."""
    return type(b)(
        **{
            f.name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x
            for f in fields(b)
            if f.init
            for x in [getattr(b, f.name)]
        }
    )


@pytest.mark.parametrize("name", [*upref.names(), "up(sapo)"])
def test_an_objective_has_one_loss_and_gradient_on_both_devices(name):
    o = upref.get(name)
    here = batch(o, edges=OFF_EDGES)
    found = []
    for b in (here, there(here)):
        lp = b.logp.detach().clone().requires_grad_()
        loss = o.loss(type(b)(**{**arguments(b), "logp": lp}))
        loss.backward()
        found.append((loss.detach().cpu(), lp.grad.cpu()))
        assert loss.device.type == b.logp.device.type
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)


def arguments(b):
    """The fields with which a batch is made."""
    return {f.name: getattr(b, f.name) for f in fields(b) if f.init}


@pytest.mark.parametrize(
    "settings",
    [{}, {"kernels": "triton"}, {"kernels": "triton", "keep_logits": True}],
    ids=["torch", "triton", "triton-kept"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_is_within_float32_of_float64(dtype, settings):
    """Outputs are within 5e-6 of float64's, and gradients within one rounding to their
    dtype and float32's rounding.
    """
    if settings and DEVICE == "cpu":
        pytest.skip("the kernels need a GPU")
    g = torch.Generator().manual_seed(0)
    h = torch.randn(3, 40, 64, generator=g).to(DEVICE, dtype).requires_grad_()
    W = (torch.randn(5003, 64, generator=g) / 8).to(DEVICE, dtype).requires_grad_()
    tokens = torch.randint(5003, (3, 40), generator=g).to(DEVICE)
    found = of_hidden(partial(hidden.token_log_probs, **settings), h, W, tokens)
    wide = [x.detach().double().requires_grad_() for x in (h, W)]
    want = of_hidden(by_logits, *wide, tokens)
    for x, y in zip(found[:2], want[:2], strict=True):
        assert x.dtype == torch.float32
        assert (x - y).abs().max() < 5e-6
    for x, y in zip(found[2:], want[2:], strict=True):
        once = float((y.to(dtype) - y).abs().max())
        assert x.dtype == dtype
        assert float((x - y).abs().max()) <= 1.1 * once + 3e-6 * float(y.abs().max())


def by_logits(h, W, tokens, temperature):
    """Return log-probabilities and entropies through the logits of hidden states."""
    z = h @ W.T
    return (
        logprobs.token_log_probs(z, tokens, temperature=temperature),
        logprobs.entropy(z, temperature=temperature),
    )


def of_hidden(f, h, W, tokens):
    lp, entropy = f(h, W, tokens, temperature=0.8)
    total = lp.sum() + 0.3 * entropy.sum()
    return [lp.detach(), entropy.detach(), *torch.autograd.grad(total, (h, W))]


def test_hidden_refuses_tensors_on_two_devices():
    if DEVICE == "cpu":
        pytest.skip("needs two devices")
    h, W = torch.randn(2, 3, 4, device=DEVICE), torch.randn(7, 4)
    with pytest.raises(upref.InputError, match="on one device"):
        hidden.token_log_probs(h, W, torch.zeros(2, 3, dtype=torch.long))


def test_a_batch_on_two_devices_is_one_sentence():
    if DEVICE == "cpu":
        pytest.skip("needs two devices")
    b = batch(upref.get("dapo"))
    with pytest.raises(upref.InputError):
        upref.Rollouts(b.logp.to(DEVICE), b.logp_old, b.adv, b.mask)


@pytest.mark.parametrize("name", ["group_norm", "group_mean", "leave_one_out"])
def test_advantages_are_the_same_on_both_devices(name):
    R = torch.tensor([1.0, 0, 0, 1, 1, 1, 0, 0.5], dtype=torch.float64)
    group = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    f = advantages.get(name)
    found = f(R.to(DEVICE), group.to(DEVICE))
    assert found.device.type == DEVICE
    torch.testing.assert_close(found.cpu(), f(R, group), rtol=1e-12, atol=1e-12)


def dapo(log_prob, old_log_prob, advantages, mask):
    """Return DAPO's loss, computed on the device from tensors of the CPU."""
    lp, old, A, m = (x.to(DEVICE) for x in (log_prob, old_log_prob, advantages, mask))
    r = torch.where(m, lp - old, 0).exp()
    A = torch.where(m, A, 0)
    return (-torch.minimum(r * A, r.clamp(0.8, 1.28) * A).sum() / m.sum()).cpu()


def test_check_and_identify_read_a_loss_that_computes_on_the_device():
    assert upref.check(dapo, "dapo")
    assert not upref.check(dapo, "grpo")
    assert "dapo" in str(upref.identify(dapo))


def test_check_logprobs_reads_a_function_that_computes_on_the_device():
    def right(hidden, weight, tokens, temperature):
        z = (hidden.to(DEVICE) @ weight.to(DEVICE).T).float() / temperature
        lp = z.log_softmax(-1).gather(-1, tokens.to(DEVICE)[..., None])[..., 0]
        return lp.cpu()

    def hot(hidden, weight, tokens, temperature):
        return right(hidden, weight, tokens, 1.0)

    assert upref.check_logprobs(right)
    assert not upref.check_logprobs(hot)


def step(model, rows, temperature=T):
    """Run the loop of the guide on the model's device: it leaves DAPO's gradient."""
    device = next(model.parameters()).device
    total = sum(sum(r.trains) for r in rows)
    for part in (rows[:3], rows[3:]):
        width = max(len(r.ids) for r in part)

        def pad(x, r, width=width):
            return torch.tensor(
                [0.0] * len(r.prompt) + x + [0.0] * (width - len(r.ids))
            )[1:]

        ids = torch.stack(
            [torch.tensor(r.ids + [0] * (width - len(r.ids))) for r in part]
        ).to(device)
        mask = torch.stack([pad([float(t) for t in r.trains], r) for r in part])
        old = torch.stack([pad(r.old, r) for r in part]).to(device)
        mask, A = mask.to(device), torch.tensor([[r.adv] for r in part]).to(device)
        logp = (model(ids)[:, :-1] / temperature).log_softmax(-1)
        r = (logp.gather(-1, ids[:, 1:, None])[..., 0] - old).exp()
        J = torch.minimum(r * A, r.clamp(0.8, 1.28) * A)
        (-(J * mask).sum() / total).backward()


def model():
    torch.manual_seed(0)
    return Recurrent().to(DEVICE)


def test_check_step_accepts_a_right_step_and_names_a_fault_on_the_device():
    net = model()
    before = copy.deepcopy(net.state_dict())
    report = upref.check_step(step, net, "dapo", temperature=T)
    assert report and report.error < 2e-5, report
    hot = upref.check_step(
        lambda m, rows: step(m, rows, 1.0), net, "dapo", temperature=T
    )
    assert not hot
    assert "the temperature is left out" in hot.failures[0].cause
    after = net.state_dict()
    assert all(torch.equal(v, after[k]) for k, v in before.items())
    assert {p.device.type for p in net.parameters()} == {DEVICE}


def test_a_step_is_checked_in_full_float32_and_the_setting_is_restored():
    torch.set_float32_matmul_precision("high")
    try:
        report = upref.check_step(step, model(), "dapo", temperature=T)
        assert report and report.error < 2e-5, report
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_half_precision_on_the_device_is_named():
    def mixed(net, rows):
        with torch.autocast(DEVICE, torch.bfloat16):
            step(net, rows)

    report = upref.check_step(mixed, model(), "dapo", temperature=T)
    assert report.computed_in == "bfloat16", report
    assert report, report


def test_a_recorded_step_is_checked_on_the_device():
    """A right step with old log-probabilities near the model's own agrees when it is
    recorded on the device.
    """
    from upref.step.inputs.rows import make_rows

    net, rows = model(), make_rows(64, 1, (), None, None)
    noise = torch.Generator().manual_seed(0)
    with record_step(net) as seen:
        with torch.no_grad():
            for r in rows:
                ids = torch.tensor([r.ids], device=DEVICE)
                z = net(ids)[0, :-1].double().cpu() / T
                lp = z.log_softmax(-1).gather(1, ids[0, 1:, None].cpu())[:, 0]
                now = lp[len(r.prompt) - 1 :]
                moved = now + 0.3 * torch.randn(len(now), generator=noise)
                r.old = moved.clamp(max=-1e-6).tolist()
        step(net, rows)
        torch.optim.SGD(net.parameters(), lr=0.1).step()
    assert check_recorded(seen, [rows], "dapo", temperature=T, bound=5e-3)


def test_identify_step_reads_a_model_on_the_device():
    assert "dapo" in str(upref.identify_step(step, model(), temperature=T))
