# SPDX-License-Identifier: Apache-2.0
"""The sentence of every finding: {names} are its numbers. Nothing else in this folder
says what a finding means.

A note names every cause that fits; it accuses nobody. A failure says what was undone
and what is left.
"""

from collections.abc import Mapping
from typing import Any

# ---- the sampler's column ------------------------------------------------------------
UNDONE = "the mean difference falls from {before:.3g} to {after:.2g} nats"
ABOVE_ZERO = (
    "mean log ρ = {mean:+.3f}, at most 0 where the trainer's column is normalized and the "
    "mask does not leave out tokens by their ratio"
)
# the model of the two sides is one, and what it reads is not
CONTEXT = "another context (a cache, a window, the tokens of a prompt or of a template)"
LIKELIEST = (
    "the number of the likeliest token, or of the last of a list, in place of the drawn "
    "one"
)
MASKED_BY_RATIO = " A mask that leaves out tokens by their ratio looks like this too."
LIKELY = "Likely causes, by what the file shows: {causes}"
# Causes that share a signature, and what tells each from the others: suspects.py orders
# them.
SUSPECTS: dict[str, tuple[str, str]] = {
    "weights": (
        "other weights: stale, undelivered or of a draft model, or sharper since the "
        "sampling",
        "record version and ref, at several steps",
    ),
    "arithmetic": (
        "other arithmetic: low precision, quantized weights, other experts of a mixture, "
        "dropout or a trainer in training mode, another mask in the attention",
        "score the same tokens twice: equal without dropout; in float32, with routing "
        "replay, the gap vanishes",
    ),
    "ids": (
        "other ids (a text that was tokenized again, an inserted token, labels shifted by "
        "one) or " + CONTEXT,
        "record sampler_ids, and compare the ids that each side reads, prompt included",
    ),
    "context": (
        CONTEXT,
        "compare the ids that each side reads, prompt included",
    ),
    "settings": (
        "a setting of the sampler: penalties, a logit bias, banned tokens, a grammar, a "
        "temperature, top_p, top_k or min_p",
        "sample once with all of them off",
    ),
    "penalties": (
        "penalties, a logit bias or banned tokens of the sampler",
        "switch them off",
    ),
    "temperature": (
        "another temperature or scale of the logits, or a softcap that one side lacks",
        "sample and train at temperature 1",
    ),
    "before_temperature": (
        "a sampler's column of before the temperature",
        "vLLM: logprobs_mode=processed_logprobs",
    ),
    "cut": (
        "a sampler that was cut and renormalized, and a trainer that was not (top_p, "
        "top_k, min_p, a grammar)",
        "set top_p=1, top_k off, min_p=0",
    ),
    "vocabulary": (
        "tokens in the trainer's softmax that the sampler's lacks (a padded vocabulary)",
        "compare the two sizes",
    ),
    "divided": (
        "log-probabilities divided by the temperature in place of logits",
        "look where the trainer divides",
    ),
    "likeliest": (
        LIKELIEST,
        "take the number of the sampled id",
    ),
    "undrawn": (
        "tokens that the sampler did not draw: its number is 0",
        "mask them, and record NaN",
    ),
    "order": (
        "numbers in other places: another order of responses or of the chunks of a "
        "sequence, or the other end of a padded row",
        "carry an id with each response, and slots from its first token on",
    ),
    "rows": (
        "numbers of another response (exchanged rows)",
        "carry an id with each response",
    ),
}
# a log holds the place of a cause in this list: new ones come last
SAMPLER = {
    "other_ids": (
        "{tokens} of {trained} trained tokens have other ids than the sampler drew: "
        "the text was tokenized again, or tokens were inserted."
    ),
    "not_sampled": (
        "{tokens} of {trained} trained tokens{place} have no log-probability of the sampler "
        "(it is {value}): the sampler did not draw them (the text of a prompt, "
        "a tool or an environment, an appended token, a token that a grammar forces), or "
        "did not report them. Mask what it did not draw."
    ),
    "factor": (
        "the sampler's log-probabilities are {factor:.4g} times the trainer's: one of "
        "them was divided by a temperature after the log-softmax, or has another base. "
        "Divided out, " + UNDONE + "."
    ),
    "sign": "the sampler's column holds negated log-probabilities: change its sign.",
    "probabilities": (
        "the sampler's column holds probabilities: record their logarithm."
    ),
    "shift": (
        "in {rows} of {of} responses{long} the sampler's number of a token stands {shift:+d} "
        "slots from the trainer's. Moved back, " + UNDONE + "."
    ),
    "rows": (
        "{rows} of {of} responses have the sampler's column of another response (row "
        "{first} has that of row {second}). Exchanged again, " + UNDONE + "."
    ),
    "floor": (
        "the column {column} has a {side} at {value:.4g}, which {tokens} tokens share; "
        "the other column goes on. With the same {side} there, " + UNDONE + "."
    ),
    "all_zero": (
        "the sampler's column is 0 on every trained token: it was not recorded, or the "
        "sampler was certain of every token (greedy, or cut to one token)."
    ),
    "copied": (
        "the sampler's column equals the trainer's bit for bit, so nothing is compared: "
        "the run takes the engine's numbers as π_old, one column is a copy of the other, "
        "one engine made both, or two engines compute the same bits. Record now, from the "
        "trainer's own forward pass, to compare."
    ),
    "reference_weights": (
        "the sampler's column fits the reference model better than the trainer "
        "({after:.2g} against {before:.2g} nats): the engine may still hold the "
        "weights of the reference, or the reference's log-probabilities were recorded "
        "as the sampler's."
    ),
    "impossible_tokens": (
        "{tokens} of {trained} tokens are more than {far:g} nats less likely for the trainer "
        "than for the sampler, and most others agree. " + LIKELY + "."
    ),
    "cut": (
        "the sampler is above the trainer on {share:.0%} of the tokens, and certain "
        "where the trainer is not; of a cut, the mean kept mass is E[ρ] = {rho:.3f}. "
        + LIKELY
        + "."
        + MASKED_BY_RATIO
    ),
    "cut_or_divided": (
        "the sampler is above the trainer on {share:.0%} of the tokens, E[ρ] = "
        "{rho:.3f}. " + LIKELY + "." + MASKED_BY_RATIO
    ),
    "trainer_above": (
        "the trainer is above the sampler on {share:.0%} of the tokens, E[ρ] = "
        "{rho:.3f}: the trainer is cut and renormalized and the sampler's column is "
        "not, one of them divides log-probabilities by the temperature, or the "
        "sampler's column is not the distribution that sampled (numbers of a draft "
        "model, or of before a cut)." + MASKED_BY_RATIO
    ),
    "raw_temperature": (
        "the sampler's column is not the distribution that sampled ("
        + ABOVE_ZERO
        + "), and is stretched against the trainer's: log-probabilities of before the "
        "temperature (vLLM: logprobs_mode=processed_logprobs), of before a softcap, or "
        "of another temperature."
    ),
    "not_the_sampler": (
        "the sampler's column is not the distribution that sampled ("
        + ABOVE_ZERO
        + "): log-probabilities of before the temperature or before penalties, of "
        "other weights than those that sampled, or computed again. Or the trainer's is "
        "none: log-probabilities divided by the temperature."
    ),
    "above_one": (
        "E[ρ] = {rho:.3f} ± {error:.3f} is above 1, and the mass of a policy is at "
        "most 1 unless the mask leaves out tokens by their ratio: the sampler's column "
        "is not the distribution that sampled, or the trainer's is none (log-probabilities "
        "divided by the temperature). The sampler's has numbers of before the "
        "temperature or of other weights (a draft model, an update that arrived "
        "later), or something else than the log-probability of each token."
    ),
    "sums": (
        "the sampler's column holds the log-probability of the response up to each "
        "token: take the difference of neighbors. With it, " + UNDONE + "."
    ),
    "positive": (
        "{tokens} of {trained} numbers in the sampler's column are above 0, and no "
        "log-probability is: they are something else."
    ),
    "one_number": (
        "the sampler's column has one number for all tokens of a response, in each of "
        "{responses} responses{long}: a mean or a sum over the response, where the number of "
        "each token belongs."
    ),
    "temperature": (
        "the columns are two stretched versions of each other, mean gap {mean_abs:.3f} "
        "nats, E[ρ] = {rho:.3f}. " + LIKELY + "."
    ),
    "some_temperature": (
        "the columns are two stretched versions of each other, mean gap {mean_abs:.3f} "
        "nats, E[ρ] = {rho:.3f}. " + LIKELY + "."
    ),
    "bfloat16_column": (
        "the column {column} holds bfloat16 numbers, 8 bits of each log-probability; "
        "mean gap {mean_abs:.2g} nats."
    ),
    "two_policies": (
        "the columns look like two normalized policies, mean gap {mean_abs:.3f} nats, "
        "E[ρ] = {rho:.3f}, KL about {k3:.2g}: more than bfloat16 rounding in most "
        "models. " + LIKELY + "."
    ),
    "unrelated": (
        "a token's numbers in the two columns have little to do with each other "
        "(correlation {correlation:.2f}, mean gap {mean_abs:.3f} nats, E[ρ] = "
        "{rho:.3f}). " + LIKELY + "."
    ),
    "some_responses": (
        "{rows} of {of} responses are off, by {mean_abs:.3f} nats a token, and the "
        "others agree to {rest:.2g}. " + LIKELY + "."
    ),
    "aligned": (
        "in {rows} of {of} responses{long} the sampler's numbers are at the {side} end of "
        "the row, and the tokens are not: one column is padded on the left and the "
        "other on the right, or a prompt is missing in one. Moved back, " + UNDONE + "."
    ),
    "missing_mass": (
        "E[ρ] = {rho:.3f} ± {error:.3f} is below 1, mean gap {mean_abs:.3f} nats, as if "
        "the trainer gave mass to tokens that the sampler cannot draw. "
        + LIKELY
        + "."
        + MASKED_BY_RATIO
    ),
    "now_compared": (
        "old is the sampler's own column: the run takes the engine's numbers as π_old, or "
        "one is a copy of the other. So now is compared, and updates since the sampling "
        "are part of the gap."
    ),
    "constant": (
        "the sampler's column is {value:.6g} on every trained token: it holds no "
        "log-probabilities of these tokens."
    ),
    "zero": (
        "on {tokens} of {trained} trained tokens{place} the sampler's number is 0, although "
        "several of them are unlikely for the trainer. Here 0 is also what the sampler has on "
        "tokens of which the trainer is certain. So either it was certain of these "
        "tokens too, and the trainer has other ids, other weights or experts, or reads "
        + CONTEXT
        + "; or it did not draw them (the text of a tool or an environment, an appended "
        "token, a token that a grammar forces). What it did not draw must be masked."
    ),
}

# ---- zero mismatch -------------------------------------------------------------------
ZERO = {
    "differs": (
        "{differ} of {tokens} tokens differ, in {rows} of {of} responses. The first is "
        "token {token} of response {row}: {mu:.9g} by the sampler, {pi:.9g} by the "
        "trainer. Beyond 0.5 nats: {half:.2%}."
    ),
}

# ---- several steps -------------------------------------------------------------------
SERIES = {
    "never_delivered": (
        "at {steps} steps the sampler's column is that of the reference model, although "
        "newer weights are recorded as having sampled, and the gap to the trainer grows "
        "from {first:.2g} to {last:.2g} nats: the engine never received new weights, or "
        "the reference's log-probabilities were recorded as the sampler's."
    ),
    "stays_reference": (
        "at {steps} steps the sampler's column is that of the reference model, and the "
        "gap to the trainer grows from {first:.2g} to {last:.2g} nats: the engine "
        "never received new weights, the reference's log-probabilities were recorded "
        "as the sampler's, or all these steps train on responses that the reference "
        "model sampled once."
    ),
    "grows_with_steps": (
        "the gap grows with the steps (capped k2 {first:.2g} to {last:.2g}): weights that "
        "never reach the engine look like this, and so do a growing lag or a rising "
        "learning rate in an asynchronous run, updates on responses that were sampled "
        "once, and a numerical gap that grows. Record ref, or version, to tell."
    ),
    "grows_at_one_lag": (
        "the gap grows with the steps (capped k2 {first:.2g} to {last:.2g}) although the "
        "recorded lag stays {lag}: weights that never reach the engine, whatever it "
        "counts, look like this, and so do a rising learning rate in an asynchronous "
        "run and a numerical gap that grows. Record ref to tell."
    ),
    "one_version": (
        "the weights of step {version} sampled the responses of all {steps} steps, and "
        "the gap grows (capped k2 {first:.2g} to {last:.2g}): the engine received no newer "
        "weights, or these are updates on responses that were sampled once."
    ),
    "jumps": (
        "from step {since} on the gap is larger than before: the least capped k2 is "
        "{after:.2g}, and the largest up to step {until} is {before:.2g}."
    ),
    "stands_out": (
        "the gap stands out at {lone} of {of} steps: {named}. The least capped k2 "
        "there is {least:.2g}, and the median of the other steps is {median:.2g}."
    ),
    "follows_lag": (
        "the gap follows the lag of the weights that sampled (capped k2 {low:.2g} at lag "
        "{least}, {high:.2g} at lag {most}): staleness."
    ),
}

# ---- advantages ----------------------------------------------------------------------
ADVANTAGES = {
    "wrong_grouping": (
        "advantages are {estimator} of {grouping}: {mixed} of these {groups} groups "
        "mix prompts. Within the prompts no estimator gives them."
    ),
    "whole_batch": (
        "advantages are {estimator} over the whole batch, not within each prompt. "
        "REINFORCE++ does that, and a fixed baseline may equal it; GRPO does not."
    ),
    "fixed_baseline": (
        "the advantages are the rewards less one number, or a multiple, whatever the "
        "prompt: a fixed baseline, or "
        "{estimator} of {grouping}, which mixes prompts in {mixed} of {groups} groups. "
        "Within the prompts no estimator gives them."
    ),
    "subgroups": (
        "advantages are {estimator} of {grouping}, which divides the prompts into "
        "smaller groups: a prompt that was drawn several times, or files of two runs, "
        "look like this."
    ),
    "rests_of_prompts": (
        "advantages are {estimator} of each prompt. But {rests} of {prompts} prompts have "
        "fewer than {size} responses here, and the rewards of each of these are all equal: a "
        "filter that drops single responses may have dropped those that differed. Filter "
        "whole prompts."
    ),
    "split_groups": (
        "no estimator gives the recorded advantages from the rewards that are here, "
        "where the prompts have from {low} to {high} responses: others may be in other "
        "steps of the same generation (a mini-batch cuts groups) or filtered out. "
        "Shaped rewards and other estimators look like this too."
    ),
    "no_estimator": (
        "no estimator gives the recorded advantages from the recorded rewards: shaped, "
        "clipped or scaled rewards or advantages, a second normalization, advantages of "
        "other responses, a group that is not whole in this file, another eps, or a custom "
        "estimator."
    ),
    "negated_advantages": (
        "the advantages are minus {estimator}, exactly: they have the other sign, or the "
        "recorded rewards have."
    ),
    "moved_advantages": (
        "the advantages are {estimator}, exactly, but each response has that {ways}."
    ),
    "shuffled_advantages": (
        "the advantages are those of {estimator}, exactly, but of other responses: the "
        "same numbers are in another order, as if rewards, responses or advantages had "
        "been sorted or shuffled alone."
    ),
    "masked_advantages": (
        "the advantages are {estimator} on {kept} of {of} responses, and 0 on the others, "
        "where that estimator's are not: as if these had been filtered (responses that are "
        "too long or were cut off)."
    ),
    "multiple_advantages": (
        "the advantages are {factor:g} times {estimator}: counted so often, or times a "
        "coefficient."
    ),
    "per_token": (
        "advantages differ within {rows} of {of} responses: they are of tokens (GAE, a "
        "KL term in the reward, a teacher), which rewards of responses do not give."
    ),
    "no_signal": (
        "all advantages are 0 ({why}), so they give no gradient. What may still move "
        "weights is another term (a KL, entropy, value or auxiliary loss), weight decay, or "
        "an optimizer's momentum."
    ),
    "too_few": (
        "too few responses have an advantage other than 0 to name an estimator: "
        "{responses}."
    ),
}

# ---- the loss ------------------------------------------------------------------------
LOSS = {
    "other_sum": (
        "the logged loss {logged:.6g} is the {found} of {objective}'s terms, not the "
        "{expected} ({value:.6g})."
    ),
    "multiple": (
        "the logged loss {logged:.6g} is {factor:.6g} times the {expected} of "
        "{objective}'s terms ({value:.6g}): a count of micro-batches, accumulation "
        "steps or ranks enters once too often or too rarely, the loss has a "
        "coefficient, or it is divided by another number, which is that multiple by "
        "chance."
    ),
    "negated": (
        "the logged loss {logged:.6g} is minus the {expected} of {objective}'s terms "
        "({value:.6g}): the loss, the number that the run logs, or the advantages have "
        "the other sign."
    ),
    "logged_zero": (
        "the logged loss is 0, and the {expected} of {objective}'s terms is "
        "{value:.6g}. Their {found} cancels to 0 here; a run that does not log its loss "
        "has a 0 too."
    ),
    "divided": (
        "the logged loss {logged:.6g} is not the {expected} of {objective}'s terms "
        "({value:.6g}). It would be with a divisor of about {divisor:.12g}{remark} in place "
        "of {count:.12g} {unit}; a coefficient, a further term (a KL, an entropy), a mean "
        "over several steps, another mask in the loss than in the file, other "
        "hyperparameters or another objective give that too."
    ),
    "other_sign": (
        "the logged loss {logged:.6g} does not have the sign of the {expected} of "
        "{objective}'s terms ({value:.6g}): it is {factor:.6g} times that, which no single "
        "divisor gives. A divisor of its own for each response or prompt, a further term "
        "(a KL, an entropy), another mask in the loss than in the file, other "
        "hyperparameters or another objective can; so can the wrong sign beside another "
        "divisor or a coefficient."
    ),
    "times": (
        "the logged loss {logged:.6g} is {factor:.6g} times the {expected} of "
        "{objective}'s terms ({value:.6g}), in which each prompt has a divisor of its own. "
        "Other divisors, a coefficient, a further term (a KL, an entropy), a mean over "
        "several steps, another mask in the loss than in the file, other hyperparameters "
        "or another objective give that."
    ),
    "unexplained": (
        "the logged loss {logged:.6g} is not the {expected} of {objective}'s terms "
        "({value:.6g}), and it is too near 0 to tell a divisor. A divisor of its own for each "
        "response or prompt, another mask in the loss than in the file, a further term, "
        "other hyperparameters or another objective can."
    ),
    "beside_zero": (
        "the logged loss {logged:.6g} is not the {expected} of {objective}'s terms, "
        "which cancel to {value:.2g}: it has other terms (a KL or an entropy term, an "
        "auxiliary loss), or is of another objective or of other tokens."
    ),
    "only_here": (
        "the logged loss {logged:.6g} is not the {expected} of {objective}'s terms "
        "({value:.6g}). It is their {what}, but at other steps it is not: other "
        "hyperparameters or another objective give that by chance."
    ),
    "uninformative": (
        "the loss says nothing here: its terms sum to {value:.2g} (where all "
        "advantages are 0, and often where r is 1)."
    ),
    "extra_terms": (
        "the logged loss {logged:.6g} has terms beside the objective's ({value:.6g}): "
        "{extra}. The loss alone tells nothing here."
    ),
    "gradient_other_sum": (
        "dL/dlp of the recorded tokens is that of the {found}, not that of the "
        "{expected} of {objective}'s terms."
    ),
    "gradient_multiple": (
        "dL/dlp of the recorded tokens is {factor:.6g} times that of the {expected} of "
        "{objective}'s terms: a count of micro-batches, accumulation steps or ranks "
        "enters once too often or too rarely, or the loss has a coefficient."
    ),
    "gradient_scaled": (
        "dL/dlp of the recorded tokens is {factor:.6g} times that of the {expected} of "
        "{objective}'s terms: as if the divisor of the step were {divisor:.6g} in "
        "place of {count:.6g}; a coefficient of the loss or of the advantages gives "
        "that too."
    ),
    "gradient_coefficient": (
        "dL/dlp of the recorded tokens is {factor:.6g} times that of the {expected} of "
        "{objective}'s terms: another divisor, or a coefficient of the loss or of the "
        "advantages."
    ),
    "gradient_sign": (
        "dL/dlp of the recorded tokens is {factor:.6g} times that of the {expected} of "
        "{objective}'s terms: the loss, the column grad or the advantages have the other "
        "sign."
    ),
    "gradient_zero": (
        "dL/dlp is 0 on every recorded token, and {objective}'s is not: the column "
        "grad was not recorded, or the loss does not train these tokens."
    ),
    "gradient_parts": (
        "dL/dlp is in each {part} a multiple of that of the {expected} of "
        "{objective}'s terms, and not in all the same one: from {low:.4g} to "
        "{high:.4g}."
    ),
    "gradient_rows": (
        "dL/dlp is in each response a multiple of that of the {expected} of "
        "{objective}'s terms, and not in all the same one: from {low:.4g} to "
        "{high:.4g}. No known sum gives these."
    ),
    "no_gradient": (
        "no recorded token has a gradient that tells the normalizer: each one is "
        "clipped or at a clip bound, its advantage is 0, or the correction of the "
        "sampler multiplies it by 0."
    ),
    "gradient_other": (
        "dL/dlp is not a multiple of {objective}'s gradient on {tokens} of {trained} "
        "compared tokens: other weights than this objective's with these "
        "hyperparameters and columns, so its normalizer cannot be told."
    ),
    "gradient_of_another": (
        "dL/dlp of the recorded tokens is that of the {found}, and not that of "
        "{objective}{settings}, which {tokens} of {trained} compared tokens contradict. "
        "If {objective} ran, its hyperparameters or its columns old and now differ from "
        "those that were compared."
    ),
    "needs_now": (
        "the column now was not recorded, so the loss is that of the first optimizer "
        "step, r = 1."
    ),
}

# ---- which policy is old -------------------------------------------------------------
OLD = {
    "ratio_one": (
        "r = 1 on every token although the weights that sampled are {lag} steps old: "
        "old was computed with the current weights, or now is a copy of it. With r = 1 "
        "no clip acts."
    ),
    "ratio_one_of_versions": (
        "r = 1 on every token although the weights that sampled are {lag} to {most} steps "
        "old: old was computed with the current weights, or now is a copy of it. With "
        "r = 1 no clip acts."
    ),
}

CAUSES: dict[str, str] = SAMPLER | ZERO | SERIES | ADVANTAGES | LOSS | OLD


def sentence(cause: str, numbers: Mapping[str, Any]) -> str:
    """Return the finding in words.

    Args:
        cause: a key of CAUSES.
        numbers: what its placeholders stand for.

    Raises:
        KeyError: there is no such cause, or a number is missing.
    """
    return CAUSES[cause].format(**numbers)
