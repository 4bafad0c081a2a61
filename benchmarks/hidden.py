# SPDX-License-Identifier: Apache-2.0
"""From hidden states to log-probabilities and entropy: memory, time and error of
upref.hidden and of its peers.

    python -m benchmarks.hidden              # needs verl, TRL, and a network for Liger and Unsloth
    python -m benchmarks.hidden --quick      # N = 64, V = 8192
    python -m benchmarks.hidden memory       # one section

Memory is the peak resident set of a fresh process, beyond the inputs. Times are CPU
seconds of forward and backward on one thread, as ratios to `naive`: at full size once,
in the process of the memory; at the miniature's size in 30 rounds in which both take
their turn. Errors are against float64; half of the rows have a token with p near 0.9.
`naive` is float32 logits and torch's log_softmax. torch's linear_cross_entropy has no
entropy: it stands beside the log-probs alone of naive and of upref.hidden. `limit` is
the time in which this machine multiplies three float32 matrices of 2 N V H operations:
logits, dh and dW, and nothing else.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import types
from pathlib import Path

import torch

import upref.logprobs
from benchmarks.gpu import kernels, sizes
from benchmarks.speed import operations_per_second

V, H = 151_936, 896  # of Qwen2.5-0.5B
TAU = 0.8


# ---- what is compared ----------------------------------------------------------------
# Each returns a function: (hidden [N, H], weight [V, H], tokens [N]) -> (log-probs [N],
# entropy [N] or None).
def at_tau(make):
    """Return a maker of the function of benchmarks/gpu/kernels.py that `make` makes, at
    the temperature TAU.
    """

    def made():
        function = make()
        return lambda h, W, tokens: function(h, W, tokens, TAU)

    return made


def liger_scaled():
    """Return Liger's function from its file: the package needs triton, and this
    function does not on a CPU.
    """
    path = placed("liger") / "liger_kernel/ops/fused_linear_scaled_cross_entropy.py"
    spec = importlib.util.spec_from_file_location("liger_scaled", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def log_probs(h, W, tokens):
        """Return -nll and the entropy of Liger's function."""
        nll, entropy = module.LigerFusedLinearScaledCrossEntropyFunction.apply(
            h, W, tokens, TAU, -100, 1, True
        )
        return -nll, entropy

    return log_probs


def unsloth_fused():
    """Return Unsloth's function from its file, uncompiled: the package needs a GPU, and
    this function does not.
    """
    os.environ["UNSLOTH_COMPILE_DISABLE"] = "1"
    root = placed("unsloth") / "unsloth_zoo"
    for name in (
        "unsloth_zoo",
        "unsloth_zoo.fused_losses",
        "unsloth_zoo.temporary_patches",
    ):
        # its __init__ is skipped
        shell = sys.modules.setdefault(name, types.ModuleType(name))
        shell.__path__ = [str(root.parent / name.replace(".", "/"))]
    fused = importlib.import_module(
        "unsloth_zoo.fused_losses.fused_linear"
    ).fused_linear_logprobs

    def log_probs(h, W, tokens):
        return fused(h, W, tokens, temperature=TAU, return_entropy=True)

    return log_probs


def torch_linear_ce():
    """Return torch's linear_cross_entropy, which has no entropy."""
    options = torch.nn.LinearCrossEntropyOptions()

    def log_probs(h, W, tokens):
        """Return minus torch's loss of each token, and no entropy."""
        loss = torch.nn.functional.linear_cross_entropy(
            h / TAU, W, tokens, reduction="none", options=options
        )
        return -loss, None

    return log_probs


def placed(name):
    """Return the folder of a framework's package, which is fetched if it is absent."""
    from upref_frameworks.audits import framework
    from upref_frameworks.audits.isolated.pin import place

    return Path(place(name, framework(name).pin).paths[0])


def without_entropy(function):
    """Return a function that gives the log-probs of another one, without entropy."""
    return lambda h, W, tokens: (function(h, W, tokens)[0], None)


WHO = {
    "upref.hidden": at_tau(kernels.upref_hidden),
    "naive": at_tau(lambda: sizes.naive),
    "TRL chunked": at_tau(kernels.trl_chunked),
    "verl fused": at_tau(kernels.verl_fused),
    "Liger scaled": liger_scaled,
    "Unsloth fused": unsloth_fused,
}
CE = "torch linear_ce"
ONLY = "log-probs of "  # before a name: its log-probs alone


def make_function(name):
    """Return the function of a name: of WHO, or of CE or WHO after the words ONLY."""
    if not name.startswith(ONLY):
        return WHO[name]()
    name = name.removeprefix(ONLY)
    if name == CE:
        return torch_linear_ce()
    return without_entropy(WHO[name]())


# ---- one run -------------------------------------------------------------------------
def inputs(N, V, H=H, dtype=torch.float32, seed=0):
    """Return hidden states [N, H], a weight [V, H] and tokens [N] at random.

    In rows 0, 2, ... the sampled token has p near 0.9 at temperature TAU.
    """
    g = torch.Generator().manual_seed(seed)
    W = torch.randn(V, H, generator=g).mul_(H**-0.5)
    h, tokens = torch.randn(N, H, generator=g), torch.randint(V, (N,), generator=g)
    peak = tokens[::2]
    # a row of W has a length near 1, so this token's logit over TAU is log V + 2.3: the
    # others' are near 0, and p = 0.9
    h[::2] = W[peak] * (TAU * (torch.tensor(V).log() + 2.3))
    return h.to(dtype).requires_grad_(), W.to(dtype).requires_grad_(), tokens


def step(function, h, W, tokens):
    """Run the forward and backward pass of a function.

    Returns:
        Log-probs [N], entropy [N] or None, and the gradient of the weight [V, H].
    """
    lp, entropy = function(h, W, tokens)
    total = lp.sum()
    if entropy is not None:
        total = total + 0.1 * entropy.sum()
        entropy = entropy.detach()
    total.backward()
    dW = W.grad
    h.grad = W.grad = None
    return lp.detach(), entropy, dW


def status(key):
    """Return a size of this process in MiB from /proc/self/status.

    Args:
        key: such as VmRSS (resident now) or VmHWM (the most that was resident).
    """
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{key}:\s+(\d+) kB", text)[1]) / 1024


def one(who, N, V):
    """Print, as JSON, the peak memory of one step beyond the inputs in MiB and its CPU
    seconds. The process must be fresh.
    """
    function = make_function(who)
    h, W, tokens = inputs(N, V)
    step(function, *inputs(4, 1000))  # what is imported and compiled at the first call
    before, start = status("VmRSS"), time.process_time()
    Path("/proc/self/clear_refs").write_text("5")  # Linux resets VmHWM
    step(function, h, W, tokens)
    print(json.dumps([status("VmHWM") - before, time.process_time() - start]))


def fresh(who, N, V):
    """Return what `one` prints in a fresh process: [MiB, CPU seconds], or None if it
    fails.
    """
    module = [sys.executable, "-W", "ignore", "-m", "benchmarks.hidden"]
    done = subprocess.run(
        [*module, "--one", who, str(N), str(V)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    if done.returncode:
        return None
    return json.loads(done.stdout.splitlines()[-1])


# ---- the tables ----------------------------------------------------------------------
def memory(cases, who, only=""):
    """Print the peak memory and the CPU seconds of one step of each function.

    Args:
        cases: numbers of tokens N and of ids V.
        who: names of the functions, `naive` first: the others are printed relative to it.
        only: ONLY for the log-probs alone, or nothing.
    """
    alone = "; log-probs alone" if only else ""
    print(
        f"\nPeak memory of forward and backward, MB: beyond the inputs, and of that beyond dh and dW; CPU seconds{alone}"
    )
    print(
        f"{'':16} {'N':>5} {'V':>7} {'MB':>7} {'beyond dh, dW':>14} {'of naive':>9} {'seconds':>8} {'of naive':>9}"
    )
    naive_rest = naive_seconds = None
    speed = operations_per_second()
    for N, V in cases:
        for name in who:
            measured = fresh(only + name, N, V)
            if measured is None:
                print(f"{name:16} {N:5} {V:7}  does not run", flush=True)
                continue
            peak, seconds = measured
            rest = peak - 4 * H * (N + V) / 2**20  # without dh and dW, in float32
            if name == "naive":
                naive_rest, naive_seconds = rest, seconds
            rest_share = seconds_share = ""
            if naive_rest is not None:
                rest_share = f"{rest / naive_rest:9.3f}"
                seconds_share = f"{seconds / naive_seconds:9.3f}"
            print(
                f"{name:16} {N:5} {V:7} {peak:7.0f} {rest:14.0f} {rest_share:>9} {seconds:8.1f} {seconds_share:>9}",
                flush=True,
            )
        limit = 3 * 2 * N * V * H / speed
        share = "" if naive_seconds is None else f"{limit / naive_seconds:9.3f}"
        print(
            f"{'limit':16} {N:5} {V:7} {'-':>7} {'-':>14} {'-':>9} {limit:8.1f} {share:>9}",
            flush=True,
        )


def seconds(N, V, who, rounds, H=H):
    """Return name -> the CPU seconds of its forward and backward pass, one for each
    round. All functions take their turn in a round.
    """
    functions = {name: WHO[name]() for name in who}
    h, W, tokens = inputs(N, V, H)
    small = inputs(4, 1000)
    for function in functions.values():
        step(function, *small)  # what is imported and compiled at the first call
    taken = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.process_time()
            step(function, h, W, tokens)
            taken[name].append(time.process_time() - start)
    return taken


def times(N, V, who, rounds, H=H):
    """Print the CPU time of each function as a ratio to naive's in the same round: the
    median over rounds, the least and the most; the fastest first.
    """
    taken = seconds(N, V, who, rounds, H)
    ratios = {
        name: [a / b for a, b in zip(of_name, taken["naive"], strict=True)]
        for name, of_name in taken.items()
    }
    load = os.getloadavg()[0]
    print(
        f"\nCPU time of forward and backward, of naive's; N = {N}, V = {V}, H = {H}; {rounds} rounds, load {load:.0f}"
    )
    for name, r in sorted(ratios.items(), key=lambda x: statistics.median(x[1])):
        print(
            f"{name:16} {statistics.median(r):5.2f} ({min(r):.2f} .. {max(r):.2f})",
            flush=True,
        )


def exact_step(h, W, tokens):
    """Return what `step` returns of upref.hidden in float64."""
    h, W = (x.detach().double().requires_grad_() for x in (h, W))
    return step(WHO["upref.hidden"](), h, W, tokens)


def largest_difference(x, y):
    """Return the largest absolute difference of two tensors."""
    return (x - y).abs().max()


def errors(N, V, who):
    """Print the largest errors of each function's log-probs, entropy and dW against
    float64; those of dW relative to its largest element. Of a function without entropy
    only the log-probs are compared: `step` has another loss for it.
    """
    print(
        f"\nLargest error against float64; N = {N}, V = {V}, float32; dW relative to its largest element"
    )
    h, W, tokens = inputs(N, V)
    exact_lp, exact_entropy, exact_dW = exact_step(h, W, tokens)
    for name in who:
        lp, entropy, dW = step(WHO[name](), h, W, tokens)
        lp_error = f"{largest_difference(lp, exact_lp):.1e}"
        entropy_error = dW_error = "-"
        if entropy is not None:
            relative = largest_difference(dW, exact_dW) / exact_dW.abs().max()
            entropy_error = f"{largest_difference(entropy, exact_entropy):.1e}"
            dW_error = f"{relative:.1e}"
        print(
            f"{name:16} log-prob {lp_error:8} entropy {entropy_error:8} dW {dW_error}",
            flush=True,
        )


def bf16(N, V, who):
    """Print the largest error of each function's dW for bfloat16 weights, divided by
    the error of rounding the exact dW to bfloat16. A function that raises gets the name
    of its error; one without entropy is left out.
    """
    print(
        f"\ndW for bfloat16 weights, N = {N}, V = {V}: largest error, in those of rounding the exact one once"
    )
    h, W, tokens = inputs(N, V, dtype=torch.bfloat16)
    _, _, exact_dW = exact_step(h, W, tokens)
    rounding = largest_difference(exact_dW.bfloat16(), exact_dW)
    for name in who:
        try:
            _, entropy, dW = step(WHO[name](), h, W, tokens)
        except Exception as e:
            print(f"{name:16} {type(e).__name__}")
            continue
        if entropy is not None:
            error = largest_difference(dW, exact_dW)
            print(f"{name:16} {error / rounding:6.2f}", flush=True)


def logits_of(kind, V):
    """Return random logits [32, V] and tokens [32].

    Args:
        kind: `flat`, `mixed`, or `peaked` or `peak first` for logits with a token of
            p = 0.9, which is the sampled one in rows 0, 2, ...
        V: how many ids there are; seed of the draw.
    """
    g = torch.Generator().manual_seed(V)
    logits = torch.randn(32, V, generator=g) * {"flat": 0.1, "mixed": 3.0}.get(kind, 1)
    tokens = torch.randint(V, (32,), generator=g)
    if kind in ("flat", "mixed"):
        return logits, tokens
    if kind == "peak first":
        peak = torch.zeros(32, 1, dtype=torch.int64)
    else:
        peak = torch.randint(V, (32, 1), generator=g)
    logits.scatter_(1, peak, logits.logsumexp(1, keepdim=True) + 2.2)  # p = 0.9
    tokens[::2] = peak[::2, 0]
    return logits, tokens


def by_kind(sizes):
    """Print errors of upref.logprobs from logits, and of torch.log_softmax, which it
    used before.
    """
    print(
        "\nupref.logprobs in float32: largest error against float64 over 32 rows; before: by torch.log_softmax"
    )
    print(
        f"{'V':>7} {'rows':12} {'log-prob before':>16} {'now':>8} {'entropy before':>15} {'now':>8}"
    )
    for V in sizes:
        for kind in ("flat", "mixed", "peaked", "peak first"):
            logits, tokens = logits_of(kind, V)
            double = logits.double()
            exact_lp = upref.logprobs.token_log_probs(double, tokens)
            exact_entropy = upref.logprobs.entropy(double)
            lp = upref.logprobs.token_log_probs(logits, tokens)
            entropy = upref.logprobs.entropy(logits)
            lp_of_all = logits.log_softmax(-1)
            lp_before = lp_of_all.gather(1, tokens[:, None])[:, 0]
            entropy_before = -(lp_of_all.exp() * lp_of_all).sum(-1)
            of_lp = [
                largest_difference(lp_before, exact_lp).item(),
                largest_difference(lp, exact_lp).item(),
            ]
            of_entropy = [
                largest_difference(entropy_before, exact_entropy).item(),
                largest_difference(entropy, exact_entropy).item(),
            ]
            print(
                f"{V:7} {kind:12} {of_lp[0]:16.1e} {of_lp[1]:8.1e} {of_entropy[0]:15.1e} {of_entropy[1]:8.1e}",
                flush=True,
            )


def main():
    """Print the sections that are named, or all of them; with --one the numbers of one
    function.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "sections",
        nargs="*",
        help="accuracy, time, memory, growth, alone; all of them unless given",
    )
    parser.add_argument(
        "--one", nargs=3, metavar=("WHO", "N", "V"), help=argparse.SUPPRESS
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.one:
        who, tokens, words = args.one
        return one(who, int(tokens), int(words))
    n, v = (64, 8192) if args.quick else (2048, V)
    versions = [
        f"{package} {importlib.metadata.version(package)}"
        for package in ("torch", "trl", "verl")
    ]
    print(
        f"H = {H}, 1 thread, {platform.machine()}, {', '.join(versions)}; "
        f"load {os.getloadavg()[0]:.1f} at the start",
        flush=True,
    )
    sections = args.sections or ["accuracy", "time", "memory", "growth", "alone"]
    if "accuracy" in sections:
        by_kind([1000, 32_000, v, 262_144])
        errors(n // 16, v, WHO)
        bf16(n, v // 32, WHO)
    if "time" in sections:
        # a minibatch of the miniature
        times(832, 107, ["naive", "upref.hidden"], 30, 64)
    if "memory" in sections:
        memory([(n, v)], ["naive", *(k for k in WHO if k != "naive")])
    if "growth" in sections:
        memory([(n * k // 4, v // 8) for k in (1, 4, 8)], ["naive", "upref.hidden"])
    if "alone" in sections:
        memory([(n, v)], ["naive", "upref.hidden", CE], ONLY)


if __name__ == "__main__":
    main()
