# SPDX-License-Identifier: Apache-2.0
"""A training step may compile the loss: one graph, the same gradient, and no wait for
the device.
"""

import shutil

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import upref
from upref import ops
from upref.rollouts import autograd_gradient
from upref.weights.batches import OFF_EDGES, batch


@pytest.mark.parametrize("name", [*upref.names(), "up(sapo)"])
def test_no_host_synchronisation(name):
    """On fake tensors, which have no values, whatever asks for one (`.item()`,
    `if x.any()`) raises.
    """
    if name == "aspo_code" and torch.__version__ < (2, 5):
        pytest.skip("nanquantile of torch 2.4 asks for a value")
    o = upref.get(name)
    with FakeTensorMode():
        lp = torch.empty(4, 6, requires_grad=True)
        x, mask, group = (
            torch.empty(4, 6),
            torch.empty(4, 6, dtype=torch.bool),
            torch.empty(4, dtype=torch.long),
        )
        hp = {"beta": 0.1} if o.kl else {}
        o.J(lp, x, x, mask, group, lp_ref=x, entropy=x, is_weights=x, **hp).backward()
        assert lp.grad.shape == lp.shape


class WritesInPlace(TorchDispatchMode):
    """Collects the operators that write into one of their inputs."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.is_mutable:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_exp_writes_nothing_in_place():
    """torch 2.11, which the GPU lists pin, compiles an in-place step of the forward of
    an autograd.Function to a gradient of 0.
    """
    x = torch.tensor([0.5, 2.0, 1e6], requires_grad=True)
    with WritesInPlace() as mode:
        ops.exp(x)
    assert mode.found == []


@pytest.mark.skipif(
    not shutil.which("c++"), reason="torch.compile needs a C++ compiler"
)
@pytest.mark.parametrize(
    ("name", "hp", "backend"),
    [
        ("up_dapo", {}, "aot_eager"),
        ("dapo", {"c": 3.0}, "aot_eager"),
        pytest.param("dapo", {"c": 3.0}, "inductor", marks=pytest.mark.nightly),
        ("gspo", {}, "aot_eager"),
        ("cispo", {}, "aot_eager"),
        ("gmpo", {}, "aot_eager"),
        ("dppo_tv_verl", {}, "aot_eager"),
    ],
)
def test_one_graph_and_the_eager_gradient(name, hp, backend):
    """By night one of them by inductor, whose C++ takes most of the time; one graph is
    what all need.
    """
    o = upref.get(name)
    # the compiler's exp may differ in the last bit, which decides on a bound
    b = batch(o, edges=OFF_EDGES, **hp)
    torch.compiler.reset()
    compiled = torch.compile(
        lambda lp: o.J(lp, b.logp_old, b.adv, b.mask, b.group, **hp),
        fullgraph=True,
        backend=backend,
    )
    found, expected = (
        autograd_gradient(lambda x: compiled(x.logp), b),
        autograd_gradient(lambda x: o(x, **hp), b),
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["dppo_kl_verl", "dppo_tv_verl", "gmpo"])
def test_compiled_forward_keeps_no_comparison(name):
    """Inductor's C++ writes a boolean tensor 20 times slower than eager torch does."""
    if name == "gmpo" and torch.__version__ < (2, 5):
        pytest.skip("the partitioner of torch 2.4 keeps one of gmpo's comparisons")
    o = upref.get(name)
    b = batch(o, edges=OFF_EDGES)
    kept = []

    def note(graph, _):
        outputs = graph.graph.find_nodes(op="output")[0].args[0]
        kept.extend(x for x in outputs if getattr(x, "op", "") == "call_function")
        return graph.forward

    backend = aot_autograd(
        fw_compiler=note,
        bw_compiler=lambda graph, _: graph.forward,
        partition_fn=min_cut_rematerialization_partition,
    )
    torch.compiler.reset()
    compiled = torch.compile(
        lambda lp: o.J(lp, b.logp_old, b.adv, b.mask), backend=backend, fullgraph=True
    )
    compiled(b.logp.detach().requires_grad_())
    assert kept
    of_tokens = [x for x in kept if x.meta["val"].shape == b.mask.shape]
    assert [x for x in of_tokens if x.meta["val"].dtype == torch.bool] == []
