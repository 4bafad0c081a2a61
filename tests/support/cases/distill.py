# SPDX-License-Identifier: Apache-2.0
"""Distillation losses as people write them: RIGHT with the divergence and the
aggregation that each has, and WRONG with the id of the fault.
"""

import torch
import torch.nn.functional as F


def _logs(student_logits, teacher_logits, temperature=1.0):
    return (
        F.log_softmax(student_logits / temperature, -1),
        F.log_softmax(teacher_logits.detach() / temperature, -1),
    )


def _mean(x, mask):
    return (x * mask).sum() / mask.sum()


# ---- right ---------------------------------------------------------------------------
def reverse(student_logits, teacher_logits, loss_mask):
    q, p = _logs(student_logits, teacher_logits)
    return _mean((q.exp() * (q - p)).sum(-1), loss_mask)


def reverse_by_kl_div(student_logits, teacher_logits, mask, temperature):
    q, p = _logs(student_logits, teacher_logits, temperature)
    return _mean(F.kl_div(p, q, reduction="none", log_target=True).sum(-1), mask)


def forward_by_cross_entropy(student_logits, teacher_logits, mask):
    """Return the cross-entropy of the student under the teacher, which is the forward
    KL divergence less a constant.
    """
    q, p = _logs(student_logits, teacher_logits)
    return -_mean((p.exp() * q).sum(-1), mask)


def forward_with_labels(student_logits, teacher_logits, labels):
    q, p = _logs(student_logits, teacher_logits)
    d = F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    return d[labels != -100].mean()


def forward_times_square(student_logits, teacher_logits, mask, temperature):
    q, p = _logs(student_logits, teacher_logits, temperature)
    return _mean((p.exp() * (p - q)).sum(-1), mask) * temperature**2


def forward_times_square_of_2(student_logits, teacher_logits, mask):
    return forward_times_square(student_logits, teacher_logits, mask, 2.0)


def forward_unreduced(student_logits, teacher_logits):
    q, p = _logs(student_logits, teacher_logits)
    return (p.exp() * (p - q)).sum(-1)


def generalized_jsd(student_logits, teacher_logits, mask, beta=0.5):
    q, p = _logs(student_logits, teacher_logits)
    m = (beta * p.exp() + (1 - beta) * q.exp()).log()
    d = beta * (p.exp() * (p - m)) + (1 - beta) * (q.exp() * (q - m))
    return _mean(d.sum(-1), mask)


def mean_of_responses(student_logits, teacher_logits, mask):
    q, p = _logs(student_logits, teacher_logits)
    d = (q.exp() * (q - p)).sum(-1) * mask
    return (d.sum(1) / mask.sum(1)).mean()


def of_log_probs(student_logprobs, teacher_logprobs, mask):
    return _mean(
        (student_logprobs.exp() * (student_logprobs - teacher_logprobs)).sum(-1), mask
    )


def teacher_top(student_logits, teacher_logits, mask, top_k=16):
    q, p = _logs(student_logits, teacher_logits)
    top = p.topk(top_k, -1).indices
    q, p = q.gather(-1, top), p.gather(-1, top)
    return _mean((p.exp() * (p - q)).sum(-1), mask)


def teacher_top_of_engine(
    student_logits, teacher_topk_log_probs, teacher_topk_ids, mask
):
    """Return KL(teacher ‖ student) over the teacher's k ids, whose log-probabilities a
    server returned, as for verl.
    """
    q = student_logits.log_softmax(-1).gather(-1, teacher_topk_ids)
    d = teacher_topk_log_probs.exp() * (teacher_topk_log_probs - q)
    return _mean(d.sum(-1), mask)


def student_top_renormalized(student_logits, teacher_logits, mask, k):
    top = student_logits.topk(k, -1).indices
    q = student_logits.gather(-1, top).log_softmax(-1)
    p = teacher_logits.gather(-1, top).log_softmax(-1)
    return _mean((q.exp() * (q - p)).sum(-1), mask)


def sampled_policy_gradient(log_prob, teacher_log_prob, mask):
    return _mean((log_prob - teacher_log_prob).detach() * log_prob, mask)


def sampled_k2(student_logps, teacher_logps, mask):
    return _mean((student_logps - teacher_logps) ** 2 / 2, mask)


def sampled_k3(student_logps, ref_logps, mask):
    d = ref_logps - student_logps
    return _mean(d.exp() - 1 - d, mask)


RIGHT = [
    (reverse, "reverse_kl", "token-mean"),
    (reverse_by_kl_div, "reverse_kl", "token-mean"),
    (forward_by_cross_entropy, "forward_kl", "token-mean"),
    (forward_with_labels, "forward_kl", "token-mean"),
    (forward_times_square, "forward_kl", "token-mean"),
    (forward_unreduced, "forward_kl", "token-mean"),
    (generalized_jsd, "jsd", "token-mean"),
    (mean_of_responses, "reverse_kl", "seq-mean-token-mean"),
    (of_log_probs, "reverse_kl", "token-mean"),
    (teacher_top, "teacher_top_k(forward_kl)", "token-mean"),
    (teacher_top_of_engine, "teacher_top_k(forward_kl)", "token-mean"),
    (student_top_renormalized, "student_top_k_renormalized(reverse_kl)", "token-mean"),
    (sampled_policy_gradient, "sampled_reverse_kl", "token-mean"),
    (sampled_k2, "sampled_reverse_kl", "token-mean"),
    (sampled_k3, "sampled_forward_kl", "token-mean"),
]


# ---- wrong ---------------------------------------------------------------------------
def detached_weights(student_logits, teacher_logits, mask):
    q, p = _logs(student_logits, teacher_logits)
    return _mean((q.exp().detach() * (q - p)).sum(-1), mask)


def no_entropy(student_logits, teacher_logits, mask):
    q, p = _logs(student_logits, teacher_logits)
    return -_mean((q.exp() * p).sum(-1), mask)


def no_gradient(student_logits, teacher_logits, mask):
    with torch.no_grad():
        return reverse(student_logits, teacher_logits, mask)


def padding_counts(student_logits, teacher_logits, mask):
    q, p = _logs(student_logits, teacher_logits)
    return (q.exp() * (q - p)).sum(-1).mean()


def over_width(student_logits, teacher_logits, mask):
    q, p = _logs(student_logits, teacher_logits)
    return ((q.exp() * (q - p)).sum(-1) * mask).mean()


def over_vocabulary(student_logits, teacher_logits, mask):
    q, p = _logs(student_logits, teacher_logits)
    return _mean((q.exp() * (q - p)).mean(-1), mask)


def pushes_away(student_logits, teacher_logits, mask):
    return -reverse(student_logits, teacher_logits, mask)


def raw_logits(student_logits, teacher_logits, mask):
    q = student_logits.softmax(-1)
    return _mean((q * (student_logits - teacher_logits)).sum(-1), mask)


def clamped_ratio(student_logits, teacher_logits, mask):
    q, p = _logs(student_logits, teacher_logits)
    return _mean((q.exp() * (q - p).clamp(-2, 2)).sum(-1), mask)


def clamped_loss(student_logits, teacher_logits, mask):
    q, p = _logs(student_logits, teacher_logits)
    return _mean((q.exp() * (q - p)).sum(-1).clamp(max=2.0), mask)


def temperature_of_student(student_logits, teacher_logits, mask, temperature):
    q = (student_logits / temperature).log_softmax(-1)
    p = teacher_logits.log_softmax(-1)
    return _mean((q.exp() * (q - p)).sum(-1), mask)


def temperature_unused(student_logits, teacher_logits, mask, temperature):
    return reverse(student_logits, teacher_logits, mask)


def shifted_teacher(student_logits, teacher_logits, mask):
    return reverse(student_logits, teacher_logits.roll(1, 1), mask)


def beta_inverted(student_logits, teacher_logits, mask, beta):
    return generalized_jsd(student_logits, teacher_logits, mask, 1 - beta)


def mixture_of_logs(student_logits, teacher_logits, mask, beta):
    q, p = _logs(student_logits, teacher_logits)
    m = beta * p + (1 - beta) * q
    d = beta * (p.exp() * (p - m)) + (1 - beta) * (q.exp() * (q - m))
    return _mean(d.sum(-1), mask)


def clamped_at_zero(student_logits, teacher_logits, mask, k):
    q, p = _logs(student_logits, teacher_logits)
    top = p.topk(k, -1).indices
    q, p = q.gather(-1, top), p.gather(-1, top)
    return _mean((p.exp() * (p - q)).sum(-1).clamp_min(0.0), mask)


def k1(log_prob, teacher_log_prob, mask):
    return _mean(log_prob - teacher_log_prob, mask)


def not_detached(log_prob, teacher_log_prob, mask):
    return _mean((log_prob - teacher_log_prob) * log_prob, mask)


def absolute(log_prob, teacher_log_prob, mask):
    return _mean((log_prob - teacher_log_prob).abs(), mask)


def squared(log_prob, teacher_log_prob, mask):
    return _mean((log_prob - teacher_log_prob) ** 2, mask)


def halved(student_logits, teacher_logits, mask):
    return reverse(student_logits, teacher_logits, mask) / 2


WRONG = [
    (forward_by_cross_entropy, "reverse_kl", "other-divergence"),
    (reverse, "forward_kl", "other-divergence"),
    (generalized_jsd, "reverse_kl", "other-divergence"),
    (detached_weights, "reverse_kl", "no-gradient"),
    (no_entropy, "reverse_kl", "entropy-missing"),
    (no_gradient, "reverse_kl", "no-gradient"),
    (padding_counts, "reverse_kl", "padding-trains"),
    (over_width, "reverse_kl", "aggregated-by-mean-over-width"),
    (mean_of_responses, "reverse_kl", "aggregated-by-seq-mean-token-mean"),
    (over_vocabulary, "reverse_kl", "vocabulary-averaged"),
    (pushes_away, "reverse_kl", "teacher-sign-flipped"),
    (raw_logits, "reverse_kl", "logits-not-normalized"),
    (clamped_ratio, "reverse_kl", "log-ratio-clamped"),
    (clamped_loss, "reverse_kl", "token-loss-clamped"),
    (temperature_of_student, "reverse_kl", "temperature-of-teacher-missing"),
    (temperature_unused, "reverse_kl", "temperature-missing"),
    (shifted_teacher, "reverse_kl", "teacher-one-token-late"),
    (beta_inverted, "jsd", "beta-inverted"),
    (mixture_of_logs, "jsd", "mixture-of-logs"),
    (teacher_top, "forward_kl", "other-divergence"),
    (teacher_top, "teacher_top_k_tail(forward_kl)", "other-divergence"),
    (clamped_at_zero, "teacher_top_k(forward_kl)", "loss-clamped-at-zero"),
    (clamped_at_zero, "teacher_top_k_tail(forward_kl)", "loss-clamped-at-zero"),
    (k1, "sampled_reverse_kl", "k1-as-loss"),
    (not_detached, "sampled_reverse_kl", "log-ratio-not-detached"),
    (absolute, "sampled_reverse_kl", "absolute-log-ratio"),
    (squared, "sampled_reverse_kl", "k2-half-missing"),
    (sampled_k3, "sampled_reverse_kl", "other-divergence"),
    (halved, "reverse_kl", "numbers-scaled"),
    (
        forward_times_square_of_2,
        "forward_kl",
        "loss-times-square-of-temperature",
    ),
]
