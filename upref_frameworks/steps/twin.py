# SPDX-License-Identifier: Apache-2.0
"""A two-layer twin of a run, checked before the run starts: its family, head and
options, in the sizes of families.py.

Kept are scales, softcaps, biases, tied heads, the kind of attention and its
implementation. A sliding window is cut to the rows of a check, so that it acts. Dropout
is off. FlashAttention needs a GPU: eager attention stands for it, because both apply a
softcap in attention and sdpa does not.
"""

import copy
from typing import Any

import torch
from torch import nn

from upref.errors import InputError, NotInstalled, importing
from upref.step.compare.case import perturb
from upref.step.inputs.families import FAMILIES, GATED, HEADS
from upref.step.inputs.reference import unwrapped
from upref.user_code.guard import one_line

SIZES = (
    GATED
    | HEADS
    | dict(
        sliding_window=6,
        moe_intermediate_size=24,
        num_experts=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_expert_intermediate_size=24,
    )
)
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


@torch.random.fork_rng(devices=())
def twin(model: Any, peft_config: Any = None, **how: Any) -> nn.Module:
    """Make a tiny model like this one, with disturbed weights, in float32.

    Args:
        model: a causal language model of transformers, plain or with PEFT's adapters;
            its config; or its name.
        peft_config: of adapters that a trainer will add.
        how: of AutoConfig.from_pretrained, where the model is a name;
            attn_implementation is the twin's too.

    Returns:
        A model of two layers, which has the same weights at each call.

    Raises:
        InputError: no twin of this kind of model can be made.
    """
    with importing("transformers"):
        from transformers import AutoModelForCausalLM
    torch.manual_seed(1)  # a run that starts today starts tomorrow
    net: Any = unwrapped(model) if isinstance(model, nn.Module) else None
    if net is not None and hasattr(net, "get_base_model"):
        peft_config = peft_config or next(iter(net.peft_config.values()))
        net = net.get_base_model()
    try:
        attention = how.pop("attn_implementation", None)
        config = _configuration(model, net, how)
        attention = attention or config._attn_implementation  # noqa: SLF001  its public name is of models
        if attention not in (None, "eager", "sdpa"):
            attention = "eager"  # others may need a GPU or a package
        small = _shrunk(config)
        if net is not None:
            tiny = type(net)._from_config(small, attn_implementation=attention)  # noqa: SLF001  of any class of theirs
        else:
            tiny = AutoModelForCausalLM.from_config(
                small, attn_implementation=attention
            )
        if peft_config is not None:
            tiny = _with_small_adapters(tiny, peft_config)
        tiny(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False)
    except NotInstalled:
        raise
    except (
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
        RuntimeError,
        OSError,
        IndexError,
    ) as e:
        what = model if isinstance(model, str) else type(model).__name__
        raise InputError(
            f"no two-layer twin of {what} can be made ({one_line(e)}): leave step_check out."
        ) from e
    return perturb(tiny.float())


def _configuration(model: Any, net: Any, how: dict[str, Any]) -> Any:
    """Return the configuration of transformers of a model.

    Args:
        model: the model, its configuration, or its name.
        net: the module without adapters; None where the model is no module.
        how: of AutoConfig.from_pretrained, where the model is a name.

    Raises:
        TypeError: it has none.
        NotInstalled: transformers, or the class of configurations, is not there.
    """
    with importing("transformers"):
        from transformers import AutoConfig, PreTrainedConfig
    if isinstance(model, str):
        config = AutoConfig.from_pretrained(model, **how)
    else:
        config = getattr(net, "config", model)
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"{type(model).__name__} has no configuration of transformers")
    return config


def _with_small_adapters(tiny: nn.Module, peft_config: Any) -> nn.Module:
    """Return the model with PEFT's adapters of rank 4, at random and without dropout.
    `peft_config` stays as it is.
    """
    from peft import get_peft_model

    small = copy.deepcopy(peft_config)
    small_values = {"r": 4, "lora_dropout": 0.0, "init_lora_weights": False}
    for name, value in small_values.items():
        if hasattr(small, name):
            setattr(small, name, value)
    return get_peft_model(tiny, small)


def _few_key_value_heads(original: dict[str, Any]) -> dict[str, int]:
    """Return the number of key and value heads of the twin, whose attention has 4
    heads: 4 where the original has as many as heads, 1 where it has one for all heads,
    2 between. {} where the original tells no number.
    """
    heads = original.get("num_attention_heads")
    key_value_heads = original.get("num_key_value_heads")
    if not (key_value_heads and heads):
        return {}
    if key_value_heads == heads:
        return {"num_key_value_heads": 4}
    return {"num_key_value_heads": 1 if key_value_heads == 1 else 2}


def _two_layers(original: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the original that have a value for each layer, for two
    layers: its first one, and the first of another kind, if there is one.
    """
    layers = next((original[field] for field in LAYERS if original.get(field)), 0)
    kinds_of_layers = (
        original.get("layer_types") or original.get("block_types") or [0, 0]
    )
    second_layer = 1
    for i, kind in enumerate(kinds_of_layers):
        if kind != kinds_of_layers[0]:
            second_layer = i
            break
    changed: dict[str, Any] = {}
    for field, value in original.items():
        if not isinstance(value, list):
            continue
        # block_types is a pattern that repeats, so it may be shorter than the layers
        if len(value) == layers > 2 or field == "block_types":
            changed[field] = [value[0], value[second_layer]]
    for field in LAYERS:
        if original.get(field):
            changed[field] = 2
    return changed


def _shrunk(config: Any) -> Any:
    """Return a copy of the configuration with two layers and small sizes, without
    dropout and without the loss of a router. What is not a size stays.
    """
    original = config.to_dict()
    name = original["model_type"].removesuffix("_text")
    fields_of_family = FAMILIES[name][1] if name in FAMILIES else SIZES
    sizes = {
        field: size for field, size in fields_of_family.items() if type(size) is int
    }
    always = ("hidden_size", "vocab_size", "head_dim")
    changed: dict[str, Any] = {
        field: size
        for field, size in sizes.items()
        if original.get(field) is not None or field in always
    }
    changed |= _few_key_value_heads(original)
    for field, value in original.items():
        is_dropout = "drop" in field and isinstance(value, float)
        if is_dropout or field == "router_aux_loss_coef":
            changed[field] = 0.0
    changed |= _two_layers(original)
    # of the weights, which the twin does not load
    dropped = (
        "torch_dtype",
        "dtype",
        "quantization_config",
        "auto_map",
        "_name_or_path",
        "transformers_version",
    )
    return type(config)(
        **{
            field: value
            for field, value in (original | changed).items()
            if field not in dropped
        }
    )
