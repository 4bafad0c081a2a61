# SPDX-License-Identifier: Apache-2.0
"""Objectives whose function and weight share a helper, on batches worked out by hand."""

import torch

import upref


def made(log_r, adv, entropy=None):
    log_r, adv = torch.tensor([log_r], dtype=torch.float64), torch.tensor([adv], dtype=torch.float64)
    old = torch.full_like(log_r, -3.0)
    more = {} if entropy is None else {"entropy": torch.tensor([entropy], dtype=torch.float64)}
    return upref.Rollouts(old + log_r, old, adv, torch.ones_like(log_r, dtype=torch.bool), **more)


def test_m2po_drops_from_the_top_until_the_mean_is_at_most_tau():
    """Past π_old in the update's direction: A > 0 with r > 1, A < 0 with r < 1. Squares .01, .04, .16, .25 (tau 0.075):
    means from the bottom .01, .025, .07, .115: the last goes. The two others are out of the count, far as they are."""
    b = made([0.1, -0.2, 0.4, 0.5, -2.0, 2.0], [1.0, -1.0, 1.0, 1.0, 1.0, -1.0])
    alive = upref.get("m2po").token_weights(b, tau=0.075)[0] != 0
    assert alive.tolist() == [True, True, True, False, True, True]
    # the mean .07 may reach tau exactly, up to rounding; just below it the third goes as well
    assert (upref.get("m2po").token_weights(b, tau=0.0699)[0] != 0).tolist() == [True, True, False, False, True, True]


def test_m2po_counts_tied_tokens_together():
    b = made([0.3, 0.3, 0.1], [1.0, 1.0, 1.0])  # squares .09, .09, .01: one of the two would still fit under .05
    assert (upref.get("m2po").token_weights(b, tau=0.05)[0] != 0).tolist() == [False, False, True]


def test_aspo_code_widens_the_clip_above_the_80_percent_quantile():
    """Entropies 0..5: the 80 % quantile is 4, so only the last token may go to r = 1.4; r = 1.3 throughout."""
    log_r = torch.tensor(1.3).log().item()
    w = upref.get("aspo_code").token_weights(made([log_r] * 6, [1.0] * 6, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]))[0]
    assert (w[:5] == 0).all()
    torch.testing.assert_close(w[5], torch.tensor(1 / 1.3, dtype=torch.float64), rtol=1e-6, atol=0)
