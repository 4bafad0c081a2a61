# SPDX-License-Identifier: Apache-2.0
"""upref.hidden in place of the log-prob functions of TRL and of verl, for one process.

docs/trl.md and docs/verl.md have what that changes in memory, time and errors.
"""

from typing import Any

from torch import Tensor

from upref.hidden import token_log_probs

# of trl.trainer.utils, whose models look it up at each call
TRLS = "_ChunkedLogProbFunction"


def in_trl() -> None:
    """Let TRL compute log-probs from hidden states by `upref.hidden`, in this process.

    This acts on models with a fused output layer, for log-probs and entropies. Calls
    that ask for other outputs still use TRL's own function.
    """
    from trl.trainer import utils

    function: Any = getattr(utils, TRLS)

    class Hidden:
        @staticmethod
        def apply(
            h: Any,
            W: Any,
            bias: Any,
            tokens: Tensor,
            tau: Any,
            chunk: Any,
            cap: Any,
            scale: Any,
            outputs: Any,
        ) -> Any:
            """Compute log-probs and entropy by upref, or call TRL's own function if
            other outputs are asked for.
            """
            if not set(outputs) <= {"log_probs", "entropy"}:
                return function.apply(
                    h, W, bias, tokens, tau, chunk, cap, scale, outputs
                )
            lp, H = token_log_probs(
                h, W, tokens, temperature=tau, bias=bias, softcap=cap, logit_scale=scale
            )
            entropy = H if "entropy" in outputs else None
            # TRL's function returns five tensors; the last three were not asked for
            return lp, entropy, None, None, None

    setattr(utils, TRLS, Hidden)


def in_verl() -> None:
    """Let verl's fused output layer compute by `upref.hidden`, in this process.

    This acts with `use_fused_kernels=True` and the backend torch. UPREF_HIDDEN=1 in the
    environment does it in each process that imports upref_frameworks.verl.training.
    """
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    def forward(
        self: Any,
        hidden_states: Tensor,
        vocab_weights: Tensor,
        input_ids: Tensor,
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probs and entropy by upref, with the arguments of verl's layer."""
        return token_log_probs(
            hidden_states, vocab_weights, input_ids, temperature=temperature
        )

    FusedLinearForPPO.forward = forward
