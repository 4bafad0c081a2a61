# SPDX-License-Identifier: Apache-2.0
"""The training loop: every objective trains, the loss is what upref says, and the
settings say what is run.
"""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import upref
from repro.mini import tasks
from repro.mini.experiment import records
from repro.mini.policy import models
from repro.mini.policy.tokens import tokenizer
from repro.mini.tasks import Verdict
from repro.mini.train import loop, measure
from repro.mini.train.checkpoint import Run
from repro.mini.train.measure import Tally
from repro.mini.train.rollout import rollout, too_long
from repro.mini.train.settings import Settings
from tests.support.daily import daily
from upref import logprobs
from upref.errors import InputError

SMALL = Settings(
    steps=1,
    prompts=16,
    responses=8,
    minibatches=2,
    eval_every=0,
    train_problems=200,
    warmup=0,
)
CLIPS = [
    "clip_pos_high",
    "clip_neg_low",
    "clip_pos_low",
    "clip_neg_high",
    "alive",
    "overflow",
]
SEEN = ["reward", "valid", "length", "entropy", "groups_used", "rounds"]
STEP_KEYS = [
    *CLIPS,
    *SEEN,
    "step",
    "kl_base",
    "kl_old",
    "grad_norm",
    "grad_norm_max",
    "ratio_q",
    "lr",
    "loss",
]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def a_step(s):
    """Return a run, its batch, and the rows of its first minibatch."""
    models.deterministic()
    run = Run(s)
    batch = rollout(
        run.policy, run.task, run.task.problems("train", s.train_problems, 0), s, 0
    )
    return run, batch, torch.arange(s.prompts // s.minibatches * s.responses)


def gradient(run):
    """Return the gradient of one update with this entropy bonus; or of minus the mean
    entropy alone.
    """
    return torch.cat([p.grad.flatten() for p in run.policy.parameters()])


@pytest.mark.parametrize(
    "name", daily([*upref.names(), "up(sapo)", "up(dapo)", "up(m2po)", "up(gmpo)"], 3)
)
def test_every_objective_trains(name, tmp_path):
    """Train one step with each objective, and find its record and the tokens that it
    saw.
    """
    s = replace(SMALL, objective=name)
    loop.train(s, tmp_path / "run", say=lambda _: None)
    (step,) = lines(tmp_path / "run" / "steps.jsonl")
    assert sorted(step) == sorted(STEP_KEYS)
    assert step["grad_norm"] > 0
    assert step["alive"] > 0
    assert step["kl_old"] > 0
    assert abs(step["kl_base"]) < 1e-6  # the first batch is the base's own
    assert step["reward"] > 0
    done = json.loads((tmp_path / "run" / "done.json").read_text())
    assert {"key", "commit", "versions", "machine", "seconds"} <= set(done)
    seen = np.load(tmp_path / "run" / "seen.npz")
    assert len(seen["pi_old"]) == len(seen["pi"]) == len(seen["adv"]) > 0
    assert (seen["pi_old"] > 0).all()
    assert (seen["pi_old"] <= 1 + 1e-6).all()


@pytest.mark.parametrize(
    ("base", "task", "objective"),
    [
        ("moe", "countdown", "up_gspo"),
        ("chain", "chain", "grpo"),
        ("biased", "countdown", "dapo"),
    ],
)
def test_every_base_trains(base, task, objective, tmp_path):
    """One step from each base leaves a line with tokens that have a gradient, and an
    evaluation of every set.
    """
    s = replace(
        SMALL,
        base=base,
        task=task,
        objective=objective,
        eval_every=1,
        eval_problems=4,
        eval_samples=2,
    )
    loop.train(s, tmp_path / "run", say=lambda _: None)
    (step,) = lines(tmp_path / "run" / "steps.jsonl")
    assert step["alive"] > 0
    assert {e["set"] for e in lines(tmp_path / "run" / "evals.jsonl")} == {
        "test",
        *tasks.get(task).levels,
    }


def test_pictures_train(tmp_path, monkeypatch):
    """An untrained Qwen3-VL, rewarded for even first tokens; every part of it, the eyes
    included, has a gradient.
    """
    task = tasks.get("geometry")
    models.save(tmp_path / "blind", models.new("qwen3_vl", task), tokenizer(task))

    def even(problems, tokens):
        return Verdict((tokens[:, 0] % 2 == 0).float(), tokens[:, 0] >= 0, tokens[:, 0])

    monkeypatch.setattr(task, "verify", even)
    s = replace(
        SMALL, base=str(tmp_path / "blind"), task="geometry", objective="up_grpo"
    )
    run, batch, rows = a_step(s)
    loop.update(run, batch, None, rows, Tally(batch.tokens.shape[1]))
    still = [
        name
        for name, p in run.policy.named_parameters()
        if p.grad is None or not p.grad.any()
    ]
    assert still == []


@pytest.mark.parametrize(
    "name",
    [
        "up_dapo",
        "dapo",
        "gspo",
        "dr_grpo",
        "m2po",
        "tpo",
        "dro",
        "aspo_code",
        "up_grpo",
        "reinforce",
    ],
)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_leaving_out_what_has_no_gradient_changes_none(name, beta):
    """The loop's minibatch gradient is that of Objective(Rollouts) on all of the
    minibatch's responses.
    """
    beta = beta if upref.get(name).kl else 0.0
    s = replace(SMALL, objective=name, beta=beta, grad_clip=1e9, lr=1e-9)
    run, batch, rows = a_step(s)
    with torch.no_grad():  # off the anchor, where objectives differ
        for p in run.policy.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=tasks.generator("noise")))
        ref = models.padded_logits(
            run.base, *batch.prompts_of(torch.arange(len(batch.tokens))), batch.tokens
        )
        ref = ref.log_softmax(-1).gather(-1, batch.tokens[..., None])[..., 0]
    logits = models.padded_logits(
        run.policy, *batch.prompts_of(rows), batch.tokens[rows]
    )
    lp_all = logits.log_softmax(-1)
    H = -(lp_all.exp() * lp_all).sum(-1).detach()
    b = upref.Rollouts(
        lp_all.gather(-1, batch.tokens[rows][..., None])[..., 0],
        batch.logp[rows].clamp(max=0),
        batch.adv[rows, None],
        batch.mask[rows],
        batch.group[rows],
        ref[rows] if beta else None,
        H.clamp(min=0),
    )
    run.objective.loss(b, **s.hyperparameters()).backward()
    expected = gradient(run).clone()
    assert (batch.adv[rows] == 0).any()
    loop.update(run, batch, ref if beta else None, rows, Tally(batch.tokens.shape[1]))
    torch.testing.assert_close(
        gradient(run), expected, rtol=1e-3, atol=1e-5 * expected.abs().max().item()
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_kept_of_the_old_policy_is_what_it_said(dynamic):
    """Of every token, by states that responses share, at a temperature; against
    transformers and upref.logprobs.
    """
    run, batch, _ = a_step(replace(SMALL, temperature=0.6, dynamic_sampling=dynamic))
    assert batch.seen["rounds"] > 1 or not dynamic
    with torch.no_grad():
        logits = models.padded_logits(
            run.policy, *batch.prompts_of(torch.arange(len(batch.tokens))), batch.tokens
        )
    mask, close = batch.mask, partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)
    close(
        batch.logp[mask],
        logprobs.token_log_probs(logits, batch.tokens, temperature=0.6)[mask],
    )
    assert (batch.logp[~mask] == 0).all()
    lp, said = batch.log_probs[batch.state][mask], logits[mask][None]
    close(measure.entropy(lp), logprobs.entropy(said, temperature=0.6)[0])
    if not dynamic:  # else over all that was sampled
        assert batch.seen["entropy"] == pytest.approx(
            measure.entropy(lp).mean().item(), rel=1e-4
        )
    other = said + torch.randn(said.shape, generator=tasks.generator("noise"))
    q = (other[0] / 0.6).log_softmax(-1)
    close(measure.kl(lp, q), logprobs.categorical_kl(said, other, temperature=0.6)[0])


def test_a_minibatch_without_gradient_is_a_step_of_zero():
    run, batch, rows = a_step(SMALL)
    batch.adv = torch.zeros_like(batch.adv)
    loop.update(run, batch, None, rows, Tally(batch.tokens.shape[1]))
    assert (gradient(run) == 0).all()
    assert len(run.optimizer.state) > 0


def test_aggregation_and_advantages_can_be_chosen():
    assert replace(SMALL, aggregation="token-mean").target().agg == "token-mean"
    _, mean, _ = a_step(replace(SMALL, advantages="group_mean"))
    _, norm, _ = a_step(SMALL)
    assert not torch.equal(mean.adv, norm.adv)
    assert torch.equal(mean.adv.sign(), norm.adv.sign())


def test_evaluating_changes_nothing(tmp_path):
    """A run with evaluations has the same steps as one without, bit for bit."""
    s = replace(SMALL, steps=2)
    loop.train(s, tmp_path / "without", say=lambda _: None)
    loop.train(
        replace(s, eval_every=1, eval_problems=8, eval_samples=4),
        tmp_path / "with",
        say=lambda _: None,
    )

    def read(name):
        return (tmp_path / name / "steps.jsonl").read_bytes()

    assert read("with") == read("without")
    evals = lines(tmp_path / "with" / "evals.jsonl")
    assert [e["step"] for e in evals] == [0, 0, 1, 1] + [2] * 8
    assert {e["set"] for e in evals} == {"test", "one_step", "two_steps", "three_steps"}
    assert {e["decoding"] for e in evals} == {"top_p_0.7", "t_1"}
    for e in evals:
        assert (e["n_problems"], e["k"]) == (8, 4)
        assert e["pass1"] == e["avg"] <= e["best"]


def test_dynamic_sampling_fills_with_mixed_groups():
    s = replace(SMALL, prompts=8, responses=4, dynamic_sampling=True)
    _, batch, _ = a_step(s)
    mixed = (batch.adv.view(8, 4) != 0).any(1)
    assert batch.seen["rounds"] > 1
    assert int(mixed.sum()) == batch.seen["groups_used"] == 8
    _, plain, _ = a_step(replace(s, dynamic_sampling=False))
    assert plain.seen["groups_used"] < 8


def test_overlong_responses_are_punished_linearly():
    mask = torch.arange(13) < torch.tensor([[5], [9], [10], [11], [13]])
    assert too_long(mask, replace(SMALL, overlong=4)).tolist() == [0, 0, 0.25, 0.5, 1]
    assert too_long(mask, SMALL).tolist() == [0] * 5


def test_epochs_go_over_the_batch_again(tmp_path):
    loop.train(replace(SMALL, epochs=3), tmp_path / "three", say=lambda _: None)
    loop.train(SMALL, tmp_path / "one", say=lambda _: None)
    (three,), (one,) = (
        lines(tmp_path / name / "steps.jsonl") for name in ("three", "one")
    )
    assert three["reward"] == one["reward"]
    assert three["kl_old"] > one["kl_old"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"objective": "up_dappo"}, "did you mean up_dapo"),
        ({"base": "wlak"}, "there is no base named 'wlak'"),
        ({"task": "chess"}, "there is no task named 'chess'"),
        ({"stepps": 3}, "did you mean 'steps'"),
        ({"steps": "many"}, "steps must be a int"),
        ({"steps": 0}, "steps must be 1 or more"),
        ({"lr": float("nan")}, "lr must be a finite number"),
        ({"hp": {"eps": 0.1}}, "no hyperparameter 'eps'"),
        ({"hp": {"eps_low": -1}}, "eps_low must be a number >= 0"),
        ({"prompts": 10}, "do not divide into 16 minibatches"),
        ({"responses": 1}, "responses must be 2 or more"),
        ({"advantages": "gae"}, "there is no advantage named 'gae'"),
        ({"aggregation": "sum"}, "aggregation must be one of"),
        (
            {"objective": "gspo", "aggregation": "token-mean"},
            "no other aggregation can replace",
        ),
        ({"objective": "reinforce", "beta": 0.1}, "no hyperparameter 'beta'"),
        ({"overlong": 13}, "overlong must lie between"),
        ({"dynamic_sampling": 1}, "dynamic_sampling must be a bool"),
        ({"task": "chain"}, "was made for task 'countdown'"),
    ],
)
def test_bad_settings_are_one_sentence(given, says):
    with pytest.raises(InputError, match=says) as e:
        Run(Settings.of(given))
    assert "\n" not in str(e.value)


def test_settings_round_trip(tmp_path):
    s = Settings(objective="up(sapo)", hp={"tau_pos": 2.0}, seed=3, lr=1e-3)
    s.write(tmp_path / "s.json")
    assert Settings.read(tmp_path / "s.json") == s
    assert Settings.read(tmp_path / "s.json").key == s.key != replace(s, seed=4).key
    assert s.key.startswith("up_of_sapo-walk-s3-")
    (tmp_path / "s.json").write_text("{")
    with pytest.raises(InputError, match="cannot read settings from"):
        Settings.read(tmp_path / "s.json")


def test_up_turned_around_is_reinforce_where_A_is_negative():
    """mirror(dapo) has the gradient A where A < 0, and DAPO's elsewhere; of a sequence
    objective it is refused.
    """
    o, base = Settings(objective="mirror(dapo)").target(), upref.get("dapo")
    lp_old = torch.full((40,), -2.0, dtype=torch.float64)
    lp = (lp_old + torch.linspace(-1, 1, 40, dtype=torch.float64)).requires_grad_()
    for A in (-1.5, 1.5):
        adv = torch.full((40,), A, dtype=torch.float64)
        (slope,) = torch.autograd.grad(o.fn(lp, lp_old, adv).sum(), lp)
        (expected,) = torch.autograd.grad(
            (adv * lp if A < 0 else base.fn(lp, lp_old, adv)).sum(), lp
        )
        assert torch.equal(slope, expected)
        r = (lp - lp_old).exp().detach().numpy()
        np.testing.assert_allclose(
            np.broadcast_to(o.weight(r, A), 40), slope.numpy(), atol=1e-12
        )
    with pytest.raises(InputError, match="only objectives of single tokens"):
        Settings(objective="mirror(gspo)")


def test_lean_evaluation_is_less_of_the_same(tmp_path):
    """A lean run has the same steps and a part of the same lines; only its last
    evaluation has counts.
    """
    s = replace(SMALL, eval_every=1, eval_problems=8, eval_samples=4)
    lines = {}
    for name, lean in (("whole", False), ("lean", True)):
        loop.train(replace(s, lean_eval=lean), tmp_path / name, say=lambda _: None)
        found = [
            json.loads(line)
            for line in (tmp_path / name / "evals.jsonl").read_text().splitlines()
        ]
        lines[name] = {(x["step"], x["set"], x["decoding"]): x for x in found}
    assert (tmp_path / "lean/steps.jsonl").read_bytes() == (
        tmp_path / "whole/steps.jsonl"
    ).read_bytes()
    assert set(lines["lean"]) < set(lines["whole"])
    for key, line in lines["lean"].items():
        more = {line.pop(k, None) is None for k in ("solved", "counts")}
        assert line == lines["whole"][key] and more == {key[0] < s.steps}
    assert replace(s, lean_eval=False).key == s.key != replace(s, lean_eval=True).key


@pytest.mark.parametrize("name", ["up_above_clip", "up_below_one", "up_both_sides"])
def test_half_of_up_has_its_weight_in_one_region(name):
    """The gradient of J is the hand-written weight, and that is A in the half's region
    and DAPO's weight elsewhere.
    """
    o, dapo = Settings(objective=name).target(), upref.get("dapo")
    lp_old = torch.full((401,), -3.0, dtype=torch.float64)
    lp = (lp_old + torch.linspace(-1.5, 1.5, 401, dtype=torch.float64)).requires_grad_()
    r = (lp - lp_old).exp().detach().numpy()
    for hp in ({}, {"eps_high": 1.0}):
        above, below = r > 1 + hp.get("eps_high", 0.28), r < 1
        region = {
            "up_above_clip": above,
            "up_below_one": below,
            "up_both_sides": above | below,
        }[name]
        for A in (-1.5, 1.5):
            adv = torch.full((401,), A, dtype=torch.float64)
            (slope,) = torch.autograd.grad(o.fn(lp, lp_old, adv, **hp).sum(), lp)
            expected = np.where(region & (A > 0), A, dapo.weight(r, A, **hp))
            np.testing.assert_allclose(slope.numpy(), expected, atol=1e-12)
            np.testing.assert_allclose(
                np.broadcast_to(o.weight(r, A, **hp), 401), expected, atol=1e-12
            )
    assert Settings(objective=name).key.startswith(f"{name}-walk-s0-")


def test_entropy_bonus_is_the_token_mean_of_the_minibatch(monkeypatch):
    """The gradient of an update with a bonus c is that without one, plus c times that
    of the mean entropy.
    """

    def gradient(bonus: float, only_entropy: bool = False) -> torch.Tensor:
        """Return the gradient of a minibatch's update with this bonus, or of the
        negative entropy alone.
        """
        run = Run(replace(SMALL, objective="dapo", entropy_bonus=bonus, grad_clip=1e9))
        s = run.s
        problems = run.task.problems("train", s.train_problems, seed=0)
        batch = loop.rollout(run.sampler(), run.task, problems, s, 0)
        rows = torch.arange(len(batch.tokens))
        if only_entropy:
            lp = loop.log_probs(
                run.policy,
                batch.prompts_of(rows),
                batch.tokens,
                batch.mask,
                s.temperature,
            )
            (lp.exp() * lp).sum(-1).mean().backward()
        else:
            monkeypatch.setattr(run.optimizer, "step", lambda: None)
            loop.update(run, batch, None, rows, loop.Tally(batch.tokens.shape[1]))
        return torch.cat(
            [p.grad.flatten() for p in run.policy.parameters() if p.grad is not None]
        )

    plain, bonus, minus_entropy = (
        gradient(0.0),
        gradient(0.03),
        gradient(0.0, only_entropy=True),
    )
    assert minus_entropy.norm() > 1e-3
    torch.testing.assert_close(
        bonus, plain + 0.03 * minus_entropy, atol=1e-6, rtol=1e-4
    )


def test_decodings_give_the_whole_curve_at_each_evaluation(tmp_path):
    """Each top-p at each evaluation of the trained policy, and nothing else; another
    draw of problems by eval_seed.
    """
    s = replace(
        SMALL,
        eval_every=1,
        eval_problems=8,
        eval_samples=4,
        lean_eval=True,
        decodings=(0.7, 0.9, 1.0),
    )
    found = {}
    for seed in (0, 1):
        loop.train(replace(s, eval_seed=seed), tmp_path / str(seed), say=lambda _: None)
        found[seed] = records.record(tmp_path / str(seed))
        assert list(found[seed]["evals"]) == [
            "test/top_p_0.7",
            "test/top_p_0.9",
            "test/t_1",
        ]
        assert all(
            e["step"] == list(range(1, s.steps + 1))
            for e in found[seed]["evals"].values()
        )
        assert {sum(counts) for counts in found[seed]["counts"].values()} == {8}
    assert (
        found[0]["steps"] == found[1]["steps"]
        and found[0]["evals"] != found[1]["evals"]
    )
    loop.train(
        replace(s, decodings=(), eval_problems=8),
        tmp_path / "before",
        say=lambda _: None,
    )
    before = records.record(tmp_path / "before")
    for decoding in ("test/top_p_0.7", "test/t_1"):
        assert (
            before["evals"][decoding]["avg"][-1]
            == found[0]["evals"][decoding]["avg"][-1]
        )


def test_new_settings_change_no_key_of_before(tmp_path):
    """Settings at their new defaults have the old key, others have keys of their own,
    and bad values are refused.
    """
    s = Settings()
    assert s.key == replace(s, entropy_bonus=0.0, decodings=(), eval_seed=0).key
    new = [
        replace(s, entropy_bonus=0.01),
        replace(s, decodings=(0.7, 1.0)),
        replace(s, eval_seed=1),
    ]
    assert len({s.key, *(x.key for x in new)}) == 4
    for x in new:
        x.write(tmp_path / "s.json")
        assert Settings.read(tmp_path / "s.json") == x
    for bad in (
        {"entropy_bonus": -1.0},
        {"decodings": [0.0]},
        {"decodings": ["x"]},
        {"decodings": 0.7},
    ):
        with pytest.raises(InputError, match=next(iter(bad))):
            Settings(**bad)
