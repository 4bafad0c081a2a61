# SPDX-License-Identifier: Apache-2.0
"""Adapters of a model, such as LoRA, that have an effect."""

from typing import Any

import torch
from torch import nn

STD = 0.03  # of the adapters' second matrices, which are 0 at first


@torch.no_grad()
def fill_adapters(module: nn.Module) -> None:
    """Give the second matrices of adapters numbers: at 0 the adapters have no effect.

    Args:
        module: with adapters of peft, or without.
    """
    generator = torch.Generator().manual_seed(2)
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            weights: Any = (
                parameter.to_local() if hasattr(parameter, "to_local") else parameter
            )
            noise = torch.randn(weights.shape, generator=generator)
            weights.copy_(STD * noise)
