# SPDX-License-Identifier: Apache-2.0
"""What the nightly run would say of a framework that has changed, on the committed
audits.
"""

import copy

import pytest

from docs.framework_pages import audits
from docs.nightly import changes

AUDITS = audits()


@pytest.mark.parametrize("then", AUDITS, ids=[a["framework"] for a in AUDITS])
def test_what_changed_is_listed(then):
    assert changes(then, then) == []
    now = copy.deepcopy(then)
    now["version"] = "next"
    row = now["rows"][0]
    row |= {"difference": 1.0, "verdict": "differs, UNEXPLAINED"}
    now["against_ledger"] = ["a default has moved"]
    now["unaudited"] = ["brand_new"]
    version, moved, *rest = changes(then, now)
    assert (
        version == f"{then['version']} -> next"
        and row["label"] in moved
        and moved.endswith("-> differs, UNEXPLAINED")
    )
    assert rest == ["new loss: brand_new", "a default has moved"]
