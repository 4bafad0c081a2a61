# SPDX-License-Identifier: Apache-2.0
"""Advantages and KL terms of the same repositories: what each needs before upref can call it, and its formula by hand.

A wrapper takes the repository's folder and answers with a function of (rewards, n), (rewards, group) or (log_prob,
ref_log_prob); no line is theirs. `python -m docs.in_the_wild FOLDER estimators` judges them all.
"""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import torch

import upref
from docs.in_the_wild.fetched import Fetched
from upref.errors import InputError
from upref.verify.render import describe_pair


@dataclass(frozen=True)
class Estimator:
    """An estimator of advantages or KL in somebody's code.

    Args:
        repo: the repository.
        file: the file in it.
        says: what its name or text says that it is.
        held: the estimator of upref that it is compared with.
        formula: what it computes, in words, written by hand.
        hand: the same as a function.
        same: whether that is what it is compared with.
        wrap: the wrapper: (the repository's folder) -> what upref can call.
    """

    repo: str
    file: str
    says: str
    held: str
    formula: str
    hand: Callable
    same: bool
    wrap: Callable

    @property
    def is_kl(self) -> bool:
        return self.wrap.__name__.endswith("_kl")


EVERY: dict[str, Estimator] = {}


def listed(
    repo: str,
    file: str,
    says: str,
    held: str,
    formula: str,
    hand: Callable,
    same: bool = True,
):
    """A decorator that lists a wrapper in EVERY; the arguments are those of Estimator."""

    def add(wrap):
        EVERY[wrap.__name__] = Estimator(
            repo, file, says, held, formula, hand, same, wrap
        )
        return wrap

    return add


# ---- by hand: of one group's rewards, and of two log-probabilities -------------------
def deviation(R, ddof: int):
    """The standard deviation over a group."""
    return (((R - R.mean()) ** 2).sum() / (len(R) - ddof)).sqrt()


def plus(ddof: int, eps: float):
    """(R − mean) / (std + eps)"""
    return lambda R: centered(R) / (deviation(R, ddof) + eps)


def floor(ddof: int, eps: float):
    """(R − mean) / max(std, eps)"""
    return lambda R: centered(R) / deviation(R, ddof).clamp(min=eps)


def centered(R):
    """R − mean"""
    return R - R.mean()


def others(R):
    """R − the mean of the others"""
    return R - (R.sum() - R) / (len(R) - 1)


def k3(lp, ref):
    return (ref - lp).exp() - 1 - (ref - lp)


GRPO = "group_norm"
FELD = "Feld-maxiu/PPO-GRPO-from-Scratch"
R20213 = "r20213/Tiny-GRPO"
LINXINRONG = "Linxinrong8023/grpo-gspo-dapo_reproduce"
CORE = "src/post_training_contrast/algorithms/base.py"


def over(what: str) -> str:
    return f"(R − mean) / {what}"


# ---- advantages ----------------------------------------------------------------------
@listed(FELD, "src/losses.py", "GRPO", GRPO, over("(std + 1e-8)"), plus(1, 1e-8))
def feld(code: Fetched):
    compute = code.take(
        "src/losses.py", "compute_grpo_advantages"
    ).compute_grpo_advantages
    return lambda rewards, n: torch.tensor(
        [A for group in rewards.view(-1, n) for A in compute(group.tolist())]
    )


def scored(step, **settings):
    """The advantages of a step that scores texts itself: the rewards are its texts."""

    def advantages(rewards, n):
        texts = rewards.tolist()
        return step(lambda x, _: {"reward": x}, texts, texts, n, **settings)[0]

    return advantages


@listed(
    "KaiP-598/grpo-from-scratch",
    "grpo/rewards.py",
    "GRPO",
    GRPO,
    over("(std + 1e-6)"),
    plus(1, 1e-6),
)
def kaip(code: Fetched):
    return scored(code.take("grpo/rewards.py", "compute_advantages").compute_advantages)


@listed(R20213, "grpo.py", "GRPO", GRPO, over("(std + 1e-8)"), plus(1, 1e-8))
def r20213(code: Fetched):
    compute = code.take("grpo.py", "compute_advantages").compute_advantages
    return lambda rewards, n: compute(rewards, Of(group_size=n))


@listed(
    "gamendez98/simple-grpo",
    "grpo/GRPO.py",
    "Dr. GRPO",
    "group_mean",
    "R − mean",
    centered,
)
def gamendez(code: Fetched):
    compute = code.take(
        "grpo/GRPO.py", "ToolGRPOTrainer.calculate_advantages"
    ).calculate_advantages
    return lambda rewards, n: compute(
        Of(config=Of(drgrpo=True)), rewards.view(-1, n)
    ).view(-1)


@listed(
    "RobotSail/mini-grpo",
    "cli.py",
    "GRPO",
    GRPO,
    over("(std_0 + 1e-8), std_0 over G"),
    plus(0, 1e-8),
)
def robotsail(code: Fetched):
    calculate = code.take("cli.py", "calculate_advantage").calculate_advantage

    def advantages(rewards, n):
        values = []
        for group in rewards.view(-1, n):
            rollouts = [Of(reward=r.item(), advantage=None) for r in group]
            calculate(Of(rollouts=rollouts))
            values += [rollout.advantage for rollout in rollouts]
        return torch.tensor(values, dtype=rewards.dtype)

    return advantages


@listed(
    "sandeshjung/nanoGRPO",
    "src/grpo_trainer.py",
    "GRPO, group-wise",
    GRPO,
    "R − mean",
    centered,
    same=False,
)
def sandesh(code: Fetched):
    compute = code.take(
        "src/grpo_trainer.py", "GRPOTrainer.compute_advantages"
    ).compute_advantages
    config = Of(advantage_normalization="group", use_baseline=False)
    return lambda rewards, n: compute(Of(grpo_config=config), rewards.view(-1, n)).view(
        -1
    )


@listed(
    "JeevanBhoot/nanoRL",
    "nano_rl/rloo.py",
    "RLOO",
    "leave_one_out",
    "R − the mean of the others",
    others,
)
def jeevan(code: Fetched):
    def advantages(rewards, n):
        names = {"rewards": rewards.view(-1, n), "args": Of(group_size=n)}
        return code.lines("nano_rl/rloo.py", 92, 94, **names).advantages.view(-1)

    return advantages


@listed(
    LINXINRONG,
    CORE,
    "GRPO, GSPO and DAPO",
    GRPO,
    over("max(std_0, 1e-8)"),
    floor(0, 1e-8),
)
def linxinrong(code: Fetched):
    return code.take(
        CORE, "compute_group_relative_advantages"
    ).compute_group_relative_advantages


@listed(
    "InfiniteMalice/gepa-dapo-grn",
    "src/gepa_dapo_grn/dapo_core.py",
    "DAPO",
    GRPO,
    over("max(std_0, 1e-6)"),
    floor(0, 1e-6),
)
def malice(code: Fetched):
    normalize = vars(code.take("src/gepa_dapo_grn/dapo_core.py", "_group_normalize"))[
        "_group_normalize"
    ]
    return lambda rewards, n: normalize(rewards, n)


@listed(
    "JimyMa/NanoRL",
    "nanorl/rl/advantages.py",
    "GRPO",
    GRPO,
    over("max(std_0, 1e-4)"),
    floor(0, 1e-4),
)
def jimyma(code: Fetched):
    return code.take(
        "nanorl/rl/advantages.py", "group_relative_advantages"
    ).group_relative_advantages


def course(code: Fetched):
    step = code.take(
        "cs336_alignment/grpo.py", "compute_group_normalized_rewards"
    ).compute_group_normalized_rewards
    return scored(step, advantage_eps=1e-6, normalize_by_std=True)


FILE = "cs336_alignment/grpo.py"


@listed(
    "ymzhang0303/assignment5-alignment",
    FILE,
    "GRPO",
    GRPO,
    over("(std + 1e-6)"),
    plus(1, 1e-6),
)
def ymzhang(code: Fetched):
    return course(code)


@listed(
    "damek/assignment5-alignment",
    FILE,
    "GRPO",
    GRPO,
    over("(std + 1e-6)"),
    plus(1, 1e-6),
)
def damek(code: Fetched):
    return course(code)


@listed(
    "LibAssignment/cs336-assignment5-alignment",
    "cs336_alignment/rl/utils.py",
    "GRPO",
    GRPO,
    over("(std + 1e-8)"),
    plus(1, 1e-8),
)
def libassignment(code: Fetched):
    names = "GroupRewards", "compute_group_normalized_rewards"
    taken = code.take("cs336_alignment/rl/utils.py", *names, dataclass=dataclass)
    return lambda rewards, n: (
        taken.compute_group_normalized_rewards(rewards, n).advantages
    )


# ---- KL terms ------------------------------------------------------------------------
@listed(
    FELD,
    "src/losses.py",
    "an approximate KL",
    "k1",
    "log π_ref − log π",
    lambda lp, ref: ref - lp,
    same=False,
)
def feld_kl(code: Fetched):
    return code.take("src/losses.py", "compute_kl_divergence").compute_kl_divergence


@listed(
    "Nick-2908/grpo-from-scratch",
    "3_grpo/08_grpo_modular.py",
    "cal_k1",
    "k1",
    "π_ref/π − 1 − log π_ref/π",
    k3,
    same=False,
)
def nick_kl(code: Fetched):
    return code.take("3_grpo/08_grpo_modular.py", "cal_k1").cal_k1


@listed(
    R20213,
    "grpo.py",
    "K3 of DeepSeek's GRPO",
    "k3",
    "(π_ref/π − 1 − log π_ref/π) / 2",
    lambda lp, ref: 0.5 * k3(lp, ref),
    same=False,
)
def r20213_kl(code: Fetched):
    return code.take("grpo.py", "compute_kl_k3").compute_kl_k3


@listed(
    "manuhalapeth/rlhf-from-scratch-on-distilgpt2",
    "rlhf/ppo.py",
    "per token KL",
    "k1",
    "log π − log π_ref",
    lambda lp, ref: lp - ref,
)
def manuhalapeth_kl(code: Fetched):
    return code.take("rlhf/ppo.py", "per_token_kl").per_token_kl


@listed(
    "gamendez98/simple-grpo",
    "grpo/GRPO.py",
    "a KL divergence",
    "k3",
    "π/π_ref − log π/π_ref",
    lambda lp, ref: (lp - ref).exp() - (lp - ref),
    same=False,
)
def gamendez_kl(code: Fetched):
    def kl(log_prob, ref_log_prob):
        return code.lines(
            "grpo/GRPO.py", 333, 334, log_probs=log_prob, ref_log_probs=ref_log_prob
        ).divergence_kl

    return kl


# ---- judged --------------------------------------------------------------------------
def apart(x, y) -> float:
    """The largest difference, over the largest value of y."""
    return ((x - y).abs().max() / y.abs().max()).item()


def off_advantages(fn, hand) -> float:
    """Largest difference over random rewards, two groups of two to eight."""
    rng, worst = torch.Generator().manual_seed(0), 0.0
    by_ids = "group_ids" in fn.__code__.co_varnames
    for n in range(2, 9):
        R = torch.rand(2 * n, generator=rng, dtype=torch.float64)
        A = fn(R.numpy(), (torch.arange(2 * n) // n).numpy()) if by_ids else fn(R, n)
        expected = torch.cat([hand(group) for group in R.view(2, n)])
        worst = max(worst, apart(torch.as_tensor(A).double(), expected))
    return worst


def off_kl(fn, hand) -> float:
    """Largest difference over 500 random pairs of log-probabilities."""
    rng = torch.Generator().manual_seed(0)
    lp, ref = (
        -torch.rand(500, generator=rng, dtype=torch.float64) * 4 - 0.1 for _ in range(2)
    )
    return apart(fn(lp, ref), hand(lp, ref))


def judged(folder: Path) -> dict[str, dict]:
    """Each: what it says it is, the verdict, and how far it is from the formula by hand."""
    losses = tomllib.loads(LOSSES.read_text(encoding="utf-8")).values()
    commits = {loss["repo"]: loss["commit"] for loss in losses}
    out = {}
    for name, e in EVERY.items():
        fn = e.wrap(Fetched(folder / e.repo.replace("/", "+")))
        off_formula = off_kl if e.is_kl else off_advantages
        out[name] = {
            "repo": e.repo,
            "commit": commits[e.repo],
            "file": e.file,
            "says": e.says,
            "held": e.held,
            **checked(e, fn),
            "by_hand": e.formula,
            "same": e.same,
            "off_formula": off_formula(fn, e.hand),
        }
    return out


READ_OFF = ("ddof", "eps", "divides")  # words of the assumptions that the table has


def checked(e: Estimator, fn: Callable) -> dict[str, Any]:
    """What check_kl or check_advantages says of a function."""
    check = upref.check_kl if e.is_kl else upref.check_advantages
    try:
        report = check(fn, e.held)
    except InputError as error:
        return {"refused": str(error)}
    failures = []
    for f in report.failures:
        why = f.cause or describe_pair(f.expected, f.found)[1]
        failures.append(f"{f.oracle}: {why}")
    return {
        "check": bool(report),
        "hp": {k: v for k, v in report.hp.items() if v is not None},
        "failures": failures,
        "read": [x for x in report.assumptions if any(word in x for word in READ_OFF)],
    }


LOSSES = Path(__file__).parent / "losses.toml"
