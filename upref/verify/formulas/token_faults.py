# SPDX-License-Identifier: Apache-2.0
"""Known faults of advantages of tokens and turns: what each makes of the inputs."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from upref import token_advantages
from upref.advantages import whiten_tokens
from upref.verify.faults import Fault
from upref.verify.formulas.case import CLAMPS, Formula, Inputs, Settings
from upref.verify.formulas.losses import LENGTHS, first_slots

TokenFault = Fault[Formula]


def compute(name: str, inputs: Inputs, settings: Settings) -> Tensor:
    """Return the advantages of the estimator of this name.

    Args:
        name: a key of TOKEN_ADVANTAGES.
        inputs: tensors by role.
        settings: by name; those that the estimator lacks are not read.

    Returns:
        [N, K].
    """
    x = inputs
    estimator = token_advantages.get(name)
    values = {k: v for k, v in settings.items() if k in SETTINGS[name]}
    arguments: tuple[Tensor, ...]
    match name:
        case "gae" | "gae_whitened":
            arguments = (x["rewards"], x["values"], x["mask"], x["bootstrap"])
        case "discounted_returns" | "discounted_returns_whitened":
            arguments = (x["rewards"], x["mask"])
        case "step_group_norm" | "gigpo":
            arguments = (x["rewards"], x["mask"], x["group"], x["state"])
        case "remax":
            arguments = (x["rewards"], x["greedy_reward"], x["mask"])
        case "optimal_token_baseline":
            policy = (x["log_prob"], x["sum_pi_squared"])
            arguments = (x["rewards"], *policy, x["mask"], x["group"])
        case "minillm" | "minillm_length_normalized":
            arguments = (x["log_prob"], x["teacher_log_prob"], x["mask"])
        case "distillation":
            policies = (x["log_prob"], x["teacher_log_prob"], x["mask"])
            arguments = (*policies, x["advantages"])
        case _:
            arguments = (x["rewards"], x["mask"], x["group"])
    return estimator(*arguments, **values)


# the settings of each estimator, with the values at which it is compared first
SETTINGS: dict[str, dict[str, Any]] = {
    "gae": {"gamma": 0.9, "lam": 0.8},
    "gae_whitened": {"gamma": 0.9, "lam": 0.8},
    "discounted_returns": {"gamma": 0.9},
    "discounted_returns_whitened": {"gamma": 0.9},
    "turns_normalized_discounted": {"gamma": 0.9, "ddof": 1, "eps": 1e-6},
    "turns_discounted_normalized": {"gamma": 0.9, "ddof": 1, "eps": 1e-6},
    "turn_index_normalized_discounted": {"gamma": 0.9, "ddof": 1, "eps": 1e-6},
    "turn_index_discounted_normalized": {"gamma": 0.9, "ddof": 1, "eps": 1e-6},
    "step_group_norm": {"gamma": 0.9, "ddof": 1, "eps": 1e-6},
    "gigpo": {"gamma": 0.9, "omega": 1.0, "ddof": 1, "eps": 1e-6},
    "opo": {},
    "gpg": {},
    "pass_at_k": {},
    "remax": {},
    "optimal_token_baseline": {},
    "minillm": {"gamma": 0.9},
    "minillm_length_normalized": {"gamma": 0.9},
    "distillation": {"coef": 1.0},
}
GAE = ("gae", "gae_whitened")
RETURNS = ("discounted_returns", "discounted_returns_whitened")


class Turns(NamedTuple):
    """How an estimator of turns makes advantages of rewards.

    Attributes:
        normalizes_first: whether it normalizes rewards and discounts them then; else the
            other way round.
        by_number: whether it normalizes among the turns of the same number; else among
            all turns of the prompt.
    """

    normalizes_first: bool
    by_number: bool


TURNS = {
    "turns_normalized_discounted": Turns(normalizes_first=True, by_number=False),
    "turns_discounted_normalized": Turns(normalizes_first=False, by_number=False),
    "turn_index_normalized_discounted": Turns(normalizes_first=True, by_number=True),
    "turn_index_discounted_normalized": Turns(normalizes_first=False, by_number=True),
}
STEPS = ("step_group_norm", "gigpo")
RESPONSES = ("opo", "gpg", "pass_at_k")  # one advantage for each response
BASELINES = (*RESPONSES, "remax", "optimal_token_baseline")
TEACHER = ("minillm", "minillm_length_normalized", "distillation")


# ---- the recursion, with what may go wrong in it -------------------------------------
@dataclass(frozen=True)
class Recursion:
    """A recursion over the slots of a response, from the back.

    Attributes:
        skips: whether the sum skips slots that are left out.
        skips_values: whether V⁺ is the value of the next trained slot, not of the next.
        masks_inputs: whether rewards and values are 0 on slots that are left out.
        resets: whether a slot that is left out ends the sum behind it.
        next_value: the factor on V⁺ in δ: "gamma", "one" or "none".
        own_value: whether V is subtracted.
        decay: the factor on A⁺: "gamma lam", "gamma", "lam", "one" or "none".
        bootstrap: the factor on the value behind the response: "gamma", "one", "none",
            or "wraps", where the first value of the response takes its place.
        masks_delta: whether δ is 0 on slots that are left out.
        reward_late: whether a slot has the reward of the next one.
        answer: what a slot gets: the "sum", the sum "without own reward", the "next"
            slot's sum, or the sum "plus value", as returns have it.
        from_first: the slots that the decay is counted over from the front of the
            response, without being divided out: "" for none, "trained", "all".
        forward: whether it runs from the front.
    """

    skips: bool = True
    skips_values: bool = True
    masks_inputs: bool = True
    resets: bool = False
    next_value: str = "gamma"
    own_value: bool = True
    decay: str = "gamma lam"
    bootstrap: str = "gamma"
    masks_delta: bool = False
    reward_late: bool = False
    answer: str = "sum"
    from_first: str = ""
    forward: bool = False

    def run(self, inputs: Inputs, settings: Settings, values: Tensor) -> Tensor:
        """Return the advantages before whitening, [N, K].

        Args:
            inputs: tensors by role.
            settings: gamma and lam.
            values: V, [N, K]; 0 for returns.
        """
        mask = inputs["mask"]
        r = inputs["rewards"].double()
        V = values.double()
        if self.masks_inputs:
            r = torch.where(mask, r, 0)
            V = torch.where(mask, V, 0)
        if self.reward_late:
            r = torch.nn.functional.pad(r[:, 1:], (0, 1))
        gamma = settings["gamma"]
        lam = settings.get("lam", 1.0)
        on_value = {"gamma": gamma, "one": 1.0, "none": 0.0}[self.next_value]
        on_sum = {
            "gamma lam": gamma * lam,
            "gamma": gamma,
            "lam": lam,
            "one": 1.0,
            "none": 0.0,
        }[self.decay]
        next_value = self._behind(inputs, V, gamma)
        total = torch.zeros(len(r), dtype=torch.float64)
        out = torch.zeros_like(r)
        slots = range(r.shape[1]) if self.forward else reversed(range(r.shape[1]))
        for k in slots:
            trained = mask[:, k]
            delta = r[:, k] + on_value * next_value
            if self.own_value:
                delta = delta - V[:, k]
            if self.masks_delta:
                delta = torch.where(trained, delta, 0)
            new_total = delta + on_sum * total
            out[:, k] = self._answer(new_total, total, r[:, k], V[:, k])
            if self.skips:
                total = torch.where(trained, new_total, total)
            elif self.resets:
                total = torch.where(trained, new_total, 0)
            else:
                total = new_total
            if self.skips_values:
                next_value = torch.where(trained, V[:, k], next_value)
            else:
                next_value = V[:, k]
        if self.from_first:
            counted = mask if self.from_first == "trained" else torch.ones_like(mask)
            slots_before = (counted.cumsum(1) - 1).clamp(min=0)
            out = out * on_sum**slots_before
        return torch.where(mask, out, 0)

    def _behind(self, inputs: Inputs, V: Tensor, gamma: float) -> Tensor:
        """Return the value behind each response, [N]. It is divided by γ beforehand where
        the recursion should not multiply it by γ.
        """
        if self.bootstrap == "wraps":
            return V[:, 0]
        zeros = torch.zeros(len(V), dtype=torch.float64)
        if self.bootstrap == "none" or "values" not in inputs:
            return zeros
        value = inputs["bootstrap"].double()
        if self.bootstrap == "one" and gamma != 0:
            return value / gamma
        return value

    def _answer(self, total: Tensor, after: Tensor, r: Tensor, V: Tensor) -> Tensor:
        """Return what a slot gets, [N]; after is the sum of the next slot."""
        match self.answer:
            case "without own reward":
                return total - r
            case "next":
                return after
            case "plus value":
                return total + V
        return total


def _recursive(name: str, recursion: Recursion) -> Formula:
    """Return the formula of an estimator with another recursion."""

    def formula(inputs: Inputs, settings: Settings) -> Tensor:
        """Return the advantages, whitened where the estimator whitens."""
        values = inputs["values"]
        if name in RETURNS:
            values = torch.zeros_like(values)
        A = recursion.run(inputs, settings, values)
        return whiten_tokens(A, inputs["mask"]) if "whitened" in name else A

    return formula


RUNS_THROUGH = "it runs through untrained slots (a tool's tokens)"
ENDS = "an untrained slot (a tool's tokens) ends the sum: what lies behind it is lost"
RECURSIONS: tuple[tuple[str, str, Recursion], ...] = (
    (
        f"{RUNS_THROUGH}: they discount, and their values count",
        "runs-through-untrained-slots",
        Recursion(skips=False, skips_values=False, masks_inputs=False),
    ),
    (
        f"{RUNS_THROUGH}, each of which discounts once more",
        "untrained-slots-discount",
        Recursion(skips=False, skips_values=False),
    ),
    (
        f"{RUNS_THROUGH}, each of which discounts once more",
        "untrained-slots-discount",
        Recursion(skips=False),
    ),
    (
        f"{RUNS_THROUGH}, each of which discounts once more; δ is 0 there",
        "untrained-slots-discount",
        Recursion(skips=False, masks_delta=True),
    ),
    (
        f"{RUNS_THROUGH}, each of which discounts once more; δ and the next value are 0 there",
        "untrained-slots-discount",
        Recursion(skips=False, skips_values=False, masks_delta=True),
    ),
    (
        f"{RUNS_THROUGH}: each discounts once more, and has its own δ",
        "runs-through-untrained-slots",
        Recursion(skips=False, masks_inputs=False),
    ),
    (ENDS, "untrained-slot-ends-sum", Recursion(skips=False, resets=True)),
    (
        f"{ENDS}; the next value is that of the next slot, also where it is untrained",
        "untrained-slot-ends-sum",
        Recursion(skips=False, resets=True, skips_values=False, masks_inputs=False),
    ),
    (
        f"{ENDS}; the next value is 0 there",
        "untrained-slot-ends-sum",
        Recursion(skips=False, resets=True, skips_values=False),
    ),
    (
        "the next value is read from the next slot, also where that is untrained",
        "next-value-of-untrained-slot",
        Recursion(skips_values=False, masks_inputs=False),
    ),
    (
        "the next value is 0 where the next slot is untrained",
        "next-value-of-untrained-slot",
        Recursion(skips_values=False),
    ),
    ("λ is left out: it is 1", "lambda-missing", Recursion(decay="gamma")),
    (
        "the sum decays by λ alone: γ is left out of γ λ",
        "gamma-missing-in-decay",
        Recursion(decay="lam"),
    ),
    (
        "the next value is not multiplied by γ",
        "next-value-undiscounted",
        Recursion(next_value="one"),
    ),
    (
        "γ is left out: it is 1",
        "gamma-missing",
        Recursion(next_value="one", decay="lam"),
    ),
    (
        "the next value is left out of δ",
        "next-value-missing",
        Recursion(next_value="none"),
    ),
    ("V is not subtracted", "value-not-subtracted", Recursion(own_value=False)),
    (
        "only δ of the slot itself: nothing is added up",
        "sum-missing",
        Recursion(decay="none"),
    ),
    (
        "the value behind a truncated response (bootstrap) is not read",
        "bootstrap-missing",
        Recursion(bootstrap="none"),
    ),
    (
        "the value behind a truncated response (bootstrap) is not multiplied by γ",
        "bootstrap-undiscounted",
        Recursion(bootstrap="one"),
    ),
    (
        "the value behind a response is its own first one: the values are rotated, not shifted",
        "bootstrap-wraps-around",
        Recursion(bootstrap="wraps"),
    ),
    (
        "each slot has the reward of the next slot",
        "reward-one-slot-late",
        Recursion(reward_late=True),
    ),
    (
        "a slot's own reward is left out of its sum",
        "own-reward-missing",
        Recursion(answer="without own reward"),
    ),
    (
        "each slot has the sum of the next slot",
        "sum-one-slot-late",
        Recursion(answer="next"),
    ),
    (
        "the discount counts from the first trained slot of the response, and is not divided out",
        "discount-from-first-slot",
        Recursion(from_first="trained"),
    ),
    (
        "the discount counts from slot 0, and is not divided out",
        "discount-from-first-slot",
        Recursion(from_first="all", skips=False, masks_delta=True),
    ),
    (
        "it returns A + V, the returns, not the advantages",
        "returns-for-advantages",
        Recursion(answer="plus value"),
    ),
    (
        "it runs from the front: a slot has what came before it",
        "runs-forward",
        Recursion(forward=True),
    ),
)


# the fields of a recursion that tell what it does with slots that are left out
HOLES = ("skips", "skips_values", "masks_inputs", "masks_delta", "resets")
# where no value is read, these change nothing
OF_VALUES: dict[str, Any] = {
    "skips_values": True,
    "masks_delta": False,
    "next_value": "gamma",
    "own_value": True,
    "bootstrap": "gamma",
}


def _recursion_faults(name: str) -> Iterator[TokenFault]:
    """Yield the faults of a recursion, for GAE and for returns: each alone, then one of
    what it does with slots that are left out together with one of the rest.
    """
    own = [one for one in RECURSIONS if name in GAE or not _is_of_values(one[2])]
    own.append(
        ("the sum is not discounted: γ is 1", "gamma-missing", Recursion(decay="one"))
    )
    for words, fault_id, recursion in own:
        yield Fault(words, _recursive(name, recursion), id=fault_id)
    # those that change nothing else, and those that change nothing of it
    of_holes = [one for one in own if _changes(one[2]) <= set(HOLES)]
    others = [one for one in own if not _changes(one[2]) & set(HOLES)]
    for (words, fault_id, holes), (other_words, other_id, other) in itertools.product(
        of_holes, others
    ):
        both = replace(other, **{field: getattr(holes, field) for field in HOLES})
        yield Fault(
            f"{other_words}; {words}",
            _recursive(name, both),
            id=other_id,
            beside=fault_id,
        )


def _changes(recursion: Recursion) -> set[str]:
    """Return the fields in which a recursion differs from the right one."""
    plain = asdict(Recursion())
    return {
        field for field, value in asdict(recursion).items() if value != plain[field]
    }


def _is_of_values(recursion: Recursion) -> bool:
    """Return whether a recursion changes only what is done with values or λ."""
    without = replace(recursion, **OF_VALUES)
    return without == Recursion() or recursion.decay in ("gamma", "lam")


# ---- whitening -----------------------------------------------------------------------
def _whitening_faults(name: str) -> Iterator[TokenFault]:
    """Yield the faults of whitening, of an estimator that whitens or of its raw form."""
    raw = name.removesuffix("_whitened")

    def whitened(
        inputs: Inputs, settings: Settings, how: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Return the raw advantages, whitened in this way."""
        mask = inputs["mask"]
        return torch.where(mask, how(compute(raw, inputs, settings), mask), 0)

    ways: tuple[tuple[str, str, Callable[[Tensor, Tensor], Tensor]], ...] = (
        (
            "the variance divides by n, not by n - 1",
            "whitened-population",
            partial(whiten_tokens, ddof=0),
        ),
        (
            "it is whitened over all slots, untrained ones and padding included",
            "whitened-with-padding",
            lambda A, mask: (A - A.mean()) / (A.var() + 1e-8).sqrt(),
        ),
        (
            "it is whitened over all slots, untrained ones and padding included, and the variance divides by n",
            "whitened-with-padding",
            lambda A, mask: (A - A.mean()) / (A.var(correction=0) + 1e-8).sqrt(),
        ),
        (
            "each response is whitened by itself",
            "whitened-by-response",
            _whitened_rows,
        ),
        (
            "each response is whitened by itself, its variance divided by n",
            "whitened-by-response",
            partial(_whitened_rows, ddof=0),
        ),
        (
            "it is divided by the standard deviation, and the mean is kept (shift_mean=False)",
            "mean-kept",
            lambda A, mask: whiten_tokens(A, mask) + A[mask].mean(),
        ),
        (
            "it is divided by the standard deviation, and the mean is kept (shift_mean=False); the variance divides by n",
            "mean-kept",
            lambda A, mask: whiten_tokens(A, mask, ddof=0) + A[mask].mean(),
        ),
        (
            "the mean over the trained slots is subtracted, and nothing divides",
            "mean-subtracted",
            lambda A, mask: A - A[mask].mean(),
        ),
        (
            "it is divided by the standard deviation, and no mean is subtracted",
            "no-baseline",
            lambda A, mask: A / (A[mask].var() + 1e-8).sqrt(),
        ),
    )
    if name == raw:
        words = f"it is whitened over the trained slots: that is {raw}_whitened"
        yield Fault(
            words,
            partial(compute, f"{raw}_whitened"),
            id="advantages-whitened-over-batch",
        )
    for words, fault_id, how in ways:
        yield Fault(words, partial(whitened, how=how), id=fault_id)


def _whitened_rows(A: Tensor, mask: Tensor, ddof: int = 1) -> Tensor:
    """Return the advantages of each response, whitened by themselves."""
    rows = []
    for i in range(len(A)):
        row = A[i : i + 1]
        if mask[i].any():
            row = whiten_tokens(row, mask[i : i + 1], ddof=ddof)
        rows.append(row)
    return torch.cat(rows)


# ---- turns and steps -----------------------------------------------------------------
def _normalized(
    x: Tensor, mask: Tensor, ids: Tensor, settings: Settings, centered: bool = False
) -> Tensor:
    """Return x, normalized among the trained slots of one id, [N, K].

    Args:
        x: rewards or returns, [N, K].
        mask: True on trained slots, [N, K].
        ids: the id of each slot, [N, K, parts of an id].
        settings: ddof and eps of the standard deviation.
        centered: whether the mean is subtracted, and nothing divides.

    Returns:
        0 on slots that are left out, and on a slot whose id no other slot has.
    """
    out = torch.zeros_like(x)
    for one_id in torch.unique(ids[mask], dim=0):
        has_id = mask & (ids == one_id).all(-1)
        numbers = x[has_id]
        deviations = numbers - numbers.mean()
        if centered:
            out[has_id] = deviations
        elif len(numbers) > 1:
            freedom = max(len(numbers) - settings["ddof"], 1)
            std = ((deviations * deviations).sum() / freedom).sqrt()
            out[has_id] = torch.where(std > 0, deviations / (std + settings["eps"]), 0)
    return out


def _of_prompt(x: Inputs) -> Tensor:
    """Return the prompt of each turn, [N, K, 1]."""
    return _spread(x["group"], x)[..., None]


def _of_prompt_and_number(x: Inputs) -> Tensor:
    """Return the prompt and the number of each turn, [N, K, 2]."""
    return torch.stack([_spread(x["group"], x), x["mask"].long().cumsum(1)], -1)


def _of_prompt_and_slot(x: Inputs) -> Tensor:
    """Return the prompt and the slot of each turn, [N, K, 2]."""
    slot = torch.arange(x["mask"].shape[1]).expand_as(x["mask"])
    return torch.stack([_spread(x["group"], x), slot], -1)


def _of_batch(x: Inputs) -> Tensor:
    """Return one id for all turns, [N, K, 1]."""
    return torch.zeros_like(x["mask"], dtype=torch.int64)[..., None]


def _of_response(x: Inputs) -> Tensor:
    """Return the response of each turn, [N, K, 1]."""
    return _spread(torch.arange(len(x["mask"])), x)[..., None]


def _of_number(x: Inputs) -> Tensor:
    """Return the number of each turn in its response, [N, K, 1]."""
    return x["mask"].long().cumsum(1)[..., None]


AMONG_PROMPT = "among the turns of the prompt"
AMONG_NUMBER = "among the turns of the same number"
AMONG_SLOT = "among the turns of the same slot"
# words -> ids of the turns; turns of one id are normalized together
IDS_OF_TURNS: dict[str, Callable[[Inputs], Tensor]] = {
    AMONG_PROMPT: _of_prompt,
    AMONG_NUMBER: _of_prompt_and_number,
    AMONG_SLOT: _of_prompt_and_slot,
    "over the whole batch, whatever the prompt": _of_batch,
    "among the turns of its own response": _of_response,
    "among the turns of the same number in the whole batch": _of_number,
}
# the steps in their order -> words
ORDERS = {
    "normalize, discount": "normalized first and then discounted",
    "discount, normalize": "discounted first and then normalized",
    "normalize": "normalized, and not discounted",
    "discount": "discounted, and not normalized",
}


def _turn_advantages(
    inputs: Inputs,
    settings: Settings,
    ids: Callable[[Inputs], Tensor],
    order: str,
    centered: bool,
) -> Tensor:
    """Return advantages of turns, [N, K].

    Args:
        inputs: tensors by role.
        settings: gamma, ddof and eps.
        ids: from the inputs to the ids among which turns are normalized.
        order: a key of ORDERS.
        centered: whether the mean is subtracted, and nothing divides.
    """
    mask = inputs["mask"]
    rewards = torch.where(mask, inputs["rewards"], 0)
    normalize = partial(
        _normalized,
        mask=mask,
        ids=ids(inputs),
        settings=settings,
        centered=centered,
    )

    def discount(x: Tensor) -> Tensor:
        """Return the discounted returns."""
        return token_advantages.discounted_returns(x, mask, gamma=settings["gamma"])

    if order == "normalize, discount":
        return discount(normalize(rewards))
    if order == "discount, normalize":
        return normalize(discount(rewards))
    if order == "normalize":
        return normalize(rewards)
    return discount(rewards)


def _turn_faults(name: str) -> Iterator[TokenFault]:
    """Yield the faults of turns that are normalized: among other turns, in the other
    order of the two steps or with one of them left out, and then all with the mean
    subtracted alone. Of each kind those of the right order come first.
    """
    if TURNS[name].normalizes_first:
        own_order = "normalize, discount"
    else:
        own_order = "discount, normalize"
    own_among = AMONG_NUMBER if TURNS[name].by_number else AMONG_PROMPT
    cases = itertools.product(
        (False, True),
        sorted(ORDERS, key=lambda order: order != own_order),
        sorted(IDS_OF_TURNS, key=lambda among: among != own_among),
    )
    for centered, order, among in cases:
        if (order, among, centered) == (own_order, own_among, False):
            continue  # the right one
        if own_among == AMONG_NUMBER and among == AMONG_SLOT:
            continue  # which is the same thing where no turn is left out
        if order == "discount" and (among != own_among or centered):
            continue  # nothing is normalized, so that these are one fault
        said = []
        fault_id = "turns-by-other-group"
        if order != own_order:
            said.append(f"rewards are {ORDERS[order]}")
            fault_id = "turns-in-other-order"
        if among != own_among:
            said.append(f"normalized {among}")
        if centered:
            said.append("the mean is subtracted, and nothing divides")
        yield Fault(
            "; ".join(said),
            partial(
                _turn_advantages,
                ids=IDS_OF_TURNS[among],
                order=order,
                centered=centered,
            ),
            id=fault_id,
        )


def _missing_turn_faults(name: str) -> Iterator[TokenFault]:
    """Yield the faults that a turn that is not there enters a mean as a reward of 0."""

    def with_all_slots(inputs: Inputs, settings: Settings) -> Tensor:
        """Return the advantages of responses whose turns that are not there give 0."""
        mask = inputs["mask"]
        full = torch.ones_like(mask)
        rewards = torch.where(mask, inputs["rewards"], 0)
        gamma = settings["gamma"]
        ids_of = _of_prompt_and_number if TURNS[name].by_number else _of_prompt
        ids = ids_of({**inputs, "mask": full})
        if TURNS[name].normalizes_first:
            normalized = _normalized(rewards, full, ids, settings)
            return token_advantages.discounted_returns(normalized, mask, gamma=gamma)
        returns = token_advantages.discounted_returns(rewards, mask, gamma=gamma)
        return torch.where(mask, _normalized(returns, full, ids, settings), 0)

    yield Fault(
        "a turn that a response does not have enters the mean as a reward of 0",
        with_all_slots,
        id="missing-turn-is-zero",
    )


def _spread(ids: Tensor, inputs: Inputs) -> Tensor:
    """Return one id per response as one per slot, [N, K]."""
    return ids[:, None].expand(inputs["mask"].shape)


def _step_faults(name: str) -> Iterator[TokenFault]:
    """Yield the faults of steps that are normalized by state. Of GiGPO, which adds the
    advantage of the response, yield those of the sum too.
    """
    steps: tuple[tuple[str, str, Formula], ...] = (
        (
            "steps of one state are normalized across prompts",
            "steps-across-prompts",
            partial(_step_part, ids=lambda x: x["state"][..., None]),
        ),
        (
            "steps are normalized among all of the prompt, whatever their state",
            "steps-whatever-state",
            partial(_step_part, ids=_of_prompt),
        ),
        (
            "steps are normalized by their own rewards, not by the discounted returns",
            "steps-without-returns",
            partial(_step_part, ids=_of_prompt_and_state, discounts=False),
        ),
        (
            "the mean of the steps is subtracted, and nothing divides",
            "no-division-by-std",
            partial(_step_part, ids=_of_prompt_and_state, centered=True),
        ),
    )
    for words, fault_id, formula in steps:
        if name == "step_group_norm":
            yield Fault(words, formula, id=fault_id)
        else:
            yield Fault(words, partial(_with_episode, step=formula), id=fault_id)
    if name == "gigpo":
        yield from _gigpo_faults()


def _of_prompt_and_state(x: Inputs) -> Tensor:
    """Return the prompt and the state of each step, [N, K, 2]."""
    return torch.stack([_spread(x["group"], x), x["state"]], -1)


def _step_part(
    inputs: Inputs,
    settings: Settings,
    ids: Callable[[Inputs], Tensor],
    discounts: bool = True,
    centered: bool = False,
) -> Tensor:
    """Return the advantages of steps alone, [N, K].

    Args:
        inputs: tensors by role.
        settings: gamma, ddof and eps.
        ids: from the inputs to the ids among which steps are normalized.
        discounts: whether discounted returns are normalized; else rewards.
        centered: whether the mean is subtracted, and nothing divides.
    """
    mask = inputs["mask"]
    x = torch.where(mask, inputs["rewards"], 0)
    if discounts:
        x = token_advantages.discounted_returns(x, mask, gamma=settings["gamma"])
    return _normalized(x, mask, ids(inputs), settings, centered)


def _gigpo_faults() -> Iterator[TokenFault]:
    """Yield the faults of GiGPO's sum of two advantages, of the step and of the
    response.
    """
    yield Fault(
        "only the step part: the advantage of the response is missing",
        lambda x, s: s["omega"] * compute("step_group_norm", x, s),
        id="episode-missing",
    )
    yield Fault(
        "only the advantage of the response: the step part is missing",
        lambda x, s: compute("gigpo", x, {**s, "omega": 0.0}),
        id="steps-missing",
    )
    yield Fault(
        "the weight of the step part is left out: it is 1",
        lambda x, s: compute("gigpo", x, {**s, "omega": 1.0}),
        id="step-weight-missing",
    )
    yield Fault(
        "the weight of the step part multiplies both parts",
        lambda x, s: s["omega"] * compute("gigpo", x, {**s, "omega": 1.0}),
        id="step-weight-on-both",
    )
    yield Fault(
        "the weight of the step part multiplies the part of the response",
        _weight_on_episode,
        id="step-weight-on-episode",
    )
    yield Fault(
        "a response counts once for each of its steps in the mean of the prompt, not once",
        _episode_by_steps,
        id="episode-counted-by-steps",
    )
    yield Fault(
        "the advantage of the response is of its discounted return, not of the sum of its rewards",
        _episode_of_return,
        id="episode-discounted",
    )


def _with_episode(inputs: Inputs, settings: Settings, step: Formula) -> Tensor:
    """Return GiGPO's advantage with another step part."""
    own_step = compute("step_group_norm", inputs, settings)
    right = compute("gigpo", inputs, settings)
    omega = settings["omega"]
    return right + omega * (step(inputs, settings) - own_step)


def _weight_on_episode(inputs: Inputs, settings: Settings) -> Tensor:
    """Return ω A^E + A^S."""
    step = compute("step_group_norm", inputs, settings)
    episode = compute("gigpo", inputs, {**settings, "omega": 0.0})
    return settings["omega"] * episode + step


def _episode_by_steps(inputs: Inputs, settings: Settings) -> Tensor:
    """Return GiGPO's advantage whose response part is normalized over steps."""
    mask = inputs["mask"]
    total = torch.where(mask, inputs["rewards"], 0).sum(1, keepdim=True)
    ids = _spread(inputs["group"], inputs)[..., None]
    episode = _normalized(total.expand(mask.shape), mask, ids, settings)
    return episode + settings["omega"] * compute("step_group_norm", inputs, settings)


def _episode_of_return(inputs: Inputs, settings: Settings) -> Tensor:
    """Return GiGPO's advantage whose response part is of the return from the first step."""
    mask = inputs["mask"]
    returns = compute("discounted_returns", inputs, settings)
    first_slot = mask.int().argmax(1, keepdim=True)
    first_return = returns.gather(1, first_slot)
    at_first = torch.zeros_like(returns).scatter(1, first_slot, first_return)
    episode = compute(
        "gigpo", {**inputs, "rewards": at_first}, {**settings, "omega": 0.0}
    )
    return episode + settings["omega"] * compute("step_group_norm", inputs, settings)


# ---- a teacher's log-probabilities ---------------------------------------------------
def _teacher_faults(name: str) -> Iterator[TokenFault]:
    """Yield the faults of returns of a teacher's log-probabilities, or of a term of the
    teacher that is added to an advantage.

    Args:
        name: a key of TEACHER. Only `distillation` has the added term.
    """
    for bound in CLAMPS:
        yield Fault(
            f"the log-ratio of each token is clamped to ±{bound:g}",
            partial(_with_ratio_clamped, name, bound),
            id="log-ratio-clamped",
        )
    if name == "distillation":
        yield from _faults_of_added_term()
    else:
        yield from _faults_of_teacher_returns(name)
    yield Fault(
        "it is the other way round: log π - log π_teacher, which pushes away from the teacher",
        lambda x, s: -compute(name, x, s),
        id="teacher-sign-flipped",
    )
    if name != "minillm":
        return
    for words, fault_id, recursion in RECURSIONS:
        if _is_of_values(recursion) or _changes(recursion) & set(HOLES):
            continue
        yield Fault(
            words.replace("reward", "difference"),
            partial(_of_differences, _recursive("discounted_returns", recursion)),
            id=fault_id,
        )


def _faults_of_added_term() -> Iterator[TokenFault]:
    """Yield the faults of `distillation`, which adds a term of the teacher to an
    advantage.
    """
    name = "distillation"
    yield Fault(
        "the advantage to which it is added is left out",
        lambda x, s: compute(
            name, {**x, "advantages": torch.zeros_like(x["advantages"])}, s
        ),
        id="base-advantage-missing",
    )
    yield Fault(
        "the coefficient is left out: it is 1",
        lambda x, s: compute(name, x, {**s, "coef": 1.0}),
        id="coefficient-missing",
    )
    yield Fault(
        "the coefficient multiplies the advantage to which it is added too",
        lambda x, s: s["coef"] * compute(name, x, {**s, "coef": 1.0}),
        id="coefficient-on-both",
    )
    yield Fault(
        "it is added with the wrong sign: it pushes away from the teacher",
        lambda x, s: compute(name, x, {**s, "coef": -s["coef"]}),
        id="teacher-sign-flipped",
    )


def _faults_of_teacher_returns(name: str) -> Iterator[TokenFault]:
    """Yield the faults of returns of log π_teacher - log π.

    Args:
        name: minillm or minillm_length_normalized.
    """
    yield Fault(
        "the sum is divided by the number of tokens that are left, discounted or not",
        lambda x, s: compute("minillm", x, s) / _tokens_left(x),
        id="divided-by-tokens-left",
    )
    yield Fault(
        "the discount is by the absolute position, not by the distance",
        partial(_discounted_by_position, masked=True),
        id="discount-by-position",
    )
    yield Fault(
        "it runs through untrained slots, each of which discounts once more",
        partial(_sum_through_untrained, masked=True),
        id="untrained-slots-discount",
    )
    yield Fault(
        "the discount is by the absolute position, not by the distance; padding is not masked",
        partial(_discounted_by_position, masked=False),
        id="discount-by-position",
    )
    yield Fault(
        "padding and untrained slots are added up: the differences are not masked",
        partial(_sum_through_untrained, masked=False),
        id="padding-not-masked",
    )
    yield Fault(
        "the sum is not discounted: γ is 1",
        lambda x, s: compute(name, x, {**s, "gamma": 1.0}),
        id="gamma-missing",
    )
    yield Fault(
        "each token has its own difference alone: what follows is not added up",
        lambda x, s: _differences(x),
        id="sum-missing",
    )
    yield Fault(
        "the sum is divided by the number of trained tokens of the response",
        lambda x, s: (
            compute("minillm", x, s) / x["mask"].sum(1, keepdim=True).clamp(min=1)
        ),
        id="divided-by-length",
    )


def _differences(inputs: Inputs, masked: bool = True) -> Tensor:
    """Return log π_teacher - log π, [N, K]; `masked`: 0 on untrained slots."""
    difference = inputs["teacher_log_prob"] - inputs["log_prob"]
    return torch.where(inputs["mask"], difference, 0) if masked else difference


def _tokens_left(inputs: Inputs) -> Tensor:
    """Return how many tokens of the response train from each slot on, at least 1,
    [N, K].
    """
    ones = {**inputs, "rewards": torch.ones_like(inputs["log_prob"])}
    return compute("discounted_returns", ones, {"gamma": 1.0}).clamp(min=1)


def _discounted_by_position(inputs: Inputs, settings: Settings, masked: bool) -> Tensor:
    """Return the sum whose discount is by the absolute position; `masked` as of
    `_differences`.
    """
    r = _differences(inputs, masked)
    weights = settings["gamma"] ** torch.arange(r.shape[1], dtype=r.dtype)
    total = (r * weights).flip(1).cumsum(1).flip(1)
    return torch.where(inputs["mask"], total, 0)


def _sum_through_untrained(inputs: Inputs, settings: Settings, masked: bool) -> Tensor:
    """Return the discounted sum that runs through untrained slots, each of which discounts
    once more; `masked` as of `_differences`.
    """
    total = torch.zeros(len(inputs["mask"]), dtype=torch.float64)
    r = _differences(inputs, masked)
    out = torch.zeros_like(r)
    for k in reversed(range(r.shape[1])):
        total = r[:, k] + settings["gamma"] * total
        out[:, k] = total
    return torch.where(inputs["mask"], out, 0)


def _with_ratio_clamped(
    name: str, bound: float, inputs: Inputs, settings: Settings
) -> Tensor:
    """Return the advantages of log-ratios that are clamped."""
    ratio = (inputs["teacher_log_prob"] - inputs["log_prob"]).clamp(-bound, bound)
    clamped = {"log_prob": torch.zeros_like(ratio), "teacher_log_prob": ratio}
    return compute(name, {**inputs, **clamped}, settings)


def _of_differences(formula: Formula, inputs: Inputs, settings: Settings) -> Tensor:
    """Return what a formula of rewards makes of log π_teacher - log π."""
    return formula({**inputs, "rewards": _differences(inputs)}, settings)


# ---- baselines -----------------------------------------------------------------------
def _baseline_faults(name: str) -> Iterator[TokenFault]:
    """Yield the faults of estimators that subtract a baseline from rewards: first those of
    one estimator, then those of each that has one advantage for each response.

    Args:
        name: one of BASELINES.
    """
    less_mean = partial(_less_baseline, _mean_of_prompt)
    ways: dict[str, tuple[tuple[str, str, Formula], ...]] = {
        "opo": (
            (
                "the baseline is the plain mean: lengths are left out",
                "baseline-by-length-missing",
                less_mean,
            ),
        ),
        "gpg": (
            (
                "the factor N / (N - M) is left out",
                "gpg-factor-missing",
                less_mean,
            ),
            (
                "a response counts to M where its own A is 0, also beside responses with a gradient",
                "gpg-factor-of-nonzero-advantages",
                lambda x, s: _times_nonzero_advantages(less_mean(x, s), x),
            ),
            (
                "the factor is N over the number of rewards that are not 0",
                "gpg-factor-of-nonzero-rewards",
                lambda x, s: _times_nonzero(less_mean(x, s), x),
            ),
        ),
        "pass_at_k": (
            (
                "the largest reward of the others is subtracted, below 0 too",
                "pass-at-k-negative",
                _minus_best_other,
            ),
        ),
        "remax": (
            (
                "the greedy response's reward is not subtracted",
                "baseline-missing",
                lambda x, s: compute("discounted_returns", x, {"gamma": 1.0}),
            ),
            (
                "the greedy response's reward is subtracted at every token before rewards are added up",
                "baseline-at-every-token",
                lambda x, s: compute(
                    "discounted_returns",
                    {**x, "rewards": x["rewards"] - x["greedy_reward"][:, None]},
                    {"gamma": 1.0},
                ),
            ),
        ),
        "optimal_token_baseline": (
            (
                "the weights are of the token alone: they are not added up from the first one",
                "weights-not-cumulated",
                lambda x, s: _token_baseline(x, _squared_norm(x)),
            ),
            (
                "where no other response has a t-th token, the baseline is the token's own return, and A = 0",
                "lone-token-without-advantage",
                lambda x, s: _token_baseline(x, _cumulated(x), lone=True),
            ),
            (
                "the baseline is the plain mean of the t-th tokens",
                "baseline-weights-missing",
                lambda x, s: _token_baseline(x, torch.ones_like(x["rewards"])),
            ),
        ),
    }
    for words, fault_id, formula in ways[name]:
        yield Fault(words, formula, id=fault_id)
    if name not in RESPONSES:
        return
    yield Fault(
        "nothing is subtracted",
        partial(_less_baseline, lambda R, same: torch.zeros_like(R)),
        id="baseline-missing",
    )
    yield Fault(
        "the baseline is the mean of the other responses: leave_one_out",
        partial(_less_baseline, _mean_of_others),
        id="estimator-leave-one-out",
    )
    if name != "gpg":  # which has this fault as the factor that is left out
        yield Fault(
            "the baseline is the mean of the responses: group_mean",
            less_mean,
            id="estimator-group-mean",
        )


def _less_baseline(
    baseline: Callable[[Tensor, Tensor], Tensor], inputs: Inputs, settings: Settings
) -> Tensor:
    """Return the reward of each response minus a baseline, on its trained slots, [N, K].

    Args:
        baseline: from the rewards R of responses, [N], and whether two of them have one
            prompt, [N, N] of 1 and 0, to a number for each response, [N].
        inputs: tensors by role.
        settings: not read.
    """
    mask = inputs["mask"]
    R = torch.where(mask, inputs["rewards"], 0).sum(1)
    has_slots = mask.any(1)
    same = (inputs["group"][:, None] == inputs["group"]) & has_slots
    A = R - baseline(R, same.double())
    return torch.where(mask, A[:, None], 0)


def _mean_of_prompt(R: Tensor, same: Tensor) -> Tensor:
    """Return the mean of the prompt's rewards."""
    return same @ R / same.sum(1)


def _mean_of_others(R: Tensor, same: Tensor) -> Tensor:
    """Return the mean of the other responses' rewards."""
    size = same.sum(1)
    return (same @ R - R) / (size - 1).clamp(min=1)


def _times_nonzero(A: Tensor, inputs: Inputs) -> Tensor:
    """Return advantages times N over the number of rewards that are not 0."""
    R = torch.where(inputs["mask"], inputs["rewards"], 0).sum(1)
    return A * len(R) / R.count_nonzero().clamp(min=1)


def _times_nonzero_advantages(A: Tensor, inputs: Inputs) -> Tensor:
    """Return advantages times N over the number of responses whose own is not 0."""
    has_slots = inputs["mask"].any(1)
    count = (A.abs() > 1e-12).any(1).sum().clamp(min=1)
    return A * has_slots.sum() / count


def _minus_best_other(inputs: Inputs, settings: Settings) -> Tensor:
    """Return R minus the largest reward of the other responses."""
    mask, group = inputs["mask"], inputs["group"]
    R = torch.where(mask, inputs["rewards"], 0).sum(1)
    same = (group[:, None] == group) & ~torch.eye(len(R), dtype=torch.bool)
    best = torch.where(same & mask.any(1), R, -torch.inf).amax(1)
    A = torch.where(best.isfinite(), R - best, 0)
    return torch.where(mask, A[:, None], 0)


def _squared_norm(inputs: Inputs) -> Tensor:
    """Return 1 - 2 π + Σ_v π_v² of each token."""
    return 1 - 2 * inputs["log_prob"].double().exp() + inputs["sum_pi_squared"]


def _cumulated(inputs: Inputs) -> Tensor:
    """Return the weights, added up from the first trained token on."""
    return torch.where(inputs["mask"], _squared_norm(inputs), 0).cumsum(1)


def _token_baseline(inputs: Inputs, weights: Tensor, lone: bool = False) -> Tensor:
    """Return the reward to go, G, minus its weighted mean over the t-th trained tokens of
    the responses to one prompt.

    Args:
        inputs: tensors by role.
        weights: of the mean, [N, K].
        lone: whether a t-th token without another has a baseline.
    """
    mask = inputs["mask"]
    returns = compute("discounted_returns", inputs, {"gamma": 1.0})
    ids = torch.stack([_spread(inputs["group"], inputs), mask.long().cumsum(1)], -1)
    out = torch.zeros_like(returns)
    for one in torch.unique(ids[mask], dim=0):
        cells = mask & (ids == one).all(-1)
        g, w = returns[cells], weights[cells]
        out[cells] = g - (g @ w / w.sum() if lone or len(g) > 1 else 0)
    return out


def _clamped(name: str, bound: float) -> TokenFault:
    """Make the fault that advantages are clamped to ±bound."""
    return Fault(
        f"advantages are clamped to ±{bound:g}",
        lambda x, s: compute(name, x, s).clamp(-bound, bound),
        id="advantages-clamped",
    )


def _by_lengths(name: str, inputs: Inputs, settings: Settings) -> Tensor:
    """Return the advantages of a batch whose first slots are taken for the trained
    ones.
    """
    mask = inputs["mask"]
    A = compute(name, {**inputs, "mask": first_slots(mask)}, settings)
    return torch.where(mask, A, 0)


def _other_estimator(name: str) -> TokenFault:
    """Make the fault that the function is this other estimator."""

    def formula(inputs: Inputs, settings: Settings) -> Tensor:
        """Return its advantages; what only it has is at its first value."""
        return compute(name, inputs, {**SETTINGS[name], **settings})

    return Fault(f"it is {name}", formula, id=f"estimator-{name.replace('_', '-')}")


# ---- all of them ---------------------------------------------------------------------
def known(name: str) -> tuple[TokenFault, ...]:
    """Return the known faults of an estimator, in the order in which they are tried.

    Args:
        name: a key of TOKEN_ADVANTAGES.
    """
    faults: list[TokenFault] = []
    if name in (*GAE, *RETURNS):
        faults += [*_whitening_faults(name), *_recursion_faults(name)]
    if name in TURNS:
        faults += [*_turn_faults(name), *_missing_turn_faults(name)]
    if name in STEPS:
        faults += _step_faults(name)
    if name in BASELINES:
        faults += _baseline_faults(name)
    if name in TEACHER:
        faults += _teacher_faults(name)
    faults += [_clamped(name, bound) for bound in CLAMPS]
    if name not in TEACHER:
        faults.append(
            Fault(LENGTHS, partial(_by_lengths, name), id="mask-read-as-lengths")
        )
    faults.append(
        Fault(
            "the sign is flipped: bad answers are reinforced",
            lambda x, s: -compute(name, x, s),
            id="advantages-negated",
        )
    )
    faults += [_other_estimator(other) for other in SETTINGS if other != name]
    return tuple(faults)
