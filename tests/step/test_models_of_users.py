# SPDX-License-Identifier: Apache-2.0
"""Models that people bring: a failure is one sentence with the model's line, and a
checkpoint is none.
"""

import warnings
from types import SimpleNamespace

import pytest
import torch
from loops import T
from torch import nn
from torch.utils.checkpoint import checkpoint

import upref
from upref.step import check_step
from upref.step.explain.scores import _logits_with_cache
from upref.step.inputs.reference import TorchModel

V, WIDTH = 96, 16


class Tiny(nn.Module):
    """Two layers: a mean over the tokens so far, and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(V, WIDTH)
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, V)

    def hidden(self, ids):
        x = self.embed(ids)
        return x + torch.tanh(
            self.layer(x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None])
        )

    def forward(self, ids):
        return self.head(self.hidden(ids))


def step(model, rows):
    """Compute DAPO's gradient, one row at a time."""
    total = sum(sum(r.trains) for r in rows)
    for r in rows:
        z = model(torch.tensor([r.ids]))[0, len(r.prompt) - 1 : -1] / T
        ratio = (
            z.log_softmax(-1)[range(len(r.response)), r.response] - torch.tensor(r.old)
        ).exp()
        J = torch.minimum(ratio * r.adv, ratio.clamp(0.8, 1.28) * r.adv)
        (-(J * torch.tensor(r.trains)).sum() / total).backward()


class Narrows(Tiny):
    """Converts hidden states to float32 in every way that WideOperations widens."""

    def __init__(self):
        super().__init__()
        # no buffer: the reference's copy leaves it in float32
        self.shift = torch.ones(1, dtype=torch.float32)

    def hidden(self, ids):
        """Return the hidden states, after asserting that no way of narrowing them
        leaves float64.
        """
        x = super().hidden(ids)
        for narrowed in (
            x.float(),
            x.to(torch.float32),
            x.to(dtype=torch.float32),
            x.to(self.shift),
            x.to(tensor=self.shift),
            x.type_as(self.shift),
            x.type(torch.FloatTensor),
            x.type("torch.BFloat16Tensor"),
            x.type(dtype=torch.float32),
            x.softmax(-1, dtype=torch.float32) * 0 + x,
        ):
            assert narrowed.dtype == torch.float64
            assert narrowed.equal(x)
        assert x.type() == "torch.DoubleTensor"
        assert x.to("cpu").type(torch.LongTensor).dtype == torch.int64
        return x


def test_the_reference_computes_in_float64_where_a_model_narrows():
    ids = [3, 4, 5]
    right = TorchModel(Tiny())
    assert TorchModel(Narrows()).logits(ids).equal(right.logits(ids))


class NeedsMask(Tiny):
    def forward(self, ids, attention_mask):
        return self.head(self.hidden(ids))


class TakesBatch(Tiny):
    def forward(self, batch):
        return self.head(self.hidden(batch["input_ids"]))


class FewPositions(Tiny):
    def __init__(self):
        super().__init__()
        self.position = nn.Embedding(8, WIDTH)

    def forward(self, ids):
        return self.head(self.hidden(ids) + self.position(torch.arange(ids.shape[1])))


class ReturnsHidden(Tiny):
    def forward(self, ids):
        return self.hidden(ids)


class NeedsCuda(Tiny):
    def forward(self, ids):
        raise RuntimeError("Found no NVIDIA driver on your system.")


class AssertsDtype(Tiny):
    def forward(self, ids):
        x = self.hidden(ids)
        assert x.dtype == torch.float32, "hidden states must be float32"
        return self.head(x)


class BackwardFails(Tiny):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            assert g.dtype == torch.float32
            return g

    def forward(self, ids):
        return self.head(self.Broken.apply(self.hidden(ids)))


@pytest.mark.parametrize(
    "model, sentence",
    [
        (NeedsMask, r"missing 1 required positional argument: 'attention_mask': give these arguments a default"),
        (TakesBatch, r"IndexError: .*_users.py, line \d+, in forward\): pass a module whose forward takes"),
        (FewPositions, r"test_models_of_users.py, line \d+, in forward\): the model needs 14 positions"),
        (ReturnsHidden, r"the model returns 16 numbers for each token, and its vocabulary has 96: it must"),
        (NeedsCuda, r"line \d+, in forward\): the reference runs a copy of the model on the CPU"),
        (AssertsDtype, r"must be float32.*_users.py, line \d+, in forward\): the reference runs a float64 copy"),
        (BackwardFails, r"line \d+, in backward\): the reference runs a float64 copy"),
    ],
)  # fmt: skip
def test_a_model_that_the_reference_cannot_run_is_one_sentence(model, sentence):
    with pytest.raises(upref.InputError, match=sentence):
        check_step(step, model(), "dapo", temperature=T)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_may_checkpoint_in_its_own_forward(reentrant):
    """Checkpoint a block within the model, and find torch's function in place
    afterwards.
    """

    class Checkpointed(Tiny):
        def block(self, x):
            # computed in float32, as RMSNorm does
            norm = x.float().pow(2).mean(-1, keepdim=True).rsqrt()
            return x + torch.tanh(self.layer(x * norm.to(x.dtype)))

        def forward(self, ids):
            return self.head(
                checkpoint(self.block, self.hidden(ids), use_reentrant=reentrant)
            )

    own = torch.utils.checkpoint.CheckpointFunction
    report = check_step(step, Checkpointed(), "dapo", temperature=T)
    assert report and report.error < 5e-6, report
    assert torch.utils.checkpoint.CheckpointFunction is own


def test_an_error_in_the_search_for_a_cause_leaves_the_verdict(monkeypatch):
    def fails(*_):
        raise RuntimeError("an internal error")

    monkeypatch.setattr("upref.step.check.diagnose", fails)
    monkeypatch.setattr("upref.step.check.not_reached", fails)
    report = check_step(
        lambda model, rows: step(model, rows[:4]), Tiny(), "dapo", temperature=T
    )
    assert not report and "no known cause fits" in report.failures[0].cause


class Cached(Tiny):
    """Its cache is an argument, and a part of what it returns, of this name."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, ids, use_cache=False, **given):
        """Return logits and a cache of running sums, which the argument of this name
        takes; any other argument fails.
        """
        assert not given.keys() - {self.name}, given
        total, count = given.get(self.name, (0.0, 0))
        x = self.embed(ids)
        sums = x.cumsum(1) + total
        counts = torch.arange(1, ids.shape[1] + 1)[:, None] + count
        z = self.head(x + torch.tanh(self.layer(sums / counts)))
        cache = (sums[:, -1:], count + ids.shape[1])
        return SimpleNamespace(logits=z, **{self.name: cache})


ROW = SimpleNamespace(
    prompt=[1, 2, 3], response=[4, 5, 6, 7], ids=[1, 2, 3, 4, 5, 6, 7]
)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_has_the_name_of_the_installed_transformers(name):
    model = TorchModel(Cached(name))
    with_cache, plain = _logits_with_cache(model, ROW), model.logits(ROW.ids)
    assert torch.allclose(with_cache[2:], plain[2:], atol=1e-12)


def test_checkpointing_is_ended_by_the_name_that_stays():
    class Old(Tiny):
        ended = ()

        def gradient_checkpointing_disable(self):
            self.ended = (*self.ended, "gradient")

    class New(Old):
        def activation_checkpointing_disable(self):
            self.ended = (*self.ended, "activation")

    assert TorchModel(Old()).net.ended == ("gradient",)
    assert TorchModel(New()).net.ended == ("activation",)


def test_no_call_of_transformers_is_deprecated():
    transformers = pytest.importorskip("transformers", reason="repro/venv.sh trl")
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1)
    heads = dict(num_attention_heads=2, num_key_value_heads=1)
    config = transformers.Qwen2Config(vocab_size=V, **sizes, **heads)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        warnings.simplefilter("error", DeprecationWarning)
        model = TorchModel(transformers.Qwen2ForCausalLM(config))
        with_cache, plain = _logits_with_cache(model, ROW), model.logits(ROW.ids)
    assert torch.allclose(with_cache[2:], plain[2:], atol=1e-12)
