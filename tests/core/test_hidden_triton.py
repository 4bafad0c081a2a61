# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of upref.hidden, run by Triton's interpreter on a CPU.

Where Triton is missing the tests are skipped. A wrong kernel fails them without a GPU.
One test compiles the kernels to machine code of three GPUs, which needs none either. What
no test here shows is how long they take.
"""

import importlib.util
import inspect
import itertools
import os
import subprocess
import sys

import pytest
import torch

from upref import hidden as fused
from upref.errors import InputError
from upref.hidden import token_log_probs

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(
    not (HAS_TRITON and INTERPRETED), reason="the interpreter is not on"
)


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
@pytest.mark.skipif(INTERPRETED, reason="the interpreter is on")
def test_the_others_pass_in_a_process_with_the_interpreter():
    """Triton reads the variable when it is imported, so it needs a fresh process."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


NUMBERS = {"scale", "outer"}
IDS = {"row_ptr", "id_ptr", "best_column_ptr"}
COUNTS = {"start", "width", "n_blocks"}


def types_of(kernel, constants, of_parts="fp32"):
    """Return the type of each argument of a kernel, as Triton writes it."""
    types = {}
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name in COUNTS:
            types[name] = "i32"
        elif name in NUMBERS:
            types[name] = "fp32"
        elif name in IDS:
            types[name] = "*i64"
        else:
            types[name] = (
                f"*{of_parts if name in ('large_ptr', 'rest_ptr') else 'fp32'}"
            )
    return types


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
@pytest.mark.skipif(INTERPRETED, reason="the interpreter is on")
@pytest.mark.parametrize("capability", [80, 90, 100])  # A100, H100, B200
def test_the_kernels_compile_for_a_gpu(capability, tmp_path, monkeypatch):
    """Triton's wheel has NVIDIA's assembler, so no GPU is needed."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from upref import hidden_triton

    if "constexprs" not in inspect.signature(ASTSource).parameters:
        pytest.skip(
            f"the compiler of triton {triton.__version__} takes other arguments"
        )

    def machine_code(kernel, constants, of_parts="fp32"):
        """Compile a kernel for this GPU, and return its machine code."""
        names = kernel.arg_names
        places = {(names.index(name),): x for name, x in constants.items()}
        types = types_of(kernel, constants, of_parts)
        source = ASTSource(kernel, types, constexprs=places)
        target = GPUTarget("cuda", capability, 32)
        return triton.compile(source, target=target).asm["cubin"]

    block = {"BLOCK": hidden_triton.BLOCK}
    assert machine_code(hidden_triton._sum_row, block).startswith(b"\x7fELF")
    for has_entropy, has_cap, has_rest in itertools.product([False, True], repeat=3):
        constants = block | {
            "HAS_ENTROPY": has_entropy,
            "HAS_CAP": has_cap,
            "HAS_REST": has_rest,
        }
        if not has_entropy:
            constants["g_H_ptr"] = None
        kernel = hidden_triton._gradient_of_block
        code = machine_code(kernel, constants, "bf16" if has_rest else "fp32")
        assert code.startswith(b"\x7fELF")


@pytest.mark.skipif(HAS_TRITON, reason="needs a machine without triton")
def test_without_triton_one_sentence():
    h, W = torch.zeros(1, 2, 3), torch.zeros(4, 3)
    with pytest.raises(InputError, match='kernels="triton" needs Triton'):
        token_log_probs(h, W, torch.zeros(1, 2, dtype=torch.long), kernels="triton")


def test_unknown_kernels():
    h, W = torch.zeros(1, 2, 3), torch.zeros(4, 3)
    with pytest.raises(InputError, match="kernels must be"):
        token_log_probs(h, W, torch.zeros(1, 2, dtype=torch.long), kernels="cuda")


def batch(V=2500, H=16, shape=(2, 5), dtype=torch.float32, peaked=True, seed=0):
    """Return states, weight, tokens and upstream gradients, some of them 0. A peaked row
    has a token of p near 0.9.
    """
    g = torch.Generator().manual_seed(seed)
    W = torch.randn(V, H, generator=g)
    h = torch.randn(*shape, H, generator=g)
    tokens = torch.randint(V, shape, generator=g)
    if peaked:
        h[0] = (
            W[tokens[0]] * (9 / W[tokens[0]].square().sum(-1, keepdim=True)) + h[0] / 9
        )
    up = [torch.randn(shape, generator=g) for _ in range(2)]
    for gradient in up:
        gradient[0, 1] = 0
    return h.to(dtype), W.to(dtype), tokens, up


def results(h, W, tokens, up, bias=None, **settings):
    """Return both outputs and all gradients; of `up` an entry may be None."""
    leaves = [
        x.detach().clone().requires_grad_() for x in (h, W, bias) if x is not None
    ]
    of_bias = {} if bias is None else {"bias": leaves[2]}
    out = token_log_probs(leaves[0], leaves[1], tokens, **of_bias, **settings)
    total = sum((x * g).sum() for x, g in zip(out, up, strict=True) if g is not None)
    return [*out, *torch.autograd.grad(total, leaves)]


SETTINGS = [
    {},
    {"temperature": 0.7, "chunk": 2000},
    {"temperature": 1.3, "softcap": 3.0},
    {"logit_scale": 0.4, "chunk": 11_000},
]


@needs_interpreter
@pytest.mark.parametrize("keep_logits", [False, True])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("without", [None, 0, 1])
def test_as_float64_by_torch(settings, without, keep_logits):
    h, W, tokens, up = batch()
    up = [None if i == without else g for i, g in enumerate(up)]
    bias = None if "softcap" in settings else torch.linspace(-1, 1, len(W))
    ours = {"kernels": "triton", "keep_logits": keep_logits}
    found = results(h, W, tokens, up, bias, **settings, **ours)
    double = [None if x is None else x.double() for x in (h, W, bias)]
    doubled = [None if g is None else g.double() for g in up]
    exact = results(double[0], double[1], tokens, doubled, double[2], **settings)
    for x, y in zip(found, exact, strict=True):
        assert (x - y).abs().max() <= 1e-5 * max(1, y.abs().max())


@needs_interpreter
def test_values_are_the_same_to_rounding_as_of_torch():
    """Beside a peak the largest logits are exact, as they are with torch."""
    h, W, tokens, up = batch(V=9000, H=128, shape=(2, 8))
    exact = results(h.double(), W.double(), tokens, [g.double() for g in up])
    errors = {}
    for kernels in ("torch", "triton"):
        found = results(h, W, tokens, up, kernels=kernels)
        errors[kernels] = [
            (x - y).abs().max().item()
            for x, y in zip(found[:2], exact[:2], strict=True)
        ]
    for by_torch, by_triton in zip(*errors.values(), strict=True):
        assert by_triton <= 2 * by_torch + 1e-6


@needs_interpreter
def test_bfloat16_as_on_a_gpu(monkeypatch):
    """The path of a GPU, with a product that a CPU has."""
    h, W, tokens, up = batch(dtype=torch.bfloat16)
    settings = {"temperature": 0.7, "chunk": 11_000}
    exact = results(
        h.double(), W.double(), tokens, [g.double() for g in up], **settings
    )
    monkeypatch.setattr(
        fused, "_multiplies_bfloat16", lambda h, W: h.dtype == W.dtype == torch.bfloat16
    )
    monkeypatch.setattr(fused, "_product", lambda a, b: a.float() @ b.float())
    for keep_logits in (False, True):
        found = results(
            h, W, tokens, up, kernels="triton", keep_logits=keep_logits, **settings
        )
        for x, y in zip(found[:2], exact[:2], strict=True):
            assert (x - y).abs().max() <= 1e-5 * max(1, y.abs().max())
        for x, y in zip(found[2:], exact[2:], strict=True):
            # one rounding to bfloat16
            assert ((x - y).abs() <= 2**-8 * y.abs() + 1e-5 * y.abs().max()).all()


@needs_interpreter
def test_two_parts_hold_the_gradient_to_bfloat16_squared():
    """The interpreter truncates to bfloat16, so 2^-15; a GPU rounds, so 2^-17."""
    from upref.hidden_triton import gradient_of_tile

    g = torch.Generator().manual_seed(0)
    x, log_z, H = torch.randn(4, 1500, generator=g), torch.zeros(4), torch.ones(4)
    up = torch.randn(2, 4, generator=g)
    rows, ids = torch.tensor([2, 0, 3]), torch.tensor([5, 9000, 1300])
    numbers = (ids, log_z[rows], H[rows], up[0, rows], up[1, rows])
    exact, *none = gradient_of_tile(x, 0.5, 0, rows, numbers, 0, torch.float32)
    large, rest = gradient_of_tile(x, 0.5, 0, rows, numbers, 0, torch.bfloat16)
    assert none == []
    assert large.dtype == rest.dtype == torch.bfloat16
    sum_of_parts = large.double() + rest.double()
    assert ((sum_of_parts - exact).abs() <= 2**-15 * exact.abs() + 1e-30).all()


@needs_interpreter
def test_forbidden_tokens_and_nan():
    """-inf forbids a token; a state that is NaN spoils its own slot alone."""
    h, W, tokens, _ = batch(V=1100)
    bias = torch.zeros(len(W))
    bias[1:1050] = -torch.inf
    tokens = torch.zeros_like(tokens)
    lp, H = token_log_probs(h, W, tokens, bias=bias, kernels="triton")
    exact = token_log_probs(h.double(), W.double(), tokens, bias=bias.double())
    assert (lp - exact[0]).abs().max() < 1e-5
    assert (H - exact[1]).abs().max() < 1e-5
    h[1, 2] = torch.nan
    spoiled = torch.stack(token_log_probs(h, W, tokens, bias=bias, kernels="triton"))
    assert spoiled[:, 1, 2].isnan().all()
    assert spoiled.isnan().sum() == 2


@pytest.mark.parametrize("settings", SETTINGS)
def test_kept_logits_change_nothing(settings):
    """Without the kernels, too; a second backward pass finds them as they were."""
    h, W, tokens, up = batch()
    by_default = results(h, W, tokens, up, **settings)
    for x, y in zip(
        results(h, W, tokens, up, keep_logits=True, **settings), by_default, strict=True
    ):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    leaf = h.clone().requires_grad_()
    lp, _ = token_log_probs(leaf, W, tokens, keep_logits=True, **settings)
    first, second = (
        torch.autograd.grad(lp.sum(), leaf, retain_graph=True)[0] for _ in range(2)
    )
    assert torch.equal(first, second)


def test_kept_logits_save_a_product(monkeypatch):
    """Count the matrix products with and without `keep_logits`."""
    products = []
    product = fused._product

    def counted(a, b):
        products.append(a.shape)
        return product(a, b)

    monkeypatch.setattr(fused, "_product", counted)
    h, W, tokens, up = batch()
    counts = []
    for keep_logits in (False, True):
        products.clear()
        results(h, W, tokens, up, keep_logits=keep_logits)
        counts.append(len(products))
    assert counts[1] == counts[0] - 1
