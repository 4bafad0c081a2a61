# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPOTrainer with any objective: `GRPOTrainer(..., objective="up_dapo")` trains
the function proved here.

    from upref_frameworks.trl.training import GRPOTrainer
    GRPOTrainer(model, reward_funcs, args, train_dataset=data,
                objective="up_dapo", hp={"eps_low": 0.2}).train()

`objective` is a name of `upref list`, `up(NAME)`, or an Objective of your own; `hp` its
hyperparameters, the paper's unless given. `class Mine(GRPOTrainer, YourTrainer)` puts
it before a trainer of your own that keeps TRL's loss.

Only the policy term is replaced. Sampling, rewards, advantages, masks (padding, tool
results, truncated responses), micro-batches, the entropy bonus, a router's loss and
their metrics are TRL's own code. GRPOConfig's fields that shape TRL's policy term are
not read, and a run that moves one is stopped and told what to write (REPLACED).

The first micro-batches of each process, and then every 50th, are compared with the
float64 reference (parity.py): `upref/parity_max_abs` is the largest difference so far,
and a run beyond what rounding explains stops.
`parity={"first": 8, "every": 20, "on_fail": "warn"}` sets how often, and trains on
(`upref/parity_alarms` counts); 0 and 0: never. `upref.replay.watch(trainer, "up_dapo")`
judges whole steps besides, over all micro-batches and ranks.

`step_check=True` checks one optimizer step of a two-layer twin of the run before
anything is loaded: on the CPU, in float32, with the run's family, head, LoRA,
temperature, accumulation and padding. A difference stops the run with the report. Left
out are sampling, rewards, mixed precision, and the entropy bonus, which TRL averages
over micro-batches.

What differs from the objective called on `Rollouts`, because of how TRL cuts its
batches:

* the counts are TRL's: tokens of a step are those of the generation batch,
  `num_items_in_batch`, divided by the number of optimizer steps made of it; a response
  that is masked altogether counts as a response;
* no prompt ids: `group-token-mean` (Eq. 14) becomes the token mean of the step, as in
  TRL's own `dapo` and `cispo`, and tpo, which is not TRL's experimental one (Triple
  Preference Optimization), cannot run;
* dr_grpo and its like are their papers' plain sums over tokens: TRL divides by
  max_completion_length besides;
* sampler corrections (vLLM) multiply token terms; a term per response takes their mean.
  `objective="tis(dapo)"` and its like compute their own from vLLM's log-probabilities,
  and TRL's vllm_importance_sampling_* are not read;
* `beta` is GRPOConfig's, whose trainer loads the reference model; the KL term has the
  estimator of the objective's paper and its aggregation;
  `objective="unbiased_kl(grpo)"` has TRL's default, use_bias_correction_kl=True, which
  the others refuse;
* an objective coupled over the batch (m2po) gets one micro-batch;
* aspo_code reads the entropies that TRL computes, of the policy at the sampling
  temperature.
"""

import dataclasses
import inspect
import logging
from typing import Any

import torch
from torch import Tensor

from upref.aggregation import Totals, aggregate
from upref.errors import InputError
from upref.kl import WITH_RATIO, per_token
from upref.logprobs import clamp_log_probs
from upref.registry import Objective, get
from upref.rollouts import one_per_response
from upref_frameworks.live import live
from upref_frameworks.parity import Monitor, ParityError
from upref_frameworks.trl.twin import trl_twin

try:
    import trl
except ImportError as e:
    raise ImportError(
        f"upref_frameworks.trl.training needs TRL ({e}): `pip install 'trl>=1.16'`."
    ) from e

log = logging.getLogger(__name__)

# field of GRPOConfig -> what to write instead; a name on the left is one of ours for it
REPLACED: dict[str, tuple[tuple[str, ...], str]] = {
    "loss_type": ((), "objective= sets the loss"),
    "importance_sampling_level": (
        (),
        "objective='gspo' or 'up_gspo' acts on responses",
    ),
    "epsilon": (("eps", "eps_low"), ""),
    "epsilon_high": (("eps_high",), ""),
    "delta": (("c", "trunc"), ""),
    "sapo_temperature_pos": (("tau_pos",), ""),
    "sapo_temperature_neg": (("tau_neg",), ""),
    "vespo_k_pos": (("c1_pos",), ""),
    "vespo_lambda_pos": (("c2_pos",), ""),
    "vespo_k_neg": (("c1_neg",), ""),
    "vespo_lambda_neg": (("c2_neg",), ""),
    "top_entropy_quantile": ((), "the objective acts on every token"),
    "off_policy_mask_threshold": ((), "the objective acts on every response"),
    "use_liger_kernel": (
        (),
        "Liger may bring its own loss; model_init_kwargs={'use_kernels': True} brings kernels",
    ),
}
# the advantages of a paper that TRL computes
SCALE_REWARDS = {"group_norm": "group", "group_mean": "none"}


class GRPOTrainer(trl.GRPOTrainer):  # type: ignore[misc]  # TRL is untyped here
    """TRL's GRPOTrainer, or the trainer behind it in a class of yours, with `objective`
    in place of a loss_type.
    """

    beta: float

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *more: Any,
        objective: str | Objective,
        hp: dict[str, Any] | None = None,
        parity: dict[str, Any] | None = None,
        step_check: bool = False,
        **kw: Any,
    ) -> None:
        """Refuse a loss of another class, and settings that contradict the objective.
        Then set TRL's trainer up with a loss_type that is 0 without advantages.
        """
        behind = super()._compute_loss.__func__
        if behind is not trl.GRPOTrainer._compute_loss:
            raise InputError(
                f"{behind.__qualname__} is another loss, which would be half replaced: remove it."
            )
        self.objective = get(objective) if isinstance(objective, str) else objective
        self.hyperparameters = hyperparameters(self.objective, hp or {})
        self.monitor = Monitor.of(self.objective, parity or {})
        if args is not None:
            refuse_settings(self.objective, args)
        if step_check:
            self._check_twin(model, args, kw.get("peft_config"))
        super().__init__(model, reward_funcs, args, *more, **kw)
        tell(self.objective, self.args)
        # of what TRL still computes, see _loss_beside_the_objective: 0 without advantages,
        # and no metrics of its own
        self.loss_type = "sapo"
        self._forward: tuple[Any, ...] = ()

    def _check_twin(self, model: Any, args: Any, peft_config: Any) -> None:
        """Compare one step of a two-layer twin of this run with the objective; raise
        ParityError where the gradient is another, and log the error where it is not.
        """
        # without the arguments that the constructor of a user's class asks for
        bare = type("Twin", (type(self),), {"__init__": GRPOTrainer.__init__})
        report = trl_twin(
            bare, self.objective, self.hyperparameters, model, args, peft_config
        )
        if not report:
            raise ParityError(
                f"step_check: a two-layer twin of this run has a different gradient.\n{report}"
            )
        log.info(
            "step_check: a two-layer twin agrees to %.1g of the gradient's norm",
            report.error,
        )

    def _get_per_token_logps_and_entropies(
        self, *args: Any, **kw: Any
    ) -> tuple[Any, ...]:
        """Call TRL's method, and keep what it returns in `self._forward`."""
        self._forward = super()._get_per_token_logps_and_entropies(*args, **kw)
        return self._forward

    def _loss_beside_the_objective(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Return TRL's loss with advantages and beta of 0: its entropy bonus and its
        router's loss are left. TRL logs their metrics on the way, and this keeps the
        forward pass in `self._forward`.
        """
        inputs = {k: v for k, v in inputs.items() if k != "old_per_token_logps"}
        inputs["advantages"] = torch.zeros_like(inputs["advantages"])
        if "importance_sampling_ratio" in inputs:
            inputs["importance_sampling_ratio"] = torch.ones_like(
                inputs["importance_sampling_ratio"]
            )
        beta = self.beta
        self.beta = 0.0
        try:
            rest: Tensor = super()._compute_loss(model, inputs)
        finally:
            self.beta = beta
        return rest

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Return the objective's loss on a micro-batch, plus its KL term and what TRL
        adds to a loss. Parity compares the loss on the way, and the metrics are logged.
        """
        rest = self._loss_beside_the_objective(model, inputs)
        lp, entropy, *_ = self._forward
        self._forward = ()
        mode = "train" if self.model.training else "eval"
        mask = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()
        lp = clamp_log_probs(lp)
        lp_old = inputs.get("old_per_token_logps")
        if lp_old is None:  # the policy has not moved
            lp_old = lp.detach()
        else:
            lp_old = clamp_log_probs(lp_old)
        A = inputs["advantages"]
        if A.ndim == 1:
            A = A[:, None]
        if self.objective.one_adv and not one_per_response(A, mask):
            raise InputError(
                f"upref/{self.objective.name} needs one advantage per response, and the tokens of one differ: choose "
                "a token-level objective, or advantages of responses."
            )
        totals, ranks = self._totals(inputs, mask, mode)
        weights = inputs.get("importance_sampling_ratio")
        if weights is not None:
            weights = weights.expand_as(mask)
        engine = None
        if self.objective.sampler is not None:  # it corrects for the sampler itself
            weights = None
            engine = clamp_log_probs(inputs["sampling_per_token_logps"])
        H = entropy.detach() if reads_entropy(self.objective) else None
        hp = self.hyperparameters
        loss = -ranks * self.objective.J(
            lp, lp_old, A, mask, None, None, H, totals, weights, engine, **hp
        )

        metrics: dict[str, float] = {}
        if mode == "train":
            batch = dict(
                logp=lp,
                logp_old=lp_old,
                adv=A,
                mask=mask,
                totals=totals,
                dp_size=ranks,
                is_weights=weights,
            )
            if H is not None:
                batch["entropy"] = H
            if engine is not None:
                batch["logp_sampler"] = engine
            metrics |= self.monitor(loss, batch, hp)
        metrics |= live(self.objective, lp, lp_old, A, mask, hp, H, engine)
        self._log_over_ranks(metrics, mode)
        if self.beta:
            ref = inputs["ref_per_token_logps"]
            kl = per_token(
                self.objective.kl,
                torch.where(mask, lp, 0),
                torch.where(mask, ref, 0),
                torch.where(mask, lp_old, 0),
            )
            loss = loss + self.beta * ranks * aggregate(
                kl, mask, self.objective.agg, totals=totals
            )
            sums = torch.stack([torch.where(mask, kl.detach(), 0).sum(), mask.sum()])
            kl_sum, tokens = self.accelerator.reduce(sums, reduction="sum").tolist()
            self._metrics[mode]["kl"].append(kl_sum / max(tokens, 1))
        # TRL's, beside an entropy bonus: it saw 0
        if self._metrics[mode].get("policy_loss"):
            self._metrics[mode]["policy_loss"][-1] = (
                self.accelerator.gather(loss.detach()).mean().item()
            )
        return loss + rest

    def _totals(
        self, inputs: dict[str, Any], mask: Tensor, mode: str
    ) -> tuple[Totals, int]:
        """Return the counts of the optimizer step over all ranks, as TRL's losses
        count, and the number of ranks.

        In evaluation a batch stands by itself.
        """
        ranks = self.accelerator.num_processes
        steps = self.current_gradient_accumulation_steps if mode == "train" else 1
        tokens = inputs["num_items_in_batch"].clamp(min=1)
        if mode == "train":
            tokens = tokens * steps / self.args.steps_per_generation
        return Totals(tokens, len(mask) * steps * ranks, 1, tokens), ranks

    def _log_over_ranks(self, metrics: dict[str, float], mode: str) -> None:
        """Log each metric for TRL: the mean over the ranks, or the largest if it is one
        of parity.
        """
        values = torch.tensor([list(metrics.values())], device=self.accelerator.device)
        of_ranks = self.accelerator.gather(values)
        for key, mean, most in zip(
            metrics,
            of_ranks.mean(0).tolist(),
            of_ranks.amax(0).tolist(),
            strict=True,
        ):
            self._metrics[mode][key].append(most if "/parity_" in key else mean)


def reads_entropy(objective: Objective) -> bool:
    """Tell whether the function of an objective takes the policy's entropies.

    Args:
        objective: the objective.
    """
    return "entropy" in inspect.signature(objective.fn).parameters


def hyperparameters(objective: Objective, hp: dict[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters in force, without beta: `hp` over the defaults.

    Args:
        objective: the objective that trains.
        hp: those that were given.

    Returns:
        Name -> value.

    Raises:
        InputError: the objective needs prompts, which TRL does not pass to a loss; or
            `hp` has beta, which is GRPOConfig's, or an unknown name.
    """
    if "group" in objective.reads:
        raise InputError(
            f"{objective.name} needs the prompt of each response, and TRL shuffles groups into batches."
        )
    if "beta" in hp:
        raise InputError(
            "set beta in GRPOConfig, whose trainer loads the reference model, not in hp."
        )
    return {k: v for k, v in objective.resolve(hp).items() if k != "beta"}


def refuse_settings(objective: Objective, args: Any) -> None:
    """Refuse settings of GRPOConfig that the objective, or this trainer, would ignore.

    Args:
        objective: the objective that trains.
        args: GRPOConfig.

    Raises:
        InputError: what to write instead.
    """
    default = {f.name: f.default for f in dataclasses.fields(trl.GRPOConfig)}
    for field, (ours, why) in REPLACED.items():
        value = getattr(args, field, default.get(field))
        if value == default.get(field):
            continue
        has = [name for name in ours if name in objective.hyperparameters]
        if has:
            why = f"write hp={{'{has[0]}': VALUE}}"
        elif not why:
            why = f"{objective.name} has nothing like it"
        raise InputError(
            f"upref/{objective.name} does not read GRPOConfig.{field}={value!r}: leave it at {default[field]!r}; "
            f"{why}."
        )
    if objective.sampler is not None and not args.use_vllm:
        raise InputError(
            f"{objective.name} corrects for the engine that sampled: set GRPOConfig.use_vllm=True."
        )
    if args.beta and not objective.kl:
        raise InputError(
            f"{objective.name} has no KL term, and GRPOConfig.beta={args.beta}: leave beta at 0."
        )
    corrected = objective.kl in WITH_RATIO
    if args.beta and getattr(args, "use_bias_correction_kl", False) != corrected:
        if corrected:
            form = "is multiplied by the ratio"
            other = "its base"
        else:
            form = "has no ratio"
            other = f"unbiased_kl({objective.name})"
        raise InputError(
            f"the KL term of {objective.name} {form}: set GRPOConfig.use_bias_correction_kl={corrected} beside beta, "
            f"or train {other}."
        )


def tell(objective: Objective, args: Any) -> None:
    """Log what a user must know before the run and no error says.

    These are advantages other than the paper's, generation batches of one step, and
    objectives that act on each micro-batch by itself.

    Args:
        objective: the objective that trains.
        args: GRPOConfig.
    """
    log.info(
        "upref/%s trains; `upref show %s` tells where its hyperparameters come from",
        *[objective.name] * 2,
    )
    if args.scale_rewards != SCALE_REWARDS.get(objective.adv):
        want = SCALE_REWARDS.get(objective.adv)
        log.warning(
            "the advantages of %s are %s in its paper, and TRL's scale_rewards=%r has others: %s.",
            objective.name,
            objective.adv,
            args.scale_rewards,
            f"set {want!r}" if want else "TRL cannot compute them",
        )
    if (
        args.gradient_accumulation_steps
        % (args.steps_per_generation * args.num_iterations)
        == 0
    ):
        log.warning(
            "each generation batch makes one optimizer step, so that r = 1, where %s has the gradient of nearly every "
            "other objective: raise steps_per_generation or num_iterations to see a difference.",
            objective.name,
        )
    if objective.batch_coupled:
        log.warning(
            "%s acts on each micro-batch by itself: %s.",
            objective.name,
            objective.batch_coupled,
        )
