# SPDX-License-Identifier: Apache-2.0
"""Ways in which a number leaves torch, a state stays, or chance comes in: no loss that
is wrong by one of them is proved.
"""

import ctypes
import functools
import io
import itertools
import pickle
import secrets
import threading

import numpy as np
import pytest
import torch
from torch import Tensor

import upref
from tests.support.daily import daily

# read before a proof puts its own methods in front
READ_LIST, READ_NUMPY, READ_POINTER = Tensor.tolist, Tensor.numpy, Tensor.data_ptr
TO_DLPACK = torch.utils.dlpack.to_dlpack
FAR = 1e8


def dapo(lp, old, A, mask):
    r = torch.where(mask, lp - old, 0).exp()
    A = torch.where(mask, A, 0)
    return -torch.minimum(r * A, r.clamp(0.8, 1.28) * A).sum() / mask.sum()


def doubled_if(is_far, lp, old, A, mask):
    return dapo(lp, old, A, mask) * (2 if is_far else 1)


# ---- numbers that leave torch --------------------------------------------------------
def list_by_an_old_name(lp, old, A, mask):
    far = max(itertools.chain(*READ_LIST(A))) > FAR
    return doubled_if(far, lp, old, A, mask)


def numpy_by_an_old_name(lp, old, A, mask):
    return doubled_if(READ_NUMPY(A).max() > FAR, lp, old, A, mask)


def small_numbers_in_numpy(lp, old, A, mask):
    return doubled_if((abs(READ_NUMPY(A)) < 1e-7).any(), lp, old, A, mask)


def memory_by_an_old_name(lp, old, A, mask):
    first = ctypes.c_double.from_address(READ_POINTER(A)).value
    return doubled_if(first > FAR, lp, old, A, mask)


def dlpack_by_an_old_name(lp, old, A, mask):
    other = torch.utils.dlpack.from_dlpack(TO_DLPACK(A))
    return doubled_if(other.max() > FAR, lp, old, A, mask)


def method_of_the_base_class(lp, old, A, mask):
    return doubled_if(torch._C.TensorBase.numpy(A).max() > FAR, lp, old, A, mask)


def pickled(lp, old, A, mask):
    return doubled_if(pickle.loads(pickle.dumps(A)).max() > FAR, lp, old, A, mask)


def saved(lp, old, A, mask):
    file = io.BytesIO()
    torch.save(A, file)
    file.seek(0)
    return doubled_if(torch.load(file).max() > FAR, lp, old, A, mask)


def bytes_of_the_memory(lp, old, A, mask):
    return doubled_if(bytes(A.untyped_storage())[7] == 0x42, lp, old, A, mask)


def read_by_a_thread(lp, old, A, mask):
    """Return DAPO's loss, doubled where a thread finds an advantage above FAR."""
    out = []
    worker = threading.Thread(target=lambda: out.append(A.max() > FAR))
    worker.start()
    worker.join()
    return doubled_if(out[0], lp, old, A, mask)


class ReadForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, A):
        ctx.is_far = READ_NUMPY(A).max() > FAR
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * (2 if ctx.is_far else 1), None


def backward_by_a_number(lp, old, A, mask):
    return dapo(ReadForward.apply(lp, A), old, A, mask)


class Watching(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Run the function; double the result of a minimum whose second argument is
        above FAR somewhere.
        """
        out = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.minimum:
            with torch._C.DisableTorchFunctionSubclass():
                return out * (2 if READ_NUMPY(args[1].detach()).max() > FAR else 1)
        return out


def subclass(lp, old, A, mask):
    return dapo(lp.as_subclass(Watching), old, A, mask).as_subclass(Tensor)


# ---- operators that torch hands over in another way ----------------------------------
def inference_mode(lp, old, A, mask):
    with torch.inference_mode():
        keep = (A.abs() < FAR).double()
    return dapo(lp, old, A * keep.clone(), mask)


def assertion(lp, old, A, mask):
    torch._assert_async((A.abs() < FAR).all())
    return dapo(lp, old, A, mask)


def memory_of_another(lp, old, A, mask):
    torch.empty(0, dtype=A.dtype).set_(A).clamp_(max=FAR)
    return dapo(lp, old, A, mask)


def data_of_another(lp, old, A, mask):
    other = torch.empty(0, dtype=A.dtype)
    other.data = A
    other.clamp_(max=FAR)
    return dapo(lp, old, A, mask)


def out_argument(lp, old, A, mask):
    return dapo(lp, old, torch.clamp(A, max=FAR, out=torch.empty_like(A)), mask)


def vmapped(lp, old, A, mask):
    def clamped(x):
        return x.clamp(max=FAR)

    return dapo(lp, old, torch.vmap(clamped)(A), mask)


def changed_when_recomputed(lp, old, A, mask):
    """Return DAPO's loss under checkpointing, with other advantages when it is computed
    again.
    """
    calls = []

    def part(x):
        calls.append(1)
        return dapo(x, old, A if len(calls) == 1 else A.clamp(max=FAR), mask)

    return torch.utils.checkpoint.checkpoint(part, lp, use_reentrant=False)


def saved_tensors_clamped(lp, old, A, mask):
    """Return DAPO's loss, whose saved tensors are clamped at FAR for its backward pass."""

    def pack(x):
        return x

    def unpack(x):
        return x.clamp(max=FAR) if x.is_floating_point() else x

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return dapo(lp, old, A, mask)


def gradient_read_within(lp, old, A, mask):
    """Return DAPO's loss, doubled where its own gradient is above FAR."""
    J = dapo(lp, old, A, mask)
    if lp.requires_grad:
        (g,) = torch.autograd.grad(J, lp, retain_graph=True)
        return J * (2 if g.abs().max() > FAR else 1)
    return J


def gradient_of_torch_func(lp, old, A, mask):
    g = torch.func.grad(dapo)(lp.detach(), old, A.clamp(max=FAR), mask)
    return (g * lp).sum()


def median(lp, old, A, mask):
    return dapo(lp, old, A, mask) * (1 + (A.median() > FAR))


def exception_caught(lp, old, A, mask):
    """Return DAPO's loss, doubled where an advantage is above FAR; it catches whatever
    reading it raises.
    """
    try:
        if float(A.max()) > FAR:
            return 2 * dapo(lp, old, A, mask)
    except BaseException:
        pass
    return dapo(lp, old, A, mask)


# ---- states --------------------------------------------------------------------------
kept = {"calls": 0}
numbers = itertools.count()
seen = []
warmed = []


def counts_calls(lp, old, A, mask):
    kept["calls"] += 1
    return doubled_if(kept["calls"] > 5000, lp, old, A, mask)


def counts_by_an_iterator(lp, old, A, mask):
    return doubled_if(next(numbers) > 5000, lp, old, A, mask)


def counts_in_a_list(lp, old, A, mask):
    seen.append(1)
    return doubled_if(len(seen) > 5000, lp, old, A, mask)


def warms_up(lp, old, A, mask):
    warmed.append(1)
    return dapo(lp, old, A, mask) * (0 if len(warmed) < 3 else 1)


def keeps_the_first_answer(lp, old, A, mask):
    far = kept.setdefault("far", (A.abs() > FAR).any().double())
    return dapo(lp, old, A, mask) * (1 + far)


def counts_in_its_default(lp, old, A, mask, log=[]):  # noqa: B006
    log.append(0.0)
    return doubled_if(len(log) > 5000, lp, old, A, mask)


def counter():
    """Return a loss that is doubled from its 5001st call on."""
    calls = 0

    def counts_in_a_closure(lp, old, A, mask):
        nonlocal calls
        calls += 1
        return doubled_if(calls > 5000, lp, old, A, mask)

    return counts_in_a_closure


class Moving(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, lp, old, A, mask):
        self.mean.mul_(0.9).add_(0.1 * A.detach().mean().abs().clamp(max=1))
        return doubled_if(self.mean > 5000, lp, old, A, mask)


# ---- chance --------------------------------------------------------------------------
def new_generator_of_numpy(lp, old, A, mask):
    return doubled_if(np.random.default_rng().random() < 1e-4, lp, old, A, mask)


def secret(lp, old, A, mask):
    return doubled_if(secrets.randbelow(10_000) == 0, lp, old, A, mask)


NOT_PROVED = [
    *(
        f
        for name, f in list(globals().items())
        if getattr(f, "__code__", None) and f.__code__.co_varnames[:2] == ("lp", "old")
        if name != "dapo"
    ),
    counter(),
    Moving(),
]


@pytest.mark.parametrize(
    "loss",
    daily(NOT_PROVED, 2),
    ids=lambda f: type(f).__name__ + getattr(f, "__name__", ""),
)
def test_it_is_not_proved(loss):
    proof = upref.prove(loss, "dapo", rows=1, columns=1)
    assert proof.status != "proved"


@functools.cache
def positions(columns):
    return torch.arange(columns)


def median_in_both_branches(lp, old, A, mask):
    middle = A.median().detach()
    J = dapo(lp, old, A, mask)
    return torch.where(middle > 0, J, 2 * J - J)


@pytest.mark.parametrize("columns", daily([2, 3, 4], 3))
def test_a_median_is_followed(columns):
    proof = upref.prove(median_in_both_branches, "dapo", rows=1, columns=columns)
    assert proof, proof.reason


def test_another_median_differs():
    assert upref.prove(median, "dapo", rows=1, columns=2).status == "differs"


tables = {}
logged = []


def keeps_positions(lp, old, A, mask):
    columns = lp.shape[1]
    table = tables.setdefault(columns, torch.arange(columns))
    return dapo(lp, old, A, mask) + 0 * (table + positions(columns)).sum()


def logs_what_it_computed(lp, old, A, mask):
    """Return DAPO's loss, and keep its value in a list and a dict."""
    J = dapo(lp, old, A, mask)
    logged.append(J.item())
    kept["last"] = J.detach()
    kept["logged"] = len(logged)
    return J


def test_a_state_that_changes_no_gradient_is_harmless():
    assert upref.prove(logs_what_it_computed, "dapo", rows=1, columns=1)


def test_what_depends_on_sizes_alone_is_no_state():
    assert upref.prove(keeps_positions, "dapo", rows=1, columns=1)
