# SPDX-License-Identifier: Apache-2.0
"""An adapter for torchtune: the unmodified `grpo_step` of its GRPO recipe on given
rows. It needs no import of upref.

It runs where a checkout of torchtune is on PYTHONPATH: neither the recipe nor its loss
is in the wheel of 0.6.1. torchtune imports torchao, blobfile, kagglehub, tiktoken and
sentencepiece too.
"""

import importlib.util
import runpy
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import datasets  # noqa: F401
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.utils import is_torchvision_available

# A text-only recipe calls nothing of torchvision. It is absent again when torchtune is
# imported; transformers and datasets have asked before whether it is installed.
is_torchvision_available()
ABSENT = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
there = importlib.util.find_spec("torchvision") is not None
stand_ins = {} if there else {name: MagicMock() for name in ABSENT}
sys.modules.update(stand_ins)
import torchtune
from torchtune import generation
from torchtune.dev.grpo.loss import GRPOLoss
from torchtune.dev.grpo.types import GRPOTrajectory

CHECKOUT = Path(torchtune.__file__).parents[1]
RECIPE = CHECKOUT / "recipes/dev/grpo_full_finetune_distributed.py"
Recipe = runpy.run_path(str(RECIPE))["GRPOFullFinetuneRecipeDistributed"]
for stand_in in stand_ins:
    del sys.modules[stand_in]

# Decoder takes one causal mask, which leaves out a sliding window and means nothing to
# a state-space layer and to linear attention.
NO_MASK_FOR = ("mistral", "gemma2", "mamba2", "falcon_h1", "qwen3_next")
PAD = 2  # the end token, as rows have no padding of their own


def commit() -> str:
    """Return the commit of the checkout; "a checkout" where git does not know it."""
    git = ["git", "-C", str(CHECKOUT), "rev-parse", "--short=7", "HEAD"]
    said = subprocess.run(git, capture_output=True, text=True, check=False).stdout
    return said.strip() or "a checkout"


class Torchtune:
    """The recipe's own step, without its set-up: a model, a loss and a temperature are
    all that it reads.
    """

    name = f"torchtune {(CHECKOUT / 'version.txt').read_text().strip()}, {commit()}"

    def supports(self, case):
        """Return "" for a case that the recipe can run, else why not."""
        if case.objective != "ppo_clip" or case.hp:
            return "GRPOLoss is PPO's clip with a mean over all tokens, without a dual clip"
        if case.entropy_coef:
            return "the recipe has no entropy bonus"
        if case.micro_batches > 1 or case.updates > 1:
            return (
                "the recipe makes one backward pass and one step of a generation batch"
            )
        if case.ranks > 1:
            return "the recipe's ranks are FSDP's, on GPUs"
        if case.family in NO_MASK_FOR:
            return "the wrapper of the model has one causal mask"
        return ""

    def scale(self, case):
        return 1.0

    def settings(self, case):
        """Return the settings in which a case runs, as texts."""
        return {
            "loss": f"GRPOLoss(epsilon=0.2, kl_coeff={case.beta})",
            "temperature": str(case.temperature),
            "clip_grad_norm": str(case.clip),
        }

    def step(self, model, rows, case):
        """Run the recipe's `grpo_step` on the rows, with a clip of the norm if the case
        has one, and take a step of SGD.
        """
        recipe = object.__new__(Recipe)
        recipe._model = Decoder(model)
        recipe._temperature = case.temperature
        recipe._loss_fn = GRPOLoss(epsilon=0.2, kl_coeff=case.beta)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        recipe.grpo_step(*trajectory(rows))
        if case.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()


class Decoder(torch.nn.Module):
    """A model of transformers that is called as torchtune's TransformerDecoder is."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, *, input_pos, mask):
        """Return logits in float32, with torchtune's arguments."""
        blocked = torch.zeros(mask.shape, dtype=self.model.dtype).masked_fill(
            ~mask, torch.finfo(self.model.dtype).min
        )
        return self.model(
            tokens, position_ids=input_pos, attention_mask=blocked[:, None]
        ).logits.float()


def trajectory(rows):
    """Return the rows as the recipe keeps them: prompts padded on the left, responses
    on the right; and the prompts' width.
    """
    prompts = pad([row.prompt for row in rows], PAD, "left")
    there = torch.cat(
        [
            pad([[True] * len(row.prompt) for row in rows], False, "left"),
            pad([[True] * len(row.response) for row in rows], False),
        ],
        1,
    )
    responses = pad([row.response for row in rows], PAD)
    trains = pad([row.trains for row in rows], False)
    old, ref = (
        pad([getattr(row, name) for row in rows], 1.0) for name in ("old", "ref")
    )
    made = GRPOTrajectory(
        query_responses=torch.cat([prompts, responses], 1),
        logprobs=old.masked_fill(~trains, 1.0),
        ref_logprobs=ref.masked_fill(~trains, 1.0),
        advantages=torch.tensor([row.adv for row in rows]),
        masks=generation.get_causal_mask_from_padding_mask(there),
        position_ids=generation.get_position_ids_from_padding_mask(there),
        response_padding_masks=~trains,
    )
    return made, prompts.shape[1]


def pad(lists, value, side="right"):
    """Return the lists as one tensor, padded with `value` on this side."""
    return pad_sequence(
        [torch.tensor(x) for x in lists],
        batch_first=True,
        padding_value=value,
        padding_side=side,
    )
