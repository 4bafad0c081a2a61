# SPDX-License-Identifier: Apache-2.0
"""The oracle of functions that take a mask of tokens and give each response one
advantage: on masks with holes, and for rewards of tokens also where in a response its
reward lies, and how many there are.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from upref.errors import InputError
from upref.verify.advantages.case import AdvantageCase
from upref.verify.exact import RewardBatch, nearly_equal
from upref.verify.faults import measured
from upref.verify.finding import Cause, Example, number_pair
from upref.verify.oracle import oracle
from upref.verify.report import Finding, fail, note

# from rewards [T] and mask [T] of one response to the reward that is read
Reader = Callable[[Tensor, Tensor], float]


def _summed(rewards: Tensor, mask: Tensor) -> float:
    """Return the sum over trained tokens, which is right."""
    return float(rewards[mask].sum())


def _summed_everywhere(rewards: Tensor, mask: Tensor) -> float:
    """Return the sum over all slots."""
    return float(rewards.sum())


def _at_count(rewards: Tensor, mask: Tensor) -> float:
    """Return the reward at the slot (number of trained tokens - 1)."""
    return float(rewards[int(mask.sum()) - 1])


def _last(rewards: Tensor, mask: Tensor) -> float:
    """Return the reward of the last trained token."""
    trained = rewards[mask]
    return float(trained[-1]) if len(trained) else 0.0


def _first(rewards: Tensor, mask: Tensor) -> float:
    """Return the reward of the first trained token."""
    trained = rewards[mask]
    return float(trained[0]) if len(trained) else 0.0


def _mean(rewards: Tensor, mask: Tensor) -> float:
    """Return the mean over trained tokens."""
    return _summed(rewards, mask) / max(int(mask.sum()), 1)


def _largest(rewards: Tensor, mask: Tensor) -> float:
    """Return the largest reward of a trained token."""
    return float(rewards[mask].max()) if bool(mask.any()) else 0.0


def _last_column(rewards: Tensor, mask: Tensor) -> float:
    """Return the reward in the last column."""
    return float(rewards[-1])


READERS: tuple[tuple[str, str, Reader], ...] = (
    (
        "the reward is read at the slot (number of trained tokens - 1): with a tool's tokens in between, it is not there",
        "reward-at-count",
        _at_count,
    ),
    (
        "of several rewards of a response only that of its last trained token is read",
        "last-reward-alone",
        _last,
    ),
    (
        "of several rewards of a response only that of its first trained token is read",
        "first-reward-alone",
        _first,
    ),
    ("the rewards of a response are averaged, not added", "rewards-averaged", _mean),
    (
        "of several rewards of a response only the largest is read",
        "largest-reward-alone",
        _largest,
    ),
    ("the reward is read in the last column", "reward-in-last-column", _last_column),
)


@dataclass(frozen=True)
class TokenRewards:
    """Rewards of tokens.

    Attributes:
        words: what is special about them.
        rewards: [N, T].
        mask: [N, T].
        group: the prompt of each response.
    """

    words: str
    rewards: Tensor
    mask: Tensor
    group: tuple[int, ...]

    def read(self, reader: Reader) -> RewardBatch:
        """Return one reward per response, read in this way.

        Args:
            reader: from rewards and mask of a response to its reward.
        """
        rows = zip(self.rewards, self.mask, strict=True)
        return RewardBatch(tuple(Fraction(reader(r, m)) for r, m in rows), self.group)


def _mask(rows: Sequence[str]) -> Tensor:
    """Return a mask from text: True where there is an x, [rows, characters]."""
    return torch.tensor([[c == "x" for c in row] for row in rows])


ROWS = ("x..x..", "xxxx..", ".xx.x.", "xxxxxx", "x.x...", "xx..xx")
GROUP = (0, 0, 0, 1, 1, 1)


def _at_last(values: Sequence[float]) -> Tensor:
    """Return rewards of these responses, each on the last trained token."""
    mask = _mask(ROWS)
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    for row, value in enumerate(values):
        rewards[row, int(mask[row].nonzero()[-1])] = value
    return rewards


HOLES = "untrained tokens between trained ones (a tool's tokens)"
ONE_REWARD = TokenRewards(
    HOLES,
    _at_last([1.0, 0.0, 1.0, 0.0, 1.0, 0.0]),
    _mask(ROWS),
    GROUP,
)


def _several() -> TokenRewards:
    """Return responses with a reward on their first and on their last trained token."""
    rewards = _at_last([1.0, -0.5, 0.25, 0.5, 0.0, 2.0])
    mask = _mask(ROWS)
    for row, value in enumerate([0.5, 1.0, -1.0, 0.25, 0.75, -0.5]):
        rewards[row, int(mask[row].nonzero()[0])] = value
    return TokenRewards("several rewards in a response", rewards, mask, GROUP)


def _many() -> TokenRewards:
    """Return 24 responses to four prompts in turn, of 1 to 30 tokens, with holes, behind
    up to 9 masked columns; two or three tokens of each have a reward.
    """
    rng = np.random.default_rng(0)
    N, T = 24, 40
    mask = np.zeros((N, T), dtype=bool)
    rewards = np.zeros((N, T))
    for row in range(N):
        start = int(rng.integers(0, 10))
        mask[row, start : start + 1 + row * 29 // (N - 1)] = True
        mask[row, start + 1 :] &= rng.random(T - start - 1) < 0.7
        trained = np.flatnonzero(mask[row])
        for column in (trained[0], trained[-1], rng.choice(trained)):
            rewards[row, column] = rng.integers(-8, 9) / 4
    group = tuple(row % 4 for row in range(N))
    words = "24 responses with holes, several rewards and masked columns in front"
    return TokenRewards(words, torch.from_numpy(rewards), torch.from_numpy(mask), group)


SEVERAL = _several()
BATCHES = (ONE_REWARD, SEVERAL, _many())


def no_token_mask(case: AdvantageCase) -> str:
    """Return why masks with holes are not tried; "" where they are."""
    if "mask" not in case.function.reads:
        return "it takes no mask of tokens"
    if case.function.groups_are_contiguous or case.wrong:
        return "the values are wrong already, or it takes no group ids"
    return ""


@oracle("token-rewards", not_run=no_token_mask)
def token_rewards(case: AdvantageCase) -> Iterator[Finding]:
    """Compare on masks with holes and on several rewards in a response, up to the first
    batch that fails; if none does, say what becomes of a reward on an untrained token.
    `signed`, which reads rewards of 0 and 1, is compared on the first batch alone. A
    function that takes one reward per response has nothing on untrained tokens, and may
    refuse masks with holes, which is a note.
    """
    takes_tokens = case.function.takes_tokens
    for batch in BATCHES:
        if batch is not ONE_REWARD and case.name == "signed":
            continue  # which reads rewards of 0 and 1 alone
        try:
            finding = _compare(case, batch)
        except InputError as e:
            if takes_tokens:
                raise
            yield note("token-rewards", f"{HOLES} are refused", cause=str(e))
            return
        if finding is not None:
            yield finding
            return
    if case.name == "signed" or not takes_tokens:
        return
    untrained = list(_on_untrained(case))
    yield from untrained
    # a second note on the same slots would say no more
    if not any(found.regime == COUNTS for found in untrained):
        yield from _on_masked(case)


def _compare(case: AdvantageCase, batch: TokenRewards) -> Finding | None:
    """Return a failure at the response whose advantage is off by most; None where all
    agree.

    Raises:
        InputError: the function refuses the batch.
    """
    try:
        found = case.function.on_tokens(batch.rewards, batch.mask, batch.group)
    except InputError as e:
        raise InputError(f"{e}, on {batch.words}") from e
    expected = case.expected(batch.read(_summed))
    tol = max(case.function.tol, 1e-6)
    if nearly_equal(found, expected, tol):
        return None
    row = max(range(len(found)), key=lambda i: abs(found[i] - expected[i]))
    rewards = batch.rewards
    if not case.function.takes_tokens:
        rewards = torch.where(batch.mask, rewards, 0).sum(1)
    inputs = {
        "rewards": rewards.tolist(),
        "mask": batch.mask.tolist(),
        "group": list(batch.group),
    }
    example = Example(inputs, expected=list(expected), found=list(found))
    numbers = number_pair("A", expected[row], found[row])
    words = batch.words if case.function.takes_tokens else HOLES
    about = f"{words}: response {row}"
    return fail("token-rewards", about, *numbers, example, _cause(case, batch, tol))


def _cause(case: AdvantageCase, failing: TokenRewards, tol: float) -> Cause:
    """Return the cause that the advantages of a response differ on the batch that fails;
    else the first of READERS that gives the advantages of all batches; no cause where
    none does. For `signed` only the batch with rewards of 0 and 1 decides.
    """
    if case.function.differs_within_response(
        failing.rewards, failing.mask, failing.group
    ):
        return measured.ADVANTAGES_OF_TOKENS_DIFFER.cause()
    if not case.function.takes_tokens:
        return Cause()
    for words, fault_id, reader in READERS:
        batches = (ONE_REWARD,) if case.name == "signed" else BATCHES
        fits = []
        for batch in batches:
            found = case.function.on_tokens(batch.rewards, batch.mask, batch.group)
            fits.append(nearly_equal(found, case.expected(batch.read(reader)), tol))
        if all(fits):
            return Cause(words, (fault_id,))
    return Cause()


COUNTS = (
    "a reward on an untrained token counts: that of a response without any trained "
    "token moves its peers"
)


def _on_untrained(case: AdvantageCase) -> Iterator[Finding]:
    """Note that a reward on an untrained token counts, also that of a response without
    any trained token, or that such a response makes its peers' advantages not finite.
    """
    rewards = ONE_REWARD.rewards.clone()
    mask = ONE_REWARD.mask.clone()
    mask[1] = False
    rewards[1] = 0
    rewards[1, -1] = 2.0
    batch = TokenRewards("", rewards, mask, GROUP)
    tol = max(case.function.tol, 1e-6)
    others = [0, 2, 3, 4, 5]
    try:
        found = case.function.on_tokens(rewards, mask, GROUP)
    except InputError as e:
        text = "a response without a trained token is refused"
        yield note("token-rewards", text, cause=str(e))
        return
    everywhere = case.expected(batch.read(_summed_everywhere))
    masked = case.expected(batch.read(_summed))
    at_others = [found[i] for i in others]
    if nearly_equal(at_others, [masked[i] for i in others], tol):
        return
    if nearly_equal(at_others, [everywhere[i] for i in others], tol):
        yield note(
            "token-rewards",
            COUNTS,
            cause="mask the rewards before they are added, if such slots hold no rewards",
        )
    elif not all(map(math.isfinite, at_others)):
        yield note(
            "token-rewards",
            "a response without a trained token: the advantages of its peers become NaN or infinite",
        )


JUNK = (3.0, math.nan)  # in masked slots


def _on_masked(case: AdvantageCase) -> Iterator[Finding]:
    """Note that a number, or NaN, in the masked slots of responses with trained tokens
    reaches the advantages, or is refused; the first of the two that does. NaN that makes
    them other finite numbers is a failure.
    """
    right = case.expected(ONE_REWARD.read(_summed))
    tol = max(case.function.tol, 1e-6)
    mask = ONE_REWARD.mask
    for junk in JUNK:
        # more in one response than in another: their difference does not cancel
        filler = junk * torch.arange(1, mask.numel() + 1).reshape(mask.shape)
        rewards = torch.where(mask, ONE_REWARD.rewards, filler.double())
        words = f"masked slots that hold {junk:g}".replace("nan", "NaN")
        words = words.replace("3", "numbers")
        try:
            found = case.function.on_tokens(rewards, mask, GROUP)
        except InputError as e:
            yield note("token-rewards", f"{words} are refused", cause=str(e))
            return
        if nearly_equal(found, right, tol):
            continue
        if math.isnan(junk) and all(map(math.isfinite, found)):
            example = Example(
                {
                    "rewards": rewards.tolist(),
                    "mask": mask.tolist(),
                    "group": list(GROUP),
                },
                expected=list(right),
                found=list(found),
            )
            row = max(range(len(found)), key=lambda i: abs(found[i] - right[i]))
            numbers = number_pair("A", right[row], found[row])
            yield fail("token-rewards", f"{words}: response {row}", *numbers, example)
            return
        yield note(
            "token-rewards",
            f"{words} reach the advantages",
            cause="select with torch.where(mask, rewards, 0) before you add them up",
        )
        return
