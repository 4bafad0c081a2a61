# SPDX-License-Identifier: Apache-2.0
"""The entry points that fuzz.py must reach, and arguments that each accepts;
test_fuzz.py holds that none is missing.

PUBLIC: every name of upref.__all__, the methods of its types, and the functions of the
modules that docs/site/api.toml
shows. INNER: what of those answers to no user, with the reason.
"""

import inspect
import random
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

import upref
import upref.hidden
import upref.weights.batches
from tests.support.bad_inputs import JUNK

# of docs/site/api.toml: module or function -> why it need not answer with a sentence
INNER = {
    "ops": "the words in which objectives are written, for tensors, arrays and symbols: their own errors",
    "kl": "two tensors in, elementwise: torch's own errors",
    "weights.batches": "makes the batches of the checker; no user code reaches it",
    "weights.axes": "the same",
    "weights.curve": "`make_curve`, which reads user code, is the entry point; the rest is called with curves",
    "derivation": "parts of `derive`",
    "weights.plots": "parts of `cap_map` and `weights`, handed curves and axes",
    "weights.plots.save": "the last step of `upref cap -o`",
    "weights.atlas": "takes nothing",
    "verify.report": "parts of a report",
    "identification.identification": "parts of an answer",
    "identification.diff.compare_losses": "a part of `diff`",
    "verify.oracle": "for who writes an oracle",
    "upref_frameworks.parity": "inside a training step: a trainer's own errors",
    "upref_frameworks.trl.training": "inside a training step: a trainer's own errors",
    "upref_frameworks.verl.training": "inside a training step: a trainer's own errors",
    "aggregation.verl_name": "two words from the registry",
    "weights.capacity.own_token_bound": "one line of numpy",
    "weights.capacity.words_for_fading": "handed curves",
    "logprobs.clamp_log_probs": "for tensors that the library made",
    "logprobs.check_temperature": "a check of an argument",
    "logprobs.check_tokens": "a check of an argument",
    "upref_course.explorer.page": "takes nothing",
    "upref_course.explorer.script": "file names of its own folder",
    "upref_course.explorer.data": "takes nothing",
    "upref_course.explorer.assemble": "a folder of the package",
    "upref_course.explorer.as_json": "what the package computes",
    "weights.stress.stress_batch": "batches of a check, by its own words",
    "weights.stress.relabel_groups": "a batch that a check made",
    "plugins": "for who writes a package; `names` of entry points, no input of a user",
    "user_code.frameworks": "for who writes a package",
    "replay.trainers": "for who writes a package",
    "cli.verb": "parts of a parser",
    "upref_frameworks.audits.framework": "the first step of `audit`",
    "upref_frameworks.audits.recipe.covered_objectives": "a part of `recipe`",
    "upref_frameworks.audits.recipe.no_kl": "a part of `recipe`",
    "upref_frameworks.audits.recipe.value": "a part of `recipe`",
    "upref_frameworks.audits.recipe.typed_fields": "a part of `recipe`",
    "metrics.Estimate.of": "made by the metrics",
}
# methods that say of themselves that they look at nothing: inside a compiled training
# step
UNCHECKED = {
    "Rollouts.but",
    "Objective.J",
    "Objective.unreduced",
    "Objective.surrogate",
    "Objective.token_weights",
    "Objective.gradient",
    "Objective.with_weight",
    "Objective.surrogate_hyperparameters",
    "Objective.per_term",
    "Objective.sampler_weights",
    "Rollouts.unchecked",
    "Rollouts.rows",
    # cuts and casts of a batch that is whole; Rollouts checks what they make of it
    "Rollouts.tensors",
    "Rollouts.map",
    "Rollouts.floats",
    "Rollouts.take",
}


def _plain(lp, lp_old, A, *, eps=0.2):
    """J = A r."""
    return A * upref.get("is_pg").fn(lp, lp_old, A)


def _loss(log_prob, old_log_prob, advantages, mask):
    """Return DAPO's loss."""
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    J = torch.min(r * advantages, r.clamp(0.8, 1.28) * advantages)
    return -(J * mask).sum() / mask.sum()


def _step(model, rows):
    """Compute DAPO's gradient at a temperature of 0.7, one response at a time;
    gradients add up in the model.
    """
    trained = sum(sum(row.trains) for row in rows)
    for row in rows:
        # the logits before each token of the response
        logits = model(torch.tensor([row.ids]))[0, len(row.prompt) - 1 : -1] / 0.7
        tokens = torch.tensor(row.response)[:, None]
        lp = logits.log_softmax(-1).gather(-1, tokens)[:, 0]
        r = (lp - torch.tensor(row.old)).exp()
        J = torch.minimum(r * row.adv, r.clamp(0.8, 1.28) * row.adv)
        J = J * torch.tensor(row.trains)
        (-J.sum() / trained).backward()


def _model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(48, 8), torch.nn.Linear(8, 48))


def _rows(model):
    """Return the rows that check_step would make for DAPO at a temperature of 0.7."""
    from upref.step.compare import case

    goal = case.make_goal("dapo", {}, 0.7, 0, 0, 0, None, 1.0)
    return case.build_case(case.TorchModel(model), goal, None, (), 0, False).rows


def _recorded(model, first=8):
    """Return what `record_step` records of one step of SGD with DAPO."""
    with upref.record_step(model, first) as seen:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        _step(model, _rows(model))
        optimizer.step()
    return seen


def _distilled(student_logits, teacher_logits, mask):
    q, p = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    return (q.exp() * (q - p)).sum(-1)[mask].mean()


def _valued(values, returns, mask):
    return ((values - returns) ** 2)[mask].mean()


def public() -> dict[str, tuple[Callable, dict[str, Any]]]:
    """Return {name: (function, arguments that it accepts)} of every public function and
    method.

    An argument with the name `*` goes by position. The names are those of the public
    interface, as in "Objective.loss".
    """
    b, o = upref.weights.batches.on_policy_batch(), upref.get("dapo")
    totals = upref.Totals.of(b.mask, b.group)
    rewards, group = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1])
    logits, tokens = torch.zeros(2, 3, 5), torch.ones(2, 3, dtype=torch.int64)
    right = [[True, False], [False, False]]
    fields = {k: getattr(b, k) for k in ("logp", "logp_old", "adv", "mask", "group")}
    facts = {
        "paper": "x",
        "eq": "1",
        "level": "token",
        "agg": "token-mean",
        "adv": "group_norm",
    }

    def lp_of(logits, tokens, temperature):
        return upref.logprobs.token_log_probs(logits, tokens, temperature=temperature)

    def k3(log_prob, ref_log_prob):
        return (ref_log_prob - log_prob).expm1() - (ref_log_prob - log_prob)

    def mean(rewards, group):
        return upref_advantages.group_mean(rewards, group)

    from upref import advantages as upref_advantages, logprobs, metrics
    from upref.weights import capacity as cap, curve, plots
    from upref_course import explorer
    from upref_frameworks import audits
    from upref_frameworks.audits import recipe

    many = {
        "get": (upref.get, {"name": "dapo"}),
        "names": (upref.names, {}),
        "up": (upref.up, {"base": o}),
        "up_anchored": (upref.up_anchored, {"base": o}),
        "objective": (lambda **facts: upref.objective(**facts)(_plain), facts),
        "Objective": (upref.Objective, {"name": "x", "fn": _plain, "equation": "J", **facts}),
        "Objective.__call__": (o, {"b": b, "eps_low": 0.1}),
        "Objective.loss": (o.loss, {"b": b, "eps_low": 0.1}),
        "Objective.weight": (o.weight, {"r": 1.0, "A": 1.0, "eps_low": 0.1}),
        "Objective.aggregated": (o.aggregated, {"agg": "seq-mean-token-mean"}),
        "Objective.factors": (upref.get("tis(dapo)").factors, {"b": replace(b, logp_sampler=b.logp_old)}),
        "Objective.kept": (upref.get("icepop(dapo)").kept, {"b": replace(b, logp_sampler=b.logp_old), "is_min": 0.1}),
        "Objective.resolve": (o.resolve, {"hp": {"eps_low": 0.1}}),
        "Rollouts": (upref.Rollouts, fields),
        "Rollouts.split": (b.split, {"n": 2}),
        "Totals": (upref.Totals, {"tokens": 3, "sequences": 2, "groups": 1, "group_tokens": 3}),
        "Totals.of": (upref.Totals.of, {"mask": b.mask, "group": b.group}),
        "Totals.of_lengths": (upref.Totals.of_lengths, {"lengths": torch.tensor([2, 3]), "group": tokens[0, :2]}),
        "Totals.rows": (totals.rows, {"i": torch.tensor([0])}),
        "aggregate": (upref.aggregate, {"x": b.logp, "mask": b.mask, "agg": "token-mean", "group": b.group}),
        "row_weights": (upref.row_weights, {"agg": "token-mean", "mask": b.mask, "totals": totals}),
        "capacity": (upref.capacity, {"objective": "dapo", "pi": 0.1, "pi_old": 0.1, "adv": 1.0, "eps_low": 0.1}),
        "cap_map": (upref.cap_map, {"*": "dapo", "adv": 1.0, "eps_low": 0.1}),
        "derive": (upref.derive, {"objective": "dapo", "mu": 0.25, "eps_low": 0.1}),
        "replay.clipping": (upref.replay.clipping, {"objective": o, "batch": b, "eps_low": 0.1}),
        "check": (upref.check, {"loss": _loss, "objective": "dapo", "skip": (), "eps_low": 0.1}),
        "identify": (upref.identify, {"loss": o}),
        "diff": (upref.diff, {"a": _loss, "b": o}),
        "maximizes": (upref.maximizes, {"fn": mean, "kind": "advantage", "group_size": 2}),
        "prove": (upref.prove, {"loss": _loss, "objective": "dapo", "rows": 1, "columns": 1, "seconds": 1.0}),
        "prove_kl": (upref.prove_kl, {"estimator": k3, "name": "k3", "rows": 1, "columns": 1, "seconds": 1.0}),
        "prove_advantages": (upref.prove_advantages, {"fn": mean, "estimator": "group_mean", "responses": 1,
                                                      "seconds": 1.0}),
        "check_kl": (upref.check_kl, {"fn": k3, "estimator": "k3", "skip": ()}),
        "check_value": (upref.check_value, {"fn": _valued, "loss": "mse", "agg": "token-sum", "skip": ()}),
        "check_distillation": (upref.check_distillation, {"fn": _distilled, "divergence": "jsd", "agg": "token-sum",
                                                          "skip": ()}),
        "check_logprobs": (upref.check_logprobs, {"fn": lp_of, "softcap": None, "ranks": 1, "top_k": None, "top_p": None,
                                                  "skip": ()}),
        "check_advantages": (upref.check_advantages, {"fn": mean, "estimator": "group_mean", "skip": ()}),
        "assert_policy_loss": (upref.assert_policy_loss, {"loss": _loss, "objective": "dapo"}),
        "assert_logprobs": (upref.assert_logprobs, {"fn": lp_of}),
        "assert_kl": (upref.assert_kl, {"fn": k3, "estimator": "k3"}),
        "assert_advantages": (upref.assert_advantages, {"fn": mean, "estimator": "group_mean"}),
        "check_step": (upref.check_step, {"step": _step, "model": _model(), "objective": "dapo", "temperature": 0.7,
                                          "value": None, "value_coef": None}),
        "assert_step": (upref.assert_step, {"step": _step, "model": _model(), "objective": "dapo", "temperature": 0.7}),
        "check_recorded": (upref.check_recorded, {"seen": _recorded(_model()), "rows": _rows(_model()),
                                                  "objective": "dapo", "temperature": 0.7}),
        "identify_step": (upref.identify_step, {"step": _step, "model": _model(), "temperature": 0.7}),
        "record_step": (_recorded, {"model": _model(), "first": 1}),
        "from_jax": (upref.from_jax, {"fn": _loss, "float32": False}),
        "from_mlx": (upref.from_mlx, {"fn": _loss}),
        "InputError": (upref.InputError, {"sentence": "x"}),
        "weights.curve.make_curve": (curve.make_curve, {"what": "dapo", "eps_low": 0.1}),
        "weights.capacity.capacity": (cap.capacity, {"objective": _loss, "pi": 0.1, "pi_old": 0.1, "adv": -1.0}),
        "weights.plots.weights": (plots.weights, {"*": "dapo", "mu": 0.1, "eps_low": 0.1}),
        "upref_course.explorer.write": (explorer.write, {"file": "no/folder/x.html"}),
        "upref_frameworks.audits.audit": (audits.audit, {"name": "trl", "comparisons": ()}),
        "upref_frameworks.audits.recipe.recipe": (recipe.recipe, {"objective": "dapo", "name": "verl"}),
        "advantages.get": (upref_advantages.get, {"name": "whiten"}),
        "advantages.whiten_tokens": (upref_advantages.whiten_tokens, {"adv": b.adv, "mask": b.mask}),
        "advantages.gdpo": (
            upref_advantages.gdpo,
            {
                "rewards": rewards[:, None],
                "group": group,
                "weights": torch.ones(1),
                "ddof": 0,
                "eps": 1e-6,
            },
        ),
        "advantages.distillation": (
            upref_advantages.distillation,
            {
                "lp": b.logp,
                "lp_teacher": b.logp_old,
                "mask": b.mask,
                "adv": b.adv,
                "coef": 0.5,
            },
        ),
        "hidden.token_log_probs": (
            upref.hidden.token_log_probs,
            {"hidden": logits, "weight": torch.zeros(7, 5), "tokens": tokens, "softcap": 2.0, "chunk": 9},
        ),
        "logprobs.token_log_probs": (logprobs.token_log_probs, {"logits": logits, "tokens": tokens, "temperature": 1}),
        "logprobs.shifted_log_probs": (logprobs.shifted_log_probs, {"logits": logits, "input_ids": tokens}),
        "logprobs.entropy": (logprobs.entropy, {"logits": logits, "temperature": 0.5}),
        "logprobs.categorical_kl": (logprobs.categorical_kl, {"logits_p": logits, "logits_q": logits}),
        "metrics.maj_at_k": (metrics.maj_at_k, {"answers": [["a", "b"], ["c", "c"]], "correct": right}),
    }  # fmt: skip
    cut = {"logits": logits, "temperature": 1.0, "top_k": 2, "top_p": 0.9}
    many["nucleus.kept"] = upref.nucleus.kept, cut
    many["nucleus.kept_jointly"] = upref.nucleus.kept_jointly, cut
    many["nucleus.nucleus_log_probs"] = (
        upref.nucleus.nucleus_log_probs,
        {"logits": logits, "tokens": tokens, "keep": logits == 0, "temperature": 1.0},
    )
    slots = torch.zeros(2, 3)
    two = {"lp": logits, "lp_teacher": logits}
    for name in ("reverse_kl", "forward_kl", "jsd"):
        given = two | ({"beta": 0.25} if name == "jsd" else {})
        many[f"distillation.{name}"] = upref.distillation.DIVERGENCES[name], given
    for name, fn in upref.distillation.SAMPLED.items():
        many[f"distillation.{name}"] = fn, two
    errors = {"values": slots, "returns": slots, "scale": 1.0}
    many["critic.mse"] = upref.critic.mse, errors
    more = {"old_values": slots, "clip": 0.1}
    many["critic.clipped"] = upref.critic.clipped, errors | more
    many["critic.get"] = upref.critic.get, {"name": "mse"}
    many["distillation.names"] = upref.distillation.names, {}
    many["distillation.get"] = (
        upref.distillation.get,
        {"name": "student_top_k_tail(jsd)"},
    )
    of_tokens = {
        "rewards": slots,
        "values": slots,
        "mask": torch.ones(2, 3, dtype=torch.bool),
        "bootstrap": torch.zeros(2),
        "greedy_reward": torch.zeros(2),
        "group": torch.tensor([0, 0]),
        "state": torch.zeros(2, 3, dtype=torch.int64),
        "log_prob": slots,
        "sum_pi_squared": slots.abs(),
        "teacher_log_prob": slots,
        "gamma": 0.9,
        "lam": 0.8,
        "omega": 0.5,
        "ddof": 0,
        "eps": 1e-6,
    }
    many["token_advantages.get"] = upref.token_advantages.get, {"name": "gae"}
    for name, fn in upref.token_advantages.TOKEN_ADVANTAGES.items():
        if name != "distillation":
            given = inspect.signature(fn).parameters
            many[f"token_advantages.{name}"] = fn, {k: of_tokens[k] for k in given}
    for name, fn in upref_advantages.ADVANTAGES.items():
        given = {"rewards": rewards, "group": group}
        if "ddof" in inspect.signature(fn).parameters:
            given |= {"ddof": 0, "eps": 1e-6}
        many[f"advantages.{name}"] = fn, given
    of_metrics = {"correct": right, "k": 2, "draws": 10, "seed": 1}
    for name in (
        "avg_at_k",
        "pass_at_1",
        "best_at_k",
        "best_at_k_replaced",
        "best_at_k_bootstrap",
    ):
        fn = getattr(metrics, name)
        takes = inspect.signature(fn).parameters
        given = {k: v for k, v in of_metrics.items() if k in takes}
        many[f"metrics.{name}"] = fn, given
    return many


def qualified(name: str) -> str:
    """The name with its package, which PUBLIC leaves out where it is upref itself."""
    return name if name.startswith("upref_") else f"upref.{name}"


PUBLIC = public()


DTYPES = [torch.int8, torch.float16, torch.complex64, torch.bool, torch.int64]


def an_argument(good: Any, rng: random.Random) -> Any:
    """Return something in place of an argument: junk, or of a tensor (half of the time)
    one like it with another size, dtype or content.
    """
    if not isinstance(good, torch.Tensor) or rng.random() < 0.5:
        return rng.choice(JUNK)
    x = good.clone()
    match rng.choice(["dtype", "longer", "flat", "nan", "empty", "strange", "wide"]):
        case "dtype":
            return x.to(rng.choice(DTYPES))
        case "longer":
            return torch.cat([x, x])
        case "flat":
            return x.reshape(-1)
        case "nan":
            return x.double() * float("nan")
        case "empty":
            return x[:0]
        case "strange":
            return rng.choice(
                [x.to("meta"), x.to_sparse(), x.double().requires_grad_()]
            )
    return x[None]


def called(name: str, rng: random.Random) -> Callable[[], Any]:
    """Return a call of the public function, with up to two of its arguments replaced,
    and now and then one more hyperparameter.
    """
    fn, good = PUBLIC[name]
    given = dict(good)
    count = min(len(given), rng.choice([0, 1, 1, 1, 2]))
    for k in rng.sample(list(given), count):
        given[k] = an_argument(given[k], rng)
    if rng.random() < 0.1 and "eps_low" in good:
        junk = rng.choice(JUNK)
        more = ["beta", "c", "eps_high", "eps", "seed", "x", "length"]
        given[rng.choice(more)] = junk
    first = [given.pop("*")] if "*" in given else []
    return lambda: fn(*first, **given)


# ---- what there is, asked of the library itself --------------------------------------
def there_is() -> set[str]:
    """Return the name of every public function and method, as PUBLIC has them, but for
    those of INNER and UNCHECKED.
    """
    from docs.site.api import MODULES

    found = set(upref.__all__)
    for name in upref.__all__:
        value = getattr(upref, name)
        if inspect.isclass(value) and not issubclass(value, Exception):
            found |= {f"{name}.{method}" for method in public_methods(value)}
    modules = {name.removeprefix("upref.") for name in MODULES}
    modules.add("weights.capacity")
    for where in modules - {*INNER}:
        for name in public_functions(import_module(qualified(where))):
            if name not in upref.__all__:
                found.add(f"{where}.{name}")
    return found - {*INNER} - UNCHECKED


def public_methods(kind: type) -> list[str]:
    """Return the names of the public methods that a class itself defines, __call__
    included; neither fields of a dataclass nor static methods.
    """
    fields = getattr(kind, "__dataclass_fields__", {})
    names = []
    for name, value in vars(kind).items():
        is_method = isinstance(value, classmethod) or inspect.isfunction(value)
        is_public = not name.startswith("_") and name not in fields
        if is_method and (is_public or name == "__call__"):
            names.append(name)
    return names


def public_functions(module: ModuleType) -> list[str]:
    """Return the names of the public functions that a module itself defines."""
    names = []
    for name, value in vars(module).items():
        is_own = inspect.isfunction(value) and value.__module__ == module.__name__
        if is_own and not name.startswith("_"):
            names.append(name)
    return names
