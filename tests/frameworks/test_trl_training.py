# SPDX-License-Identifier: Apache-2.0
"""upref_frameworks.trl.training trains the reference through TRL's own training_step,
and equals TRL's own losses.
"""

import os
import re
import subprocess
import sys
from copy import copy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch

import upref
from tests.support.daily import daily
from upref import InputError, Totals
from upref.rollouts import autograd_gradient
from upref.weights.batches import (
    OFF_EDGES,
    batch,
    fill_padding,
    sampler_logp,
)
from upref_frameworks.parity import Monitor, ParityError

trl = pytest.importorskip(
    "trl", reason="`repro/venv.sh trl` installs what TRL's losses need"
)
from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

import upref_frameworks.trl.losses as given  # noqa: E402
from upref_frameworks.trl.training import REPLACED, GRPOTrainer  # noqa: E402

pytestmark = pytest.mark.trl
NAMES = [n for n in upref.names() if "group" not in upref.get(n).reads]
DOC = Path(__file__).parents[2] / "docs" / "trl.md"


@lru_cache
def bound(name, **hp):
    """Return a trainer class of this objective: upref_frameworks.trl.losses makes
    trainers from a class and a config.
    """

    class Bound(GRPOTrainer):
        def __init__(self, *args, **kw):
            super().__init__(*args, objective=name, hp=hp, parity={"every": 1}, **kw)

    return Bound


@pytest.fixture(autouse=True)
def at_home(monkeypatch):
    monkeypatch.setenv("CI", "1")  # TRL's telemetry is silent there
    yield
    shared()


def shared():
    """Make accelerate's state again: a config that was made forgets the state that
    trainers made before it share.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    Accelerator()


@pytest.fixture
def token_advantages(monkeypatch):
    """TRL's GRPOTrainer takes advantages [B, T] from subclasses; so does ours."""
    monkeypatch.setattr(given, "token_advantages", lambda cls: True)


def plain(name, thin=1, rows=8, edges=OFF_EDGES, **hp):
    """Return the regime grid as TRL batches it: no groups, numbers in masked slots,
    micro-batches of equal size.
    """
    b = replace(
        fill_padding(batch(upref.get(name), edges=edges, thin=thin, **hp)), group=None
    )
    n = len(b.mask) // rows * rows
    return b.rows(torch.arange(n), Totals.of(b.mask[:n]))


def gradient(trainer, b, parts=1, **settings):
    """Return the gradient by log_prob of what TRL gives to backward, micro-batch by
    micro-batch.
    """
    return torch.cat(
        [
            autograd_gradient(lambda x: given.trl_loss(trainer, x, **settings), p)
            for p in b.split(parts)
        ]
    )


def same(x, y, tol=1e-12):
    assert x.isfinite().all() and y.isfinite().all() and y.abs().max() > 0
    assert (x - y).abs().max() <= tol * y.abs().max()


# ---- the same function ---------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_objective_through_training_step(name, token_advantages):
    """In 1, 2 and 4 micro-batches; a coupled objective sees each by itself."""
    o = upref.get(name)
    b = plain(name)
    for parts in (1, 2, 4):
        if o.batch_coupled:
            totals = b.totals._replace(group_tokens=b.totals.tokens)
            whole = torch.cat(
                [o.gradient(p) for p in replace(b, totals=totals).split(parts)]
            )
        else:
            whole = o.gradient(b)
        same(-gradient(bound(name), b, parts), whole)


def test_up_of_anything_and_hyperparameters(token_advantages):
    o = upref.up(upref.get("sapo"))
    b = plain("sapo", thin=5)
    same(-gradient(bound("up(sapo)"), b, 2), o.gradient(b))
    b = plain("up_dapo", thin=3, eps_low=0.1)
    same(
        -gradient(bound("up_dapo", eps_low=0.1, c=3.0), b, 2),
        upref.get("up_dapo").gradient(b, eps_low=0.1, c=3.0),
    )


TWINS = {  # objective: hp, settings of TRL's own, how many times ours TRL's gradient is
    "grpo": ({"eps": 0.15}, dict(loss_type="grpo", epsilon=0.15), 1),
    "dapo": (
        {"c": 10.0},
        dict(loss_type="dapo", epsilon=0.2, epsilon_high=0.28, delta=10.0),
        1,
    ),
    "dr_grpo": ({}, dict(loss_type="dr_grpo", max_completion_length=6), 1 / 6),
    "gspo": (
        {},
        dict(
            loss_type="grpo",
            importance_sampling_level="sequence",
            epsilon=3e-4,
            epsilon_high=4e-4,
        ),
        1,
    ),
    "sapo": ({}, dict(loss_type="sapo"), 1),
    "cispo": ({}, dict(loss_type="cispo", epsilon_high=5.0), 1),
}


@pytest.mark.parametrize("name", TWINS)
def test_it_is_trls_own_loss_where_trl_has_the_objective(name, token_advantages):
    hp, settings, times = TWINS[name]
    b = plain(name, thin=2, **hp)
    # their float32
    same(
        gradient(trl.GRPOTrainer, b, 4, **settings),
        times * gradient(bound(name, **hp), b, 4),
        1e-6,
    )


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "sapo"])
@pytest.mark.parametrize("shape", ["tokens", "responses"])
def test_sampler_corrections_and_masks_are_trls(name, shape):
    """Our trainer and TRL's own get the same gradient from the same weights of tokens
    or responses, and the same mask of tools.
    """
    hp, settings, times = TWINS[name]
    b = plain(name, thin=5, **hp)
    ratio = torch.rand(
        b.mask.shape if shape == "tokens" else (len(b.mask), 1), dtype=torch.float64
    )
    tools = (torch.rand(b.mask.shape) < 0.7).long()
    tools[0] = 0  # as mask_truncated_completions leaves a response

    def theirs(trainer, x):
        """Return the loss of TRL's trainer with vLLM's correction on."""
        (
            trainer.use_vllm,
            trainer.current_gradient_accumulation_steps,
            trainer.args.steps_per_generation,
        ) = True, 2, 4
        inputs = {
            "prompt_ids": torch.zeros(len(x.mask), 1, dtype=torch.int64),
            "prompt_mask": torch.ones(len(x.mask), 1, dtype=torch.int64),
            "completion_ids": torch.zeros(x.mask.shape, dtype=torch.int64),
            "completion_mask": x.mask.long(),
            "tool_mask": tools,
            "advantages": x.adv[:, 0],
            "old_per_token_logps": x.logp_old,
            "importance_sampling_ratio": ratio,
            "num_items_in_batch": torch.tensor(1234),
        }
        try:
            return trainer.compute_loss(
                given._StandIn(x.logp, torch.ones_like(x.logp)), inputs
            )
        finally:
            trainer.use_vllm = False

    own = given._trainer(trl.GRPOTrainer, tuple(sorted(settings.items())))
    ours = given._trainer(bound(name, **hp), ())
    same(
        autograd_gradient(lambda x: theirs(own, x), b),
        times * autograd_gradient(lambda x: theirs(ours, x), b),
        1e-6,
    )


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_ranks_count_as_in_trl(name, monkeypatch, token_advantages):
    """DDP averages the gradients of two ranks, so that each hands over twice its share."""
    hp, settings, _ = TWINS[name]
    b = plain(name, thin=5, **hp)
    with monkeypatch.context() as m:
        m.setattr(Accelerator, "num_processes", property(lambda self: 2))
        two = gradient(bound(name, **hp), b, 2)
        same(gradient(trl.GRPOTrainer, b, 2, **settings), two, 1e-6)
    one = gradient(bound(name, **hp), b, 2)
    # num_items_in_batch is of all ranks, responses are counted here
    same(two, one * (2 if name == "dapo" else 1))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "reinforce_pp_baseline"])
def test_the_kl_term_is_the_objectives(name, token_advantages):
    o = upref.get(name)
    b = plain(name, thin=5)
    settings = dict(beta=0.04, use_bias_correction_kl=False)
    same(
        -gradient(bound(name), b, 2, **settings),
        autograd_gradient(lambda x: o(x, beta=0.04), b),
    )


def test_masked_slots_may_hold_anything_in_the_policy_term(token_advantages):
    """As far as TRL's own arithmetic allows it: old log-probabilities and advantages."""
    b = plain("up_dapo", thin=5)

    def fill(x):
        return x.masked_fill(~b.mask, float("nan"))

    c = b.unchecked(**{**b.__dict__, "logp_old": fill(b.logp_old)})
    x = b.logp.clone().requires_grad_()
    y = b.unchecked(**{**c.__dict__, "logp": x})
    (g,) = torch.autograd.grad(given.trl_loss(bound("up_dapo"), y, padding=None), x)
    same(g, gradient(bound("up_dapo"), b))


# ---- what it refuses -----------------------------------------------------------------

CONFIG = dict(
    output_dir="unused",
    use_cpu=True,
    bf16=False,
    report_to="none",
    per_device_train_batch_size=8,
)
MOVED = {
    "loss_type": ("grpo", "objective= sets the loss"),
    "importance_sampling_level": ("sequence", "up_gspo"),
    "epsilon": (0.1, r"write hp=\{'eps_low': VALUE\}"),
    "epsilon_high": (0.3, "up_dapo has nothing like it"),
    "delta": (4.0, r"write hp=\{'c': VALUE\}"),
    "sapo_temperature_pos": (2.0, "nothing like it"),
    "sapo_temperature_neg": (2.0, "nothing like it"),
    "vespo_k_pos": (1.0, "nothing like it"),
    "vespo_lambda_pos": (1.0, "nothing like it"),
    "vespo_k_neg": (1.0, "nothing like it"),
    "vespo_lambda_neg": (1.0, "nothing like it"),
    "top_entropy_quantile": (0.2, "every token"),
    "off_policy_mask_threshold": (0.5, "every response"),
    "use_liger_kernel": (True, "its own loss"),
}


def refused(match, objective="up_dapo", args=None, **kw):
    with pytest.raises(InputError, match=match) as e:
        GRPOTrainer(None, None, args, objective=objective, **kw)
    assert str(e.value).count("\n") == 0 and str(e.value)[-1] in ".?"


def test_every_field_that_shapes_trls_policy_term_is_refused():
    assert set(MOVED) == set(REPLACED)
    source = re.findall(
        r"self\.args\.(\w+)", given.inspect.getsource(trl.GRPOTrainer._compute_loss)
    )
    kept = {"use_bias_correction_kl", "steps_per_generation"} | {
        f for f in source if f.startswith("entropy_")
    }
    assert set(source) <= set(REPLACED) | kept, (
        "TRL reads a setting that nobody here has thought about"
    )


@pytest.mark.parametrize("field", MOVED)
def test_settings_it_cannot_honour(field):
    value, said = MOVED[field]
    refused(
        f"does not read GRPOConfig.{field}=.*{said}",
        args=trl.GRPOConfig(**CONFIG, **{field: value}),
    )


def test_another_loss_behind_it_is_refused():
    class Halved(trl.GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return 0.5 * super()._compute_loss(model, inputs)

    class Mine(GRPOTrainer, Halved):
        pass

    with pytest.raises(InputError, match=r"Halved\._compute_loss is another loss"):
        Mine(None, objective="up_dapo")


def test_what_else_is_refused():
    """Find the sentence for each wrong KL setting, name, hyperparameter and parity
    setting.
    """

    def config(**kw):
        return trl.GRPOConfig(**CONFIG, **kw)

    refused(
        "up_dapo has no KL term", args=config(beta=0.1, use_bias_correction_kl=False)
    )
    refused("use_bias_correction_kl=False", "grpo", config(beta=0.1))
    refused(
        "use_bias_correction_kl=True",
        "unbiased_kl(grpo)",
        config(beta=0.1, use_bias_correction_kl=False),
    )
    refused("set beta in GRPOConfig", "grpo", hp={"beta": 0.1})
    refused("did you mean up_dapo", "up_dap")
    refused("has no hyperparameter 'eps'", hp={"eps": 0.1})
    refused("eps_low must be", hp={"eps_low": -1})
    refused("no setting 'evry'", parity={"evry": 1})
    refused("tpo needs the prompt of each response", "tpo")


@pytest.mark.parametrize("name", ["gspo", "up_gspo", "gmpo", "topr"])
def test_token_advantages_are_refused_where_a_response_has_one(name, token_advantages):
    with pytest.raises(InputError, match="one advantage per response"):
        given.trl_loss(bound(name), plain("dapo", thin=5))


def test_a_loss_that_is_not_the_objective_stops_the_run(monkeypatch, token_advantages):
    right = upref.Objective.J
    monkeypatch.setattr(upref.Objective, "J", lambda *a, **kw: 1.001 * right(*a, **kw))
    with pytest.raises(ParityError, match="upref/up_dapo is not what trains"):
        given.trl_loss(
            bound("up_dapo"),
            replace(b := plain("up_dapo", thin=5), logp=b.logp.requires_grad_()),
        )


# ---- whole runs ----------------------------------------------------------------------

DIGITS = list("01234567")


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """Write a tiny Qwen3 with its tokenizer to a folder, from which TRL loads the
    reference model; return the folder and the tokenizer.
    """
    words = Tokenizer(
        models.WordLevel(
            {w: i for i, w in enumerate(["<pad>", "<eos>", *DIGITS])}, unk_token="<pad>"
        )
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
    )
    size = dict(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=8,
    )
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=10, num_key_value_heads=2, eos_token_id=1, pad_token_id=0, **size
    )
    path = tmp_path_factory.mktemp("policy")
    Qwen3ForCausalLM(config).double().save_pretrained(path)
    words.save_pretrained(path)
    return path, words


def echo(prompts, completions, **_):
    return [
        answer.split().count(prompt) / 6
        for prompt, answer in zip(prompts, completions, strict=True)
    ]


def run(policy, trainer, tmp_path, lr=0.5, **settings):
    """Run six optimizer steps of two micro-batches each, on three generation batches;
    return the weights and what was logged.
    """
    path, words = policy
    fields = dict(
        output_dir=str(tmp_path), max_steps=6, learning_rate=lr, max_grad_norm=0.0, optim="sgd", num_generations=4,
        per_device_train_batch_size=8, gradient_accumulation_steps=2, steps_per_generation=4, max_completion_length=6,
        logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False,
        per_device_eval_batch_size=8, disable_tqdm=True,
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": DIGITS})
    t = trainer(
        str(path), echo, trl.GRPOConfig(**fields | {"model_init_kwargs": {"dtype": "auto"}} | settings),
        train_dataset=data, eval_dataset=data.select(range(2)), processing_class=words,
    )  # fmt: skip
    before = {k: v.clone() for k, v in t.model.state_dict().items()}
    t.train()
    t.evaluate()
    moved = max((v - before[k]).abs().max() for k, v in t.model.state_dict().items())
    assert moved > 1e-3
    return t.model.state_dict(), t.state.log_history


@pytest.mark.parametrize(
    ("name", "more"),
    daily(
        [("dapo", dict(optim="adamw_torch", num_iterations=2)), ("dapo", dict(entropy_coef=0.05)),
         *((name, {}) for name in TWINS), ("grpo", dict(beta=0.04, use_bias_correction_kl=False))], 4),
)  # fmt: skip
def test_whole_runs_end_at_the_same_weights(name, more, policy, tmp_path):
    """Our trainer and TRL's own end alike and log the same, off policy, with clipped
    tokens.
    """
    hp, settings, times = TWINS[name]
    lr = 1e-2 if "optim" in more else 0.5
    ours, our_log = run(policy, bound(name, **hp), tmp_path, lr * times, **more)
    theirs, their_log = run(policy, trl.GRPOTrainer, tmp_path, lr, **settings | more)
    for key, weights in theirs.items():
        torch.testing.assert_close(ours[key], weights, rtol=0, atol=1e-5)
    metric = "^(eval_)?(reward|entropy|kl|loss|num_tokens)$"
    for mine, other in zip(our_log, their_log, strict=True):
        shared = [k for k in other if re.search(metric, k)]
        for k in shared:
            scaled = times * mine[k] if k.endswith("loss") else mine[k]
            assert scaled == pytest.approx(other[k], abs=2e-5), (k, mine, other)
    assert "eval_loss" in shared and our_log[0]["upref/parity_of_bound"] <= 1
    clipped = 0
    for entry in our_log:
        clipped += sum(v for k, v in entry.items() if k.startswith("upref/clip/"))
    assert clipped > 0 or name in ("sapo", "cispo")
    off_policy = max(entry.get("upref/ratio/max", 1) for entry in our_log)
    assert off_policy > 1.0001, "r = 1 shows nothing"


TWO_RANKS = """import sys
from pathlib import Path
import torch, trl
from transformers import AutoTokenizer
from tests.frameworks.test_trl_training import TWINS, bound, run

torch.set_num_threads(1)
policy, out = Path(sys.argv[1]), Path(sys.argv[2])
policy = policy, AutoTokenizer.from_pretrained(policy)
more = dict(per_device_train_batch_size=4, ddp_backend="gloo", ddp_find_unused_parameters=False)
for name in ("grpo", "dapo"):
    hp, settings, _ = TWINS[name]
    ours, log = run(policy, bound(name, **hp), out, **more)
    theirs, _ = run(policy, trl.GRPOTrainer, out, **settings | more)
    apart = max((ours[key] - theirs[key]).abs().max().item() for key in theirs)
    assert apart <= 1e-5 and log[0]["upref/parity_of_bound"] <= 1, (name, apart)
    place = torch.distributed
    (out.parent / f"same-{name}-{place.get_rank()}-of-{place.get_world_size()}").touch()
"""


@pytest.mark.nightly
def test_a_run_on_two_ranks_is_trls(policy, tmp_path):
    root = Path(__file__).parents[2]
    (tmp_path / "two.py").write_text(TWO_RANKS)
    places = (root,)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "two.py",
         str(policy[0]), str(tmp_path / "out")],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places)), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    # files, since what two processes print may be cut through one another
    assert {p.name for p in tmp_path.glob("same-*")} == {
        f"same-{name}-{k}-of-2" for name in ("grpo", "dapo") for k in (0, 1)
    }


def test_another_objective_ends_at_other_weights(policy, tmp_path):
    """So the test above can fail: runs that differ in the clip of one side part by far
    more than it allows.
    """
    one, other = (run(policy, bound(name), tmp_path)[0] for name in ("dapo", "up_dapo"))
    assert max((one[k] - other[k]).abs().max() for k in one) > 1e-3


def test_what_is_said_before_a_run(policy, tmp_path, caplog):
    """The trainer warns of updates at r = 1, of an objective that couples a batch, and
    of a scale of rewards that the objective does not have.
    """
    args = dict(
        args=trl.GRPOConfig(**CONFIG | {"output_dir": str(tmp_path)}),
        processing_class=policy[1],
    )
    GRPOTrainer(
        str(policy[0]),
        echo,
        train_dataset=Dataset.from_dict({"prompt": DIGITS}),
        objective="m2po",
        **args,
    )
    assert (
        "r = 1" in caplog.text
        and "m2po acts on each micro-batch by itself" in caplog.text
    )
    caplog.clear()
    GRPOTrainer(
        str(policy[0]),
        echo,
        train_dataset=Dataset.from_dict({"prompt": DIGITS}),
        objective="dr_grpo",
        **args,
    )
    assert "set 'none'" in caplog.text


def test_a_trainer_of_ones_own(policy, tmp_path):
    class Own(trl.GRPOTrainer):
        def _calculate_rewards(self, *args):
            return 1 - super()._calculate_rewards(*args)

    class Mine(GRPOTrainer, Own):
        def __init__(self, *args, **kw):
            super().__init__(*args, objective="up_grpo", **kw)

    _, log = run(policy, Mine, tmp_path)
    assert all(entry["upref/parity_of_bound"] <= 1 for entry in log if "loss" in entry)


def test_the_pages_example_learns(tmp_path, monkeypatch, capsys):
    """A real model, up_dapo: the score rises."""
    (example,) = re.findall(r"```py\n(.*?)```", DOC.read_text(), re.S)
    assert len([line for line in example.splitlines() if line]) <= 36
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile(example, DOC.name, "exec"), {})
    scores = [
        float(x)
        for x in re.findall(r"[\d.]+", capsys.readouterr().out.strip().splitlines()[-1])
    ]
    assert scores[0] < 0.2 and scores[-1] > 0.5 and scores[-1] == max(scores), scores


def test_import_upref_loads_nothing_heavy():
    code = "import sys, upref; print(sorted({'trl', 'transformers', 'datasets', 'accelerate'} & set(sys.modules)))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True
        ).stdout.strip()
        == "[]"
    )


def test_a_sampler_correction_reads_vllms_log_probabilities():
    """Without vLLM it is refused; with its log-probabilities the gradient is the
    objective's.
    """
    b, o = plain("dapo", thin=5), upref.get("tis(dapo)")
    b = replace(b, adv=b.adv[:, :1], logp_sampler=sampler_logp(b))
    with pytest.raises(InputError, match="use_vllm=True"):
        given._trainer(bound(o.name), ())
    trainer = copy(given._trainer(bound("dapo"), ()))  # which is kept for other tests
    shared()
    trainer.objective, trainer.hyperparameters, trainer.monitor = (
        o,
        o.hyperparameters,
        Monitor(o),
    )
    trainer.args = copy(trainer.args)
    trainer.current_gradient_accumulation_steps, trainer.args.steps_per_generation = (
        1,
        1,
    )

    def J(x):
        """Return minus the loss of TRL's trainer on a batch."""
        inputs = {
            "prompt_ids": torch.zeros(len(x.mask), 1, dtype=torch.int64),
            "prompt_mask": torch.ones(len(x.mask), 1, dtype=torch.int64),
            "completion_ids": torch.zeros(x.mask.shape, dtype=torch.int64),
            "completion_mask": x.mask.long(),
            "advantages": x.adv[:, 0],
            "old_per_token_logps": x.logp_old,
            "sampling_per_token_logps": x.logp_sampler,
            "num_items_in_batch": x.mask.sum(),
        }
        return -trainer.compute_loss(
            given._StandIn(x.logp, torch.ones_like(x.logp)), inputs
        )

    same(autograd_gradient(J, b), autograd_gradient(o, b), 1e-6)


def test_log_probs_of_upref_hidden_stand_for_trls(monkeypatch):
    """On a model with a fused output layer, numbers and gradients stay what they were."""
    from trl.trainer import utils

    from upref_frameworks.hidden import in_trl

    size = dict(
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=50, **size)).double()
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", utils._ChunkedLogProbFunction)
    utils.add_fused_lm_head(model, 0.7, outputs=("log_probs", "entropy"))
    ids = torch.randint(50, (2, 6))

    def step():
        """Return log-probabilities, entropies, and the gradients by the parameters."""
        out = model(
            ids, labels=ids.masked_fill(ids == ids[0, 2], -100), fused_lm_head=True
        )
        grads = torch.autograd.grad(
            (out.log_probs.sin() + 0.1 * out.entropy).sum(), list(model.parameters())
        )
        return [out.log_probs, out.entropy, *grads]

    own = step()
    in_trl()
    assert utils._ChunkedLogProbFunction.__name__ == "Hidden"
    for x, y in zip(step(), own, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=1e-4, atol=1e-5)
