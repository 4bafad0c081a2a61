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
# a policy and its log-probabilities without a separator, as `oldlogprobs`, `logpsref`
JOINED = re.compile(r"(old|ref|new)?(logp(?:rob)?s?|lps?)(old|ref|new)?")
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
    is_log_prob = bool(LOG_P.search("_".join(words_of_name)))
    all_words = [*words_of_name]
    for word in words_of_name:
        joined = JOINED.fullmatch(word)
        if joined is None:
            continue
        is_log_prob = True
        policies = (joined[1], joined[3])  # None where it has none on this side
        all_words.extend(policy for policy in policies if policy)
    # `old`, `ref_`, `new`
    is_policy_alone = all(word in (*OLD, *REFERENCE, *NEW) for word in all_words)
    if not (is_log_prob or is_policy_alone) or set(all_words) & COUNTS:
        return ""
    if any(w in REFERENCE for w in all_words):
        return "logp_ref"
    if any(w.startswith(OLD) for w in all_words):
        return "logp_old" if is_log_prob or all_words == ["old"] else ""
    return "logp"


# words of a probability that is no logarithm, of ratios of two, and of logits
OF_PROBABILITY = {
    "prob",
    "probs",
    "probability",
    "probabilities",
    "ratios",
    "logits",
    "logit",
    "pi",
}


def not_given(name: str) -> bool:
    """Tell whether the name is that of something that upref does not give:
    probabilities, a ratio, lengths, a model.

    Args:
        name: of an argument.
    """
    if role(name):
        return False
    words_of_name = set(words(name))
    is_mask = any(word.startswith("mask") for word in words_of_name)
    if is_mask or words_of_name & (NEVER | OTHER | ELSE):
        return True
    is_log_prob = bool(LOG_P.search("_".join(words(name))))
    return not is_log_prob and bool(words_of_name & OF_PROBABILITY)


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
    is_one = is_of_sampler(one)
    is_other = is_of_sampler(other)
    if not is_one and not is_other:
        # beside the proximal policy's, the other one is the engine's
        is_one = any(word.startswith("prox") for word in words(other))
        is_other = any(word.startswith("prox") for word in words(one))
    if is_one == is_other:
        return ""
    return one if is_one else other


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
    meant = _hyperparameter_of_words(words(name), "lam" in known)
    return meant if meant in known else ""


def _hyperparameter_of_words(words_of_name: list[str], has_lam: bool) -> str:
    """Return the hyperparameter that a name means by its words, whether an objective has
    it or not; "" where it means none.

    Args:
        words_of_name: the words.
        has_lam: the objective has a `lam`, which `lambda` means then.
    """
    every = set(words_of_name)
    is_kl = "kl" in every and every & (COEFFICIENT | {"penalty"})
    if "beta" in every or is_kl:
        return "beta"
    if "dual" in every or (words_of_name[-1:] == ["c"] and "clip" in every):
        return "c"
    is_entropy = any(word == "ent" or word.startswith("entrop") for word in every)
    if is_entropy and every & COEFFICIENT:
        return "entropy_coef"
    is_clip = any(word.startswith(("clip", "eps")) for word in every)
    if is_clip and not every & NO_RATIO:
        return _side_of_eps(every)
    if "tau" in every or "temperature" in every:
        if "pos" in every:
            return "tau_pos"
        return "tau_neg" if "neg" in every else "tau"
    if "lambda" in every and has_lam:
        return "lam"
    signs = {"pos", "neg"} & every
    if signs and every & {"k", "lambda"}:  # as VESPO's code has them
        letter = "c1" if "k" in every else "c2"
        return f"{letter}_{signs.pop()}"
    return ""


def _side_of_eps(words_of_name: set[str]) -> str:
    """Return which bound of a clip a name with these words means: eps_low, eps_high, or
    eps where its words tell no side, or both.
    """
    is_low = bool(LOW & words_of_name)
    is_high = bool(HIGH & words_of_name)
    if is_low == is_high:
        return "eps"
    return "eps_low" if is_low else "eps_high"


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
    if key in arguments:
        return key
    return next((name for name in arguments if hyperparameter(name, {key})), "")


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


def is_bound(default: Any) -> bool:
    """Tell whether a default is a bound of the ratio itself by its size, as 0.8 or 1.28,
    and no distance from 1.

    Args:
        default: of an argument.
    """
    return isinstance(default, int | float) and default > MOST_EPS


def halves(defaults: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the two arguments that one `eps` goes to: the lower and the upper half of
    a clip, as `clip_low` and `clip_high`; () where there are none, or several, or where
    one is a bound of the ratio itself by its default, as `clip_max = 1.2`, or may be one
    by its name, as `clip_max` without a number.

    Args:
        defaults: argument -> default.
    """
    low = [name for name in defaults if hyperparameter(name, {"eps_low"})]
    high = [name for name in defaults if hyperparameter(name, {"eps_high"})]
    if len(low) != 1 or len(high) != 1:
        return ()
    pair = (low[0], high[0])
    numbers = [
        defaults[name] for name in pair if isinstance(defaults[name], int | float)
    ]
    are_bounds = any(map(is_bound, numbers))
    is_named_as_bound = any({"min", "max"} & set(words(name)) for name in pair)
    if are_bounds or (not numbers and is_named_as_bound):
        return ()
    return pair


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
