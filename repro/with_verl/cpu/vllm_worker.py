# SPDX-License-Identifier: Apache-2.0
"""The part that runs inside vLLM's worker processes: keep weights where the trainer can
overwrite them.

smoke.toml names it: +actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls.
vLLM's CPU build packs every linear layer for oneDNN when it loads a model and frees the
original, so the first weight sync finds an empty parameter. Without oneDNN it
multiplies by the weight itself, through torch. So it does with the weights of experts,
which it would pack for its grouped product.
"""

from verl.workers.rollout.vllm_rollout.utils import (
    vLLMColocateWorkerExtension as WorkerExtension,
)
from vllm import _custom_ops
from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

assert hasattr(_custom_ops, "_supports_onednn"), (
    "this vLLM chooses its CPU kernels elsewhere: see README.md"
)
_custom_ops._supports_onednn = False  # noqa: SLF001  vLLM has no setting for it
assert hasattr(CPUFusedMOE, "check_grouped_gemm"), (
    "this vLLM chooses its CPU kernels elsewhere: see README.md"
)
CPUFusedMOE.check_grouped_gemm = lambda self, layer: (False, "none")

__all__ = ["WorkerExtension"]
