# SPDX-License-Identifier: Apache-2.0
"""What to do about a trainer that died, read off its output: the last line of every log
says it.
"""

import re
from pathlib import Path

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TAIL = 400_000  # characters of the output that are searched
CURES = (  # the first that is found
    (
        r"ParityError|is not what trains",
        "the loss that trained is not the reference: UPREF_REPLAY=FOLDER records the steps and `upref replay FOLDER` "
        f"compares them; ++{ACTOR}.policy_loss.upref.parity.on_fail=warn trains on",
    ),
    (r"InputError: .*", "{line}"),
    (
        r"No space left on device|[Dd]isk quota exceeded|inline_container.cc.*(unexpected pos|writing)",
        "the disk is full: make room, or set trainer.default_local_dir elsewhere",
    ),
    (
        r"(No available memory for the cache blocks|Free memory on device .* less than desired)",
        f"vLLM found too little memory: lower {ROLLOUT}.gpu_memory_utilization if others hold it, raise it if not",
    ),
    (
        r"CUDA out of memory|OutOfMemoryError: CUDA|CUBLAS_STATUS_ALLOC_FAILED",
        f"a GPU ran out of memory: lower {ACTOR}.ppo_max_token_len_per_gpu, for vLLM {ROLLOUT}.gpu_memory_utilization",
    ),
    (
        r"OutOfMemoryError|ray.*(node|worker).*low on memory|OOM.*kill",
        "the machine ran out of memory, not a GPU: lower data.dataloader_num_workers, or turn an offload off",
    ),
    (
        r"Watchdog caught collective operation timeout|NCCL (error|timeout)|ncclSystemError",
        "the machines lost each other (NCCL): check the network, and NCCL_SOCKET_IFNAME",
    ),
    (
        r"undefined symbol|no kernel image is available",
        "a package was built for another torch, CUDA or GPU: {line}",
    ),
    (r"ModuleNotFoundError: .*|ImportError: .*", "{line}"),
    (r"\w*(Error|Exception)\b.*: .*", "its last error was: {line}"),
)


def plain(text: str) -> list[str]:
    """Without Ray's colours, actors and processes."""
    prefix = re.compile(r"\x1b\[\d+m|\(\w+ pid=[^)]*\)\s*")
    return [prefix.sub("", x).strip() for x in text.splitlines()]


def cure(output: Path, folder: Path) -> str:
    """One clause for the last line of the log."""
    text = (
        output.read_text(encoding="utf-8", errors="replace")[-TAIL:]
        if output.exists()
        else ""
    )
    lines = plain(text)
    for pattern, words in CURES:
        if found := [m for x in lines if (m := re.search(pattern, x))]:
            line = found[-1].string[found[-1].start() :][:300]
            return words.replace("{folder}", str(folder)).replace("{line}", line)
    return "its output names no error"
