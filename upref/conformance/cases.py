# SPDX-License-Identifier: Apache-2.0
"""The cases of the conformance suite: what a trainer is set to, and the gradient that
its step should make.

A case keeps its id and its meaning for good. A later suite may add cases under its own
date; a build that names a suite and a level runs the same cases with every release.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from upref.errors import InputError

SUITES = ("2026.11", "2026.12")
LEVELS = {
    1: "one pass over the batch: objectives, temperatures, masks",
    2: "what is added and how it is split: KL term, entropy bonus, norm clipping, micro-batches, generation batches",
    3: "model families and precisions",
    4: "two ranks, each a process of its own with its share of the rows",
    5: "two ranks that share each row: its tokens, the weights or the layers",
    6: "what the trainer makes before its step: advantages, masks, log-probabilities of the old and the reference policy",
    7: "what an engine does to gradients that it hides, read from what the weights moved",
}
# What two ranks of a case divide between them.
PARALLEL = {
    "data": "the rows",
    "sequence": "the tokens of each row, as Ulysses does",
    "context": "the tokens of each row, as Megatron's context parallelism does",
    "tensor": "the weights of each layer",
    "pipeline": "the layers",
}
SINGLE = 3  # the highest level in one process; the next is a job of its own
# Where the reference policy of a case with a KL term comes from.
REFERENCES = {
    "model": "a model of its own, with other weights",
    "adapter": "the model without the adapters that the trainer adds and trains",
}


@dataclass(frozen=True)
class Case:
    """One setting of a trainer, and the objective whose gradient its optimizer step
    should get.

    Args:
        id: stable name, such as `micro/4/token-mean`.
        level: 1 to 7.
        objective: a name of `upref list`.
        hp: the objective's hyperparameters, over its defaults.
        temperature: of the sampler. Log-probabilities are taken at it.
        beta: coefficient of a KL term with the estimator `kl`; 0: there is none.
        kl: estimator of the KL term.
        entropy_coef: coefficient of an entropy bonus, averaged as the objective is.
        clip: bound of the gradient's norm; None: it is not clipped.
        micro_batches: backward passes of one optimizer step, with an equal number of
            responses each.
        updates: optimizer steps of one generation batch. The first takes the first
            rows.
        family: a name of `upref.step.inputs.families.FAMILIES`.
        dtype: of the model's parameters: float32 or bfloat16.
        holes: whether some response tokens do not train, as output of tools.
        ends: whether each response ends in the end token; False: some are cut off at
            the longest length.
        end_inside: whether an end token stands inside the longer responses, as the end
            of a turn does; it trains, and so do tokens behind it.
        equal_lengths: whether all prompts have one length, all responses have one, and
            every response token trains.
        ranks: processes of a group.
        parallel: what the ranks divide between them, a key of `PARALLEL`. With `data`
            each has an equal share of the rows: the first has rows 0, 2, 4, ... of two.
            Otherwise each has all rows.
        layers: of the model, if not the family's two. With 0 the logits of a token
            depend on that token alone, so that ranks can divide a sequence without an
            attention that spans them.
        advantages: estimator by which the trainer makes the advantages of the rewards,
            one of `upref.advantages` or `batch_norm`; "": the rows bring them. Where it is set, an
            adapter's `train` is called in place of `step`, and the old and reference
            log-probabilities are the trainer's too.
        ddof: what a standard deviation of rewards subtracts from the number of
            responses: 1 or 0.
        iterations: passes over the generation batch, of `updates` optimizer steps each.
        reference: a key of `REFERENCES`; "": the trainer needs no reference policy, or
            the rows bring its log-probabilities.
        drop_truncated: whether no token of a response that was cut off trains.
        engine: whether the gradient is read from what the weights moved. Where it is
            set, an adapter's `move` is called in place of `step`.
        suite: the dated suite that brought the case.
    """

    id: str
    level: int
    objective: str = "ppo_clip"
    hp: Mapping[str, float] = field(default_factory=dict)
    temperature: float = 0.7
    beta: float = 0.0
    kl: str = "k3"
    entropy_coef: float = 0.0
    clip: float | None = None
    micro_batches: int = 1
    updates: int = 1
    family: str = "qwen3"
    dtype: str = "float32"
    holes: bool = True
    ends: bool = True
    end_inside: bool = False
    equal_lengths: bool = False
    ranks: int = 1
    parallel: str = "data"
    layers: int | None = None
    advantages: str = ""
    ddof: int = 1
    iterations: int = 1
    reference: str = ""
    drop_truncated: bool = False
    engine: bool = False
    suite: str = SUITES[0]

    def __str__(self) -> str:
        return self.id

    @property
    def steps(self) -> int:
        """Optimizer steps on one generation batch."""
        return self.updates * self.iterations


# aggregation -> an objective that has it
TOKEN_MEAN = {"token-mean": "ppo_clip", "seq-mean": "grpo"}

# What each family is here for is said in upref/step/inputs/families.py.
FAMILY_NAMES = (
    "qwen2",
    "qwen3_moe",
    "llama",
    "mistral",
    "gemma2",
    "phi",
    "gpt2",
    "cohere",
    "granite",
    "mamba2",
    "falcon_h1",
)


def _level_1() -> Iterable[Case]:
    """Yield cases of one objective each, of temperatures and of masks."""
    yield Case("objective/ppo_clip", 1)
    yield Case("objective/dapo", 1, "dapo")
    for name in ("grpo", "dr_grpo", "gspo", "cispo", "sapo", "up_dapo", "reinforce"):
        yield Case(f"objective/{name}", 1, name)
    yield Case("objective/dual-clip", 1, hp={"c": 3.0})
    for temperature in (1.0, 1.5):
        yield Case(f"temperature/{temperature:g}", 1, temperature=temperature)
    yield Case("mask/every-token-trains", 1, holes=False)
    yield Case("mask/holes", 1, "grpo")
    yield Case("mask/cut-off-responses", 1, ends=False)
    yield Case("mask/end-inside", 1, holes=False, end_inside=True, suite="2026.12")


def _level_2() -> Iterable[Case]:
    """Yield cases of a KL term, entropy, clipped gradients and micro-batches."""
    for aggregation, objective in TOKEN_MEAN.items():
        yield Case(f"kl/{aggregation}", 2, objective, beta=0.04)
    yield Case("kl/micro-4", 2, beta=0.04, micro_batches=4)
    yield Case("kl/luspo", 2, "luspo", beta=0.04)
    yield Case("entropy/bonus", 2, entropy_coef=0.01)
    yield Case("entropy/bonus-micro-4", 2, entropy_coef=0.01, micro_batches=4)
    yield Case("clip/norm", 2, clip=0.5)
    for n in (2, 4, 8):
        for aggregation, objective in TOKEN_MEAN.items():
            yield Case(f"micro/{n}/{aggregation}", 2, objective, micro_batches=n)
    yield Case("micro/4/gspo", 2, "gspo", micro_batches=4)
    for aggregation, objective in TOKEN_MEAN.items():
        yield Case(f"generation/2/{aggregation}", 2, objective, updates=2)
    yield Case("generation/2/micro-2", 2, updates=2, micro_batches=2)
    yield Case("generation/2/equal-lengths", 2, updates=2, equal_lengths=True)


def _level_3() -> Iterable[Case]:
    """Yield cases of one model family each, and of a half precision."""
    for family in FAMILY_NAMES:
        yield Case(f"family/{family}", 3, family=family)
    yield Case("precision/bfloat16", 3, dtype="bfloat16")
    yield Case("family/qwen3_next", 3, family="qwen3_next", suite="2026.12")


def _level_4() -> Iterable[Case]:
    """Yield cases of two ranks that share the rows."""
    for aggregation, objective in TOKEN_MEAN.items():
        yield Case(f"ranks/dp2/{aggregation}", 4, objective, ranks=2)
    yield Case("ranks/dp2/micro-2", 4, micro_batches=2, ranks=2)
    yield Case("ranks/dp2/norm", 4, clip=0.5, ranks=2)


def _level_5() -> Iterable[Case]:
    """Yield cases of two ranks that share each row. Their model has no layers, because
    what goes wrong here is the scaling of the loss.
    """

    def case(name: str, parallel: str, objective: str = "ppo_clip", n: int = 1) -> Case:
        """Return a case on two ranks; n: micro-batches."""
        return Case(
            f"ranks/{name}",
            5,
            objective,
            micro_batches=n,
            family="llama",
            ranks=2,
            parallel=parallel,
            layers=0,
            suite="2026.12",
        )

    for short, parallel in (("sp2", "sequence"), ("cp2", "context")):
        for aggregation, objective in TOKEN_MEAN.items():
            yield case(f"{short}/{aggregation}", parallel, objective)
        yield case(f"{short}/micro-2", parallel, n=2)
    yield case("tp2/token-mean", "tensor")
    yield case("pp2/micro-4", "pipeline", n=4)


def _level_6() -> Iterable[Case]:
    """Yield cases in which the trainer makes its own advantages, masks and
    log-probabilities.

    Two prompts have four responses each. All cases have two micro-batches, so that a
    count of a micro-batch shows.
    """

    def case(name: str, objective: str = "ppo_clip", **fields: Any) -> Case:
        """Return a case of two micro-batches, whose advantages are R - mean unless
        `fields` say otherwise.
        """
        common: dict[str, Any] = dict(
            micro_batches=2, advantages="group_mean", suite="2026.12"
        )
        return Case(f"prepare/{name}", 6, objective, **common | fields)

    yield case("advantages/group-mean")
    yield case("advantages/group-std", advantages="group_norm")
    yield case("advantages/group-std-of-all", advantages="group_norm", ddof=0)
    yield case("advantages/batch-std", advantages="batch_norm")
    yield case("advantages/leave-one-out", advantages="leave_one_out")
    yield case("mask/every-token-trains", holes=False)
    yield case("mask/end-inside", holes=False, end_inside=True)
    yield case("mask/cut-off", ends=False)
    for aggregation, objective in TOKEN_MEAN.items():
        yield case(
            f"mask/cut-off-dropped/{aggregation}",
            objective,
            ends=False,
            drop_truncated=True,
        )
    for aggregation, objective in TOKEN_MEAN.items():
        yield case(f"old/iterations-2/{aggregation}", objective, iterations=2)
    yield case("old/updates-2", "grpo", updates=2)
    yield case("old/cut-off", ends=False, drop_truncated=True, iterations=2)
    for aggregation, objective in TOKEN_MEAN.items():
        yield case(
            f"reference/model/{aggregation}", objective, beta=0.5, reference="model"
        )
    yield case("reference/iterations-2", beta=0.5, reference="model", iterations=2)
    yield case("reference/adapter", beta=0.5, reference="adapter")
    yield case("temperature/1.5", temperature=1.5, beta=0.5, reference="model")


def _level_7() -> Iterable[Case]:
    """Yield cases of an engine that keeps gradients in buffers of its own.

    Each rank has at least three backward passes in a step, so that one is neither the
    first nor the last. Only clip/norm clips: elsewhere the norm is far above 1, so that
    an engine's own bound shows.
    """

    def case(name: str, objective: str = "ppo_clip", n: int = 4, **fields: Any) -> Case:
        """Return a case of an engine; n: micro-batches."""
        return Case(
            f"engine/{name}",
            7,
            objective,
            micro_batches=n,
            engine=True,
            suite="2026.12",
            **fields,
        )

    for aggregation, objective in TOKEN_MEAN.items():
        yield case(f"micro-4/{aggregation}", objective)
    yield case("micro-8/token-mean", n=8)
    yield case("clip/norm", clip=0.5)
    yield case("updates-2", updates=2)
    for aggregation, objective in TOKEN_MEAN.items():
        yield case(f"dp2/micro-4/{aggregation}", objective, ranks=2)


CASES: dict[str, Case] = {
    case.id: case
    for level in (
        _level_1,
        _level_2,
        _level_3,
        _level_4,
        _level_5,
        _level_6,
        _level_7,
    )
    for case in level()
}


def cases(level: int = SINGLE, suite: str = SUITES[-1]) -> list[Case]:
    """Return the cases of a suite, up to a level.

    Args:
        level: 1 to 7; each level has the cases of the ones below it.
        suite: the date of a suite, such as 2026.11. A later suite has the cases of the
            earlier ones.

    Returns:
        The cases, in a stable order.

    Raises:
        InputError: there is no such level or suite.
    """
    if level not in LEVELS:
        raise InputError(f"there is no level {level!r}: {', '.join(map(str, LEVELS))}.")
    if suite not in SUITES:
        raise InputError(f"there is no suite {suite!r}: {', '.join(SUITES)}.")
    suites = SUITES[: SUITES.index(suite) + 1]
    return [
        case for case in CASES.values() if case.level <= level and case.suite in suites
    ]
