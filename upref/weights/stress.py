# SPDX-License-Identifier: Apache-2.0
"""The ways in which an input can be unusual, and a batch of each by itself, of every
two together, of all at once.

The table of docs/what-check-sees.md is made of AXES.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import cycle, product
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from upref.registry import REDUCE, Objective
from upref.rollouts import Rollouts
from upref.weights.batches import GUARD, MU, breakpoints

LEAST_DOUBT = 1e-8  # 1 - π of the most certain tokens
UNIT_ADVANTAGES = (1.0, -1.0)
LONG = (1, 15, 17, 65, 129, 256, 257, 300, 512, 520)  # tokens of a response
TILES = (256, 512, 1024)  # columns of a batch, all of which some of its responses fill
LONGEST = (1025, 2049)  # tokens: a little more than limits of real runs
WIDEST = 4100  # columns of a batch
MANY_ROWS = 1040  # responses of a batch: 260 prompts of 4
ONE_PROMPT = 256  # responses to one prompt
BEHIND = (5, 100)  # masked columns in front of all responses, as of a prompt
FULL_WIDTH = 48  # columns of a batch without padding
WIDE_SIZES = (63, 64, 65, 128)  # responses of a batch, and columns
HOLES = (16, 40, 100, 300)  # masked tokens inside of a response
LONG_HOLES = (600, 900)  # the same in batches of LONGEST
TURNS = (5, 12, 40)  # parts of a response, with masked tokens between them
LATE = (33, 100)  # masked columns in front of a response
VERY_LATE = (1030, 2000)  # the same in batches of LONGEST
MASKS = ("plain", "a hole", "turns", "left padding", "late")
MOSTLY = ("A = 0", "A > 0", "A < 0", "clipped")
RANKS = 4


class Order(NamedTuple):
    """An order in which a trainer deals out rows.

    Attributes:
        by: what is sorted.
        first: which lengths are in front; "shortest, and last" has the longest in the
            middle.
        by_rank: whether the rows of each of RANKS ranks are sorted by themselves.
    """

    by: Literal["length", "A", "prompt"]
    first: Literal["longest", "shortest", "shortest, and last"] = "shortest"
    by_rank: bool = False


LONGEST_FIRST = Order("length", "longest")
SHORTEST_FIRST = Order("length", "shortest")
LONGEST_FIRST_BY_RANK = Order("length", "longest", by_rank=True)
SHORTEST_FIRST_BY_RANK = Order("length", "shortest", by_rank=True)
SHORTEST_AT_BOTH_ENDS_BY_RANK = Order("length", "shortest, and last", by_rank=True)
BEST_FIRST = Order("A")
PROMPT_BY_PROMPT = Order("prompt")
ORDERS = (
    LONGEST_FIRST,
    SHORTEST_FIRST,
    LONGEST_FIRST_BY_RANK,
    SHORTEST_FIRST_BY_RANK,
    SHORTEST_AT_BOTH_ENDS_BY_RANK,
    BEST_FIRST,
    PROMPT_BY_PROMPT,
)
MOST_NEAR_MEAN = 40  # tokens of a response whose mean log r is near a bound
MOST_LOG_PRODUCT = 80.0  # |log| of a product of ratios that float32 holds
RHO = (3.0, -3.0, 6.0, -6.0, 12.0, -12.0, 18.0, -18.0)  # log π_old/μ of a token
RHO_PRODUCT = 19.0  # the largest |sum| of it over a response
# log π_ref / π_θ in batches that are unusual in other ways too
CROSSED_REF = (1.0, -1.0, 3.0, -3.0, 6.0, -6.0, 9.0, -9.0)
# estimators whose advantages are as large as the rewards
ANY_SIZE = ("group_mean", "reward", "leave_one_out")
MOST_ENTROPY = 12.5  # nats: ln of 268,000 tokens
# responses that are otherwise, in a batch of which most responses are of one kind
EXCEPTIONS = 6


@dataclass(frozen=True)
class Axis:
    """One way in which an input can be unusual; the rest of it is ordinary."""

    words: str
    A: tuple[float, ...] = UNIT_ADVANTAGES
    mu: tuple[float, ...] = MU
    lengths: tuple[int, ...] = (1, 4, 2, 6)
    rows: int = 48
    ref: tuple[float, ...] = (0.1, -0.2)  # log π_ref / π_θ
    far: tuple[float, ...] = ()  # log r of some of the tokens
    share: float = 0.25  # the part of the tokens that have it
    # whether other tokens are certain: 1 - π_old and 1 - π_θ from 0.1 to LEAST_DOUBT
    has_certain: bool = False
    # "too": a loss is measured in float32 too; "alone": in float32 alone; else in
    # float64. For float32 all numbers are numbers of float32.
    in_float32: str = ""
    masks: tuple[str, ...] = MASKS[:1]
    mostly: str = ""  # one of MOSTLY: what most responses, or tokens, are
    width: int = 0  # columns; 0: as many as the responses need
    # further A, where the objective's estimator gives advantages of any size
    more_A: tuple[float, ...] = ()
    # log π_old/μ, where the objective corrects for its sampler
    rho: tuple[float, ...] = ()
    entropy: float = 3.0  # the largest one, in nats
    zero_entropy: bool = False  # whether it is 0 for half of a response's tokens
    is_on_policy: bool = False  # every ratio is 1
    by_token: bool = False  # each token has an advantage of its own, of either sign
    holes: tuple[int, ...] = HOLES
    late: tuple[int, ...] = LATE
    order: Order | None = None  # None: a random one
    # neighbors that answer one prompt; ids ascend from block to block. 0: ids in random
    # order
    block: int = 0
    prompts_in_turn: int = 0  # ids begin again after so many blocks; 0: they do not
    behind: int = 0  # masked columns in front of all responses
    # what the weights of a loss must depend on, where not all losses are tested
    needs: Literal["", "reference", "sampler", "advantages of tokens", "entropies"] = ""

    def rounded(self, numbers: np.ndarray) -> np.ndarray:
        """Return the numbers in float64, with the digits of float32 where a loss is
        measured in it.
        """
        if not self.in_float32:
            return numbers
        return numbers.astype(np.float32).astype(float)


LARGE = "more than 65,504 tokens"
AXES = {
    "ratios": Axis(
        "|log r| of 4.5 to 15 (a response's: to 9) at π_old from 0.02 to 0.9",
        mu=(0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 0.9),
        lengths=(1, 4, 17, 40),
        far=(4.5, -4.5, 6.0, -6.0, 8.0, -8.0, 11.0, -11.0, 15.0, -15.0),
        share=0.6,
        block=16,
    ),
    "advantages": Axis(
        "|A| from 1e-6 to 40, and of 100 and 3,000 where the estimator does not divide by a standard deviation; in "
        f"{MANY_ROWS:,} responses, {MANY_ROWS // 4} prompts of 4 after each other",
        A=(1e-6, -1e-6, 1e-3, -1e-3, 7.0, -7.0, 12.0, -12.0, 40.0, -40.0),
        more_A=(100.0, -100.0, 3000.0, -3000.0),
        mu=(0.001, *MU),
        rows=MANY_ROWS,
        block=4,
    ),
    "certain tokens": Axis(
        f"π_old from 0.95 to exactly 1; π_old and π_θ both from 0.9 to 1 - {LEAST_DOUBT:g}",
        mu=(0.95, 0.97, 0.99, 0.999, 0.99999, 1.0),
        lengths=(1, 4, 17, 40),
        has_certain=True,
        block=8,
    ),
    "lengths": Axis(
        "responses of up to 520 tokens, of 256 and 512 too",
        lengths=LONG,
        rows=65,
        order=LONGEST_FIRST,
    ),
    "masks": Axis(
        f"holes of {HOLES[0]} to {HOLES[-1]} tokens, {TURNS[0]} to {TURNS[-1]} turns, left padding, "
        f"responses that begin {LATE[0]} to {LATE[-1]} columns late",
        lengths=(1, 6, 40, 300),
        rows=63,
        masks=MASKS,
        order=SHORTEST_FIRST,
    ),
    "reference": Axis(
        f"|log π_ref / π_θ| up to 19; up to {max(CROSSED_REF):g} in the batches below",
        ref=(*CROSSED_REF, 14.0, -14.0, 19.0, -19.0),
        mu=(1e-9, *MU),
        block=1,
        prompts_in_turn=12,
        needs="reference",
    ),
}
_ORDINARY = tuple(AXES.values())
AXES["sampler"] = Axis(
    f"beside a sampler's correction: |log π_old/μ| up to {max(RHO):g} for a token, and up to {RHO_PRODUCT:g} added up "
    "over a response, in responses of 1 to 300 tokens; μ of exactly 1 for some tokens, and for all of some responses",
    lengths=(1, 4, 17, 65, 300),
    rows=65,
    rho=RHO,
    block=5,
    needs="sampler",
)
AXES["entropies"] = Axis(
    f"beside entropies: 0 for half of the tokens, the rest up to {MOST_ENTROPY:g} nats",
    lengths=(1, 4, 17, 65),
    entropy=MOST_ENTROPY,
    zero_entropy=True,
    block=2,
    prompts_in_turn=6,
    needs="entropies",
)
TILED = (
    f"{TILES[0]}, {TILES[1]} and {TILES[2]:,} columns, all of which some responses fill"
)
for _T in TILES:
    AXES[f"{_T} columns"] = Axis(
        TILED,
        lengths=(1, _T // 4, _T - 1, _T),
        rows=4096 // _T,
        width=_T,
        order=LONGEST_FIRST_BY_RANK,
    )
AXES["no padding"] = Axis(
    f"batches in which every response fills all {FULL_WIDTH} columns",
    lengths=(FULL_WIDTH,),
    rows=16,
    width=FULL_WIDTH,
    block=16,
)
AXES["long responses"] = Axis(
    f"responses of {LONGEST[0]:,} and {LONGEST[1]:,} tokens, all in {WIDEST:,} columns, with holes of {LONG_HOLES[0]} and "
    f"{LONG_HOLES[1]} tokens, or {VERY_LATE[0]:,} and {VERY_LATE[1]:,} columns late",
    lengths=LONGEST,
    rows=8,
    masks=("a hole", "late"),
    holes=LONG_HOLES,
    late=VERY_LATE,
    width=WIDEST,
)
AXES["one prompt"] = Axis(
    f"{ONE_PROMPT} responses to one prompt",
    rows=ONE_PROMPT,
    block=ONE_PROMPT,
)
AXES["equal lengths"] = Axis(
    f"32 responses of one length, behind {BEHIND[0]} masked columns",
    lengths=(12,),
    rows=32,
    behind=BEHIND[0],
    block=16,
)
_BEHIND = Axis(
    f"responses that all begin behind {BEHIND[0]} or {BEHIND[1]} masked columns, off policy",
    lengths=(2, 9, 16, 23),
    rows=32,
)
AXES[f"behind {BEHIND[0]} columns"] = replace(
    _BEHIND, behind=BEHIND[0], order=SHORTEST_FIRST_BY_RANK, block=1, prompts_in_turn=8
)
AXES[f"behind {BEHIND[1]} columns"] = replace(
    _BEHIND,
    lengths=(8, 16, 24, 32),  # as padded to a multiple of 8
    behind=BEHIND[1],
    order=SHORTEST_AT_BOTH_ENDS_BY_RANK,
    block=4,
    prompts_in_turn=4,
)
AXES["right-aligned"] = replace(
    _BEHIND,
    words="responses that all end in the last column, the best first",
    masks=("left padding",),
    order=BEST_FIRST,
    block=4,
)
AXES["advantages of tokens"] = Axis(
    "where tokens have advantages of their own: both signs within one response, of 17 to 300 tokens",
    lengths=(17, 65, 129, 300),
    rows=16,
    by_token=True,
    needs="advantages of tokens",
)
AXES["first step"] = Axis(
    "64 responses of a first step, where π_θ, π_old and π_ref are equal; none of them has a token in the first "
    f"{LATE[0]} columns, as behind prompts",
    lengths=(1, 17, 65),
    rows=64,
    ref=(0.0,),
    masks=("late",),
    width=LATE[-1] + 66,
    is_on_policy=True,
)
_EVERY_TWO = replace(
    AXES["masks"],
    A=(1.0, -1.0, 1e-6, -1e-6, 7.0, -7.0, 40.0, -40.0),
    mu=(1e-4, 0.02, 0.3, 0.9, 0.95, 0.99, 0.999, 0.99999, 1.0),
    ref=(0.1, -0.2, *CROSSED_REF),
    far=(6.0, -6.0, 15.0, -15.0),
)
AXES["every two"] = replace(
    _EVERY_TWO,
    words="every two of these together, in float64 and in float32",
    lengths=(1, 17, 129, 257, 520),
    rows=64,  # 8 x 5 of them have each A with each length
    in_float32="too",
)
CROSSED = "every two of these, batches of {0} responses and {0} columns, and batches of which most or all is {1}".format(
    ", ".join(map(str, WIDE_SIZES)), ", ".join(MOSTLY)
)
# each kind of MOSTLY, and none, with each B and each T, and in both dtypes; each of ORDERS
# in both dtypes too
_next_order = {"alone": cycle(ORDERS), "": cycle(ORDERS)}
for _i, _kind in enumerate(("", *MOSTLY)):
    for _j, _B in enumerate(WIDE_SIZES):
        _T = WIDE_SIZES[(_i + _j) % len(WIDE_SIZES)]
        _dtype = "alone" if (_i + _j // 2) % 2 else ""
        AXES[f"{_B} x {_T}{_kind and f', {_kind}'}"] = replace(
            _EVERY_TWO,
            words=CROSSED,
            lengths=(1, _T // 3, _T),
            rows=_B,
            mostly=_kind,
            width=_T,
            in_float32=_dtype,
            order=next(_next_order[_dtype]) if _kind else None,
        )
_ALL = replace(
    _EVERY_TWO,
    words=f"all at once, in 128 responses of up to 640 tokens, {LARGE}, in float64 and in float32",
    A=tuple(A for axis in _ORDINARY for A in axis.A),
    mu=tuple(
        mu
        for name, axis in AXES.items()
        for mu in (MU if name in ("ratios", "advantages") else axis.mu)
    ),
    lengths=(640,) * 30 + LONG,
    rows=128,
    ref=CROSSED_REF,
)
AXES["all at once"] = replace(_ALL, in_float32="too")
for _i, _kind in enumerate(MOSTLY):
    AXES[f"all at once, {_kind}"] = replace(
        _ALL,
        words="the same where most is " + ", ".join(MOSTLY),
        mostly=_kind,
        in_float32="alone" if _i % 2 else "",
    )
GAPS = "with gaps"  # every loss must take these
NEGATIVE = "that are negative"
SMALL_MODULUS = math.lcm(*range(1, 13), 64, 100)
EQUAL_MODULUS = math.lcm(2**32, 10**6)
NAMED: dict[str, Callable[[Tensor], Tensor]] = {  # group ids
    GAPS: lambda g: 7 + 300 * g,
    NEGATIVE: lambda g: -1 - g,
    "equal modulo 2 to 12, 64 and 100": lambda g: 11 + SMALL_MODULUS * g,
    "beyond 2^40, some equal in 32 bits and modulo 10^6": lambda g: (
        2**40 + g % 2 + EQUAL_MODULUS * (g // 2)
    ),
}


def stress_batch(
    axis: str, objective: Objective, seed: int = 0, ids: tuple[str, ...] = (), **hp: Any
) -> Rollouts:
    """Return a batch that is unusual in one way, with ratios around 1 and around the
    objective's bounds.

    The batch is kept for the next check: do not write to its tensors.

    Args:
        axis: the way, a key of AXES.
        objective: whose bounds the ratios are around.
        seed: of all numbers.
        ids: keys of NAMED, by which groups are renamed, each in some rows of every A
            and of every length.
        **hp: hyperparameters.

    Returns:
        A batch that others share.
    """
    bounds = tuple(
        tuple(breakpoints(objective, sign, 0.02, **hp)) or (1.5,)
        for sign in (1.0, -1.0)
    )
    any_size = bool(AXES[axis].more_A) and objective.adv in ANY_SIZE
    corrects = bool(AXES[axis].rho) and objective.sampler is not None
    return _stress_batch(axis, objective.level, bounds, any_size, corrects, seed, ids)


@lru_cache(128)  # of about 2 MB
def _stress_batch(
    axis: str,
    level: str,
    bounds: tuple[tuple[float, ...], ...],
    any_size: bool,
    corrects: bool,
    seed: int,
    ids: tuple[str, ...],
) -> Rollouts:
    """Make the batch for all objectives with this level and these bounds of r.

    Args:
        axis: a key of AXES.
        level: of the objective: what has a ratio, a token or a response.
        bounds: the ratios at which the weight jumps, by the sign of A.
        any_size: whether the estimator gives advantages of any size.
        corrects: whether there is a correction of the sampler.
        seed: of the draws.
        ids: as for `stress_batch`.
    """
    stress = AXES[axis]
    by_response = level in REDUCE
    numbers = _draw_numbers(axis, level, any_size, seed, ids)
    mask = numbers.batch.mask.numpy()
    log_r = _log_ratios(stress, level, bounds, numbers)
    # such an objective may order the tokens: no two have one probability
    distinct = numbers.distinct if level == "custom" else 1.0
    # log π_old, so low that log π_θ is below 0
    largest = np.where(log_r > 0, -log_r - 1e-3 * distinct, 0)
    old = np.minimum(numbers.old * distinct, largest)
    lp = np.minimum(old + log_r, 0)
    if stress.has_certain and not by_response:
        old, lp = np.where(numbers.is_certain, numbers.certain_log_probs, (old, lp))
    has_sampler = stress.rho and corrects
    if has_sampler:
        old = np.minimum(old, numbers.log_rho - 1e-3)  # μ is a probability too
        old = np.where(numbers.is_sampled_surely, numbers.log_rho, old)
        lp = np.minimum(old + log_r, 0)
    ref = np.minimum(lp + numbers.ref, -1e-3)

    def fill(values: np.ndarray, padding: float) -> Tensor:
        """Return the values of tokens, and this number in the padding, [B, T]."""
        return torch.from_numpy(np.where(mask, stress.rounded(values), padding))

    # a test checks that these are valid, so they are not checked for each objective
    return numbers.batch.but(
        logp=fill(lp, -1.0),
        logp_old=fill(old, -1.1),
        logp_ref=fill(ref, -1.2),
        logp_sampler=fill(old - numbers.log_rho, -1.2) if has_sampler else None,
    )


def _log_ratios(
    stress: Axis,
    level: str,
    bounds: tuple[tuple[float, ...], ...],
    numbers: "RandomNumbers",
) -> np.ndarray:
    """Return log r of each slot, [B, T].

    Each response is near one of the bounds for its sign of A: half of its tokens have a
    log r of 0.2 to 1.8 times that bound's, and the others one near 0. The axis and the
    level then replace some of these.

    Args:
        stress: the axis.
        level: of the objective.
        bounds: the ratios at which the weight jumps, by the sign of A.
        numbers: of `_draw_numbers`.
    """
    A = numbers.A
    bounds_up, bounds_down = (np.log(side) for side in bounds)  # A > 0, A < 0
    bound_count = np.where(A > 0, len(bounds_up), len(bounds_down))
    bound_number = (numbers.bound_share * bound_count).astype(int)
    bound = np.where(
        A > 0,
        bounds_up[bound_number % len(bounds_up)],
        bounds_down[bound_number % len(bounds_down)],
    )
    near_bound = bound[:, None] * numbers.near_bound
    log_r = np.where(numbers.is_near, near_bound, numbers.far_from_bound)
    if stress.mostly == "clipped":
        last_up = max(bounds_up.max(), 0.1)
        last_down = min(bounds_down.min(), -0.1)
        last_bound = np.where(A > 0, last_up, last_down)
        beyond = last_bound[:, None] * numbers.beyond_last_bound
        log_r = np.where(numbers.is_clipped, beyond, log_r)
    if stress.far:
        log_r = np.where(numbers.is_far, numbers.far_log_ratio, log_r)
    if level == "custom":
        log_r = _coupled_log_ratios(log_r, near_bound, numbers)
    if level in REDUCE:
        # the ratio of the response is drawn, and its tokens are scattered around it
        tokens = 1 if level == "sequence_mean" else numbers.lengths[:, None]
        log_r = log_r[:, :1] / tokens + numbers.differences
    if stress.is_on_policy:
        return np.zeros_like(log_r)
    return log_r


def _coupled_log_ratios(
    log_r: np.ndarray, near_bound: np.ndarray, numbers: "RandomNumbers"
) -> np.ndarray:
    """Return log r for an objective that couples the tokens of a response, [B, T]: no
    two are equal, their product in a response stays in range (MOST_LOG_PRODUCT), and
    the mean of every third response that is not long is near a bound.

    Args:
        log_r: of each slot, before.
        near_bound: log r near the bound of its response.
        numbers: of `_draw_numbers`.
    """
    mask = numbers.batch.mask.numpy()
    order = numbers.order
    sizes = np.where(mask, np.abs(log_r), 0)
    sums = np.cumsum(sizes[:, order], 1)[:, order.argsort()]
    is_in_range = sums < MOST_LOG_PRODUCT
    log_r = np.where(is_in_range, log_r * numbers.distinct, numbers.tiny_log_ratio)
    is_third = np.arange(len(log_r)) % 3 == 1
    is_near_mean = is_third & (numbers.lengths <= MOST_NEAR_MEAN)
    around_mean = (near_bound[:, :1] + numbers.differences) * numbers.distinct
    return np.where(is_near_mean[:, None], around_mean, log_r)


@dataclass(frozen=True)
class RandomNumbers:
    """The random numbers of a batch, which depend on no bound of an objective. They are
    [B, T] unless a comment says otherwise.
    """

    batch: Rollouts  # without log-probabilities
    A: np.ndarray  # the advantage of each response, [B]
    lengths: np.ndarray  # the number of tokens of each response, [B]
    # from 0 to 1: which of the bounds for its sign of A a response is near, [B]
    bound_share: np.ndarray
    near_bound: np.ndarray  # log r near a bound, as a multiple of the bound's
    is_near: np.ndarray
    far_from_bound: np.ndarray  # log r elsewhere
    # log r of a clipped token, as a multiple of the last bound's
    beyond_last_bound: np.ndarray
    is_clipped: np.ndarray
    far_log_ratio: np.ndarray  # a far log r
    is_far: np.ndarray
    old: np.ndarray  # log π_old
    ref: np.ndarray  # log π_ref / π_θ
    is_certain: np.ndarray
    certain_log_probs: np.ndarray  # log π_old and log π_θ of certain tokens, [2, B, T]
    log_rho: np.ndarray
    is_sampled_surely: np.ndarray  # μ is 1
    # what the log r of tokens differs by from the mean of their response
    differences: np.ndarray
    # Where an objective may multiply the ratios of a response:
    order: (
        np.ndarray
    )  # of the columns, in which ratios are multiplied up to a limit, [T]
    distinct: np.ndarray  # factors of log r, so that no two tokens have one ratio
    tiny_log_ratio: np.ndarray  # log r of tokens beyond the limit


NOT_DRAWN = np.zeros((1, 1))  # what an axis or a level does not draw


@lru_cache(160)  # of about 2 MB
def _draw_numbers(
    axis: str, level: str, any_size: bool, seed: int, ids: tuple[str, ...]
) -> RandomNumbers:
    """Draw the random numbers of an axis. The result is kept for the next call: do not
    write to its arrays.

    The draws follow one another in one generator: their order is part of the batch.

    Args:
        axis, level, any_size, seed, ids: those of `_stress_batch`.
    """
    stress = AXES[axis]
    responses = _compose_responses(axis, any_size, seed, len(ids))
    mask = responses.mask
    rng = np.random.default_rng()
    rng.bit_generator.state = responses.generator_state
    # all fields but the batch
    numbers: dict[str, np.ndarray] = dict.fromkeys(
        (field.name for field in fields(RandomNumbers)[1:]), NOT_DRAWN
    )
    numbers |= {"A": responses.A, "lengths": responses.lengths}
    numbers |= _draw_log_ratios(stress, level, responses, rng)
    numbers |= _draw_log_probs(stress, level in REDUCE, mask, rng)
    entropy = _draw_entropies(stress, responses, rng)
    group = _draw_groups(stress, responses.id_kind, ids, rng)
    share_of_A = _shares_of_tokens(mask) if stress.by_token else np.ones(mask.shape)
    adv = responses.A[:, None] * share_of_A
    batch = Rollouts.unchecked(
        adv=torch.tensor(stress.rounded(adv)),
        mask=torch.tensor(mask),
        group=group,
        entropy=torch.as_tensor(np.where(mask, stress.rounded(entropy), 1.0)),
    )
    return RandomNumbers(batch, **numbers)


def _draw_among(
    numbers: tuple[float, ...], shape: tuple[int, ...], rng: np.random.Generator
) -> np.ndarray:
    """Draw one of these numbers for each slot of an array of this shape."""
    return np.array(numbers)[rng.integers(len(numbers), size=shape)]


def _draw_log_ratios(
    stress: Axis, level: str, responses: "Responses", rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Draw the numbers of which log r is made: near a bound of the objective, elsewhere,
    beyond the last bound, and far; then those of objectives of whole responses.

    Args:
        stress: the axis.
        level: of the objective.
        responses: of the batch.
        rng: draws them.

    Returns:
        Field of RandomNumbers -> its numbers, without those that are not drawn.
    """
    by_response = level in REDUCE
    mask = responses.mask
    B, T = mask.shape
    numbers: dict[str, np.ndarray] = {}
    numbers["bound_share"] = rng.random((B,))
    numbers["near_bound"] = rng.uniform(0.2, 1.8, (B, T))
    numbers["is_near"] = rng.random((B, T)) < 0.5
    normal = rng.normal(size=(B, T))
    numbers["far_from_bound"] = normal * _draw_among((1e-4, 0.02, 0.3), (B, T), rng)
    if stress.mostly == "clipped":
        if by_response:
            is_clipped = ~responses.is_exception[:, None]
        else:
            is_clipped = rng.random((B, T)) >= 0.1
        numbers["is_clipped"] = is_clipped
        numbers["beyond_last_bound"] = rng.uniform(1.1, 2, (B, T))
    if stress.far:
        far_log_ratio = _draw_among(stress.far, (B, T), rng)
        share = stress.share / (4 if stress.mostly == "clipped" else 1)
        is_far = rng.random((B, T)) < share
        if by_response:
            side = responses.side[:, None]
            far_log_ratio = np.abs(far_log_ratio) * np.where(side == ABOVE, 1, -1)
            is_far = side != NEAR
        guard = GUARD[level] - 1  # beyond it, implementations clamp log r
        numbers["is_far"] = is_far
        numbers["far_log_ratio"] = far_log_ratio.clip(-guard, guard)
    if level == "custom":
        numbers["order"] = rng.permutation(T)
        numbers["distinct"] = rng.uniform(0.98, 1, (B, T))
        numbers["tiny_log_ratio"] = rng.normal(size=(B, T)) * 1e-4
    if by_response or level == "custom":
        differences = _differences_of_tokens(mask, responses.lengths, rng)
        is_far_response = (responses.side != NEAR)[:, None] & bool(stress.far)
        numbers["differences"] = differences * np.where(is_far_response, 0.05, 1)
    return numbers


def _draw_log_probs(
    stress: Axis, by_response: bool, mask: np.ndarray, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Draw log-probabilities of the old policy, and those of the sampler and of the
    reference policy relative to others.

    Args:
        stress: the axis.
        by_response: the objective has a ratio of the whole response.
        mask: the tokens, [B, T].
        rng: draws them.

    Returns:
        Field of RandomNumbers -> its numbers, without those that are not drawn.
    """
    B, T = mask.shape
    numbers: dict[str, np.ndarray] = {}
    with np.errstate(divide="ignore"):  # log 0 is minus infinity
        numbers["old"] = np.log(_draw_among(stress.mu, (B, T), rng))
    if stress.has_certain and not by_response:
        numbers["is_certain"] = rng.random((B, T)) < 0.6
        # both policies leave a doubt of LEAST_DOUBT to 0.1
        doubt = 10 ** rng.uniform(math.log10(LEAST_DOUBT), -1, (2, B, T))
        numbers["certain_log_probs"] = np.log1p(-doubt)
    if stress.rho:
        log_rho = _sampler_ratios(stress.rho, mask, rng)
        # half of the responses whose log ρ is near 0 have μ = 1 at all tokens
        is_sure_throughout = (np.arange(B) % 6 == 5)[:, None]
        log_rho = np.where(is_sure_throughout, -np.abs(log_rho), log_rho)
        is_sure = is_sure_throughout | (rng.random((B, T)) < 0.1)
        numbers["log_rho"] = log_rho
        numbers["is_sampled_surely"] = (log_rho <= 0) & is_sure
    numbers["ref"] = _draw_among(stress.ref, (B, T), rng)
    return numbers


def _draw_entropies(
    stress: Axis, responses: "Responses", rng: np.random.Generator
) -> np.ndarray:
    """Draw the entropy of each slot, [B, T]. Each is exact in float32, in which many
    losses compare entropies with a quantile.
    """
    mask = responses.mask
    drawn = rng.uniform(0, stress.entropy, mask.shape)
    entropy = drawn.astype(np.float32).astype(float)
    if stress.zero_entropy:
        return _with_zero_entropies(entropy, mask, responses.lengths)
    return entropy


def _draw_groups(
    stress: Axis, id_kind: np.ndarray, ids: tuple[str, ...], rng: np.random.Generator
) -> Tensor:
    """Draw the group of each response, [B]: about four responses are of one prompt. Where
    kinds of ids are named, they decide the groups.

    Args:
        stress: the axis, which may have blocks of rows of one prompt.
        id_kind: of each response, [B].
        ids: as for `stress_batch`.
        rng: draws them, whether they are used or not.
    """
    B = len(id_kind)
    is_by_prompt = stress.order == PROMPT_BY_PROMPT
    prompt = rng.permutation(B) % max(1, B // 4)
    if ids:
        return _ids_of_kinds(id_kind, ids, is_by_prompt)
    if stress.block:
        prompt = np.arange(B) // stress.block
        if stress.prompts_in_turn:
            prompt = prompt % stress.prompts_in_turn
    elif is_by_prompt:
        prompt = np.sort(prompt)
    return torch.as_tensor(prompt)


FAR_TOKEN = (10.5, 18.0)  # |log r| of single tokens of a response near 1
ALTERNATING = 8  # tokens of a response that alternate


def _differences_of_tokens(
    mask: np.ndarray, lengths: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Return what the log r of each token differs by from the mean of its response,
    [B, T]. Responses in turn have tokens near each other, one far token, two far ones
    of opposite sign, alternating ones, long tails, and equal ones.

    Args:
        mask: the tokens, [B, T].
        lengths: their number in each response, [B].
        rng: draws them.
    """
    B, T = mask.shape
    near = rng.normal(size=(B, T)) * 0.1
    # columns of each row in random order, those of tokens first: places 0 to T - 1
    place = np.where(mask, rng.random((B, T)), 2).argsort(1).argsort(1)
    size = rng.uniform(*FAR_TOKEN, (B, 1)) * np.where(np.arange(B) % 2, -1, 1)[:, None]
    count = lengths[:, None]
    one_far = np.where(place == 0, size * count / np.maximum(count - 1, 1), 0)
    two_far = np.where(place == 0, size, 0) - np.where(place == 1, size, 0)
    alternating = np.where(
        place < ALTERNATING, rng.uniform(2, 5, (B, T)) * (1 - 2 * (place % 2)), 0
    )
    tails = (0.2 * rng.standard_t(1.5, size=(B, T))).clip(-9, 9)
    tails = np.where(place < 4 * ALTERNATING, tails, 0)
    kinds = (near, near + one_far, near + two_far, near + alternating, tails)
    kind = (rng.permutation(B) % (len(kinds) + 1))[:, None]
    differences = np.select([kind == i for i in range(len(kinds))], kinds, 0.0)
    differences = np.where(mask, differences, 0)
    return np.where(mask, differences - differences.sum(1, keepdims=True) / count, 0)


def _with_zero_entropies(
    entropy: np.ndarray, mask: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Return the entropies, with the lower half of each response set to 0 where it has
    at least four tokens. The objectives that select tokens by entropy do so at a
    response's 80 % quantile, which lies above that half.

    Args:
        entropy: [B, T].
        mask: the tokens, [B, T].
        lengths: the number of tokens of each response, [B].
    """
    rank = np.where(mask, entropy, np.inf).argsort(1).argsort(1)
    is_zero = (rank < lengths[:, None] // 2) & (lengths[:, None] >= 4)
    return np.where(is_zero, 0, entropy)


def _ids_of_kinds(
    id_kind: np.ndarray, ids: tuple[str, ...], is_by_prompt: bool
) -> Tensor:
    """Return group ids, [B]: the responses of each kind of ids are those of three
    prompts, which come in turns.

    Args:
        id_kind: of each response: 0 for a plain id, k for the k-th of `ids`.
        ids: kinds of ids, names of NAMED.
        is_by_prompt: whether the three prompts of a kind come one after the other, and
            not in turns.
    """
    kind_count = len(ids) + 1
    is_of_kind = id_kind[:, None] == np.arange(kind_count)
    number_in_kind = (np.cumsum(is_of_kind, 0) - 1)[np.arange(len(id_kind)), id_kind]
    if is_by_prompt:
        prompt_in_kind = number_in_kind * 3 // is_of_kind.sum(0)[id_kind]
    else:
        prompt_in_kind = number_in_kind % 3
    plain_ids = torch.as_tensor(id_kind + kind_count * prompt_in_kind)
    group = plain_ids
    for position, id_name in enumerate(ids):
        is_of_this_kind = plain_ids % kind_count == position + 1
        group = torch.where(is_of_this_kind, NAMED[id_name](plain_ids), group)
    return group


def _shares_of_tokens(mask: np.ndarray) -> np.ndarray:
    """Return factors that give the tokens of a response advantages of their own, [B, T].
    They have five sizes and, at every third token, the other sign. The padding has the
    factor of the first token.
    """
    B, T = mask.shape
    place = np.arange(B)[:, None] + np.arange(T)
    share = np.where(place % 3 == 2, -0.5, 1) * (1 + place % 5 / 4)
    first = np.take_along_axis(share, mask.argmax(1)[:, None], 1)
    return np.where(mask, share, first)


NEAR, ABOVE, BELOW = range(3)  # where the ratio of a response is, beside 1


class Responses(NamedTuple):
    """What is drawn of the responses of a batch before their tokens. Arrays are [B]."""

    is_exception: np.ndarray  # from what most are; True where they are of no one kind
    A: np.ndarray
    lengths: np.ndarray
    id_kind: np.ndarray  # 0: its group keeps its id; else the kind that it gets, from 1
    side: np.ndarray  # NEAR, ABOVE or BELOW
    mask: np.ndarray  # [B, T]
    generator_state: Any  # after these draws


@lru_cache(512)
def _compose_responses(
    axis: str, any_size: bool, seed: int, id_kinds: int
) -> Responses:
    """Draw the responses of a batch: what does not depend on an objective. The result
    is kept for the next call: do not write to its arrays.

    Args:
        axis, any_size, seed: those of `_stress_batch`.
        id_kinds: the number of kinds of ids that groups get.
    """
    stress = AXES[axis]
    rng = np.random.default_rng(seed)
    stress = replace(stress, A=stress.A + stress.more_A) if any_size else stress
    B = stress.rows
    is_exception = (
        np.arange(B) % max(1, B // EXCEPTIONS) == 0
        if stress.mostly
        else np.ones(B, dtype=bool)
    )
    A, lengths, mask_kind, id_kind, side = _assign_levels(
        stress, id_kinds + 1, is_exception, rng
    )
    if stress.mostly == "A = 0":
        A = np.where(is_exception, A, 0.0)
    if stress.mostly in ("A > 0", "A < 0"):
        sign = 1 if stress.mostly == "A > 0" else -1
        # in half of these batches all responses have this sign
        has_exceptions = B not in (64, 128)
        A = sign * np.abs(A) * np.where(is_exception & has_exceptions, -1, 1)
    order = _order_of_rows(stress.order, A, lengths, id_kind)
    is_exception, A, lengths, mask_kind, id_kind, side = (
        numbers[order]
        for numbers in (is_exception, A, lengths, mask_kind, id_kind, side)
    )
    T = stress.width or max(stress.lengths) + 1 + (
        max(HOLES) if len(stress.masks) > 1 else 0
    )
    mask = np.zeros((B, T), dtype=bool)
    for i in range(B):
        columns = _columns_of_response(
            lengths[i], stress, stress.masks[mask_kind[i]], T, rng
        )
        mask[i, columns] = True
    mask = np.pad(mask, ((0, 0), (stress.behind, 0)))
    return Responses(
        is_exception, A, lengths, id_kind, side, mask, rng.bit_generator.state
    )


def _order_of_rows(
    order: Order | None, A: np.ndarray, lengths: np.ndarray, id_kind: np.ndarray
) -> np.ndarray:
    """Return the indices of the rows in this order, [B]; None leaves them as they are."""
    B = len(lengths)
    if order is None:
        return np.arange(B)
    if order.by == "prompt":
        return id_kind.argsort(kind="stable")
    if order.by == "A":
        return (-A).argsort(kind="stable")
    rank_count = RANKS if order.by_rank else 1
    parts = []
    for rows in np.array_split(np.arange(B), rank_count):
        in_order = rows[lengths[rows].argsort(kind="stable")]
        if order.first == "longest":
            in_order = in_order[::-1]
        elif order.first == "shortest, and last":
            in_order = np.concatenate([in_order[::2], in_order[1::2][::-1]])
        parts.append(in_order)
    return np.concatenate(parts)


def _sampler_ratios(
    rho: tuple[float, ...], mask: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Return log ρ = log π_old/μ of each token, [B, T]. Of three responses in turn, one
    has a large log ρ at some tokens, up to a sum of |log ρ| of RHO_PRODUCT; one has a
    large sum of log ρ, spread over all tokens; and one has log ρ near 0.
    """
    B, T = mask.shape
    row_kind = (np.arange(B) % 3)[:, None]
    lengths = mask.sum(1, keepdims=True)
    near_ratios = rng.normal(size=(B, T)) * 1e-3
    far_ratios = np.array(rho)[rng.integers(len(rho), size=(B, T))] * rng.uniform(
        0.9, 1, (B, T)
    )
    mixed = np.where(
        (rng.random((B, T)) < 0.3) | (lengths == 1), far_ratios, near_ratios
    )
    order = rng.permutation(T)
    sums = np.cumsum(np.where(mask, np.abs(mixed), 0)[:, order], 1)[:, order.argsort()]
    mixed = np.where(sums < RHO_PRODUCT, mixed, near_ratios)
    sum_of_response = np.array([*rho, RHO_PRODUCT, -RHO_PRODUCT])[
        rng.integers(len(rho) + 2, size=(B, 1))
    ]
    spread = (
        sum_of_response * rng.uniform(0.9, 1, (B, 1)) / lengths
        + near_ratios
        - np.where(mask, near_ratios, 0).sum(1, keepdims=True) / lengths
    )
    return np.select([row_kind == 0, row_kind == 1], [mixed, spread], near_ratios)


def _assign_levels(
    stress: Axis, id_kinds: int, is_exception: np.ndarray, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """Choose five numbers of each response: A, the length, the kind of its mask, the kind
    of its id, and the side of its ratio. The answer yields these in turn, [B] each: A
    and the length themselves, and of the others an index.

    A *level* is one of the values of a number. Where there are rows enough, and no
    exceptions, every level of one number meets every level of another in a row.
    Otherwise each level of a number is in as many rows as any other.

    Args:
        stress: the axis, which has the levels of the first three.
        id_kinds: the number of kinds of ids.
        is_exception: responses that are otherwise than most, [B]; all True: none is.
        rng: draws the order.
    """
    levels = (len(stress.A), len(stress.lengths), len(stress.masks), id_kinds, 3)

    def spread_evenly(count: int, size: int) -> np.ndarray:
        """Return `size` numbers below `count` in random order, each as often as any
        other, as far as the size allows.
        """
        return rng.permutation(np.resize(rng.permutation(count), size))

    table = np.zeros((0, len(levels)), dtype=int)
    if np.prod(sorted(levels)[-2:]) <= stress.rows and is_exception.all():
        table = _covering_table(stress, levels)
    if not len(table):
        # evenly among the exceptions, and evenly among the other responses
        order = np.r_[
            np.flatnonzero(is_exception), np.flatnonzero(~is_exception)
        ].argsort()
        table = np.stack(
            [
                np.r_[
                    spread_evenly(count, is_exception.sum()),
                    spread_evenly(count, (~is_exception).sum()),
                ][order]
                for count in levels
            ],
            1,
        )
    other_rows = np.stack(
        [spread_evenly(count, stress.rows - len(table)) for count in levels], 1
    )
    A_level, length_level, *others = np.concatenate([table, other_rows]).T
    A = np.array(stress.A)[A_level]
    lengths = np.array(stress.lengths)[length_level]
    return iter((A, lengths, *others))


def _covering_table(stress: Axis, levels: tuple[int, ...]) -> np.ndarray:
    """Return rows of indices, [n, 5], in which every two levels meet. Lengths too short
    to show a mask are in rows of their own, which have every level of the others and
    mask 0.

    Args:
        stress: the axis.
        levels: how many there are of A, lengths, masks, kinds of ids, and sides.
    """
    short_lengths = [
        i
        for i, number in enumerate(stress.lengths)
        if number < TURNS[0] and len(stress.masks) > 1
    ]
    rows = pairwise((levels[0], levels[1] - len(short_lengths), *levels[2:])).copy()
    rows[:, 1] = np.delete(np.arange(levels[1]), short_lengths)[rows[:, 1]]
    rows_of_short = [
        [number % levels[0], i, 0, *(number % count for count in levels[3:])]
        for i in short_lengths
        for number in range(2 * max(levels))
    ]
    return np.concatenate(
        [rows, np.array(rows_of_short, dtype=int).reshape(-1, len(levels))]
    )


@lru_cache(64)
def pairwise(levels: tuple[int, ...]) -> np.ndarray:
    """Build a covering array of strength 2 (all-pairs testing), greedily: rows in which
    every level of a factor meets every level of every other.

    Args:
        levels: how many levels each factor has.

    Returns:
        Integers [rows, factors].
    """
    other_levels = np.array(list(product(*map(range, levels[2:]))))
    pairs = [(i, j) for i in range(len(levels)) for j in range(i)]
    is_open = {(i, j): np.ones((levels[i], levels[j]), dtype=bool) for i, j in pairs}
    rows: list[np.ndarray] = []
    while any(pairs_open.any() for pairs_open in is_open.values()):
        for first in product(range(levels[0]), range(levels[1])):
            candidates = np.c_[
                np.broadcast_to(first, (len(other_levels), 2)), other_levels
            ]
            new_pairs = sum(
                is_open[i, j][candidates[:, i], candidates[:, j]].astype(int)
                for i, j in pairs
            )
            if new_pairs.any():
                rows.append(candidates[int(np.argmax(new_pairs))])
                for i, j in pairs:
                    is_open[i, j][rows[-1][i], rows[-1][j]] = False
    return np.array(rows, dtype=int).reshape(-1, len(levels))


def _columns_of_response(
    count: int, stress: Axis, mask: str, T: int, rng: np.random.Generator
) -> np.ndarray:
    """Return which of T columns hold the tokens of a response, [count].

    Args:
        count: tokens of the response.
        stress: the axis, for the sizes of holes and of what is in front.
        mask: one of MASKS; "plain": the first columns.
        T: columns of the batch. What does not fit is cut.
        rng: draws the sizes.
    """
    positions = np.arange(count)
    free_columns = T - count
    turns = min(count, int(rng.choice(TURNS)))
    match mask:
        case "a hole":
            hole = min(free_columns, int(rng.choice(stress.holes)))
            is_behind_hole = positions >= (count + 1) // 2
            return positions + is_behind_hole * hole
        case "turns":
            turn_number = positions * turns // count
            # three masked tokens in front of each turn but the first, where they fit
            gap = min(free_columns, 3 * turns) // turns
            return positions + turn_number * gap
        case "left padding":
            return positions + free_columns
        case "late":
            return positions + min(free_columns, int(rng.choice(stress.late)))
    return positions


def relabel_groups(batch: Rollouts) -> dict[str, list[Rollouts]]:
    """Rename the groups of a batch in each of the ways of NAMED: all of them, and all
    but the one with the largest id.

    Args:
        batch: a batch with groups.

    Returns:
        The key of NAMED -> the two batches, in this order.
    """
    assert batch.group is not None
    group = batch.group
    is_last_group = batch.group == batch.group.max()
    return {
        name: [
            replace(batch, group=ids, totals=None)
            for ids in (
                relabel(group),
                torch.where(is_last_group, group, relabel(group)),
            )
        ]
        for name, relabel in NAMED.items()
    }
