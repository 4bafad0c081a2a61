# SPDX-License-Identifier: Apache-2.0
"""check_step, record_step and identify_step on a model that lives on the GPU."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import upref
from benchmarks.gpu.place import SEED, PartSetup
from upref.step import check_recorded, record_step
from upref.step.inputs.rows import make_rows

T = 0.7
Steps = list[tuple[str, bool, Callable[[nn.Module, list], None]]]


class Recurrent(nn.Module):
    """A recurrent layer, which cuDNN computes in TF32 unless this is switched off."""

    def __init__(self, V: int = 64, H: int = 32):
        """Make the layers for a vocabulary of V tokens and H hidden units."""
        super().__init__()
        self.embed = nn.Embedding(V, H)
        self.rnn = nn.GRU(H, H, batch_first=True)
        self.head = nn.Linear(H, V)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(ids))[0])


def qwen3(place: PartSetup, **changes: Any) -> nn.Module:
    """Return a tiny Qwen3 with random weights, the same in each call, on the device.
    `changes` are settings of its configuration.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    settings = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "eos_token_id": 2, "pad_token_id": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    config = Qwen3Config(**settings | changes, attn_implementation="sdpa")
    return Qwen3ForCausalLM(config).to(place.device)


def dapo(
    model: nn.Module,
    rows: list,
    *,
    temperature: float = T,
    by_micro_batch: bool = False,
    late: int = 0,
    half: torch.dtype | None = None,
    bare: bool = False,
) -> None:
    """Add the gradient of DAPO's loss to a model's parameters, in two micro-batches.

    Args:
        model: a causal language model; with `bare` a function of ids alone.
        rows: responses, as upref.check_step gives them to a step.
        temperature: a fault where it is not T.
        by_micro_batch: a fault, each micro-batch is divided by its own tokens.
        late: a fault, how many tokens the mask is late.
        half: the dtype of autocast; None: no autocast.
        bare: the model takes no attention mask.
    """
    device = next(model.parameters()).device
    total = sum(sum(r.trains) for r in rows)
    parts = [rows[:3], rows[3:]]
    for part in parts:
        b = padded(part, device)
        mask = torch.nn.functional.pad(b.mask, (late, 0))[:, : b.mask.shape[1]]
        cast = torch.autocast(device.type, half) if half else nullcontext()
        with cast:
            if bare:
                z = model(b.ids)
            else:
                z = model(b.ids, attention_mask=b.attention).logits
        lp = (z[:, :-1].float() / temperature).log_softmax(-1)
        r = (lp.gather(-1, b.ids[:, 1:, None])[..., 0] - b.old).exp()
        J = torch.minimum(r * b.A, r.clamp(0.8, 1.28) * b.A)
        n = mask.sum() * len(parts) if by_micro_batch else total
        (-(J * mask).sum() / n).backward()


class Padded(NamedTuple):
    """Rows as tensors of one width T: [B, T], [B, T], [B, T - 1] twice, [B, 1]."""

    ids: Tensor
    attention: Tensor
    mask: Tensor
    old: Tensor
    A: Tensor


def padded(rows: list, device: torch.device) -> Padded:
    """Pad rows to one width on the right, with token 2. `mask` and `old` begin at the
    second token, as log-probabilities do.

    Args:
        rows: of upref.
        device: for the tensors.
    """
    width = max(len(r.ids) for r in rows)
    ids, attention, mask, old = [], [], [], []
    for r in rows:
        before, behind = len(r.prompt), width - len(r.ids)
        ids.append(r.ids + [2] * behind)
        attention.append([1] * len(r.ids) + [0] * behind)
        mask.append([0.0] * before + [float(x) for x in r.trains] + [0.0] * behind)
        old.append([0.0] * before + [float(x) for x in r.old] + [0.0] * behind)
    return Padded(
        ids=torch.tensor(ids).to(device),
        attention=torch.tensor(attention).to(device),
        mask=torch.tensor(mask)[:, 1:].to(device),
        old=torch.tensor(old)[:, 1:].to(device),
        A=torch.tensor([[r.adv] for r in rows], device=device),
    )


def compiled(model: nn.Module, rows: list, **faults: Any) -> None:
    """Do the step of `dapo` with the model compiled."""
    dapo(torch.compile(model, dynamic=True), rows, **faults)


def models_with_steps(
    device: str,
) -> dict[str, tuple[Callable[[PartSetup], nn.Module], Steps]]:
    """Return each model by name, with what makes it and its steps: (name of the step,
    whether it is right, the step).
    """
    half = torch.bfloat16
    faults: Steps = [
        ("right", True, dapo),
        ("temperature left out", False, partial(dapo, temperature=1.0)),
        ("micro-batch means averaged", False, partial(dapo, by_micro_batch=True)),
        ("mask one token late", False, partial(dapo, late=1)),
    ]
    mixed: Steps = [
        (f"{name}, bfloat16 autocast", ok, partial(step, half=half))
        for name, ok, step in faults
    ]
    bare = partial(dapo, bare=True)
    return {
        "Qwen3, float32": (qwen3, [*faults, *mixed]),
        "Qwen3, float32, compiled": (qwen3, [("right", True, compiled)]),
        "Qwen3, bfloat16 weights": (
            lambda place: qwen3(place).to(torch.bfloat16),
            faults[:2],
        ),
        "Qwen3, gradient checkpointing": (checkpointed, faults[:1]),
        "Qwen3, float32, TF32 on": (qwen3, [("right", True, in_tf32(dapo))]),
        "GRU, cuDNN": (
            lambda place: Recurrent().to(place.device),
            [("right", True, bare), ("temperature left out", False, partial(bare, temperature=1.0))],
        ),
        "Qwen3, 4 layers of 256, 8,192 words": (wide, faults[:2]),
    }  # fmt: skip


def checkpointed(place: PartSetup) -> nn.Module:
    """Return a tiny Qwen3 that computes its activations again in the backward pass."""
    model: Any = qwen3(place)
    model.gradient_checkpointing_enable()
    return model.train()


def wide(place: PartSetup) -> nn.Module:
    """Return a Qwen3 of four layers of 256; in a trial the tiny one."""
    if place.small:
        return qwen3(place)
    return qwen3(
        place, vocab_size=8192, hidden_size=256, intermediate_size=512, head_dim=64,
        num_hidden_layers=4,
    )  # fmt: skip


def in_tf32(step: Callable[..., None]) -> Callable[..., None]:
    """Return a step with a mark: `checked` switches TF32 on before it."""

    def run(model: nn.Module, rows: list) -> None:
        step(model, rows)

    run.tf32 = True  # type: ignore[attr-defined]
    return run


PARTS = 8  # processes: one a model, and one for what is recorded


def main(place: PartSetup, which: str) -> None:
    """Check the steps of one model; or, in the last part, record steps and identify
    one.

    Args:
        place: where.
        which: number of the model in `models_with_steps`; PARTS - 1 for the last part.
    """
    torch.manual_seed(SEED)
    models = [*models_with_steps(place.device).items()]
    if int(which) < len(models):
        name, (make, steps) = models[int(which)]
        checked(place, name, make, steps)
        return
    with place.row(part="TF32", model="GRU, cuDNN", step="right") as row:
        row |= {"error": tf32_error(place)}
    recorded(place)
    with place.row(part="identify_step", model="Qwen3, float32", step="right") as row:
        text = str(upref.identify_step(dapo, qwen3(place), temperature=T))
        row |= {"right": True, "agrees": "dapo" in text, "text": text}


def checked(
    place: PartSetup,
    model_name: str,
    make: Callable[[PartSetup], nn.Module],
    steps: Steps,
) -> None:
    """Check each step of a model with `upref.check_step`, and write a row of each. TF32
    is switched on for the steps that ask for it, and is afterwards as before.
    """
    for name, right, step in steps:
        with place.row(part="check_step", model=model_name, step=name) as row:
            row |= {"right": right}
            before = torch.get_float32_matmul_precision()
            if getattr(step, "tf32", False):
                torch.set_float32_matmul_precision("high")
            try:
                report = upref.check_step(step, make(place), "dapo", temperature=T)
            finally:
                torch.set_float32_matmul_precision(before)
            row |= facts_of(report)


def facts_of(report: Any) -> dict[str, Any]:
    """Return a row of what a report of a step says: its verdict, error, the cause of
    the first failure, precision and text.
    """
    return {
        "agrees": bool(report),
        "error": report.error,
        "cause": next((f.cause for f in report.failures), ""),
        "computed_in": report.computed_in,
        "text": str(report),
    }


def tf32_error(place: PartSetup) -> float:
    """Return how far the gradient of a recurrent layer on this device is from the one
    in float64: the norm of the difference over the norm of the latter. cuDNN computes
    the layer in TF32.
    """
    torch.manual_seed(SEED)
    model = Recurrent().to(place.device)
    ids = torch.randint(64, (8, 30), device=place.device)

    def gradient(net: nn.Module) -> Tensor:
        net.zero_grad()
        net(ids).log_softmax(-1)[..., 0].sum().backward()
        return torch.cat([p.grad.flatten().double() for p in net.parameters()])

    rough = gradient(model)
    exact = gradient(model.double())
    return float((rough - exact).norm() / exact.norm())


def recorded(place: PartSetup) -> None:
    """Record two optimizer steps of AdamW by record_step, a right and a wrong pair;
    check each pair and write its row.
    """
    for name, right, fault in (
        ("right", True, {}),
        ("temperature left out", False, {"temperature": 1.0}),
    ):
        with place.row(part="record_step", model="Qwen3, float32", step=name) as row:
            model = qwen3(place)
            rows = [make_rows(96, seed, (), 2, None) for seed in (1, 2)]
            with record_step(model) as recording:
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
                for rows_of_step in rows:
                    with torch.no_grad():
                        sample(model, rows_of_step)
                    dapo(model, rows_of_step, **fault)
                    optimizer.step()
                    optimizer.zero_grad()
            report = check_recorded(recording, rows, "dapo", temperature=T)
            row |= {"right": right} | facts_of(report)


def sample(model: nn.Module, rows: list) -> None:
    """Give each row the log-probabilities of an older policy: the model's at
    temperature T, with noise of 0.3 nats. `old` and `ref` of the rows are changed in
    place.
    """
    device = next(model.parameters()).device
    noise = torch.Generator().manual_seed(SEED)
    for r in rows:
        ids = torch.tensor([r.ids], device=device)
        lp_of_all = (model(ids).logits[0, :-1].double() / T).log_softmax(-1)
        lp_of_row = lp_of_all.gather(1, ids[0, 1:, None])[:, 0]
        lp = lp_of_row[len(r.prompt) - 1 :].cpu()
        old = lp + 0.3 * torch.randn(len(lp), generator=noise, dtype=lp.dtype)
        r.old = old.clamp(max=-1e-6).tolist()
        r.ref = list(r.old)
