# SPDX-License-Identifier: Apache-2.0
"""The glue: for each repository a function that makes a step of its training loop.

A step `(model, rows)` passes the rows to the repository's own lines, and leaves the
gradients in the model. `folder` is a checkout of the repository. A function returns the
step, or (step, model) where the repository has a model of its own. Which of its lines
run, and what the function repeats of them, is in its docstring.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.trainers.rows import (
    END,
    PAD,
    Frozen,
    aligned,
    ids_of,
    number_of,
    pad,
    response_mask,
)
from tests.trainers.source import definitions, lines, module
from upref.step import Row

Step = Callable[[nn.Module, Sequence[Row]], Any]
V = 96  # tokens of the tiny models


def nano_aha_moment(folder: Path, reference_first: bool = True) -> Step:
    """Return a step of its preparation, its reference pass, its count and its loss.

    `.backward` and the optimizer are DeepSpeed's, and its count of zero advantages is a
    metric. reference_first: count the tokens after the reference pass, as it does.
    """
    utils = definitions(
        folder / "utils.py",
        "prepare_model_inputs",
        "compute_token_log_probs",
        "log_softmax_and_gather",
        torch=torch,
    )
    its = definitions(
        folder / "nano_r1_script.py",
        "compute_pg_loss",
        torch=torch,
        compute_token_log_probs=utils["compute_token_log_probs"],
        close_to_zero=lambda advantages, mask: torch.zeros(()),
    )

    def step(model, rows, size=4, temperature=0.7):
        batch = utils["prepare_model_inputs"](
            [r.prompt for r in rows],
            [r.response for r in rows],
            [[r.adv] * len(r.response) for r in rows],
            "cpu",
        )
        frozen = Frozen(rows, V, temperature)
        count = (batch["labels"] != -100).sum()
        parts = [{k: v[i : i + size] for k, v in batch.items()} for i in (0, size)]
        with torch.no_grad():
            ref = [
                utils["compute_token_log_probs"](frozen, x, temperature) for x in parts
            ]
        if reference_first:  # line 1049 counts behind the reference pass
            count = (batch["labels"] != -100).sum()
        for x, its_ref in zip(parts, ref, strict=True):
            x = x | {"ref_log_probs": its_ref}
            its["compute_pg_loss"](model, x, count, temperature, 0.001)[0].backward()

    return step


def grpo_zero(folder: Path) -> tuple[Step, nn.Module]:
    """Return a step of its update of the policy, and its model."""
    grpo, data = module(folder, "grpo"), module(folder, "data_types")
    config = module(folder, "qwen2_model").Qwen2Config(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        vocab_size=V,
    )
    model = grpo.Transformer(config, torch.device("cpu"))

    def step(model, rows):
        episodes = [
            data.Episode(
                str(r.prompt), "", r.prompt, [], r.response, True, r.reward, {}
            )
            for r in rows
        ]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        its = (2, PAD, 1.0, torch.device("cpu"), torch.float32)
        grpo.update_policy(model, optimizer, episodes, *its)

    return step, model


def tiny_grpo(folder: Path, end: int = END) -> Step:
    """Return a step of its forward pass and its loss; the masks of lines 107, 108 and
    282 are repeated.
    """
    loss = module(folder, "loss")
    its = definitions(
        folder / "train.py",
        "sequences_log_probs",
        "sequence_log_probs_from_logits",
        torch=torch,
        F=F,
    )

    def step(model, rows):
        ids = ids_of(rows, end)
        mask = ids != end
        action = response_mask(rows) & mask[:, 1:]
        log_probs = its["sequences_log_probs"](model, ids, mask)
        experience = SimpleNamespace(
            action_log_probs=aligned(rows, lambda r: r.old),
            log_probs_ref=aligned(rows, lambda r: r.ref),
            action_mask=action,
            advantages=number_of(rows, "adv")[:, None],
        )
        loss.GRPOLoss(0.2, 0.01)(log_probs, experience)[0].backward()

    return step


def simple_grpo(folder: Path) -> Step:
    """Return a step of its own; `.backward` is DeepSpeed's."""
    its = definitions(
        folder / "grpo_vllm_one.py",
        "GRPO_step",
        "get_per_token_logps",
        torch=torch,
        tokenizer=SimpleNamespace(pad_token_id=PAD),
        beta=0.04,
        clip_param=0.2,
    )

    def step(model, rows):
        n = len(rows[0].prompt)
        its["engine"] = model
        batch = {
            "plen": n,
            "inputs": ids_of(rows),
            "rewards": number_of(rows, "adv"),
            "refs": pad([r.ref for r in rows]),
            "gen_logps": pad([r.old for r in rows]),
        }
        its["GRPO_step"](batch).backward()

    return step


def nanochat(folder: Path, size: int = 4) -> tuple[Step, nn.Module]:
    """Return a step of lines 252 to 283 of its script, and its model, whose assertion
    on a dtype is met by the dtype of its buffers.
    """
    gpt = module(folder, "nanochat.gpt")

    class Model(gpt.GPT):
        def forward(self, *args, **kwargs):
            gpt.COMPUTE_DTYPE = self.cos.dtype
            return super().forward(*args, **kwargs)

    config = gpt.GPTConfig(64, V, 2, 4, 2, 32)
    model = Model(config)
    model.init_weights()

    def step(model, rows):
        ids = ids_of(rows, END)
        targets = ids[:, 1:].clone()
        targets[~response_mask(rows)] = -1
        adv = number_of(rows, "adv")
        batch = ([r.ids for r in rows], ids[:, :-1], targets, adv, adv)
        space = dict(
            model=model,
            args=SimpleNamespace(device_batch_size=size),
            batch_iterator=iter([batch]),
            examples_per_rank=1,
            rewards_list=[],
            sequence_lengths=[],
            step=0,
            num_steps=1,
            print0=print_nothing,
        )
        script = folder / "scripts/chat_rl.py"
        lines(script, "for example_step in range", "sequence_lengths.extend", space)

    return step, model


def print_nothing(*_: Any, **__: Any) -> None:
    """In place of a logger."""


class Inputs(dict):
    """What a tokenizer returns, on the CPU."""

    def to(self, device: Any) -> "Inputs":
        return self


class Tokenizer:
    """Has the tokens already."""

    pad_token_id, eos_token_id = PAD, END

    def __init__(self, inputs: Inputs):
        self.inputs = inputs

    def __call__(self, *_: Any, **__: Any) -> Inputs:
        return self.inputs


def minimind(folder: Path, loss_type: str = "grpo") -> tuple[Step, nn.Module]:
    """Return a step of its whole training epoch, of one batch, and its model; sampling
    and rewards are given.
    """
    model_of = module(folder, "model.model_minimind")
    config = model_of.MiniMindConfig(
        hidden_size=32,
        num_hidden_layers=2,
        vocab_size=V,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
    )
    names = dict(torch=torch, F=F, lm_config=config, Logger=print_nothing)
    names |= dict(DistributedDataParallel=nn.parallel.DistributedDataParallel)
    names |= dict(autocast_ctx=contextlib.nullcontext(), is_main_process=bool)
    its = definitions(folder / "trainer/train_grpo.py", "grpo_train_epoch", **names)

    def step(model, rows):
        """Train for one epoch on a rollout that is made of the rows."""
        prompts = pad([r.prompt for r in rows], PAD, left=True)
        completions = pad([r.response for r in rows], PAD)
        width, n = prompts.shape[1], completions.shape[1]
        rollout = SimpleNamespace(
            output_ids=torch.cat([prompts, completions], 1),
            completion_ids=completions,
            completions=[""] * len(rows),
            per_token_logps=pad([r.old for r in rows]),
            prompt_lens=torch.full((len(rows),), width),
            completion_mask=torch.ones(len(rows), n),
        )
        inputs = Inputs(input_ids=prompts, attention_mask=prompts != PAD)
        tokenizer = Tokenizer(inputs)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        args = dict(device="cpu", max_seq_len=0, num_generations=8, max_gen_len=n)
        args |= dict(debug_mode=False, loss_type=loss_type, epsilon=0.2)
        args |= dict(epsilon_high=5.0, beta=0.1, accumulation_steps=1, grad_clip=0)
        args |= dict(log_interval=9, save_interval=9)
        its.update(
            model=model,
            optimizer=optimizer,
            scheduler=SimpleNamespace(step=print_nothing),
            tokenizer=tokenizer,
            args=SimpleNamespace(**args),
            calculate_rewards=lambda *_: number_of(rows, "reward"),
        )
        engine = SimpleNamespace(rollout=lambda **_: rollout)
        frozen = Frozen(rows, V)
        its["grpo_train_epoch"](0, [{"prompt": [""]}], 2, engine, frozen, None)

    return step, model_of.MiniMindForCausalLM(config)


def reasoning_from_scratch(folder: Path) -> tuple[Step, nn.Module]:
    """Return a step of its loss of chapter 6, and its model; sampling and rewards are
    given.
    """
    qwen = module(folder, "reasoning_from_scratch.qwen3")
    its = definitions(
        folder / "reasoning_from_scratch/ch06.py",
        "compute_grpo_loss",
        "sequence_logprob",
        torch=torch,
        render_prompt=str,
    )
    config = dict(vocab_size=V, context_length=64, emb_dim=32, n_heads=4, n_layers=2)
    config |= dict(hidden_dim=48, head_dim=8, qk_norm=True, n_kv_groups=2)
    config |= dict(rope_base=1e4, dtype=torch.float32)

    def step(model, rows):
        sampled, rewards = iter(rows), iter(rows)

        def sample(**_):
            r = next(sampled)
            return torch.tensor(r.ids), len(r.prompt), ""

        its["sample_response"] = sample
        its["reward_rlvr"] = lambda *_: next(rewards).reward
        example = {"problem": "", "answer": ""}
        out = its["compute_grpo_loss"](model, None, example, "cpu", len(rows))
        out["loss_tensor"].backward()

    return step, qwen.Qwen3Model(config)


def nano_grpo(folder: Path) -> Step:
    """Return a step of its whole train(); sampling is given."""
    import datetime
    import time

    its = definitions(
        folder / "grpo.py",
        "GRPO",
        torch=torch,
        F=F,
        Tensor=torch.Tensor,
        contextlib=contextlib,
        defaultdict=defaultdict,
        time=time,
        datetime=datetime,
        print=print_nothing,
    )

    def step(model, rows):
        data = SimpleNamespace(shuffle=lambda seed: [])
        trainer = its["GRPO"](
            model,
            Frozen(rows, V),
            dataset=data,
            group_size=8,
            micro_group_size=2,
            reward_functions=[],
            dtype=torch.float32,
            tokenizer=None,
            batch_size=1,
        )
        sampled = ids_of(rows), number_of(rows, "reward")[None], response_mask(rows)
        trainer.sample_batch = lambda: sampled
        trainer.train(max_iterations=1)

    return step


def the_lm_book(folder: Path) -> Step:
    """Return a step of its update; prompts are padded left as its tokenizer pads them."""
    its = definitions(
        folder / "GRPO.py",
        "maximize_grpo_objective",
        "compute_log_probabilities",
        "selective_log_softmax",
        "compute_group_relative_advantages",
        "create_completion_mask",
        torch=torch,
        F=F,
        print=print_nothing,
    )

    def step(model, rows):
        prompts = pad([r.prompt for r in rows], PAD, left=True)
        completions = pad([r.response for r in rows], PAD)
        mask = its["create_completion_mask"](completions, END)
        there = pad([[1] * len(r.prompt) for r in rows], 0, left=True)
        data = dict(
            input_ids=torch.cat([prompts, completions], 1),
            attention_mask=torch.cat([there, mask], 1),
            completion_mask=mask,
            old_log_probs=pad([r.old for r in rows]),
            ref_log_probs=pad([r.ref for r in rows]),
            logits_to_keep=completions.shape[1],
            formatted_completions=None,
            repeated_prompts=None,
            repeated_answers=None,
            batch_size=1,
            num_generations=len(rows),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def reward(**_):
            return [r.reward for r in rows]

        maximize = its["maximize_grpo_objective"]
        maximize(model, None, data, None, reward, optimizer, 0.1, 0.2)

    return step


def deepseek_rl_extended(folder: Path) -> Step:
    """Return a step of its loss, of four questions with two chains each; lines 527, 528
    and 535 of its loop are repeated, and 534 clips the norm.
    """
    utils = definitions(
        folder / "utils.py",
        "get_per_token_logps",
        "selective_log_softmax",
        torch=torch,
        F=F,
    )
    its = definitions(
        folder / "main.py", "compute_loss", torch=torch, utils=SimpleNamespace(**utils)
    )
    args = SimpleNamespace(kl_weight_beta=0.04)

    def step(model, rows):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(0, len(rows), 2):
            part = rows[i : i + 2]
            prompts = torch.tensor([r.prompt for r in part])
            completions = pad([r.response for r in part], PAD)
            mask = pad([[1] * len(r.response) for r in part])
            whole = torch.cat([prompts, completions], 1)
            seen = torch.cat([torch.ones_like(prompts), mask], 1)
            adv, frozen = number_of(part, "adv"), Frozen(part, V)
            loss, _ = its["compute_loss"](
                model, frozen, whole, prompts, completions, seen, mask, adv, args
            )
            loss.backward()
        optimizer.step()

    return step


def prime_rl(folder: Path) -> Step:
    """Return a step of its loss of packed sequences with the default component, divided
    by the trained tokens of the step.
    """
    from dataclasses import dataclass, field

    its = definitions(
        folder / "src/prime_rl/trainer/rl/loss.py",
        "LossInputs",
        "LossOutputs",
        "compute_loss",
        "default_loss_fn",
        "compute_importance_ratio_and_mismatch_kl",
        "_safe_mean",
        torch=torch,
        Tensor=torch.Tensor,
        dataclass=dataclass,
        field=field,
    )
    config = SimpleNamespace(dppo_mask_low=0.2, dppo_mask_high=0.2)
    config.adv_tau, config.kl_tau = 1.0, 1e-3

    def step(model, rows, temperature=0.7):
        lp, old, adv, mask = [], [], [], []
        for r in rows:
            z = model(torch.tensor([r.ids])).logits[0, :-1] / temperature
            each = z.log_softmax(-1)[range(len(r.ids) - 1), r.ids[1:]]
            lp.append(each[len(r.prompt) - 1 :])
            old.append(torch.tensor(r.old))
            adv.append(torch.full((len(r.response),), r.adv))
            mask.append(torch.tensor(r.trains))
        total = sum(int(x.sum()) for x in mask)

        def loss_fn(inputs):
            return its["default_loss_fn"](inputs, config)

        loss, _ = its["compute_loss"](
            lp, old, None, adv, mask, None, None, None, loss_fn, total, 1, 1
        )
        loss.backward()

    return step


def open_instruct(folder: Path, loss_fn: str = "dapo") -> Step:
    """Return a step of its forward pass, its loss and its masked mean, a response a
    pass, divided by the trained tokens of the step; `.backward` is DeepSpeed's.
    """
    mean = definitions(folder / "open_instruct/rl_utils.py", "masked_mean", torch=torch)

    def pick(logits, labels):
        return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]

    its = definitions(
        folder / "open_instruct/grpo_utils.py",
        "compute_grpo_loss",
        "forward_for_logprobs",
        torch=torch,
        GRPOLossType=SimpleNamespace(dapo="dapo", cispo="cispo"),
        model_utils=SimpleNamespace(log_softmax_and_gather=pick),
    )
    config = SimpleNamespace(loss_fn=loss_fn, clip_lower=0.2, clip_higher=0.28)

    def step(model, rows, temperature=0.7):
        total = float(sum(sum(r.trains) for r in rows))
        for r in rows:
            ids = torch.tensor([r.ids])
            seen, places = torch.ones_like(ids), torch.arange(len(r.ids))[None]
            lp, _ = its["forward_for_logprobs"](
                model, ids, seen, places, PAD, temperature
            )
            old, mask = aligned([r], lambda r: r.old), aligned([r], lambda r: r.trains)
            ratio = torch.exp(lp - old)
            adv, ones = torch.full_like(lp, r.adv), torch.ones_like(lp)
            loss, _, _ = its["compute_grpo_loss"](lp, ratio, adv, None, config, ones)
            mean["masked_mean"](loss, mask, None, total).backward()

    return step


def torchtune(folder: Path, name: str = "GRPOLoss", temperature: float = 0.7) -> Step:
    """Return a step of one of its losses, in a loop of our own."""
    rewards = definitions(
        folder / "torchtune/rlhf/rewards.py",
        "masked_mean",
        "masked_sum",
        torch=torch,
    )
    its = definitions(
        folder / "torchtune/dev/grpo/loss.py",
        name,
        torch=torch,
        nn=nn,
        rlhf=SimpleNamespace(masked_mean=rewards["masked_mean"]),
        masked_sum=rewards["masked_sum"],
    )

    def step(model, rows):
        ids, mask = ids_of(rows), response_mask(rows)
        z = model(ids).logits[:, :-1] / temperature
        lp = z.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        old, ref = aligned(rows, lambda r: r.old), aligned(rows, lambda r: r.ref)
        loss = its[name](epsilon=0.2, kl_coeff=0.1)
        loss(old, lp, ref, number_of(rows, "adv"), mask)[0].backward()

    return step
