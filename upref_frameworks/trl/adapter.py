# SPDX-License-Identifier: Apache-2.0
"""An adapter for TRL: GRPOTrainer's own `training_step` on given rows. It imports upref
for a type alone, not when it runs.
"""

import contextlib
import copy
import importlib.util
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from upref.conformance import Case

VOCABULARY = 96
END = 2  # ends a response, and pads it
LONGEST = 16  # max_completion_length

# objective -> the fields of GRPOConfig that ask for it
FIELDS: dict[str, dict[str, Any]] = {
    "ppo_clip": dict(loss_type="dapo", epsilon_high=0.2),
    "dapo": dict(loss_type="dapo", epsilon_high=0.28),
    "grpo": dict(loss_type="grpo", epsilon_high=0.2),
    "dr_grpo": dict(loss_type="dr_grpo", epsilon_high=0.2),
    "cispo": dict(loss_type="cispo", epsilon_high=5.0),
    "sapo": dict(loss_type="sapo"),
    "luspo": dict(
        loss_type="luspo",
        importance_sampling_level="sequence",
        epsilon=2e-3,
        epsilon_high=2.5e-3,
    ),
    "gspo": dict(
        loss_type="grpo",
        importance_sampling_level="sequence",
        epsilon=3e-4,
        epsilon_high=4e-4,
    ),
}


# estimator of advantages -> scale_rewards
SCALES = {"group_mean": "none", "group_norm": "group", "batch_norm": "batch"}

# fields that `upref diff` tries where the step differs from another trainer's
ALTERNATIVES: tuple[dict[str, Any], ...] = (
    dict(loss_type="dapo"),
    dict(loss_type="grpo"),
    dict(loss_type="bnpo"),
    dict(temperature=1.0),
    dict(epsilon_high=0.2),
    dict(epsilon_high=0.28),
    dict(delta=None),
    dict(delta=3.0),
    dict(importance_sampling_level="sequence"),
    dict(beta=0.0),
    dict(entropy_coef=0.0),
    dict(max_grad_norm=0.0),
    dict(max_grad_norm=1.0),
)
# where it makes the advantages and the masks, these too
PREPARING: tuple[dict[str, Any], ...] = (
    dict(scale_rewards="none"),
    dict(scale_rewards="group"),
    dict(scale_rewards="batch"),
    dict(mask_truncated_completions=True),
    dict(mask_truncated_completions=False),
)


class TRL:
    """GRPOTrainer of the installed TRL."""

    name = f"trl {trl.__version__}"
    changed: Mapping[str, Any] = {}  # over the fields of each case

    def supports(self, case: "Case") -> str:
        """Return why TRL lacks what the case sets; "" where it lacks nothing.

        Args:
            case: of `upref.conformance`.
        """
        if case.objective not in FIELDS:
            return f"TRL has no loss_type of {case.objective}"
        if case.parallel != "data":
            return "one row is on one rank: the trainer has no such parallelism here"
        if case.advantages and case.advantages not in SCALES:
            return f"GRPOTrainer's scale_rewards has no {case.advantages}"
        if case.ddof != 1:
            return "the standard deviation divides by G - 1"
        if case.reference == "adapter" and importlib.util.find_spec("peft") is None:
            return "peft is not installed"
        return ""

    def scale(self, case: "Case") -> float:
        """Return the factor by which TRL multiplies the loss, as it documents.

        Args:
            case: of `upref.conformance`.

        Returns:
            1 / LONGEST for Dr. GRPO, whose sum TRL divides by max_completion_length;
            else 1.
        """
        return 1 / LONGEST if case.objective == "dr_grpo" else 1.0

    def config(self, case: "Case") -> dict[str, Any]:
        """Return the fields of GRPOConfig for a case.

        Args:
            case: one that `supports` accepts; its eight rows are divided by its
                micro-batches, updates and ranks.

        Returns:
            Field -> value; the others keep TRL's defaults.
        """
        windows = case.micro_batches * case.updates  # of this rank
        return FIELDS[case.objective] | dict(
            delta=case.hp.get("c"),
            temperature=case.temperature,
            beta=case.beta,
            use_bias_correction_kl=False,
            entropy_coef=case.entropy_coef,
            max_grad_norm=case.clip or 0.0,
            max_completion_length=LONGEST,
            num_generations=4 if case.advantages else 2,
            per_device_train_batch_size=8 // (windows * case.ranks),
            gradient_accumulation_steps=case.micro_batches,
            steps_per_generation=windows,
            num_iterations=case.iterations,
            mask_truncated_completions=case.drop_truncated,
            scale_rewards=SCALES[case.advantages or "group_mean"],
        )

    def settings(self, case: "Case") -> dict[str, str]:
        """Return TRL's own configuration of a case, as it is written to the results.

        Args:
            case: one that `supports` accepts.

        Returns:
            Field -> value, as Python writes it.
        """
        return {key: repr(value) for key, value in self._fields(case).items()}

    def alternatives(self, case: "Case") -> list[dict[str, Any]]:
        """Return fields to try in place of those of a case.

        Args:
            case: one that `supports` accepts.

        Returns:
            Changes of its fields: one micro-batch for an optimizer step, with each
            mean over tokens; then those of the tables.
        """
        one_pass: dict[str, Any] = dict(
            per_device_train_batch_size=8 // (case.updates * case.ranks),
            gradient_accumulation_steps=1,
            steps_per_generation=case.updates,
        )
        means = [one_pass, dict(loss_type="bnpo"), one_pass | dict(loss_type="bnpo")]
        return [*means, *ALTERNATIVES, *(PREPARING if case.advantages else ())]

    def with_settings(self, changed: dict[str, Any]) -> "TRL":
        """Return this adapter with other fields.

        Args:
            changed: field -> value, over those of each case.
        """
        other = copy.copy(self)
        other.changed = {**self.changed, **changed}
        return other

    def _fields(self, case: "Case") -> dict[str, Any]:
        """Return the fields of GRPOConfig for a case, with the changed ones in them."""
        return {**self.config(case), **self.changed}

    def step(self, model: Any, rows: list[Any], case: "Case") -> None:
        """Let TRL's `training_step` train a model on the rows of a case.

        Args:
            model: a small causal language model of transformers; it is trained in
                place, by SGD with a learning rate of 1e-6.
            rows: the responses.
            case: one that `supports` accepts.
        """
        with mute(), tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(model, self._fields(case), folder)

            def given_batch(_: Any) -> dict[str, Any]:
                """Return the rows as the generation batch; nothing is generated."""
                return batch(rows, trainer.accelerator)

            trainer._generate_and_score_completions = given_batch  # noqa: SLF001
            passes = trainer.args.steps_per_generation * trainer.args.num_iterations
            micro_batches = trainer.args.gradient_accumulation_steps
            trainer.current_gradient_accumulation_steps = micro_batches
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
            model.train()
            prepared = trainer.accelerator.prepare(model) if case.ranks > 1 else model
            for _ in range(passes // micro_batches):
                for _ in range(micro_batches):
                    trainer.training_step(prepared, {}, None)
                if trainer.args.max_grad_norm:
                    torch.nn.utils.clip_grad_norm_(
                        model.parameters(), trainer.args.max_grad_norm
                    )
                optimizer.step()
                optimizer.zero_grad()

    move = step  # the weights stay in the model, so what they moved is the gradient

    def train(self, model: Any, rows: list[Any], case: "Case", reference: Any) -> None:
        """Let GRPOTrainer's `train` make advantages, masks and log-probabilities of the
        rows of a case, and train on them.

        Args:
            model: a small causal language model of transformers; it is trained in
                place, by SGD.
            rows: the responses with their rewards.
            case: one of level 6 that `supports` accepts.
            reference: the reference model, or None.
        """
        fields = self._fields(case) | dict(
            optim="sgd",
            learning_rate=0.005,
            lr_scheduler_type="constant",
            max_steps=case.updates * case.iterations,
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            shuffle_dataset=False,
        )
        more: dict[str, Any] = sampled(rows, [row.reward for row in rows])
        if case.reference == "adapter":
            from peft import LoraConfig

            # without init_lora_weights=False the adapters' product is 0 at first
            more["peft_config"] = LoraConfig(
                r=4, target_modules="all-linear", init_lora_weights=False
            )
        with mute(), tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(
                model, fields, folder, prompts=2, reference=reference, **more
            )
            trainer.train()


def sampled(rows: list[Any], rewards: list[Any]) -> dict[str, Callable[..., Any]]:
    """Make the arguments of GRPOTrainer that hand it these rows and their rewards.

    Args:
        rows: a generation batch, with distinct responses.
        rewards: one for each row.

    Returns:
        rollout_func and reward_funcs.
    """
    reward_of = {
        tuple(row.response): reward for row, reward in zip(rows, rewards, strict=True)
    }

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Return the rows as what the sampler generated; the prompts are not read.
        Tokens that do not train are in `env_mask`.
        """
        batch = {
            "prompt_ids": [row.prompt for row in rows],
            "completion_ids": [row.response for row in rows],
            "logprobs": None,
        }
        if not all(all(row.trains) for row in rows):
            batch["env_mask"] = [[int(t) for t in row.trains] for row in rows]
        return batch

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        """Return the reward of each completion."""
        return [reward_of[tuple(ids)] for ids in completion_ids]

    return dict(rollout_func=rollout, reward_funcs=reward)


def make_trainer(
    model: Any,
    fields: Mapping[str, Any],
    folder: str,
    cls: Any = None,
    reward_funcs: Any = None,
    prompts: int = 8,
    reference: Any = None,
    **more: Any,
) -> Any:
    """Make TRL's trainer, with a tokenizer of single words; on a CPU where the fields
    do not say otherwise. With beta, the reference model is saved in the folder, and
    `model` takes its path as its name.

    Args:
        model: a small causal language model of transformers.
        fields: of GRPOConfig.
        folder: where TRL writes.
        cls: a trainer class; None: trl.GRPOTrainer.
        reward_funcs: reward functions; None: each completion has the reward 0.
        prompts: how many prompts its data set has.
        reference: the reference model; None: the model as it is now.
        more: arguments of the trainer, for example rollout_func.

    Returns:
        The trainer, before its first step.
    """
    if fields.get("beta"):  # the trainer loads its reference model by this name
        (reference or model).save_pretrained(f"{folder}/model")
        model.config._name_or_path = f"{folder}/model"  # noqa: SLF001
    defaults = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    arguments = trl.GRPOConfig(
        output_dir=folder, report_to="none", **defaults | dict(fields)
    )
    return (cls or trl.GRPOTrainer)(
        model,
        reward_funcs or no_reward,
        arguments,
        train_dataset=Dataset.from_list(
            [{"prompt": f"w{3 + i}"} for i in range(prompts)]
        ),
        processing_class=tokenizer(),
        **more,
    )


def tokenizer() -> Any:
    """Make a tokenizer of the words w0, w1, ...; the word of END ends and pads.

    Returns:
        One of transformers, with VOCABULARY words.
    """
    words = Tokenizer(
        models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=f"w{END}", eos_token=f"w{END}"
    )


def no_reward(completions: list[Any], **_: Any) -> list[float]:
    """Return 0 for each completion: the rows of a case bring their advantages.

    Args:
        completions: of a generation batch.
        **_: what else TRL passes to a reward function.

    Returns:
        As many zeros.
    """
    return [0.0] * len(completions)


def batch(rows: list[Any], accelerator: Any) -> dict[str, Any]:
    """Make GRPOTrainer's generation batch of rows.

    Args:
        rows: with prompt, response, trains, adv, old and ref.
        accelerator: of the trainer; it names the device, and counts tokens over the
            ranks.

    Returns:
        The inputs of the loss: prompts [B, P], padded on the left; what belongs to
        completions [B, T], padded on the right; advantages [B].
    """
    prompts = pad([row.prompt for row in rows], END, "left")
    completions = pad([row.response for row in rows], END)
    trains = pad([[int(t) for t in row.trains] for row in rows], 0)
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": pad([[1] * len(row.prompt) for row in rows], 0, "left"),
        "completion_ids": completions,
        "completion_mask": pad([[1] * len(row.response) for row in rows], 0),
        "tool_mask": trains,
        "advantages": torch.tensor([row.adv for row in rows]),
        "old_per_token_logps": pad([row.old for row in rows], 0.0),
        "ref_per_token_logps": pad([row.ref for row in rows], 0.0),
    }
    inputs = {name: value.to(accelerator.device) for name, value in inputs.items()}
    trained_tokens = accelerator.gather(inputs["tool_mask"].sum()).sum()
    return inputs | {"num_items_in_batch": trained_tokens}


def pad(lists: list[Any], value: float, side: str = "right") -> torch.Tensor:
    """Pad lists to the longest of them.

    Args:
        lists: of numbers.
        value: of the padding.
        side: `left` or `right`: where the padding goes.

    Returns:
        [B, T].
    """
    tensors = [torch.tensor(each) for each in lists]
    return pad_sequence(
        tensors, batch_first=True, padding_value=value, padding_side=side
    )


@contextlib.contextmanager
def mute() -> Iterator[None]:
    """Run without warnings, logged warnings and output; afterwards, also where the body
    raises, the level below which logging is disabled is what it was.
    """
    level_before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    silent = io.StringIO()
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(silent),
            contextlib.redirect_stderr(silent),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level_before)
