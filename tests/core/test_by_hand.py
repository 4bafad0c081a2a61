# SPDX-License-Identifier: Apache-2.0
"""Objectives whose function and weight share a helper, on batches worked out by hand."""

import torch

import upref


def made(log_r, adv, entropy=None):
    """Return a batch of one response with these log-ratios and advantages, and π_old =
    e^-3.
    """
    log_r, adv = (
        torch.tensor([log_r], dtype=torch.float64),
        torch.tensor([adv], dtype=torch.float64),
    )
    old = torch.full_like(log_r, -3.0)
    more = (
        {}
        if entropy is None
        else {"entropy": torch.tensor([entropy], dtype=torch.float64)}
    )
    return upref.Rollouts(
        old + log_r, old, adv, torch.ones_like(log_r, dtype=torch.bool), **more
    )


def test_m2po_drops_from_the_top_until_the_mean_is_at_most_tau():
    """Past π_old in the update's direction: A > 0 with r > 1, A < 0 with r < 1. Squares
    .01, .04, .16, .25 (tau 0.075): means from the bottom .01, .025, .07, .115: the last
    goes. The two others are out of the count, far as they are."""
    b = made([0.1, -0.2, 0.4, 0.5, -2.0, 2.0], [1.0, -1.0, 1.0, 1.0, 1.0, -1.0])
    alive = upref.get("m2po").token_weights(b, tau=0.075)[0] != 0
    assert alive.tolist() == [True, True, True, False, True, True]
    # the mean .07 may reach tau exactly, up to rounding; just below it the third goes
    # as well
    assert (upref.get("m2po").token_weights(b, tau=0.0699)[0] != 0).tolist() == [
        True,
        True,
        False,
        False,
        True,
        True,
    ]


def test_m2po_counts_tied_tokens_together():
    # squares .09, .09, .01: one of the two would still fit under .05
    b = made([0.3, 0.3, 0.1], [1.0, 1.0, 1.0])
    assert (upref.get("m2po").token_weights(b, tau=0.05)[0] != 0).tolist() == [
        False,
        False,
        True,
    ]


def test_tpo_pulls_to_the_target_of_its_own_group():
    """Three responses of probabilities .2, .3, .5 now and .5, .3, .2 before, and e^A 1,
    2, 4: q = .5, .6, .8 over 1.9. The fourth is alone in its group, and the fifth has
    no token: neither is pulled, and neither is a share."""

    def T(x):
        return torch.tensor(x, dtype=torch.float64)

    lp, old = (
        T([*p, 0.1, 0.9]).log()[:, None].expand(-1, 2) / 2
        for p in ((0.2, 0.3, 0.5), (0.5, 0.3, 0.2))
    )
    A = T([1.0, 2.0, 4.0, 9.0, 9.0]).log()[:, None].expand(-1, 2)
    b = upref.Rollouts.unchecked(logp=lp, logp_old=old, adv=A, mask=T([1, 1, 1, 1, 0]).bool()[:, None].expand(-1, 2),
                                 group=torch.tensor([7, 7, 7, -1, 7]))  # fmt: skip
    w = upref.get("tpo").token_weights(b)[:, 0] / 4  # of the four rows of the prompt
    expected = T([0.5 / 1.9 - 0.2, 0.6 / 1.9 - 0.3, 0.8 / 1.9 - 0.5, 0, 0])
    assert torch.allclose(w, expected, atol=1e-12)


def test_aspo_code_widens_the_clip_above_the_80_percent_quantile():
    """Entropies 0..5: the 80 % quantile is 4, so only the last token may go to r = 1.4;
    r = 1.3 throughout.
    """
    log_r = torch.tensor(1.3).log().item()
    w = upref.get("aspo_code").token_weights(
        made([log_r] * 6, [1.0] * 6, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    )[0]
    assert (w[:5] == 0).all()
    torch.testing.assert_close(
        w[5], torch.tensor(1 / 1.3, dtype=torch.float64), rtol=1e-6, atol=0
    )
