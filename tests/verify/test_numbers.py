# SPDX-License-Identifier: Apache-2.0
"""Half, 0.999, 1.001 and twice every number of every objective and transform is noticed:
some weight of the batches of a check differs beyond its tolerance.
"""

import pytest

import upref
from tests.support.daily import daily
from upref.user_code import read
from upref.verify.measure import make_case
from upref.verify.oracles.unusual import _has_what_it_needs, _unforgiven_errors
from upref.verify.oracles.weights import _random_batches
from upref.weights.stress import AXES

FACTORS = (0.5, 0.999, 1.001, 2.0)
TRANSFORMED = [
    *(f"{name}(dapo)" for name in ("opsm", "top_entropy", "up")),
    *(f"{name}(gspo)" for name in ("opsm", "up")),
    "unbiased_kl(grpo)",
    *(
        f"{name}({base})"
        for name in ("tis", "tis_seq", "mis", "mis_seq", "icepop", "seq_mask", "kpop")
        for base in ("dapo", "grpo")
    ),
]
# what no batch shows, and why; this list may only shrink
NO_EFFECT = "it acts where A > 0 alone, and UP has no bound there"
WITHIN = "where A < 0, GSPO's clip ends before the drift does"
MISSED = (
    {(f"up({x})", "eps_high", k): NO_EFFECT for x in ("dapo", "gspo") for k in FACTORS}
    | {("opsm(gspo)", "opsm_delta", k): WITHIN for k in FACTORS}
    | {
        (name, number, k): "a share of a batch that no batch is large enough to show"
        for name, number in (("clip_cov", "share"), ("kl_cov", "share"))
        for k in (0.999, 1.001)
    }
    | {
        ("clip_cov", "high", k): "no covariance lies between the two bounds"
        for k in (0.999, 1.001)
    }
)


def numbers():
    """Yield (objective, its number, a factor) of every number of every objective and
    transform.
    """
    for name in [*upref.names(), *TRANSFORMED]:
        for number, value in settings(name).items():
            if isinstance(value, float) and value and number != "seed":
                yield from ((name, number, factor) for factor in FACTORS)


def settings(name):
    """Return the numbers at which an objective is checked: its own, and a KL term if it
    has one.
    """
    own = upref.get(name).resolve({})
    return own | ({"beta": 0.04} if "beta" in own else {})


def is_noticed(name, number, factor):
    """Return whether a weight on some batch of a check differs between the number and
    the number times the factor.
    """
    objective = upref.get(name)
    hp = settings(name)
    changed = hp | {number: factor * hp[number]}

    def loss(b: upref.Rollouts):
        return objective.loss(b, **changed)

    case = make_case(read(loss, objective, hp), objective, objective.resolve(hp))
    if case.weight_error(case.grid()).max() > case.tol:
        return True
    if any(case.weight_error(b).max() > 10 * case.tol for b in _random_batches(case)):
        return True
    return any(
        _unforgiven_errors(case, case.stress_batch(axis)).max() > 10 * case.tol
        for axis in AXES
        if _has_what_it_needs(case, AXES[axis])
    )


ALL = list(numbers())


@pytest.mark.parametrize(("name", "number", "factor"), daily(ALL, 12))
def test_another_number_is_noticed(name, number, factor):
    try:
        found = is_noticed(name, number, factor)
    except upref.InputError:
        pytest.skip("the objective does not take this number")
    assert found is ((name, number, factor) not in MISSED)


def test_the_list_of_what_is_missed_names_numbers_that_there_are():
    assert set(MISSED) <= set(ALL)
    assert all(MISSED.values())


def test_the_same_number_is_no_other():
    for name in ("dapo", "opsm(dapo)", "kpop(dapo)"):
        number = next(k for k, v in settings(name).items() if isinstance(v, float))
        assert not is_noticed(name, number, 1.0)
