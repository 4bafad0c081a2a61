# SPDX-License-Identifier: Apache-2.0
"""Tiny models of many families, made from their configurations: two layers, no
download.

What a family is here for: logit scales and softcaps, head biases, tied heads, learned
positions, alibi, parallel blocks, sliding windows, experts, state spaces, linear
attention.
"""

from typing import Any

import torch

from upref.errors import InputError, importing

V = 96  # tokens of the vocabulary
END = 2  # ends a sequence, and pads it
SMALL = dict(
    vocab_size=V,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    pad_token_id=END,
    bos_token_id=1,
    eos_token_id=END,
)
GATED = SMALL | dict(
    intermediate_size=48, num_key_value_heads=2, max_position_embeddings=512
)
HEADS = dict(head_dim=8)
EXPERTS: dict[str, Any] = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    router_aux_loss_coef=0.0,
)
GPT2: dict[str, Any] = dict(
    vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=512, eos_token_id=END
)
GPT2 |= dict(bos_token_id=1)
GPT2 |= dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)

# a layer of linear attention (GatedDeltaNet), and one of attention
LINEAR: dict[str, Any] = dict(
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    shared_expert_intermediate_size=24,
    decoder_sparse_step=1,
)

# family -> (name of the classes in transformers, fields of its configuration)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", GATED),
    "qwen3": ("Qwen3", GATED | HEADS),
    "qwen3_tied": ("Qwen3", GATED | HEADS | dict(tie_word_embeddings=True)),
    "qwen3_moe": ("Qwen3Moe", GATED | HEADS | EXPERTS | dict(decoder_sparse_step=1)),
    "qwen3_next": ("Qwen3Next", GATED | HEADS | EXPERTS | LINEAR),
    "llama": ("Llama", GATED),
    "mistral": ("Mistral", GATED | HEADS | dict(sliding_window=6)),
    "gemma": ("Gemma", GATED | HEADS),
    "gemma2": (
        "Gemma2",
        GATED
        | HEADS
        | dict(
            final_logit_softcapping=2.0,
            attn_logit_softcapping=1.5,
            sliding_window=6,
            query_pre_attn_scalar=8,
        ),
    ),
    "gemma3": (
        "Gemma3",
        GATED
        | HEADS
        | dict(final_logit_softcapping=2.0, sliding_window=6, query_pre_attn_scalar=8),
    ),
    "phi": (
        "Phi",
        GATED | dict(resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0),
    ),
    "phi3": ("Phi3", GATED),
    "cohere": ("Cohere", GATED | dict(logit_scale=0.25)),
    "cohere2": ("Cohere2", GATED | HEADS | dict(logit_scale=0.25, sliding_window=6)),
    "granite": (
        "Granite",
        GATED
        | dict(logits_scaling=3.0, embedding_multiplier=2.0, residual_multiplier=0.7),
    ),
    "olmo2": ("Olmo2", GATED),
    "stablelm": ("StableLm", GATED),
    "starcoder2": (
        "Starcoder2",
        GATED | dict(residual_dropout=0.0, embedding_dropout=0.0),
    ),
    "smollm3": ("SmolLM3", GATED),
    "glm4": ("Glm4", GATED | HEADS),
    "gpt2": ("GPT2", GPT2),
    "gpt_neox": (
        "GPTNeoX",
        SMALL | dict(intermediate_size=48, max_position_embeddings=512),
    ),
    "gptj": ("GPTJ", GPT2 | dict(rotary_dim=4)),
    "codegen": ("CodeGen", GPT2 | dict(rotary_dim=4)),
    "opt": (
        "OPT",
        SMALL
        | dict(
            ffn_dim=48, max_position_embeddings=512, word_embed_proj_dim=32, dropout=0.0
        ),
    ),
    "bloom": (
        "Bloom",
        dict(
            vocab_size=V,
            hidden_size=32,
            n_layer=2,
            n_head=4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bos_token_id=1,
            eos_token_id=END,
            pad_token_id=END,
        ),
    ),
    "falcon": (
        "Falcon",
        SMALL
        | dict(
            hidden_dropout=0.0, attention_dropout=0.0, new_decoder_architecture=False
        ),
    ),
    "mpt": (
        "Mpt",
        dict(
            vocab_size=V,
            d_model=32,
            n_layers=2,
            n_heads=4,
            expansion_ratio=2,
            max_seq_len=512,
            bos_token_id=1,
            eos_token_id=END,
        ),
    ),
    "mamba2": (
        "Mamba2",
        dict(
            vocab_size=V,
            hidden_size=32,
            num_hidden_layers=2,
            state_size=8,
            head_dim=8,
            num_heads=8,
            n_groups=1,
            chunk_size=8,
            pad_token_id=END,
            bos_token_id=1,
            eos_token_id=END,
        ),
    ),
    "falcon_h1": (
        "FalconH1",
        GATED
        | HEADS
        | dict(
            mamba_d_ssm=64,
            mamba_n_heads=8,
            mamba_d_head=8,
            mamba_d_state=8,
            mamba_n_groups=1,
            mamba_chunk_size=8,
            lm_head_multiplier=0.4,
        ),
    ),
    "recurrent_gemma": (
        "RecurrentGemma",
        SMALL
        | HEADS
        | dict(
            intermediate_size=48,
            num_key_value_heads=1,
            lru_width=32,
            attention_window_size=64,
            logits_soft_cap=2.0,
            block_types=["recurrent", "attention"],
        ),
    ),
    "nemotron": ("Nemotron", GATED | HEADS),
    "exaone4": ("Exaone4", GATED | HEADS | dict(sliding_window=6)),
    "helium": ("Helium", GATED | HEADS),
}


def tiny(family: str, seed: int = 0, **changes: Any) -> torch.nn.Module:
    """Make a causal language model of a family, with two layers and random weights.

    Args:
        family: a key of FAMILIES, such as qwen3.
        seed: of the weights; torch's own generators stay as they were.
        **changes: fields of its configuration.

    Returns:
        A model of transformers in float32, on the CPU.

    Raises:
        InputError: there is no such family, or transformers does not import.
    """
    if family not in FAMILIES:
        raise InputError(
            f"there is no tiny model of {family!r}: {', '.join(FAMILIES)}."
        )
    with importing("transformers"):
        import transformers

        transformers.logging.set_verbosity_error()
        name, fields = FAMILIES[family]
        # the two exceptions of transformers' names
        suffix = "TextConfig" if name == "Gemma3" else "Config"
        head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
        config = getattr(transformers, name + suffix)(**fields | changes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: torch.nn.Module = getattr(transformers, name + head)(config)
    return model
