# SPDX-License-Identifier: Apache-2.0
"""Distillation: twenty wrong functions, ten right ones."""

import torch
import torch.nn.functional as F

from tests.second_person.case import right, wrong


def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum()


# ---- wrong ---------------------------------------------------------------------------
@wrong("reverse_kl", "the two arguments of kl_div are exchanged", "forward_kl")
def kl_div_exchanged(student_logits, teacher_logits, mask, temperature=1.0):
    student = F.log_softmax(student_logits / temperature, dim=-1)
    teacher = F.log_softmax(teacher_logits / temperature, dim=-1)
    kl = F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1)
    return masked_mean(kl, mask)


@wrong(
    "forward_kl",
    "batchmean divides by the responses, not by the tokens",
    "response|seq-mean-token-sum",
)
def kl_batchmean(student_logits, teacher_logits, mask):
    student = F.log_softmax(student_logits, dim=-1) * mask[..., None]
    teacher = F.softmax(teacher_logits, dim=-1) * mask[..., None]
    return F.kl_div(student, teacher, reduction="batchmean")


@wrong("forward_kl", "the mean is over the vocabulary too", "vocabulary|V")
def mean_over_vocabulary(student_logits, teacher_logits, mask):
    student = F.log_softmax(student_logits, dim=-1)
    teacher = F.softmax(teacher_logits, dim=-1)
    kl = F.kl_div(student, teacher, reduction="none").mean(-1)
    return masked_mean(kl, mask)


@wrong(
    "reverse_kl",
    "the teacher has no temperature",
    "temperature divides the student's logits alone",
)
def teacher_without_temperature(student_logits, teacher_logits, mask, temperature):
    q = (student_logits / temperature).log_softmax(-1)
    p = teacher_logits.log_softmax(-1)
    return masked_mean((q.exp() * (q - p)).sum(-1), mask)


@wrong("reverse_kl", "logits are multiplied by the temperature", "temperature|multipl")
def multiplied_by_temperature(student_logits, teacher_logits, mask, temperature):
    q = (student_logits * temperature).log_softmax(-1)
    p = (teacher_logits * temperature).log_softmax(-1)
    return masked_mean((q.exp() * (q - p)).sum(-1), mask)


@wrong("reverse_kl", "student and teacher are one token apart", "next token")
def shifted_student(student_logits, teacher_logits, mask):
    q = student_logits[:, :-1].log_softmax(-1)
    p = teacher_logits[:, 1:].log_softmax(-1)
    m = mask[:, 1:]
    return (((q.exp() * (q - p)).sum(-1)) * m).sum() / m.sum()


@wrong("reverse_kl", "padding trains", "mask|padding|untrained")
def mean_with_padding(student_logits, teacher_logits, mask):
    q, p = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    return (q.exp() * (q - p)).sum(-1).mean()


@wrong(
    "forward_kl",
    "it divides by the padded width",
    "padded|padding|all slots|B T|width",
)
def divided_by_the_width(student_logits, teacher_logits, mask):
    kl = teacher_logits.softmax(-1) * (
        teacher_logits.log_softmax(-1) - student_logits.log_softmax(-1)
    )
    return (kl.sum(-1) * mask).mean()


@wrong("jsd", "beta is on the other side", "β|beta")
def jsd_beta_exchanged(student_logits, teacher_logits, mask, beta=0.5):
    q, p = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    m = (beta * q.exp() + (1 - beta) * p.exp()).log()
    to_teacher = (p.exp() * (p - m)).sum(-1)
    to_student = (q.exp() * (q - m)).sum(-1)
    return masked_mean((1 - beta) * to_teacher + beta * to_student, mask)


@wrong(
    "jsd", "the mixture is of logits, not of probabilities", "mixture|logits|geometric"
)
def jsd_of_mixed_logits(student_logits, teacher_logits, mask, beta=0.5):
    q, p = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    m = (beta * teacher_logits + (1 - beta) * student_logits).log_softmax(-1)
    left = (p.exp() * (p - m)).sum(-1)
    right_side = (q.exp() * (q - m)).sum(-1)
    return masked_mean(beta * left + (1 - beta) * right_side, mask)


@wrong(
    "jsd", "the two divergences are of the mixture, not to it", "mixture|exchang|revers"
)
def jsd_from_the_mixture(student_logits, teacher_logits, mask, beta=0.5):
    q, p = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    m = (beta * p.exp() + (1 - beta) * q.exp()).log()
    left = (m.exp() * (m - p)).sum(-1)
    right_side = (m.exp() * (m - q)).sum(-1)
    return masked_mean(beta * left + (1 - beta) * right_side, mask)


@wrong(
    "student_top_k_renormalized(reverse_kl)",
    "the teacher alone is normalized over the k tokens",
    "teacher alone",
)
def teacher_alone_renormalized(student_logits, teacher_logits, mask, k=8):
    q, p = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    q, top = q.topk(k, -1)
    p = p.gather(-1, top).log_softmax(-1)
    return masked_mean((q.exp() * (q - p)).sum(-1), mask)


@wrong(
    "student_top_k(reverse_kl)",
    "the k tokens are the teacher's",
    "teacher_top_k|teacher's",
)
def top_k_of_the_teacher(student_logits, teacher_logits, mask, k=8):
    q, p = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    top = p.topk(k, -1).indices
    q, p = q.gather(-1, top), p.gather(-1, top)
    return masked_mean((q.exp() * (q - p)).sum(-1), mask)


@wrong(
    "teacher_top_k_tail(forward_kl)",
    "the rest of the vocabulary is left out",
    r"teacher_top_k\(forward_kl\)|left out|tail",
)
def tail_forgotten(student_logits, teacher_topk_log_probs, teacher_topk_ids, mask):
    q = student_logits.log_softmax(-1).gather(-1, teacher_topk_ids)
    p = teacher_topk_log_probs
    return masked_mean((p.exp() * (p - q)).sum(-1), mask)


@wrong(
    "reverse_kl",
    "the probabilities of the student are detached: the gradient is 0",
    "detach|constant|stop|no gradient|0 in expectation|weights",
)
def student_weights_detached(student_logits, teacher_logits, mask):
    q, p = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    return masked_mean((q.detach().exp() * (q - p)).sum(-1), mask)


@wrong(
    "sampled_reverse_kl",
    "the log-ratio itself is the loss: its gradient is 0 in expectation",
    "0 in expectation|expect|k1",
)
def k1_as_a_loss(log_prob, teacher_log_prob, mask):
    return masked_mean(log_prob - teacher_log_prob, mask)


@wrong("sampled_reverse_kl", "the sign is wrong", "sign|away")
def sampled_sign(log_prob, teacher_log_prob, mask):
    advantage = (log_prob - teacher_log_prob).detach()
    return -masked_mean(advantage * log_prob, mask)


@wrong(
    "sampled_forward_kl",
    "the ratio is the student's to the teacher's, not the teacher's to the student's",
    "inver|upside|π/π_T|ratio|reciprocal",
)
def sampled_ratio_inverted(log_prob, teacher_log_prob, mask):
    w = (log_prob - teacher_log_prob).exp().detach()
    return -masked_mean(w * log_prob, mask)


@wrong("reverse_kl", "a token's loss is clamped from above", "clamp|cut|above|large")
def clipped_per_token(student_logits, teacher_logits, mask, max_kl=5.0):
    q, p = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    return masked_mean((q.exp() * (q - p)).sum(-1).clamp(max=max_kl), mask)


@wrong(
    "forward_kl",
    "each response is averaged first",
    "seq-mean-token-mean",
)
def mean_of_responses(student_logits, teacher_logits, mask):
    q, p = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    return ((kl * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


# ---- right ---------------------------------------------------------------------------
@right("jsd")
def gkd_of_trl(student_logits, teacher_logits, labels, beta=0.5, temperature=1.0):
    """Return TRL's generalized JSD loss over the labels that are not -100."""
    student = F.log_softmax(student_logits / temperature, dim=-1)
    teacher = F.log_softmax(teacher_logits / temperature, dim=-1)
    if beta == 0:
        jsd = F.kl_div(student, teacher, reduction="none", log_target=True)
    elif beta == 1:
        jsd = F.kl_div(teacher, student, reduction="none", log_target=True)
    else:
        b = torch.tensor(beta, dtype=student.dtype)
        mixture = torch.logsumexp(
            torch.stack([student + torch.log1p(-b), teacher + torch.log(b)]), dim=0
        )
        kl_teacher = F.kl_div(mixture, teacher, reduction="none", log_target=True)
        kl_student = F.kl_div(mixture, student, reduction="none", log_target=True)
        jsd = b * kl_teacher + (1 - b) * kl_student
    mask = labels != -100
    return jsd[mask].sum() / mask.sum()


@right("reverse_kl")
def reverse_by_kl_div(policy_logits, ref_logits, response_mask, temperature=1.0):
    q = F.log_softmax(policy_logits / temperature, -1)
    p = F.log_softmax(ref_logits / temperature, -1)
    kl = F.kl_div(p, q, log_target=True, reduction="none").sum(-1)
    return masked_mean(kl, response_mask)


@right("forward_kl")
def soft_cross_entropy(student_logits, teacher_logits, mask):
    m = mask.bool()
    target = teacher_logits[m].softmax(-1).detach()
    return F.cross_entropy(student_logits[m], target)


@right("forward_kl", agg="seq-mean-token-sum")
def by_response(student_logits, teacher_logits, mask):
    """Return the forward KL divergence, summed over each response and averaged over
    these.
    """
    losses = []
    for s, t, m in zip(student_logits, teacher_logits, mask.bool(), strict=True):
        p = t[m].log_softmax(-1)
        losses.append((p.exp() * (p - s[m].log_softmax(-1))).sum())
    return torch.stack(losses).mean()


@right("teacher_top_k(forward_kl)")
def from_a_server(student_logits, teacher_topk_log_probs, teacher_topk_ids, mask):
    logz = student_logits.logsumexp(-1, keepdim=True)
    q = student_logits.gather(-1, teacher_topk_ids) - logz
    p = teacher_topk_log_probs
    return masked_mean((p.exp() * (p - q)).sum(-1), mask)


@right("student_top_k_renormalized(reverse_kl)")
def both_renormalized(student_logits, teacher_logits, mask, k=8):
    value, top = student_logits.topk(k, -1)
    q = value.log_softmax(-1)
    p = teacher_logits.gather(-1, top).log_softmax(-1)
    return masked_mean((q.exp() * (q - p)).sum(-1), mask)


@right("student_top_k_tail(reverse_kl)")
def with_a_tail(student_logits, teacher_logits, mask, k=8):
    """Return the reverse KL divergence over the student's top k and one bucket for the
    rest.
    """
    q, p = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    top = q.detach().topk(k, -1).indices
    inside = torch.zeros_like(q).scatter(-1, top, 1.0).bool()

    def bucket(x):
        rest = x.masked_fill(inside, float("-inf")).logsumexp(-1, keepdim=True)
        return torch.cat([x.gather(-1, top), rest], -1)

    q, p = bucket(q), bucket(p)
    return masked_mean((q.exp() * (q - p)).sum(-1), mask)


@right("sampled_reverse_kl")
def opd_as_policy_gradient(student_logprobs, teacher_logprobs, response_mask):
    advantage = (teacher_logprobs - student_logprobs).detach()
    return -masked_mean(advantage * student_logprobs, response_mask)


@right("sampled_reverse_kl")
def half_of_the_square(log_prob, teacher_log_prob, mask):
    return masked_mean(0.5 * (log_prob - teacher_log_prob) ** 2, mask)


@right("reverse_kl")
def per_token_losses(student_logits, teacher_logits, mask):
    q, p = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    return torch.where(mask.bool(), (q.exp() * (q - p)).sum(-1), 0.0)
