# SPDX-License-Identifier: Apache-2.0
"""Forward passes with one fault each: what a trainer may do between the rows and their log-probabilities.

Each is put into the reference, and named only where the gradient that was found is one of *its* log-probabilities.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from upref.errors import InputError
from upref.step.forward import Forward
from upref.step.reference import Model, TorchModel, in_float64
from upref.step.rows import Row, found_in
from upref.step.scores import scores

BATCHES = (8, 4, 2)  # responses of a micro-batch that are tried where a fault depends on it
Variant = tuple[str, Callable[[], Forward]]


def quick(right: Forward) -> Iterator[Variant]:
    """Those that read the same logits otherwise: words, and the forward pass."""
    T, z = right.temperature, right.z

    def other(temperature: float, shift: int = 1) -> Forward:
        return Forward(right.model, right.rows, temperature, z, shift)

    temperatures = {"the temperature is left out (it is 1)": 1.0, "the temperature is applied twice": T * T,
                    "logits are multiplied by the temperature, not divided": 1 / T}  # fmt: skip
    for words, t in temperatures.items():
        if t != T:
            yield words, partial(other, t)
    yield "labels are not shifted: logits are read at the token that they should predict", lambda: other(T, 0)
    yield "labels are shifted twice", lambda: other(T, 2)
    yield "labels stand one token too late", lambda: Forward(right.model, right.rows, T, z, ahead=1)
    for words, score in scores(right.model.vocabulary):
        yield words, partial(Forward, right.model, right.rows, T, z, 1, score)
    if isinstance(model := right.model, TorchModel):
        yield "prompts are run without a gradient", lambda: again(right, [_cached(model, r) for r in right.rows])


def others(right: Forward) -> Iterator[Variant]:
    """Those that compute other logits."""
    model = right.model
    if isinstance(model, TorchModel):
        yield from _heads(model, right)
        yield from _inputs(model, right)
        yield from _configured(model, right)


def again(right: Forward, z: list[Tensor], model: Model | None = None) -> Forward:
    return Forward(model or right.model, right.rows, right.temperature, z)


# ---- what is fed -----------------------------------------------------------------------------------------------------
def _inputs(model: TorchModel, right: Forward) -> Iterator[Variant]:
    rows, end = right.rows, 0 if model.end is None else model.end
    n, p = [len(r.ids) for r in rows], [len(r.prompt) for r in rows]

    def fed(words: str, each: Callable[[int, Row], Tensor]) -> Variant:
        return words, lambda: again(right, [each(i, r) for i, r in enumerate(rows)])

    def padded(pads: list[int], what: str) -> Iterator[Variant]:
        for pad in dict.fromkeys((end, 0)):
            words = f"no attention mask: the padding left of the {what} is attended to"
            yield fed(words, lambda i, r, pad=pad: model.logits([pad] * pads[i] + r.ids))  # type: ignore[misc]
        words = f"positions count the padding left of the {what}"
        yield fed(words, lambda i, r: model.logits(r.ids, position_ids=_from(pads[i], r)))

    def packed(m: int) -> Iterator[Variant]:
        before = [[t for q in rows[i - i % m : i] for t in q.ids] for i in range(len(rows))]
        leak = "rows of a pack attend to the rows before them"
        yield fed(leak, lambda i, r: model.logits(before[i] + r.ids))
        own = lambda i: torch.cat([torch.arange(k) for k in n[i - i % m : i + 1]])[None]
        yield fed(f"{leak}, with positions of their own",
                  lambda i, r: model.logits(before[i] + r.ids, position_ids=own(i)))  # fmt: skip
        yield fed("positions go on from one row of a pack to the next",
                  lambda i, r: model.logits(r.ids, position_ids=_from(len(before[i]), r)))  # fmt: skip

    def masked(value: int) -> Iterator[Variant]:
        seen = lambda r: (torch.tensor(r.ids) != value).long()[None]
        yield fed(f"the attention mask is made of token values: it cuts out tokens that equal {value}",
                  lambda i, r: model.logits(r.ids, attention_mask=seen(r)))  # fmt: skip
        yield fed(f"the attention mask and the positions are made of token values ({value} is taken for padding)",
                  lambda i, r: model.logits(r.ids, attention_mask=seen(r),
                                            position_ids=(seen(r).cumsum(1) - 1).clamp(min=0)))  # fmt: skip

    def cut(words: str, first: Callable[[Row], int]) -> Variant:
        return fed(words, lambda i, r: _front(model.logits(r.ids[first(r) :]), first(r)))

    for value in dict.fromkeys((end, 0, *(x[0] for x in right.before + right.after if x))):
        if any(value in r.ids[:-1] for r in rows):
            yield from masked(value)
    if any(right.before):  # the trainer's own, else guesses
        front = right.before
        same = {tuple(x) for x in front}
        what = f"{len(front[0])} more token is put before each prompt" if len(same) == 1 and len(front[0]) == 1 else \
            "what precedes a row is attended to: padding without a mask, or rows of its pack"  # fmt: skip
        yield fed(what, lambda i, r: model.logits(front[i] + r.ids))
        state = "the state of recurrent layers runs on from row to row"
        state = state if hasattr(model.net, "config") else "they attend to the rows before them"
        yield fed(f"rows of a pack are not apart: {state}",
                  lambda i, r: model.logits(front[i] + r.ids, position_ids=_restarted(front[i], r, rows)))  # fmt: skip
        yield fed("positions count what precedes a row: padding, or rows of its pack",
                  lambda i, r: model.logits(r.ids, position_ids=_from(len(front[i]), r)))  # fmt: skip
    seen: set[tuple[int, ...]] = {(0,) * len(rows)}
    for m in BATCHES * (not right.before):
        for what, k in {"sequences": n, "prompts": p}.items():
            pads = [max(k[i - i % m : i - i % m + m]) - k[i] for i in range(len(rows))]
            if tuple(pads) not in seen:
                seen.add(tuple(pads))
                yield from padded(pads, what)
        yield from packed(m)
    yield fed("the mask of the loss stands for the attention mask: masked tokens are not attended to",
              lambda i, r: model.logits(r.ids, attention_mask=torch.tensor([[1] * p[i] + [int(t) for t in r.trains]]),
                                        position_ids=_from(0, r)))  # fmt: skip
    ones = lambda r: {"attention_mask": torch.ones(1, len(r.ids))} if model.masked else {}  # not a pack
    yield fed("positions start again with the response", lambda i, r: model.logits(
        r.ids, position_ids=torch.cat([torch.arange(p[i]), torch.arange(n[i] - p[i])])[None], **ones(r)))  # fmt: skip
    yield fed("every position is 0", lambda i, r: model.logits(r.ids, position_ids=0 * _from(0, r)))
    yield fed("positions start at 1", lambda i, r: model.logits(r.ids, position_ids=_from(1, r)))
    yield cut("the first token of each prompt is missing", lambda r: min(1, len(r.prompt) - 1))
    yield fed("a token is put before each prompt", lambda i, r: model.logits([end, *r.ids]))
    for keep in (2, 3, 4):
        yield cut(f"prompts are cut to their last {keep} tokens", lambda r, keep=keep: max(len(r.prompt) - keep, 0))  # type: ignore[misc]
    yield cut("responses are scored without their prompts", lambda r: len(r.prompt) - 1)


def _cached(model: TorchModel, r: Row) -> Tensor:
    """The logits with a prefix cache that has no gradient."""
    *first, last = r.prompt
    if not first:
        return model.logits(r.ids)
    with in_float64(), torch.no_grad():
        past = model.net(torch.tensor([first]), use_cache=True).past_key_values
    return _front(model.logits([last, *r.response], past_key_values=past, use_cache=True), len(first))


def _front(z: Tensor, n: int) -> Tensor:
    return torch.cat([z[:1].detach().expand(n, -1), z])


def _restarted(front: list[int], r: Row, rows: Sequence[Row]) -> Tensor:
    """Positions that start anew with every row that stands in front."""
    positions = list(range(len(front))) + list(range(len(r.ids)))
    for q in rows:
        if place := found_in([front], q):
            positions[place[1] : place[1] + len(q.ids)] = range(len(q.ids))
    return torch.tensor([positions])


def _from(start: int, r: Row) -> Tensor:
    return torch.arange(start, start + len(r.ids))[None]


# ---- the head --------------------------------------------------------------------------------------------------------
def _heads(model: TorchModel, right: Forward) -> Iterator[Variant]:
    net, size = model.net, model.vocabulary
    linear = [m for m in net.modules() if isinstance(m, torch.nn.Linear) and m.out_features == size]
    head: Any = net.get_output_embeddings() if hasattr(net, "get_output_embeddings") else next(iter(linear), None)
    if head is None:
        return
    raw: list[Tensor] = []
    with _hook(head, lambda m, args, out: raw.append(out)):
        z = model.logits(right.rows[0].ids)
    if raw and raw[0][0].shape == z.shape and not torch.allclose(raw[0][0], z, rtol=1e-9, atol=1e-12):

        def straight() -> Forward:
            out: list[Tensor] = []
            for r in right.rows:
                kept: list[Tensor] = []
                with _hook(head, lambda m, args, y, kept=kept: kept.append(y)):
                    model.logits(r.ids)
                out.append(kept[0][0])
            return again(right, out)

        yield "the head's raw output is taken: the model's logit scale or softcap is left out", straight
        config: Any = getattr(model.net, "config", None)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        if c := getattr(config, "final_logit_softcapping", None):
            yield (
                "the final softcap is x tanh(x / c), not c tanh(x / c)",
                lambda: again(right, [(x := z) * torch.tanh(x / c) for z in straight().z]),
            )
    if getattr(head, "bias", None) is not None:
        minus = lambda m, args, y: y - m.bias

        def without() -> Forward:
            with _hook(head, minus):
                return again(right, [model.logits(r.ids) for r in right.rows])

        yield "the head's bias is left out", without


@contextmanager
def _hook(module: torch.nn.Module, f: Callable):
    handle = module.register_forward_hook(lambda m, args, out: f(m, args, out))
    try:
        yield
    finally:
        handle.remove()


# ---- the configuration -----------------------------------------------------------------------------------------------
CHANGES = {  # field of a configuration -> the value that leaves it out
    "final_logit_softcapping": None, "attn_logit_softcapping": None, "sliding_window": None, "logit_scale": 1.0,
    "logits_scaling": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "lm_head_multiplier": 1.0,
}  # fmt: skip


def _configured(model: TorchModel, right: Forward) -> Iterator[Variant]:
    config = getattr(model.net, "config", None)
    for name, value in CHANGES.items():
        if getattr(config, name, value) not in (value, None):

            def other(name: str = name, value: float | None = value) -> Forward:
                changed = copy.deepcopy(config)
                setattr(changed, name, value)
                net = type(model.net)(changed)
                net.load_state_dict(model.net.state_dict(), strict=False)
                for mine, its in zip(model.net.parameters(), net.parameters(), strict=True):
                    its.requires_grad_(mine.requires_grad)
                one = TorchModel(net)
                return again(right, [one.logits(r.ids) for r in right.rows], one)

            yield f"the model's {name} is left out", other


def tried(right: Forward, variants: Callable[[Forward], Iterator[Variant]]) -> Iterator[tuple[str, Forward]]:
    """The variants that this model can run, each log-probability once."""
    seen: list[Tensor] = []
    for words, make in variants(right):
        try:
            one = make()
            lp = one.statistics()[0].detach()
            if variants is others and any(torch.allclose(lp, x, rtol=0, atol=1e-11) for x in seen):
                continue  # positions of rotary models, a window that does not act
            seen.append(lp)
            yield words, one
        except (AttributeError, TypeError, ValueError, RuntimeError, IndexError, InputError, NotImplementedError):
            continue  # its forward takes no positions or mask, has too few positions, or returns no cache
