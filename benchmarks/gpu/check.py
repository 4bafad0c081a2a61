# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.gpu --check`: what this machine has and lacks, one sentence
each, in ten seconds; before the minutes of a GPU are spent on a missing package.

vLLM's kernels are launched, because its libraries may have been taken apart for a small
copy; nothing else of vLLM and verl is imported.
"""

import importlib
import importlib.metadata
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from repro.with_verl.machine.here import look, old_driver

GIB = 2**30
MEMORY = 20 * GIB  # of the GPU that the training and the sizes need
SHARED = 2**30  # bytes of /dev/shm, for Ray and vLLM
# package -> the parts of benchmarks.gpu that need it, in words
NEEDED = {
    "transformers": "every part",
    "jaxtyping": "every part",
    "pytest": "the tests",
    "trl": "training, and TRL's rows of kernels, losses and steps",
    "datasets": "training",
    "math-verify": "training, and verl's rewards",
    "liger-kernel": "Liger's rows of kernels",
    "verl": "verl's rows of kernels and losses, and the trial of verl",
    "ray": "verl's losses, which import it, and the trial of verl",
    "tensordict": "verl's losses",
    "vllm": "the trial of verl",
    "TransferQueue": "the trial of verl",
    "xgrammar": "vLLM's worker",
    "orjson": "verl's trainer",
    # not in pack.py, which takes them to be there
    "accelerate": "verl's trainer, and to convert SmolLM2",
    "peft": "verl's trainer",
    "pandas": "verl's data",
    "pyarrow": "verl's data",
    "psutil": "the trial of verl",
}
TRANSFORMERS = "!=5.6.0,<5.11,>=5.5.3"  # of verl 0.9.1
# compiled packages that pack.py carries, each built for one Python
COMPILED = (
    "pydantic_core",
    "ray._raylet",
    "xgrammar",
    "tokenizers",
    "orjson",
    "msgspec",
)


@dataclass(frozen=True)
class Line:
    """One printed sentence.

    Attributes:
        text: the sentence.
        ok: nothing is missing.
        fatal: what is missing is needed by every part.
    """

    text: str
    ok: bool = True
    fatal: bool = False


def gpu() -> Iterator[Line]:
    """Look for the GPU and multiply on it. Yield its facts, which are not ok if less
    than MEMORY is free; or what is missing: torch, a driver for torch's CUDA, or the
    GPU, each fatal.
    """
    try:
        import torch
    except ImportError as e:
        yield Line(f"torch cannot be imported ({e}).", ok=False, fatal=True)
        return
    machine = look()
    for sentence in old_driver(machine, torch.version.cuda or ""):
        yield Line(sentence, ok=False, fatal=True)
    if not torch.cuda.is_available():
        text = f"torch {torch.__version__} finds no GPU: every part needs one."
        yield Line(text, ok=False, fatal=True)
        return
    x = torch.ones(64, 64, device="cuda")
    assert (x @ x).sum().item() == 64**3
    free, size = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    yield Line(
        f"{name}, {free / GIB:.1f} of {size / GIB:.1f} GiB free, driver {machine.driver or 'unknown'}, "
        f"torch {torch.__version__}, Python {sys.version.split()[0]}.",
        ok=free > MEMORY,
    )


def machine() -> Iterator[Line]:
    """Yield a sentence on cores, memory, disk and /dev/shm; and one each if /dev/shm is
    below 1 GiB and if Triton has no C compiler.
    """
    found = look(Path("/tmp"))
    yield Line(
        f"{found.cores} cores, {found.memory / GIB:.0f} GiB of memory, {found.free_disk / GIB:.0f} GiB free in /tmp, "
        f"{found.shared / GIB:.1f} GiB of /dev/shm."
    )
    if found.shared < SHARED:
        text = "/dev/shm is below 1 GiB: Ray and vLLM need it (mount -o remount,size=8G /dev/shm)."
        yield Line(text, ok=False)
    if not (shutil.which(os.environ.get("CC", "gcc")) or shutil.which("clang")):
        text = "no C compiler: Triton builds its launchers with one."
        yield Line(text, ok=False)


def packages() -> Iterator[Line]:
    """Yield a sentence for each package of NEEDED that is not installed, with the parts
    that need it; then the installed ones with their versions.
    """
    have = []
    for name, who in NEEDED.items():
        try:
            have.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            text = f"{name} is not installed; it is needed for {who}."
            yield Line(text, ok=False, fatal="every" in who)
    yield Line(f"installed: {', '.join(have) or 'none of them'}.")


def versions() -> Iterator[Line]:
    """Yield a sentence for each version that does not fit: transformers, which verl
    restricts, and torch, for which vLLM is built. A package that is absent is passed
    over.
    """
    from packaging.requirements import Requirement

    transformers = Requirement(f"transformers{TRANSFORMERS}")
    asked = [(transformers, "verl 0.9.1")]
    try:
        every = map(Requirement, importlib.metadata.requires("vllm") or ())
        version = importlib.metadata.version("vllm")
        asked += [(one, f"vLLM {version}") for one in every if one.name == "torch"]
    except importlib.metadata.PackageNotFoundError:
        pass
    for one, who in asked:
        try:
            found = importlib.metadata.version(one.name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
        if not one.specifier.contains(found):
            text = f"{one.name} {found} is here, and {who} needs {one}."
            yield Line(text, ok=False)


def compiled() -> Iterator[Line]:
    """Import the compiled packages that are here. Yield a sentence for each that fails,
    such as one built for another Python.
    """
    python = ".".join(map(str, sys.version_info[:2]))
    there = [name for name in COMPILED if find_spec(name.partition(".")[0])]
    for name in there:
        try:
            importlib.import_module(name)
        except ImportError as e:
            text = f"{name} does not import with Python {python}: {e} (pack.py carries packages for Python 3.12)."
            yield Line(text, ok=False)


def norm_kernel() -> Iterator[Line]:
    """Compare vLLM's RMS norm with torch's on the GPU; yield its largest error, which
    is ok below 0.05.
    """
    import torch

    importlib.import_module("vllm._C_stable_libtorch")
    torch.manual_seed(0)
    x = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)
    weight = torch.rand(128, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, 1e-6)  # noqa: SLF001  vLLM's own name
    right = torch.nn.functional.rms_norm(x.float(), (128,), weight.float(), 1e-6)
    error = (out.float() - right).abs().max().item()
    yield Line(f"vLLM's rms_norm is off by {error:.1e} in bfloat16.", ok=error < 0.05)


def attention_kernel() -> Iterator[Line]:
    """Compare FlashAttention 3, as vLLM contains it, with torch's attention on the GPU;
    yield its largest error, which is ok below 0.05.
    """
    import torch

    attention = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
    torch.manual_seed(0)
    length, heads, size = 96, 2, 64
    q, k, v = torch.randn(
        3, length, heads, size, device="cuda", dtype=torch.bfloat16
    ).unbind()
    ends = torch.tensor([0, length], device="cuda", dtype=torch.int32)
    out = attention.flash_attn_varlen_func(
        q, k, v, max_seqlen_q=length, cu_seqlens_q=ends, max_seqlen_k=length, cu_seqlens_k=ends,
        causal=True, fa_version=3,
    )  # fmt: skip
    query, key, value = (x.float().transpose(0, 1)[None] for x in (q, k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    right = attend(query, key, value, is_causal=True)
    error = (out.float() - right[0].transpose(0, 1)).abs().max().item()
    yield Line(f"FlashAttention 3 is off by {error:.1e} in bfloat16.", ok=error < 0.05)


LOOKS: tuple[Callable[[], Iterator[Line]], ...] = (
    gpu,
    machine,
    packages,
    versions,
    compiled,
    norm_kernel,
    attention_kernel,
)
OF_VLLM = (norm_kernel, attention_kernel)


def main() -> int:
    """Print all sentences. Return 0 if nothing is missing, 1 if some parts cannot run,
    2 if none can.
    """
    start = time.monotonic()
    lines: list[Line] = []
    for find in LOOKS:
        no_kernels = any(x.fatal for x in lines) or not find_spec("vllm")
        if find in OF_VLLM and no_kernels:
            continue
        try:
            found = list(find())
        except Exception as e:  # the next look is worth its second all the same
            first = (str(e).splitlines() or [""])[0][:300]
            text = f"{find.__name__}: {type(e).__name__}: {first}"
            found = [Line(text, ok=False, fatal=find is gpu)]
        for line in found:
            print(f"{'ok     ' if line.ok else 'lacks  '}{line.text}", flush=True)
        lines += found
    print(f"looked for {time.monotonic() - start:.0f} s.")
    return 2 if any(x.fatal for x in lines) else int(any(not x.ok for x in lines))
