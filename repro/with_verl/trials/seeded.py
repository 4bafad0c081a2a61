# SPDX-License-Identifier: Apache-2.0
"""verl's single-turn rollout with a seed for each response, so that two runs can be
compared.

verl's own `full_determinism` gives all responses to a prompt one seed: they would be
equal, and every advantage 0.
"""

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class SeededAgentLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params, **kwargs):
        step, row, response = (
            int(kwargs[k]) for k in ("global_steps", "index", "session_id")
        )
        seed = (step * 1_000 + row) * 1_000 + response
        return await super().run(dict(sampling_params, seed=seed), **kwargs)
