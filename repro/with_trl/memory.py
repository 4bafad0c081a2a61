# SPDX-License-Identifier: Apache-2.0
"""Bytes of a GPU that TRL's trainer takes, by arithmetic on the model's config.json. On
an H100 it took less (docs/gpu.md).

While it trains: fp32 weights, gradients and Adam's two moments, 16 bytes a parameter;
the bf16 copies of the weights that autocast keeps until the backward pass ends, 2; the
gradient of the head in float32, which TRL's fused head collects beside that
(trl/kernels/chunked_logprob.py; it holds no logits but one tile); the input of each
layer, and one layer's activations. While it generates: weights and moments; the keys
and values of all responses that are generated together, float32 under autocast (the
rotary embedding multiplies by a float32 cosine); the same of one layer once more for
each head that shares them, because sdpa is given a mask; and four float32 copies of the
last logits.
"""

from repro.with_verl.config.model import Shape
from repro.with_verl.machine.estimate import GB, PROMPT
from upref import InputError

CONTEXT = 1.0 * GB  # CUDA
MARGIN = 0.5 * GB  # that the allocator cannot use
# bytes of the fused head's tile: tokens x words of the vocabulary, bf16
TILE = 4096 * 8192 * 2
AT_ONCE = (256, 128, 64, 32, 16)  # responses that may be generated together


def training(shape: Shape, micro: int, longest: int) -> float:
    """Return the bytes of a GPU while it trains.

    Args:
        shape: of the model.
        micro: responses of a micro-batch.
        longest: tokens of a response, at most.
    """
    tokens = micro * (PROMPT + longest)
    head = 4 * shape.vocab * shape.hidden + TILE
    # the float32 input of each layer, and the activations of one layer: 68 bytes for each
    # token and hidden unit
    kept = 4 * tokens * shape.hidden * shape.layers
    layer = 2 * 34 * tokens * shape.hidden
    return (16 + 2) * shape.params + head + kept + layer + CONTEXT


def cache(shape: Shape, together: int, longest: int) -> float:
    """Return the bytes of the keys and values of responses that are generated together,
    in float32.

    Args:
        shape: of the model.
        together: how many responses.
        longest: tokens of a response, at most.
    """
    numbers_of_token = 2 * shape.layers * shape.kv_heads * shape.head_dim
    tokens = together * (PROMPT + longest)
    return 4 * numbers_of_token * tokens


def generating(shape: Shape, together: int, longest: int) -> float:
    """Return the bytes of a GPU while responses are generated together, at their last
    token.

    Args:
        shape: of the model.
        together: how many responses.
        longest: tokens of a response, at most.
    """
    held = cache(shape, together, longest)
    # the cache of one layer, once more for each head that shares it
    repeated = held / shape.layers * shape.heads / shape.kv_heads
    logits = 4 * together * shape.vocab  # float32, of one token of each response
    return 12 * shape.params + held + repeated + 4 * logits + CONTEXT


def together(shape: Shape, memory: float, micro: int, longest: int) -> int:
    """Return how many responses fit a GPU when they are generated together.

    Args:
        shape: of the model.
        memory: bytes of the GPU.
        micro: responses of a micro-batch.
        longest: tokens of a response, at most.

    Returns:
        The largest number of AT_ONCE that fits.

    Raises:
        InputError: training does not fit, or 16 responses do not.
    """
    need = training(shape, micro, longest) + MARGIN
    if need > memory:
        raise InputError(
            f"training needs about {need / GB:.1f} GB of the GPU, which has {memory / GB:.1f}: take a smaller model "
            "(--model), or a larger GPU."
        )
    for count in AT_ONCE:
        if generating(shape, count, longest) + MARGIN <= memory:
            return count
    raise InputError(
        f"{AT_ONCE[-1]} responses of {longest} tokens do not fit {memory / GB:.1f} GB: use a larger GPU."
    )


def words(shape: Shape, memory: float, micro: int, longest: int, count: int) -> str:
    """Return the estimate of a GPU as a clause: the gigabytes to train, to generate and
    of the cache, and those that the GPU has.
    """
    return (
        f"{training(shape, micro, longest) / GB:.1f} GB to train on micro-batches of {micro}, "
        f"{generating(shape, count, longest) / GB:.1f} GB to generate {count} responses together, "
        f"{cache(shape, count, longest) / GB:.1f} of them keys and values; the GPU has {memory / GB:.1f} GB"
    )
