# SPDX-License-Identifier: Apache-2.0
"""The shape of a model, read from its config.json: in a directory, in the hub's cache,
or in facts/models.toml.
"""

import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upref import InputError

KNOWN = Path(__file__).resolve().parent / "facts" / "models.toml"
PINNED = KNOWN.with_name("revisions.toml")
# variants of one architecture
SAME_SHAPE = re.compile(r"-(Base|Instruct|Thinking)(?=-|$)|-2507$|(?<=Qwen2\.5-)Math-")
# parameters of Qwen3-VL's vision tower and merger, the one family that a scale trains
VISION = 0.6e9


@dataclass(frozen=True)
class Shape:
    """Sizes in the words of config.json; parameters are counts."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    params: float
    active: float  # parameters that one token passes through
    experts: int = 0
    experts_per_token: int = 0
    expert_hidden: int = 0
    expert_params: float = 0.0
    context: int = 0  # tokens; 0: not known

    def read(self, tokens: float) -> float:
        """Return how many parameters a decoding step of so many tokens reads: all, but
        of a mixture of experts the expected share of those that some token chose.
        """
        if not self.experts:
            return self.params
        chosen = 1 - (1 - self.experts_per_token / self.experts) ** tokens
        return self.params - self.expert_params * (1 - chosen)


def shape_of(path: str) -> Shape:
    """Return the shape of a model, by its config.json if that is on this machine, else
    by its name in facts/models.toml.

    Args:
        path: a directory, or a name on the hub.

    Raises:
        InputError: the config.json is neither here nor known, or is no language
            model's.
    """
    folder = local(path)
    if folder:
        if not (folder / "config.json").exists():
            raise InputError(
                f"{folder.absolute()} holds no config.json: give the directory of a model, or its name."
            )
        try:
            return parse(
                json.loads((folder / "config.json").read_text(encoding="utf-8"))
            )
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise InputError(
                f"{folder}/config.json does not describe a language model ({e}): download it again."
            ) from e
    known = tomllib.loads(KNOWN.read_text(encoding="utf-8"))
    # the language model within a vision model has the shape of the one without
    name = re.sub(r"-VL-(?=\d+B)", "-", path)
    name = SAME_SHAPE.sub("", name)
    if name not in known:
        raise InputError(
            f"the model {path} is not on this machine, and its size is not known: `{download(path)}`."
        )
    return parse(known[name] | ({"vision_config": {}} if "-VL-" in path else {}))


def revision_of(name: str) -> str | None:
    """Return the commit to which a model of the hub is pinned; None where it is not."""
    return tomllib.loads(PINNED.read_text(encoding="utf-8")).get(name)


def download(name: str) -> str:
    """Return the command that fetches a model of the hub, at its pinned commit."""
    revision = revision_of(name)
    return f"hf download {name}" + (f" --revision {revision}" if revision else "")


def local(path: str) -> Path | None:
    """Return the directory of a model's files, None where they are not on this machine.

    Args:
        path: a directory; or a name on the hub, whose pinned commit is looked up in the
            hub's cache.

    Raises:
        InputError: the path is empty.
    """
    if not path:
        raise InputError(
            "the model has no name: give a directory, or a name as Qwen/Qwen3-8B."
        )
    if Path(path).expanduser().is_dir():
        return Path(path).expanduser()
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(path, "config.json", revision=revision_of(path))
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def parse(config: dict[str, Any]) -> Shape:
    """Count the parameters of a decoder of Qwen's or Llama's kind.

    Args:
        config: config.json; of a vision model the part text_config is read.

    Returns:
        The shape. With experts, every layer has them. The count leaves out biases and
        norms.
    """
    c = config.get("text_config", config)
    hidden = c["hidden_size"]
    layers = c["num_hidden_layers"]
    heads = c["num_attention_heads"]
    kv_heads = c.get("num_key_value_heads", heads)
    vocab = c["vocab_size"]
    head_dim = c.get("head_dim") or hidden // heads
    experts = c.get("num_experts") or c.get("num_local_experts") or 0
    chosen = width = 0  # experts of a token, and the size of each
    if experts:
        chosen = c["num_experts_per_tok"]
        width = c["moe_intermediate_size"]
    # queries and the output, keys and values
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    # the router of the experts, or the three matrices of the one MLP
    mlp = hidden * experts if experts else 3 * hidden * c["intermediate_size"]
    is_tied = c.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    # of a table of embeddings beside the head a token reads one row
    table = 0 if is_tied else vocab * hidden
    head = vocab * hidden
    vision = VISION if "vision_config" in config else 0
    without_experts = table + head + layers * (attention + mlp) + vision
    of_expert = 3.0 * hidden * width * layers  # one expert of every layer
    return Shape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        params=without_experts + experts * of_expert,
        active=without_experts + chosen * of_expert - table,
        experts=experts,
        experts_per_token=chosen,
        expert_hidden=width,
        expert_params=experts * of_expert,
        context=c.get("max_position_embeddings") or 0,
    )
