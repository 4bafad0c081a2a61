# SPDX-License-Identifier: Apache-2.0
"""A sample of tests/support/fuzz.py, the same every time; the whole run is `python tests/support/fuzz.py 20000`."""

from fuzz import fuzz


def test_a_sample_of_bad_inputs():
    counts, found = fuzz(250, 7)
    assert not found and len(counts) > 20
