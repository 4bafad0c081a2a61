# SPDX-License-Identifier: Apache-2.0
"""verl 0.9.1 without an inference engine: train on rollouts that another run recorded.

verl's own `skip.rollout_tq` writes the sampled batches of each step in one run and loads
them in another in place of sampling, but that run starts the engines all the same. Where
VERL_USE_EXTERNAL_MODULES names this module, none is started and no weights are sent.
docs/howto/recorded-rollouts.md has the commands.
"""

from typing import Any

from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.rollout.llm_server import LLMServerManager

# what sends weights to the engines, or has them sleep
OF_ENGINES = ("on_init_end", "on_step_end", "on_sample_end")


def apply() -> None:
    """Change verl in this process: its synchronous trainer starts no inference engines."""
    # verl reads it where it makes the engines, and has it for trainers with engines of
    # their own
    PPOTrainer._enable_hybrid_replicas = False  # noqa: SLF001
    for name in OF_ENGINES:
        assert name in vars(PPOTrainerSync), f"this verl has no PPOTrainerSync.{name}"
        setattr(PPOTrainerSync, name, _do_nothing)
    inner = LLMServerManager.__init__

    def without_workers(
        self: Any, config: Any, worker_group: Any = None, *more: Any, **kw: Any
    ) -> None:
        """Make the manager of the engines with a placeholder where there are no
        workers, because verl asserts that there are some.
        """
        inner(self, config, worker_group or "none", *more, **kw)

    LLMServerManager.__init__ = without_workers


def _do_nothing(trainer: Any) -> None:
    """Do nothing in place of a step that needs an engine."""


apply()
