# SPDX-License-Identifier: Apache-2.0
"""Every registered objective, and UP of every base, against every law."""

import pytest

import upref
from tests.support import laws

BASES = [n for n in upref.names() if not n.startswith("up_")]


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", upref.names())
def test_registered(name, law):
    law(upref.get(name))


TRANSFORMED = [
    "tis(dapo)", "icepop(up_dapo)", "mis(dapo)", "mis_seq(gspo)", "tis_seq(luspo)", "seq_mask(gmpo)",
    "decoupled(ppo_clip)", "kpop(dapo)", "opsm(dapo)", "opsm(gmpo)", "opsm(gspo)", "unbiased_kl(grpo)",
]  # fmt: skip


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformed(name, law):
    law(upref.get(name))


PLUGGED = [
    f
    for f in laws.LAWS
    if f.__name__ not in ("every_hyperparameter_is_alive", "record_is_complete")
]


@pytest.mark.parametrize("law", PLUGGED, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "name", ["sapo", "cispo", "gmpo", "topr", "m2po", "dppo_tv", "icepop(dapo)"]
)
def test_plugged(name, law):
    law(upref.up(upref.get(name)))
