# SPDX-License-Identifier: Apache-2.0
"""V8 with the explorer's program in it."""

import json

import pytest
from py_mini_racer import MiniRacer

from upref_course import explorer


@pytest.fixture(scope="session")
def js():
    """Yield a function that evaluates JavaScript beside the explorer's own, and returns
    what JSON can hold of it.
    """
    with MiniRacer() as v8:  # closed by all means: its thread would outlive the tests
        v8.eval(explorer.data() + explorer.script() + explorer.script(("curves",)))
        yield lambda code: json.loads(v8.eval(f"JSON.stringify({code})"))
