# SPDX-License-Identifier: Apache-2.0
"""Policies are transformers' own classes: a task's problems go in, logits come out.

With tiny configs, the paper's three architectures: Qwen3 (dense), Qwen3-MoE (8 experts,
2 of them per token) and Qwen3-VL (with pictures). From outside, Llama, of which
SmolLM2 is one.
"""

import ctypes
import json
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from repro.mini.policy import packed
from repro.mini.tasks import BOS, EOS, PAD, Task
from upref.errors import InputError

# head_dim 32 is the smallest that vLLM's CPU build takes; two query heads share one
# key-value head, as in Qwen3.
SIZE = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.08,
}
TOKENS = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": BOS}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
# pixels; 2 x 2 patches make one token, and a picture has at most so many patches
PATCH, PLACES = 8, 64
EYES = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "patch_size": PATCH,
    "out_hidden_size": 64,
    "num_position_embeddings": PLACES,
    "deepstack_visual_indexes": [0],
    "initializer_range": 0.08,
}
# With it transformers' and vLLM's processor of Qwen3-VL cuts a picture of 0..255 into
# the patches of `read_prompts`.
PROCESSOR = {
    "processor_class": "Qwen3VLProcessor",
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": PLACES * PATCH**2},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
CLASSES = {
    "qwen3": transformers.Qwen3ForCausalLM,
    "qwen3_moe": transformers.Qwen3MoeForCausalLM,
    "qwen3_vl": transformers.Qwen3VLForConditionalGeneration,
    "llama": transformers.LlamaForCausalLM,
}


def new(kind: str, task: Task, seed: int = 0) -> PreTrainedModel:
    """Return an untrained policy for the task's vocabulary.

    Args:
        kind: a name of CLASSES.
        task: qwen3_vl needs one with pictures.
        seed: of torch's global generator, which is set.
    """
    torch.manual_seed(seed)
    words = {"vocab_size": task.vocabulary, "tie_word_embeddings": True, **TOKENS}
    if kind == "llama":
        config = transformers.LlamaConfig(**SIZE, **words)
    elif kind == "qwen3":
        config = transformers.Qwen3Config(**SIZE, **words)
    elif kind == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(**SIZE, **EXPERTS, **words)
    else:
        rope = {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        }
        # setting of the configuration -> word of the task
        marks = {
            "image": "image_pad",
            "video": "video_pad",
            "vision_start": "vision_start",
            "vision_end": "vision_end",
        }
        at = {
            f"{name}_token_id": task.words.index(f"<|{mark}|>")
            for name, mark in marks.items()
        }
        config = transformers.Qwen3VLConfig(
            text_config=SIZE | words | {"rope_parameters": rope},
            vision_config=EYES,
            tie_word_embeddings=True,
            **at,
        )
    return ready(CLASSES[kind](config))


def ready(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model as a policy is used here, changed in place: float32, no dropout,
    sdpa attention; a mixture of experts multiplies all tokens of an expert together.
    """
    model.set_attn_implementation("sdpa")
    if model.config.model_type == "qwen3_moe":
        model.set_experts_implementation("grouped_mm")
    return model.float().eval()


def inputs(task: Task, problems: Tensor) -> dict[str, Tensor]:
    """Return the prompts as the model takes them, one row a problem: input_ids, and
    pictures where the task has some.
    """
    found = {"input_ids": task.prompts(problems)}
    pictures = task.pictures(problems)
    if pictures is not None:
        found["pictures"] = pictures
    return found


def reader(
    model: PreTrainedModel, prompts: dict[str, Tensor], length: int
) -> "packed.Reader | Reader":
    """Return an object that reads the prompts, then token by token what follows: its
    `first` has logits [P, V], its `read` returns [len(tokens), V].

    `read(after, tokens)` goes on from what was read last: tokens[i] comes after its row
    after[i], which may occur any number of times, or not at all.

    Args:
        model: a policy.
        prompts: from `inputs`, P rows.
        length: how many tokens may follow.
    """
    if packed.fits(model):
        return packed.Reader(model, prompts["input_ids"], length)
    return Reader(model, prompts)


class Reader:
    """Reads prompts, then one token a row at a time, by transformers."""

    def __init__(self, model: PreTrainedModel, prompts: dict[str, Tensor]):
        self.model = model
        self.first, self.cache = read_prompts(
            model, prompts, torch.arange(len(prompts["input_ids"]))
        )

    def read(self, after: Tensor, tokens: Tensor) -> Tensor:
        """Return logits [n, V] after tokens [n], each of which follows row after[i]."""
        keep_rows(self.model, self.cache, after)
        read = self.model(
            input_ids=tokens[:, None], past_key_values=self.cache, use_cache=True
        )
        return read.logits[:, -1].float()


def read_prompts(
    model: PreTrainedModel, prompts: dict[str, Tensor], of: Tensor
) -> tuple[Tensor, DynamicCache]:
    """Read each prompt once. Row i of N goes on from prompt of[i].

    Args:
        model: the policy.
        prompts: "input_ids" [P, L], all of one length, and of tasks with pictures
            "pictures" [P, 3, side, side] too.
        of: the prompt of each row, [N].

    Returns:
        Logits [N, V] of the token that comes next, in float32; and the cache, of N
        rows.
    """
    ids = prompts["input_ids"]
    cache = DynamicCache()
    pictures: dict[str, Tensor] = {}
    if "pictures" in prompts:
        pixels = prompts["pictures"]
        side = pixels.shape[-1] // PATCH  # patches
        # as Qwen's image processor orders them: blocks of 2 x 2 patches, each (channel,
        # 2 frames, row, column); a picture is two equal frames
        blocks = pixels.view(len(pixels), 3, side // 2, 2, PATCH, side // 2, 2, PATCH)
        x = blocks.permute(0, 2, 5, 3, 6, 1, 4, 7)
        frames = x.unsqueeze(6).expand(*x.shape[:6], 2, PATCH, PATCH)
        pictures = {
            "pixel_values": frames.reshape(len(pixels) * side**2, -1),
            "image_grid_thw": torch.tensor([[1, side, side]]).expand(len(pixels), 3),
            "mm_token_type_ids": (ids == model.config.image_token_id).int(),
        }
    read = model(
        input_ids=ids,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
        **pictures,
    )
    logits = read.logits[:, -1].float()
    keep_rows(model, cache, of)
    return logits.index_select(0, of), cache


def keep_rows(model: PreTrainedModel, cache: DynamicCache, rows: Tensor) -> None:
    """Replace the rows of the cache by these of its rows, in place."""
    cache.reorder_cache(rows)  # index_select: its gradient is deterministic and fast
    # after a picture positions are not those of the text
    if getattr(model.model, "rope_deltas", None) is not None:
        model.model.rope_deltas = model.model.rope_deltas[rows]


def response_logits(
    model: PreTrainedModel,
    prompts: dict[str, Tensor],
    of: Tensor,
    tokens: Tensor,
    mask: Tensor,
) -> Tensor:
    """Return the logits of what predicts tokens[mask], [mask.sum(), V], in this order.

    Args:
        model: a policy.
        prompts: from `inputs`.
        of: [N], row i answers prompt of[i].
        tokens: responses, [N, T].
        mask: bool [N, T], the tokens whose logits are needed.
    """
    if packed.fits(model):
        return packed.response_logits(model, prompts["input_ids"], of, tokens, mask)
    return padded_logits(model, prompts, of, tokens)[mask]


def padded_logits(
    model: PreTrainedModel, prompts: dict[str, Tensor], of: Tensor, tokens: Tensor
) -> Tensor:
    """Return the logits of what predicts every token, [N, T, V], by transformers, with
    the arguments of `response_logits`.

    Attention is causal, so that padding after a response changes none of its logits.
    """
    length = tokens.shape[1]
    # tiny weights, short prompts: to read them again is faster than to share them
    if "pictures" not in prompts and model.config.model_type != "llama":
        ids = torch.cat([prompts["input_ids"][of], tokens[:, :-1]], 1)
        return model(input_ids=ids, use_cache=False, logits_to_keep=length).logits
    first, cache = read_prompts(model, prompts, of)
    if length == 1:
        return first[:, None]
    rest = model(input_ids=tokens[:, :-1], past_key_values=cache, use_cache=True)
    return torch.cat([first[:, None], rest.logits.float()], 1)


def save(folder: Path, model: PreTrainedModel, words: PreTrainedTokenizerBase) -> None:
    """Save the policy as a save_pretrained folder, which transformers and vLLM load;
    for pictures, the processor too.

    Args:
        folder: it exists.
        model: a policy.
        words: its tokenizer.
    """
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    if model.config.model_type == "qwen3_vl":
        for name, kind in (
            (
                "preprocessor_config.json",
                {"image_processor_type": "Qwen2VLImageProcessor"},
            ),
            (
                "video_preprocessor_config.json",
                {"video_processor_type": "Qwen3VLVideoProcessor"},
            ),
        ):
            (folder / name).write_text(json.dumps(kind | PROCESSOR, indent=1) + "\n")


def load(folder: Path, task: Task) -> PreTrainedModel:
    """Return the policy of a folder that `save` wrote.

    Raises:
        InputError: it is not a policy, or not one for the task's vocabulary.
    """
    try:
        kind = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True
        ).model_type
        if kind not in CLASSES:
            raise ValueError(f"it is a {kind}, and not one of {', '.join(CLASSES)}")
        model = CLASSES[kind].from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, SafetensorError) as e:
        raise InputError(f"{folder} is not a policy that can be loaded: {e}.") from e
    if model.config.get_text_config().vocab_size != task.vocabulary:
        raise InputError(
            f"{folder} has another vocabulary than the task: choose a base that was made for it."
        )
    return ready(model)


def precision(name: str) -> torch.autocast:
    """Return the context of forward passes in this precision, "float32" or "bfloat16";
    weights are float32.

    It ends before the weights change: autocast keeps copies of them.
    """
    device = torch.get_default_device().type
    return torch.autocast(device, torch.bfloat16, enabled=name == "bfloat16")


def deterministic(threads: int = 1) -> None:
    """Give torch so many threads and deterministic algorithms: the same numbers to the
    bit on the same machine. Also call `keep_memory`, and switch transformers' progress
    bars off.
    """
    keep_memory()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # a safety net that costs a tenth of the time
    transformers.utils.logging.disable_progress_bar()


def keep_memory() -> None:
    """Make freed memory stay with the process, where the C library is glibc.

    It would give tensors of 128 kB and more back to the kernel, which clears every page
    again before the next one. Here, where tensors are small and many, that was most of
    the time.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # no glibc
        return
    # M_MMAP_THRESHOLD, M_TRIM_, M_TOP_PAD
    for parameter, size in ((-3, 1 << 30), (-1, (1 << 31) - 1), (-2, 1 << 26)):
        mallopt(parameter, size)
