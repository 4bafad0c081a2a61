# SPDX-License-Identifier: Apache-2.0
"""The one table of roles: what an argument of a user-supplied function is called, and
what it means.

A rule by the words of a name rather than a list of names, so that `behaviour_logprobs`
is old and `curr_logps` new.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

# role -> what upref calls it
CALLED = {
    "logp": "log_prob",
    "logp_old": "old_log_prob",
    "logp_sampler": "rollout_log_probs",
    "adv": "advantages",
    "mask": "mask",
    "row_mask": "sample_mask",
    "logp_ref": "ref_log_prob",
    "group": "group",
    "entropy": "entropy",
    "totals": "totals",
    "ranks": "dp_size",
    "parts": "num_micro_batches",
    "rewards": "rewards",
    "n": "n",
    "hidden": "hidden",
    "weight": "weight",
    "logits": "logits",
    "tokens": "tokens",
}
# beginnings of words
OLD = ("old", "prox", "behav", "rollout", "sampl", "prev", "inference", "vllm")
SAMPLER = (
    "behav",
    "rollout",
    "sampl",
    "inference",
    "vllm",
    "sglang",
    "generator",
)  # the engine's, beside another old one
REFERENCE = ("ref", "reference")
NEW = (
    "new",
    "cur",
    "curr",
    "current",
    "policy",
    "actor",
    "trainer",
    "training",
    "learner",
)
LOG_P = re.compile(
    r"log_?p(rob(abilitie)?|s|i|\b|_|$)|(^|_)lps?(_|$)|log_?likelihood|(^|_)ll(_|$)"
)
COUNTS = {
    "coef",
    "coeff",
    "coefficient",
    "weight",
    "weights",
    "size",
    "num",
    "threshold",
    "kl",
    "clip",
    "values",
}
NEVER = {
    "model",
    "batch",
    "inputs",
    "tokenizer",
    "data",
    "sample",
    "samples",
    "config",
    "cfg",
    "args",
    "trainer",
}
# words that make another thing of a log-probability, an advantage, an entropy or a
# mask: `neg_log_prob`, `norm_adv`
OTHER = {
    "fn",
    "func",
    "function",
    "ratio",
    "rate",
    "type",
    "mode",
    "mean",
    "std",
    "norm",
    "normalize",
    "whiten",
}
OTHER |= {
    "estimator",
    "dim",
    "name",
    "diff",
    "delta",
    "neg",
    "negative",
    "minus",
    "nll",
}
INVERTED = {
    "pad",
    "padding",
    "padded",
    "ignore",
    "ignored",
    "prompt",
    "prompts",
    "query",
    "input",
    "inverse",
    "inverted",
    "inv",
    "not",
    "masked",
    "invalid",
    "bad",
    "exclude",
    "excluded",
    "drop",
    "dropped",
    "discard",
    "discarded",
    "skip",
    "skipped",
    "out",
    "env",
    "environment",
    "obs",
    "observation",
}
# and what is none of these, whatever it is called beside
ELSE = {
    "length",
    "lengths",
    "len",
    "lens",
    "seqlens",
    "label",
    "labels",
    "id",
    "ids",
    "value",
    "values",
    "position",
}
ELSE |= {
    "positions",
    "prompts",
    "completions",
    "index",
    "hidden",
    "states",
    "self",
    "cls",
    "kl",
    "device",
    "step",
}
EXACT = {
    "lp": "logp",
    "totals": "totals",
    "dp_size": "ranks",
    "world_size": "ranks",
    "num_ranks": "ranks",
    "num_micro_batches": "parts",
    "n_micro_batches": "parts",
    "gradient_accumulation_steps": "parts",
    "grad_accum_steps": "parts",
}


def words(name: str) -> list[str]:
    """Split a name into words: `perTokenLogps_2` -> per, token, logps. Capitals that
    follow each other are no border: `KLCoef` -> klcoef.

    Args:
        name: of an argument.
    """
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return [w for w in re.split(r"[_\W\d]+", snake) if w]


def counts_tokens(name: str) -> bool:
    """Tell whether a name is of a number of tokens, as TRL's `num_items_in_batch` and
    `total_tokens` are.

    Args:
        name: of an argument.
    """
    words_of_name = set(words(name))
    if words_of_name == {"num", "items", "in", "batch"}:
        return True
    return bool(
        "tokens" in words_of_name
        and words_of_name & {"total", "global", "batch"}
        and not words_of_name & {"max", "min", "per", "prompt", "pad", "padding"}
    )


def is_of_sampler(name: str) -> bool:
    """Tell whether a name is of the engine that sampled, as `sampling_logps` and
    `rollout_is_weights` do.

    Args:
        name: of an argument.
    """
    return any(word.startswith(SAMPLER) for word in words(name))


def role(name: str) -> str:
    """Return the role of an argument of a loss, or of a KL estimator, by its name; ""
    where the name does not tell. The first of the rules below that fits decides.

    Args:
        name: of an argument.

    Returns:
        A key of CALLED, or "".
    """
    words_of_name = words(name)
    snake_name = "_".join(words_of_name)
    if name == "A":
        return "adv"
    if snake_name in EXACT:
        return EXACT[snake_name]
    if _is_of_something_else(words_of_name):
        return ""
    if any(w.startswith("mask") for w in words_of_name):
        return "" if set(words_of_name) & (COUNTS | INVERTED | ELSE) else "mask"
    if any(w.startswith("adv") for w in words_of_name):
        return "" if set(words_of_name) & COUNTS - {"values"} else "adv"
    if any(w.startswith("entrop") for w in words_of_name):
        return "" if set(words_of_name) & COUNTS else "entropy"
    if words_of_name[0] in ("group", "groups", "uid", "uids") or words_of_name[:2] in (
        ["prompt", "id"],
        ["prompt", "ids"],
    ):
        return "" if set(words_of_name) & COUNTS else "group"
    return _role_of_log_prob(words_of_name)


def _is_of_something_else(words_of_name: list[str]) -> bool:
    """Tell whether a word of a name excludes every role, as in `model_inputs`, but not
    in `trainer_logprobs`.
    """
    if not words_of_name or words_of_name[-1] in NEVER:
        return True
    is_log_prob = bool(LOG_P.search("_".join(words_of_name)))
    has_excluded_word = bool(set(words_of_name) & NEVER) and not is_log_prob
    return has_excluded_word or bool(set(words_of_name) & OTHER)


def _role_of_log_prob(words_of_name: list[str]) -> str:
    """Return which policy's log-probabilities a name means, by its words: logp_ref,
    logp_old or logp, in this order where several fit; "" where it means none.
    """
    # words without a separator, as `oldlogprobs` and `logpsref`
    joined_words = [
        match
        for match in (
            re.fullmatch(r"(old|ref|new)?(logp(?:rob)?s?|lps?)(old|ref|new)?", w)
            for w in words_of_name
        )
        if match
    ]
    is_log_prob = bool(LOG_P.search("_".join(words_of_name)) or joined_words)
    all_words = [
        *words_of_name,
        *(x for match in joined_words for x in (match[1], match[3]) if x),
    ]
    # `old`, `ref_`, `new`
    is_policy_alone = all(w in (*OLD, *REFERENCE, *NEW) for w in all_words)
    if not (is_log_prob or is_policy_alone) or set(all_words) & COUNTS:
        return ""
    if any(w in REFERENCE for w in all_words):
        return "logp_ref"
    if any(w.startswith(OLD) for w in all_words):
        return "logp_old" if is_log_prob or all_words == ["old"] else ""
    return "logp"


def not_given(name: str) -> bool:
    """Tell whether the name is that of something that upref does not give:
    probabilities, a ratio, lengths, a model.

    Args:
        name: of an argument.
    """
    words_of_name = set(words(name))
    if role(name):
        return False
    if words_of_name & (NEVER | OTHER | ELSE) or any(
        w.startswith("mask") for w in words_of_name
    ):
        return True
    return not LOG_P.search("_".join(words(name))) and bool(
        words_of_name
        & {
            "prob",
            "probs",
            "probability",
            "probabilities",
            "ratios",
            "logits",
            "logit",
            "pi",
        }
    )


def may_be_old(name: str) -> bool:
    """Tell whether an argument may be the old log-probabilities, where no other role is
    left for it.

    Args:
        name: of an argument.
    """
    return any(w.startswith(OLD) for w in words(name))


# words of what a PPO trainer has beside the policy's numbers, and no mask
BESIDE_POLICY = {
    "vpred",
    "vpreds",
    "vf",
    "critic",
    "baseline",
    "return",
    "returns",
    "reward",
    "rewards",
    "score",
    "scores",
}


# what is true where a response has ended
ENDED = {"done", "dones", "finished", "terminated", "eos"}


def may_be_mask(name: str) -> bool:
    """Tell whether an argument whose name tells no role may be the mask: any that is
    not of a critic or of rewards, and not true where no token trains, as `is_pad`.

    Args:
        name: of an argument.
    """
    words_of_name = words(name)
    is_of_padding = any(word.startswith("pad") for word in words_of_name)
    says_otherwise = set(words_of_name) & (BESIDE_POLICY | INVERTED | ENDED)
    return not is_of_padding and not says_otherwise


def tells_mask(name: str) -> bool:
    """Tell whether an argument holds which slots are tokens, in a form of its own: as
    padding, lengths or borders of sequences.

    Args:
        name: of an argument.
    """
    return any(
        word.startswith(("mask", "len", "seqlen", "pad", "attention"))
        for word in words(name)
    )


def sampler_of(one: str, other: str) -> str:
    """Return which of two names of old log-probabilities is the inference engine's, and
    not the proximal policy's; "" where the names do not tell.

    Args:
        one, other: names of arguments.

    Returns:
        One of the two, or nothing.
    """
    is_sampler = [
        any(w.startswith(SAMPLER) for w in words(name)) for name in (one, other)
    ]
    if not any(is_sampler):
        is_sampler = [
            any(w.startswith("prox") for w in words(name)) for name in (other, one)
        ]
    return "" if is_sampler[0] == is_sampler[1] else (one, other)[is_sampler[1]]


# words of the policy that sampled, beside one of the policy that trains
SAMPLED = {"mu", "gen", "generator"}
TRAINS = {"pi", "train", *NEW}


def older_of(one: str, other: str) -> str:
    """Return which of two names of log-probabilities is of the policy that sampled, where
    the other one is of the policy that trains: `mu_logps` beside `pi_logps`; else "".

    Args:
        one, other: names of arguments.

    Returns:
        One of the two, or nothing.
    """
    for old, new in ((one, other), (other, one)):
        says_old = set(words(old))
        says_new = set(words(new))
        if says_old & SAMPLED and says_new & TRAINS and not says_old & TRAINS:
            return old
    return ""


COEFFICIENT = {"coef", "coeff", "coefficient", "weight"}
LOW = {
    "low",
    "lower",
    "lo",
    "min",
    "bottom",
    "floor",
    "below",
    "down",
    "lb",
    "minus",
    "left",
}
HIGH = {
    "high",
    "higher",
    "hi",
    "upper",
    "max",
    "top",
    "ceil",
    "above",
    "up",
    "ub",
    "plus",
    "right",
}


# what is clipped in place of the ratio, as in `log_ratio_clip` and `clip_grad_norm`
NO_RATIO = {
    "log",
    "logratio",
    "kl",
    "adv",
    "advantage",
    "advantages",
    "grad",
    "gradient",
    "reward",
    "rewards",
    "value",
    "values",
    "vf",
    "critic",
}


def hyperparameter(name: str, known: set[str] | frozenset[str]) -> str:
    """Return which of the known hyperparameters an argument means: `clip_ratio_low` ->
    eps_low, `kl_coef` -> beta; "" where it means none. A name that is known means itself;
    of the rules below the first that fits decides.

    Args:
        name: of an argument.
        known: names of the objective's hyperparameters.
    """
    if name in known:
        return name
    words_of_name = words(name)
    every = set(words_of_name)
    low = LOW & every
    high = HIGH & every
    is_kl = "kl" in every and every & (COEFFICIENT | {"penalty"})
    is_entropy = any(w == "ent" or w.startswith("entrop") for w in every)
    signs = {"pos", "neg"} & every
    meant = ""
    if "beta" in every or is_kl:
        meant = "beta"
    elif "dual" in every or (words_of_name[-1:] == ["c"] and "clip" in every):
        meant = "c"
    elif is_entropy and every & COEFFICIENT:
        meant = "entropy_coef"
    elif any(w.startswith(("clip", "eps")) for w in every) and not every & NO_RATIO:
        meant = "eps"
        if low and not high:
            meant = "eps_low"
        elif high and not low:
            meant = "eps_high"
    elif "tau" in every or "temperature" in every:
        meant = "tau"
        if "pos" in every:
            meant = "tau_pos"
        elif "neg" in every:
            meant = "tau_neg"
    elif "lambda" in every and "lam" in known:
        meant = "lam"
    elif signs and every & {"k", "lambda"}:  # as VESPO's code has them
        letter = "c1" if "k" in every else "c2"
        meant = f"{letter}_{signs.pop()}"
    return meant if meant in known else ""


MOST_GUARD = 1e-5  # a clip is wider: GSPO's, the narrowest, is 3e-4


def guards_division(name: str, default: Any) -> bool:
    """Tell whether an argument keeps a denominator from 0, as `eps=1e-8` does, and is no
    bound of a clip.

    Args:
        name: of the argument.
        default: its default.
    """
    is_eps = any(word.startswith("eps") for word in words(name))
    return is_eps and isinstance(default, float) and 0 < default <= MOST_GUARD


def argument(key: str, arguments: Iterable[str]) -> str:
    """Return which of these arguments a hyperparameter goes to: the one of its name, or
    one that means it; "" where there is none.

    Args:
        key: the hyperparameter.
        arguments: their names.
    """
    return (
        key
        if key in arguments
        else next((p for p in arguments if hyperparameter(p, {key})), "")
    )


def arguments(key: str, defaults: Mapping[str, Any]) -> tuple[str, ...]:
    """Return which arguments a hyperparameter goes to: the one that `argument` returns,
    or the two of `halves`; () where there is none.

    Args:
        key: the hyperparameter.
        defaults: argument -> default.
    """
    if one := argument(key, defaults):
        return (one,)
    return halves(defaults) if key == "eps" else ()


MOST_EPS = 0.5  # a larger number is a bound of the ratio, as 0.8 or 1.2


def halves(defaults: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the two arguments that one `eps` goes to: the lower and the upper half of
    a clip, as `clip_low` and `clip_high`; () where there are none, or several, or where
    one is a bound of the ratio itself by its default, as `clip_max = 1.2`, or may be one
    by its name, as `clip_max` without a number.

    Args:
        defaults: argument -> default.
    """
    low, high = (
        [p for p in defaults if hyperparameter(p, {key}) == key]
        for key in ("eps_low", "eps_high")
    )
    if len(low) != 1 or len(high) != 1:
        return ()
    pair = (low[0], high[0])
    numbers = [defaults[p] for p in pair if isinstance(defaults[p], int | float)]
    are_bounds = any(number > MOST_EPS for number in numbers)
    may_be_bounds = not numbers and any({"min", "max"} & set(words(p)) for p in pair)
    return () if are_bounds or may_be_bounds else pair


REWARDS = {"reward", "rewards", "score", "scores", "return", "returns", "r"}
N = [
    "n",
    "num_generations",
    "group_size",
    "n_samples",
    "num_samples",
    "n_samples_per_prompt",
    "rollout_n",
    "g",
    "k",
]


# a mask of these has one entry for each response
ROW_WORDS = {"sample", "samples", "row", "rows", "seq", "sequence", "sequences"}
ROW_WORDS |= {
    "episode",
    "episodes",
    "trajectory",
    "trajectories",
    "example",
    "examples",
}


def reward_role(name: str) -> str:
    """Return the role of an argument of an advantage estimator, by the first of the rules
    below that fits: n, row_mask, mask, rewards or group; "" where the name does not tell.

    Args:
        name: of an argument.
    """
    words_of_name = words(name)
    if "_".join(words_of_name) in N:
        return "n"
    if "mask" in "".join(words_of_name):
        return "row_mask" if set(words_of_name) & ROW_WORDS else "mask"
    if set(words_of_name) & REWARDS and not set(words_of_name) & COUNTS - {"values"}:
        return "rewards"
    if words_of_name and (
        words_of_name[0]
        in ("group", "groups", "uid", "uids", "index", "indices", "prompt")
        and "size" not in words_of_name
    ):
        return "group"
    return ""
