# SPDX-License-Identifier: Apache-2.0
"""Which loops are checked, as which objective, and what must come out of it.

Each verdict was read in the repository's own lines. `found` is a part of the cause that
must be printed, or "" where the step agrees.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from tests.trainers import glue
from upref.advantages import group_norm
from upref.step.inputs.families import tiny

REWARDS = (1.0, 0.2, -0.5, 0.7, 0.0, 1.3, -1.1, 0.4)
NORMALIZED = dict(
    group_size=8, rewards=REWARDS, advantages=partial(group_norm, eps=1e-4)
)
# the same with the deviation of the population
POPULATION = NORMALIZED | {"advantages": partial(group_norm, ddof=0, eps=1e-4)}
AT_ONE = ["temperature", "holes"]
ON_POLICY = ["ratio", "holes"]


@dataclass(frozen=True)
class Case:
    """One loop, checked as one objective.

    Attributes:
        repository: owner/name.
        glue: the function of glue.py.
        variant: what of the repository is run, in words.
        make: from the checkout to the step, or to the step and its model.
        objective: its name.
        options: of check_step.
        found: a part of the cause; "" where the step agrees.
    """

    repository: str
    glue: Callable[..., Any]
    variant: str
    make: Callable[[Path], Any]
    objective: str
    options: dict[str, Any]
    found: str = ""

    def step_and_model(self, folder: Path) -> tuple[glue.Step, nn.Module]:
        """Return the step, and its own model or a tiny Qwen3."""
        made = self.make(folder)
        return made if isinstance(made, tuple) else (made, tiny("qwen3"))


def cases_of(repository: str, function: Callable[..., Any], **shared: Any) -> Callable:
    """Return a constructor of one repository's cases, with the options that all of them
    have.
    """

    def make_case(
        variant: str, objective: str, found: str = "", its: Any = None, **options: Any
    ) -> Case:
        """Return a case of this repository and function. its: arguments of the
        function; options: of check_step.
        """
        make = partial(function, **(its or {}))
        return Case(
            repository, function, variant, make, objective, shared | options, found
        )

    return make_case


nano_aha = cases_of(
    "McGill-NLP/nano-aha-moment",
    glue.nano_aha_moment,
    temperature=0.7,
    beta=0.001,
    without=ON_POLICY,
)
zero = cases_of("policy-gradient/GRPO-Zero", glue.grpo_zero)
tiny_grpo = cases_of(
    "open-thought/tiny-grpo",
    glue.tiny_grpo,
    temperature=1.0,
    beta=0.01,
    without=AT_ONE,
    group_size=8,
)
simple = cases_of("lsdefine/simple_GRPO", glue.simple_grpo, beta=0.04, group_size=8)
nanochat = cases_of(
    "karpathy/nanochat",
    glue.nanochat,
    temperature=1.0,
    without=["ratio", *AT_ONE],
    group_size=8,
)
minimind = cases_of("jingyaogong/minimind", glue.minimind, beta=0.1, **POPULATION)
rasbt = cases_of(
    "rasbt/reasoning-from-scratch", glue.reasoning_from_scratch, **NORMALIZED
)
nano = cases_of("joey00072/nanoGRPO", glue.nano_grpo, group_size=8, rewards=REWARDS)
book = cases_of("aburkov/theLMbook", glue.the_lm_book)
deepseek = cases_of(
    "brendanhogan/DeepSeekRL-Extended",
    glue.deepseek_rl_extended,
    beta=0.04,
    group_size=2,
)
prime = cases_of("PrimeIntellect-ai/prime-rl", glue.prime_rl)
instruct = cases_of("allenai/open-instruct", glue.open_instruct, temperature=0.7)
tune = cases_of("pytorch/torchtune", glue.torchtune, temperature=0.7, beta=0.1)

HOT = "the temperature is left out"
CASES = [
    nano_aha(
        "the script: it counts tokens after the reference pass",
        "dapo",
        "is divided by",
    ),
    nano_aha(
        "the script, with the tokens counted before the reference pass",
        "dapo",
        its={"reference_first": False},
    ),
    zero(
        "update_policy",
        "dapo",
        temperature=1.0,
        clip=1.0,
        without=["ratio", *AT_ONE],
        **POPULATION,
    ),
    tiny_grpo(
        "the padding token is the end token, as it sets it",
        "grpo",
        "made of token values",
    ),
    tiny_grpo(
        "with a padding token that no row has",
        "grpo",
        its={"end": 0},
    ),
    simple(
        "GRPO_step, rows sampled at its temperature 0.9",
        "grpo",
        HOT,
        temperature=0.9,
        without=["holes"],
    ),
    simple(
        "GRPO_step, rows sampled at temperature 1",
        "grpo",
        temperature=1.0,
        without=AT_ONE,
    ),
    nanochat(
        "two passes of four responses",
        "dapo",
        "micro-batches",
    ),
    nanochat(
        "one pass of eight responses",
        "dapo",
        its={"size": 8},
    ),
    minimind(
        "grpo, rows sampled at its temperature 0.8",
        "grpo",
        HOT,
        temperature=0.8,
        without=["holes"],
    ),
    minimind(
        "grpo, rows sampled at temperature 1",
        "grpo",
        temperature=1.0,
        without=AT_ONE,
    ),
    minimind(
        "cispo, its default, rows sampled at temperature 1",
        "cispo",
        "aggregated by seq-mean-token-mean",
        its={"loss_type": "cispo"},
        temperature=1.0,
        without=AT_ONE,
    ),
    rasbt(
        "chapter 6, rows sampled at its temperature 0.8",
        "reinforce",
        HOT,
        temperature=0.8,
        without=ON_POLICY,
    ),
    rasbt(
        "chapter 6, rows sampled at temperature 1",
        "reinforce",
        temperature=1.0,
        without=["ratio", *AT_ONE],
    ),
    nano(
        "train(), rows sampled at its temperature 0.9",
        "grpo",
        HOT,
        temperature=0.9,
        without=ON_POLICY,
    ),
    nano(
        "train(), rows sampled at temperature 1",
        "grpo",
        "every weight is 4 times what it should be",
        temperature=1.0,
        without=["ratio", *AT_ONE],
    ),
    book(
        "maximize_grpo_objective",
        "grpo",
        temperature=1.0,
        beta=0.1,
        clip=0.1,
        without=AT_ONE,
        **NORMALIZED,
    ),
    deepseek(
        "four questions, rows sampled at its temperature 0.9",
        "grpo",
        HOT,
        temperature=0.9,
        without=ON_POLICY,
    ),
    deepseek(
        "four questions, rows sampled at temperature 1",
        "grpo",
        "every weight is 4 times what it should be",
        temperature=1.0,
        without=["ratio", *AT_ONE],
    ),
    prime("the default loss", "dppo_tv_prime_rl", temperature=0.7),
    instruct("dapo, a response a pass", "dapo"),
    instruct(
        "cispo, a response a pass",
        "cispo",
        its={"loss_fn": "cispo"},
        eps_high=0.28,
    ),
    tune(
        "GRPOLoss",
        "grpo",
        "aggregated by token-mean",
        without=["holes"],
    ),
    tune("GRPOLoss", "ppo_clip", without=["holes"]),
    tune(
        "GRPOSimpleLoss, on policy",
        "grpo",
        its={"name": "GRPOSimpleLoss"},
        without=ON_POLICY,
    ),
    tune(
        "GRPOCompletionLoss",
        "grpo",
        "all tokens that train have one weight",
        its={"name": "GRPOCompletionLoss"},
        without=["holes"],
    ),
]
