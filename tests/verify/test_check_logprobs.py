# SPDX-License-Identifier: Apache-2.0
"""check_logprobs: its command, its assertion, and what is no log-prob function.
Verdicts: tests/support/cases/table.py.

Its promise: log-probs in nats and, where a function returns a pair, entropies;
gradients of both. Rounding, NaN at logits of -inf, NaN from masked NaN states, and a
refusal of -100 or of a layout are notes.
"""

import os
import re
import subprocess

import pytest
import torch

import upref
from repro import fork
from tests.fifth_set import log_probs
from tests.support.cases.logprob_changes import naive, of, x_is
from upref import InputError, check_logprobs
from upref.user_code import logprobs as read_logprobs
from upref.verify.logprobs import ORACLES


def test_the_command_and_the_assertion(tmp_path):
    (tmp_path / "my.py").write_text(
        "def lp(logits, tokens, temperature):\n"
        "    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]\n"
    )
    upref_ = [*fork.executable(), "-m", "upref"]
    done = subprocess.run(
        [*upref_, "check", "my.py:lp", "--as-logprobs"],
        cwd=tmp_path,
        env=os.environ | fork.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "the temperature is left out" in done.stdout, done
    assert upref.assert_logprobs(naive)
    with pytest.raises(pytest.fail.Exception, match="temperature"):
        upref.assert_logprobs(x_is(lambda z, t: z))


@pytest.mark.parametrize(
    "fn, settings, says",
    [
        (3, {}, "not a log-probability function"),
        (lambda logits, tokens, temperature: None, {}, "return one each"),
        (
            lambda logits, tokens, temperature: of(logits, tokens)[0].mean(),
            {},
            "return one each",
        ),
        (lambda logits, tokens, temperature: 1 / 0, {}, "ZeroDivisionError"),
        (lambda logits, tokens, temperature, labels2: 0, {}, "which of"),
        (lambda logits, tokens, temperature, magic: 0, {}, "magic"),
        (lambda: 0, {}, "names no arguments"),
        (naive, {"softcap": -1}, "softcap"),
        (naive, {"ranks": 0}, "ranks"),
        (naive, {"skip": ("no",)}, "no oracle"),
    ],
)
def test_bad_input_is_one_sentence(fn, settings, says):
    with pytest.raises(InputError, match=says):
        check_logprobs(fn, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, n", [("torch", 1), pytest.param("trl", 2, marks=pytest.mark.trl)]
)
def test_the_log_prob_functions_of_torch_and_trl_agree(name, n):
    from upref_frameworks.audits.kernels import kernels

    found = kernels(name)
    assert len(found.reports) == n and found and all(found.reports.values()), str(found)


def test_a_function_on_a_gpu_gets_no_id_that_is_out_of_range(monkeypatch):
    """There such an id reads foreign memory, or ends CUDA in the whole process."""
    asked, seen = [0], []

    def allocations():
        asked[0] += 1
        return asked[0]

    def fn(logits, tokens, temperature):
        seen.append(int(tokens.min()))
        return (
            (logits / temperature).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        )

    monkeypatch.setattr(read_logprobs, "gpu_allocations", allocations)
    report = upref.check_logprobs(fn)
    assert report, report
    assert min(seen) >= 0
    assert "ignored-ids" in " ".join(report.not_checked)


def test_a_lost_gpu_is_no_verdict():
    def fn(logits, tokens, temperature):
        """Return log-probabilities; raise an error of CUDA for more than 100 columns."""
        if logits.shape[-1] > 100:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return (
            (logits / temperature).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        )

    with pytest.raises(
        upref.InputError, match=r"fn lost the GPU .*: there is no verdict"
    ):
        upref.check_logprobs(fn)


class Once(torch.autograd.Function):
    """As torch.compile makes it: a backward pass that keeps nothing for a second one."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        if torch._C._autograd._get_current_graph_task_keep_graph():
            raise RuntimeError("compiled with non-empty donated buffers")
        return g


def test_a_backward_that_runs_once_is_a_note():
    report = check_logprobs(x_is(lambda z, t: Once.apply(z / t)))
    assert report, report
    said = [f for f in report.notes if f.oracle == "repeated-backward"]
    assert "a second backward is refused" in str(said[0]), report


@pytest.mark.parametrize("times, right", [(1.002, True), (1.005, False), (0.98, False)])
def test_half_precision_excuses_no_wrong_temperature(times, right):
    def rounded(logits, tokens, temperature):
        z = logits.bfloat16() / (times * temperature)
        lp = z.float().log_softmax(-1).gather(-1, tokens[..., None])
        return lp[..., 0].to(logits.dtype)

    report = check_logprobs(rounded)
    assert bool(report) == right, report
    assert right or "factor that every" in str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_logarithm_of_a_softmax_that_underflows_is_a_failure(dtype):
    """Below -104 nats p is 0 in float32, and below -745 in float64."""

    def log_of_softmax(logits, tokens):
        probabilities = logits.to(dtype).softmax(-1)
        return of(probabilities.log(), tokens)[0]

    def right(logits, tokens):
        return of(logits.to(dtype).log_softmax(-1), tokens)[0]

    report = check_logprobs(log_of_softmax)
    assert [f.oracle for f in report.failures] == ["peak"], report.text()
    assert report.failures[0].fault_ids == ("log-of-softmax",)
    assert check_logprobs(right), check_logprobs(right).text()


def picked_by_index(log_probs, tokens):
    rows = log_probs.flatten(0, -2)
    return rows[torch.arange(len(rows)), tokens.flatten()].view(tokens.shape)


def test_an_id_that_counts_from_the_end_is_noted():
    """Of a vocabulary of more than 100 ids, -100 is one for whoever indexes by it."""

    def wraps(logits, tokens):
        return picked_by_index(logits.log_softmax(-1), tokens)

    def gives_zero(logits, tokens):
        picked = picked_by_index(logits.log_softmax(-1), tokens.clamp(min=0))
        return torch.where(tokens == -100, 0, picked)

    [said] = [f for f in check_logprobs(wraps).notes if f.oracle == "ignored-ids"]
    assert "of 131 ids, get the log-prob of id 31" in said.regime
    assert check_logprobs(gives_zero).oracles["ignored-ids"] == "ok"


class WideHead:
    """A head that keeps a wider copy of its weight from the first call with it."""

    def __init__(self, dtype):
        self.dtype = dtype
        self.of = self.copy = None

    def __call__(self, hidden, weight, tokens):
        """Return log-probabilities of a head whose weight is kept as a copy in another
        dtype, made anew for each new weight.
        """
        if self.of is not weight:
            self.of = weight
            self.copy = weight.detach().to(self.dtype, copy=self.dtype != weight.dtype)
        values = weight + (self.copy.to(weight.dtype) - weight).detach()
        log_probs = (hidden @ values.T).float().log_softmax(-1)
        return log_probs.gather(-1, tokens[..., None])[..., 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_copy_of_the_weight_from_an_earlier_step_is_found(dtype):
    report = check_logprobs(WideHead(dtype))
    assert [f.oracle for f in report.failures] == ["weight-in-place"], report.text()
    assert report.failures[0].fault_ids == ("weight-of-earlier-call",)


def last_ids_are_cut(logits, tokens):
    return of(logits.log_softmax(-1), tokens.clamp(max=249_999))[0]


def last_ids_are_frozen(hidden, weight, tokens):
    last = weight[250_000:].detach()
    logits = hidden @ torch.cat([weight[:250_000], last]).T
    return of(logits.log_softmax(-1), tokens)[0]


@pytest.mark.parametrize("function", [last_ids_are_cut, last_ids_are_frozen])
def test_ids_beyond_a_quarter_of_a_million_are_tried_with_gradients(function):
    others = [o.name for o in ORACLES if o.name != "large-vocabulary"]
    report = check_logprobs(function, skip=others)
    [failure] = report.failures
    assert "262,208 ids" in failure.regime, report.text()
    assert failure.cause == "with 151,936 ids it is right"


def test_the_first_line_says_what_a_note_costs():
    """Check functions with NaN in the entropy and with half precision."""

    def with_nan(logits, tokens):
        log_probs = logits.log_softmax(-1)
        return of(log_probs, tokens)[0], -(log_probs.exp() * log_probs).sum(-1)

    def in_bfloat16(logits, tokens):
        return of(logits.bfloat16().log_softmax(-1).to(logits.dtype), tokens)[0]

    for function, words in ((with_nan, "NaN in the entropy"), (in_bfloat16, "half")):
        report = check_logprobs(function)
        first_line = report.text().splitlines()[0]
        assert report and "agrees, but " in first_line and words in first_line, report


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fn", "where"),
    [
        (log_probs.temperature_floored, "temperature 0.02"),
        (log_probs.temperature_nearly_one, "temperature 0.97"),
        (log_probs.eight_rows, "130 responses"),
    ],
)
def test_what_acts_near_1_far_below_it_or_in_many_rows_is_wrong(fn, where):
    report = upref.check_logprobs(fn)
    assert any(where in f.regime for f in report.failures), str(report)


def test_right_functions_agree_at_every_temperature_and_in_many_rows():
    def plain(logits, tokens, temperature=1.0):
        logp = (logits / temperature).log_softmax(-1)
        return logp.gather(-1, tokens[..., None])[..., 0]

    others = [o.name for o in ORACLES if o.name not in ("temperatures", "tiles")]
    assert upref.check_logprobs(plain, skip=others)


def hot(where):
    """Return a function that leaves out the temperature where where(logits) is true."""

    def log_probs(logits, tokens, temperature=1.0):
        z = logits if where(logits) else logits / temperature
        return log_probs_alone(z, tokens)

    return log_probs


HOT = [
    (lambda z: z.dtype == torch.bfloat16, "dtypes", "bfloat16"),
    (lambda z: z.dtype == torch.float16, "dtypes", "float16"),
    (lambda z: z.dtype == torch.float32, "dtypes", "float32"),
    (lambda z: z.shape[-1] > 100_000, "large-vocabulary", "151,936 ids"),
    (lambda z: z.shape[-1] > 200_000, "large-vocabulary", "262,208 ids"),
    (lambda z: z.shape[-1] > 64, "tiles", "67 ids"),
    (lambda z: z.shape[-2] > 1000, "tiles", "1027 tokens"),
    (lambda z: z.abs().max() > 30, "peak", "40 above"),
    (lambda z: bool(z.isneginf().any()), "forbidden", "-inf"),
    (lambda z: not z.is_contiguous(), "layout", "transposed"),
    (lambda z: bool(z.isnan().any()), "padding", "NaN in the states"),
]


@pytest.mark.parametrize(
    ("where", "name", "words"), HOT, ids=[f"{one[1]}-{one[2]}" for one in HOT]
)
def test_a_temperature_that_unusual_inputs_leave_out_is_found(where, name, words):
    others = [o.name for o in ORACLES if o.name != name]
    report = check_logprobs(hot(where), skip=others)
    assert not report
    failure = report.failures[0]
    assert words in failure.regime, report.text()
    if name != "padding":
        assert "temperature 0.5" in failure.regime
        assert failure.cause == "the temperature is left out on these inputs alone"


def test_logits_that_are_overwritten_at_temperature_1_alone_are_found():
    def overwrites(logits, tokens, temperature=1.0):
        z = logits if temperature == 1 else logits / temperature
        z.data.sub_(z.data.amax(-1, keepdim=True))
        return log_probs_alone(z, tokens)

    others = [o.name for o in ORACLES if o.name != "mutation"]
    assert not check_logprobs(overwrites, skip=others)


def entropy_alone(logits):
    lp = logits.log_softmax(-1)
    return -(lp.exp() * lp).sum(-1)


def shifted(logits, tokens):
    lp = logits[:, :-1].log_softmax(-1)
    return lp.gather(-1, tokens[:, 1:, None])[..., 0]


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (entropy_alone, r"takes no tokens: an entropy is checked beside"),
        (shifted, r"return one each. If it shifts the labels"),
    ],
)
def test_what_is_checked_in_another_form_is_told_the_form(fn, words):
    with pytest.raises(InputError, match=words):
        upref.check_logprobs(fn)


def test_an_option_with_a_default_is_no_tensor():
    def log_probs(logits, labels, keep_logits=False, num_tokens=0, head="lm"):
        return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]

    assert read_logprobs.read(log_probs).kind == "logits"
    assert read_logprobs.read(upref.hidden.token_log_probs).kind == "hidden"


def test_what_is_not_checked_is_no_name_of_an_oracle_that_needs_an_entropy():
    report = upref.check_logprobs(
        log_probs_alone, skip=[o.name for o in ORACLES if o.name != "values"]
    )
    assert "the entropy, which it does not return" in report.not_checked
    assert "gradients" not in report.not_checked[-1].split(", ")
    assert "in its caller" in report.not_checked[0]


def log_probs_alone(logits, tokens):
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def shifted_of_input_ids(logits, input_ids, temperature=1.0):
    lp = (logits[:, :-1] / temperature).log_softmax(-1)
    return lp.gather(-1, input_ids[:, 1:, None])[..., 0]


def test_the_wrapper_of_a_function_that_shifts_labels_can_be_pasted():
    with pytest.raises(InputError) as refused:
        upref.check_logprobs(shifted_of_input_ids)
    code = re.search("`(def unshifted.*)`", str(refused.value))[1]
    space = {"torch": torch, "shifted_of_input_ids": shifted_of_input_ids}
    exec(code, space)
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[0, 4, 2], [1, 1, 3]])
    due = log_probs_alone(logits / 0.7, tokens)
    assert torch.allclose(space["unshifted"](logits, tokens, 0.7), due)


def test_rounding_is_a_note_that_says_how_a_test_refuses_it():
    def in_bfloat16(logits, tokens):
        lp = logits.bfloat16().log_softmax(-1)
        return lp.gather(-1, tokens[..., None])[..., 0]

    names = [o.name for o in ORACLES if o.name != "values"]
    report = upref.check_logprobs(in_bfloat16, skip=names)
    assert report
    assert "`assert not report.costs`" in report.notes[0].cause
    with pytest.raises(AssertionError):
        assert not report.costs
