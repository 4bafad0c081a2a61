# SPDX-License-Identifier: Apache-2.0
"""What the smoke scale trains: a random Qwen3 of some 100,000 parameters, prompts of
one digit, a checkable answer.

The answer to a digit is that digit, repeated to the end; the score is the share of the
response that obeys. A policy that knows nothing scores 1/len(VOCAB), one that knows the
digits but does not read the prompt 1/DIGITS, the best 1.
"""

from pathlib import Path

DIGITS = 4
# verl asks Qwen tokenizers for a newline
SPECIAL = ["<pad>", "<|im_end|>", "<user>", "<assistant>", "\n"]
VOCAB = (
    SPECIAL + [str(i) for i in range(DIGITS)] + [chr(ord("a") + i) for i in range(11)]
)
# answers as the project's own reward reads them
BOXED = VOCAB[:-DIGITS] + [f"\\boxed{{{i}}}" for i in range(DIGITS)]
RESPONSE = 8  # tokens
SIZES = dict(
    vocab_size=len(VOCAB), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32, max_position_embeddings=64, tie_word_embeddings=False,
)  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ '<user> ' + m['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info=None, **_
) -> dict:
    """Return verl's reward: the number of right words over RESPONSE, so that a short
    answer scores less. `acc` is 1 if at most one word of RESPONSE is missing or wrong,
    and `pred` is the most frequent word.
    """
    words = solution_str.split()
    right = sum(word == ground_truth for word in words)
    return {
        "score": right / RESPONSE,
        "acc": float(right >= RESPONSE - 1),
        "pred": max(words, key=words.count, default=""),
    }


def make_model(path: Path, experts: int = 0, seed: int = 0, words: list[str] = VOCAB):
    """Save a tokenizer and a Qwen3 with random weights.

    Args:
        path: the folder.
        experts: of each layer; 0: none.
        seed: of the weights.
        words: the vocabulary, which is exactly the tokenizer's, or vLLM and the trainer
            would differ.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        AutoModelForCausalLM,
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3MoeConfig,
    )

    level = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0])
    )
    level.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=level,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        unk_token=SPECIAL[0],
        chat_template=TEMPLATE,
    )
    tokenizer.save_pretrained(path)
    torch.manual_seed(seed)
    mixture = dict(
        num_experts=experts,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
    )
    config = (Qwen3MoeConfig if experts else Qwen3Config)(
        **SIZES,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        dtype="float32",
        **(mixture if experts else {}),
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)


def make_data(path: Path, rows: int = 256):
    """Write prompts of one digit to a parquet file, in the columns that verl reads; the
    digits take their turn.
    """
    import pandas

    digits = [str(i % DIGITS) for i in range(rows)]
    pandas.DataFrame(
        {
            "data_source": "toy",
            "prompt": [[{"role": "user", "content": d}] for d in digits],
            "ability": "copy",
            "reward_model": [{"style": "rule", "ground_truth": d} for d in digits],
            "extra_info": [{"index": i} for i in range(rows)],
        }
    ).to_parquet(path)
