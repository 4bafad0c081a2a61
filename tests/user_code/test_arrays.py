# SPDX-License-Identifier: Apache-2.0
"""Functions of another array library, of one that numpy stands for here: test_jax.py
has JAX and MLX.
"""

import contextlib
from types import ModuleType

import numpy as np
import pytest
import torch

import upref
from upref.user_code import read
from upref.user_code.arrays import NOT_EXERCISED, ArrayFunction
from upref.user_code.guard import call_guarded
from upref.verify.check import CORE, every

RUN = {"determinism", "gradient", "on-policy", *NOT_EXERCISED}
SKIP = [oracle.name for oracle in every() if oracle.name not in RUN]


def _dapo(log_prob, old_log_prob, advantages, mask, clip_high=0.28):
    """Return DAPO's loss in numpy, and a count."""
    r = np.exp(np.where(mask, log_prob - old_log_prob, 0))
    A = np.where(mask, advantages, 0)
    J = np.minimum(r * A, r.clip(0.8, 1 + clip_high) * A)
    return -(J * mask).sum() / mask.sum(), {"tokens": mask.sum()}


def _slope(log_prob, old_log_prob, advantages, mask, clip_high=0.28):
    """Return the gradient of that loss by log_prob."""
    r = np.exp(np.where(mask, log_prob - old_log_prob, 0))
    A = np.where(mask, advantages, 0)
    trains = np.where(A > 0, r < 1 + clip_high, r > 0.8)
    return -r * A * trains * mask / mask.sum()


class OfNumpy(ArrayFunction):
    """A function of numpy, with its gradient by the first argument written by hand."""

    library = "NumPy"
    is_slow = False

    def __init__(self, fn, slope):
        super().__init__(fn, False)
        self.slope = slope

    def _set_up(self):
        return contextlib.nullcontext()

    def _is_array(self, x):
        return isinstance(x, np.ndarray | np.generic)

    def _from_numpy(self, numbers, dtype):
        return np.array(numbers, dtype=dtype)

    def _as_float32(self, x):
        return x.astype("float32")

    def _given(self, arguments, arrays):
        """Return the arguments by name, with the array in place of each placeholder."""
        args, kwargs = arguments
        given = {
            **dict(zip(self.__signature__.parameters, args, strict=False)),
            **kwargs,
        }
        return {
            k: arrays[getattr(x, "index", 0)] if hasattr(x, "index") else x
            for k, x in given.items()
        }

    def _call(self, arguments, arrays, needed):
        return self.fn(**self._given(arguments, arrays)), None

    def _pull(self, arguments, arrays, needed, upstream):
        slope = upstream * self.slope(**self._given(arguments, arrays))
        return [slope if i == 0 else 0 * arrays[i] for i in needed]


def test_the_gradient_is_the_librarys_and_the_report_says_what_was_not_run():
    report = upref.check(OfNumpy(_dapo, _slope), "dapo", skip=SKIP)
    assert report, str(report)
    assert {name: report.oracles[name] for name in NOT_EXERCISED} == NOT_EXERCISED
    assert all(name in str(report) for name in NOT_EXERCISED)
    assert not report.proved


def test_a_function_that_is_not_compiled_gets_the_core_oracles_alone():
    function = OfNumpy(_dapo, _slope)
    function.is_slow = True
    report = upref.check(function, "dapo")
    ran = {
        name
        for name, became in report.oracles.items()
        if became in ("ok", "note", "failure")
    }
    assert ran == CORE <= {oracle.name for oracle in every()}


def test_a_wrapper_around_it_is_recognized_by_its_call():
    inner = OfNumpy(_dapo, _slope)

    def loss(log_prob, old_log_prob, advantages, mask):
        return inner(log_prob, old_log_prob, advantages, mask)

    assert read(loss).arrays is inner
    assert read(upref.get("dapo")).arrays is None


def test_there_is_no_proof():
    proof = upref.prove(OfNumpy(_dapo, _slope), "dapo")
    assert proof.status == "no proof"
    assert "NumPy computes it" in proof.reason


@pytest.mark.parametrize("make", [upref.from_jax, upref.from_mlx])
def test_what_is_no_function_is_refused(make):
    with pytest.raises(upref.InputError, match="a function of"):
        make(1)


def test_answers_of_several_parts_come_back_as_tensors():
    function = OfNumpy(lambda x: (x, {"x": [x]}), lambda x: np.ones_like(x))
    x = torch.ones(2, requires_grad=True)
    first, rest = function(x)
    first.sum().backward()
    assert x.grad.tolist() == [1, 1]
    assert isinstance(rest["x"][0], torch.Tensor) and not rest["x"][0].requires_grad


def test_an_array_of_another_library_is_refused_with_what_to_do():
    Array = type("Array", (), {"__module__": "jaxlib._jax"})
    with pytest.raises(upref.InputError, match=r"check `upref\.from_jax"):
        upref.check(lambda log_prob, old_log_prob, advantages, mask: Array(), "dapo")


def test_an_error_of_a_library_that_got_tensors_says_what_to_do():
    where = {"__name__": "jax.numpy"}
    exec("def exp(x): raise TypeError('exp requires arrays, got torch.Tensor')", where)
    with pytest.raises(upref.InputError, match=r"torch tensors: check upref\.from_jax"):
        call_guarded("loss", lambda: where["exp"](1))


def test_an_error_of_jax_says_what_to_do_though_jax_leaves_its_frames_out():
    jax = ModuleType("jax")
    loss = {"__name__": "mine", "jnp": ModuleType("jax.numpy"), "jax": jax}
    exec("def loss(x): raise TypeError('the value is a torch.Tensor')", loss)
    with pytest.raises(upref.InputError, match=r"torch tensors: check upref\.from_jax"):
        call_guarded("loss", lambda: loss["loss"](1))
