# SPDX-License-Identifier: Apache-2.0
"""Unusual but right steps: accepted, or refused with a sentence; never rejected."""

import functools

import pytest
import torch
from loops import T, collated, log_probs, policy_step, qwen3, right, surrogate, with_

import upref
from upref.step import check_step

pytest.importorskip("transformers")


def hooked(model, rows):
    """Run the right step with hooks on parameters and modules, which only read."""
    seen = []
    handles = [
        p.register_hook(lambda g: seen.append(g.norm())) for p in model.parameters()
    ]
    handles += [
        m.register_forward_hook(lambda *a: seen.append(len(a))) for m in model.modules()
    ]
    policy_step(model, rows)
    for h in handles:
        h.remove()
    assert seen


def in_backward(model, rows):
    """Run the right step with one optimizer for each parameter, stepped as soon as its
    gradient is there.
    """
    each = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def hook(p):
        each[p].step()
        each[p].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]
    policy_step(model, rows, size=8)
    for h in handles:
        h.remove()


def optimized(model, rows):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    policy_step(model, rows)
    optimizer.step()
    optimizer.zero_grad()


def maximized(model, rows):
    """Run the right step with an optimizer that ascends: its gradients are those of J."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)
    policy_step(model, rows)
    for p in model.parameters():
        p.grad.neg_()
    optimizer.step()


def returned(model, rows):
    policy_step(model, rows)
    g = {n: p.grad.numpy().copy() for n, p in model.named_parameters()}
    model.zero_grad()
    return g


def checkpointed(model, rows):
    model.gradient_checkpointing_enable()
    model.train()
    policy_step(model, rows)
    model.gradient_checkpointing_disable()


def sorted_by_length(model, rows):
    policy_step(model, sorted(rows, key=lambda r: len(r.ids)))


def packed(model, rows):
    """Compute DAPO's gradient of all rows in one sequence, told apart by their
    positions.
    """
    ids = torch.tensor([[t for r in rows for t in r.ids]])
    where = torch.cat([torch.arange(len(r.ids)) for r in rows])[None]
    # with a cache, rows see each other
    z = model(input_ids=ids, position_ids=where, use_cache=False).logits[0] / T
    lp = z[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]

    def flat(f, x):
        """Return the numbers of all rows behind each other, x at prompts, without the
        first.
        """
        numbers = []
        for row in rows:
            numbers += [x] * len(row.prompt)
            numbers += f(row)
        return torch.tensor(numbers)[1:]

    old = flat(lambda r: r.old, 0.0)
    A = flat(lambda r: [r.adv] * len(r.response), 0.0)
    J = surrogate(lp, old, A)
    mask = flat(lambda r: r.trains, False)
    (-(J * mask).sum() / mask.sum()).backward()


def with_z_loss(model, rows):
    """Compute DAPO's gradient with a penalty of the squared log-normalizer."""
    total = sum(sum(r.trains) for r in rows)
    ids, there, trains, old, adv, _ = collated(rows)
    z = model(input_ids=ids, attention_mask=there).logits[:, :-1] / T
    lp = z.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    J = surrogate(lp, old[:, 1:], adv[:, 1:]) - 1e-3 * z.logsumexp(-1) ** 2
    (-(J * trains[:, 1:]).sum() / total).backward()


def two_ranks(model, rows):
    """Compute DAPO's gradient as two ranks do: each has the sum over its own rows
    divided by the tokens of all, times two, and the mean of both is left.
    """
    total = sum(sum(r.trains) for r in rows)
    parts = []
    for rank in (rows[::2], rows[1::2]):
        model.zero_grad()
        ids, there, trains, old, adv, _ = collated(rank)
        J = surrogate(log_probs(model, ids, there), old[:, 1:], adv[:, 1:])
        (-(J * trains[:, 1:]).sum() * 2 / total).backward()
        parts.append([p.grad.clone() for p in model.parameters()])
    for p, *g in zip(model.parameters(), *parts, strict=True):
        p.grad = sum(g) / 2


def clipped(model, rows):
    policy_step(model, rows)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def autocast(model, rows):
    with torch.autocast("cpu", torch.bfloat16):
        policy_step(model, rows)


def fused_with_loss_scale(model, rows):
    """GradScaler leaves the scale in the gradients, and a fused optimizer divides by it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    policy_step(model, rows)
    for p in model.parameters():
        p.grad *= 1024
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)


class Scheduled(torch.optim.AdamW):
    """Changes its learning rate, and then makes the step of its base."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] *= 0.99
        return super().step(closure)


def subclassed(model, rows):
    """torch has wrapped `step` of the base and of the subclass."""
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    optimizer = Scheduled(model.parameters(), lr=0.1)
    policy_step(model, rows)
    optimizer.step()


def with_metrics(model, rows):
    """SGD by hand, and metrics as the result."""
    policy_step(model, rows)
    with torch.no_grad():
        for p in model.parameters():
            p -= p.grad
            p.grad = None
    return {"loss": torch.zeros(())}


def log_in_bfloat16(model, rows):
    """Compute an entropy for the logger: no gradient has half precision."""
    with torch.no_grad():
        z = model(input_ids=torch.tensor([rows[0].ids])).logits.bfloat16()
        (z.softmax(-1) * z).sum()


def frozen(model):
    model.model.embed_tokens.requires_grad_(False)
    return model


def lora(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))


STEPS = [
    ("hooks that log", hooked, None, {}),
    ("optimizer in backward", in_backward, None, {}),
    ("an optimizer steps and clears", optimized, None, {}),
    ("an optimizer that maximizes", maximized, None, {}),
    ("a fused optimizer with a loss scale", fused_with_loss_scale, None, {}),
    ("the same, moved", fused_with_loss_scale, None, dict(moved=True)),
    ("a step inside a step of an optimizer", subclassed, None, {}),
    ("the same, moved", subclassed, None, dict(moved=True)),
    ("metrics are returned", with_metrics, None, dict(moved=1)),
    ("gradients are returned", returned, None, {}),
    ("activation checkpointing", checkpointed, None, {}),
    ("sorted by length", sorted_by_length, None, {}),
    ("packed with positions", packed, None, {}),
    ("z-loss, declared", with_z_loss, None, dict(z_loss_coef=1e-3)),
    ("two ranks", two_ranks, None, {}),
    ("clipped, declared", clipped, None, dict(clip=0.5)),
    ("autocast to bfloat16", autocast, None, {}),
    ("bfloat16 weights", right, lambda m: m.to(torch.bfloat16), {}),
    ("float64 weights", right, lambda m: m.double(), {}),
    ("frozen embeddings", right, frozen, {}),
    ("tied heads", right, lambda m: qwen3(tie_word_embeddings=True), {}),
    ("LoRA", right, lora, {}),
    ("sdpa attention", right, lambda m: qwen3(attn_implementation="sdpa"), {}),
    ("in training mode", right, lambda m: m.train(), {}),
    ("a partial", functools.partial(policy_step, size=2), None, {}),
    (
        "a constant factor, declared",
        lambda m, r: [policy_step(m, r), policy_step(m, r)],
        None,
        dict(scale=2.0),
    ),
    ("another seed", right, None, dict(seed=3)),
    (
        "no holes, and no masks",
        with_(mask=lambda m, there, ids: m),
        None,
        dict(without=["holes"]),
    ),
    ("on policy", right, None, dict(without=["ratio"])),
    ("equal lengths", right, None, dict(without=["lengths"])),
]


@pytest.mark.parametrize("name, step, change, how", STEPS, ids=[s[0] for s in STEPS])
def test_an_unusual_right_step_is_not_rejected(name, step, change, how):
    model = qwen3()
    report = check_step(
        step, change(model) if change else model, "dapo", temperature=T, **how
    )
    assert report, report


def test_metrics_are_no_gradient():
    with pytest.raises(upref.InputError, match="moved the weights and left no"):
        check_step(with_metrics, qwen3(), "dapo", temperature=T)


def divided_by_one_more(model, rows):
    """DAPO's step, divided by 44 in place of 43 tokens."""
    policy_step(model, rows)
    for p in model.parameters():
        p.grad *= 43 / 44


def test_half_precision_beside_the_gradient_hides_nothing():
    def step(model, rows):
        log_in_bfloat16(model, rows)
        divided_by_one_more(model, rows)

    report = check_step(step, qwen3(), "dapo", temperature=T)
    assert "divided by 44" in report.failures[0].cause, report
    assert not report.computed_in


class HalfProduct(torch.autograd.Function):
    """A product in bfloat16 with its own backward pass: no graph has its tensors."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return (x.bfloat16() @ weight.bfloat16().T).float()

    @staticmethod
    def backward(ctx, above):
        x, weight = ctx.saved_tensors
        above = above.bfloat16()
        of_weight = above.flatten(0, -2).T @ x.bfloat16().flatten(0, -2)
        return (above @ weight.bfloat16()).float(), of_weight.float()


class HalfHead(torch.nn.Linear):
    def forward(self, x):
        return HalfProduct.apply(x, self.weight)


def test_a_kernel_in_half_precision_is_allowed_its_rounding():
    model = qwen3()
    model.lm_head = HalfHead(32, 96, bias=False)
    report = check_step(right, model, "dapo", temperature=T)
    assert report and report.computed_in == "bfloat16", report


def micro_batches_that_are_groups(model, rows):
    for part in (rows[:3], rows[3:5], rows[5:]):
        policy_step(model, part)
    for p in model.parameters():
        p.grad /= 3


def each_group_by_itself(model, rows):
    groups = {row.group for row in rows}
    for group in groups:
        policy_step(model, [row for row in rows if row.group == group])
    for p in model.parameters():
        p.grad /= len(groups)


def test_micro_batches_are_not_taken_for_groups():
    report = check_step(micro_batches_that_are_groups, qwen3(), "dapo", temperature=T)
    assert "micro-batches" in report.failures[0].cause, report


def test_a_step_may_count_tokens_per_group():
    report = check_step(each_group_by_itself, qwen3(), "dapo", temperature=T)
    assert report and not report.notes, report


def test_groups_that_may_be_micro_batches_are_noted():
    settings = dict(temperature=T, group_size=4)

    def step(model, rows):
        for part in (rows[:4], rows[4:]):
            policy_step(model, part)
        for p in model.parameters():
            p.grad /= 2

    report = check_step(step, qwen3(), "dapo", **settings)
    assert report and "micro-batches" in report.notes[0].cause, report


def test_the_report_lists_values_that_no_row_has():
    report = check_step(right, qwen3(), "dapo", temperature=T)
    assert {"an advantage of 0", "the id 0 in a response"} <= set(report.unexercised)


def test_a_truncation_that_rows_do_not_tell_names_both():
    def step(model, rows):
        for row in rows:
            row.trains = [t and i < 8 for i, t in enumerate(row.trains)]
        policy_step(model, rows)

    cause = check_step(step, qwen3(), "dapo", temperature=T).failures[0].cause
    assert "of a response or behind the first" in str(cause), cause


def test_dropout_is_named():
    report = check_step(
        lambda m, r: policy_step(m.train(), r),
        qwen3(attention_dropout=0.5),
        "dapo",
        temperature=T,
    )
    assert "dropout or sampling" in report.failures[0].cause


def test_a_compiled_model_is_read_behind_its_wrapper():
    model = torch.compile(qwen3(), backend="eager")
    assert check_step(right, model, "dapo", temperature=T)


@pytest.mark.parametrize(
    "name", ["grpo", "gspo", "up_dapo", "cispo", "sapo", "reinforce", "topr"]
)
def test_every_kind_of_objective_is_its_own_reference(name):
    """A step written with the registered objective itself."""
    o = upref.get(name)

    def step(model, rows):
        ids, there, trains, old, adv, _ = collated(rows)
        lp = log_probs(model, ids, there).double()
        (
            -o.J(lp, old[:, 1:].double(), adv[:, 1:].double(), trains[:, 1:].bool())
        ).backward()

    report = check_step(step, qwen3(), name, temperature=T)
    assert report, report
