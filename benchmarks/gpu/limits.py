# SPDX-License-Identifier: Apache-2.0
"""The least time of a head on a GPU: that of its matrix products and of its memory, on an
H100 that does nothing else. Dense bfloat16 products and memory are by NVIDIA's data
sheet of the H100 SXM.
"""

import torch

V = 151_936
PRODUCTS = 989e12  # FLOP/s
PRODUCTS_OF_FLOAT32 = 67e12  # without tensor cores, whose TF32 is not float32
MEMORY = 3.35e12  # bytes/s


def least_milliseconds(dtype: str, hidden_size: int, tokens: int) -> float:
    """Return the time that no head can beat on that card: the products for logits, dh and
    dW, or the memory's time for one reading of the states and W and one writing of both
    gradients, whichever is longer.

    Args:
        dtype: of the states and of W: bfloat16 or float32.
        hidden_size: H.
        tokens: N.
    """
    operations = PRODUCTS if dtype == "bfloat16" else PRODUCTS_OF_FLOAT32
    size = getattr(torch, dtype).itemsize
    products = 3 * 2 * tokens * V * hidden_size / operations
    memory = 2 * size * (tokens + V) * hidden_size / MEMORY
    return 1e3 * max(products, memory)
