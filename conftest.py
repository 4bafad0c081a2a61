# SPDX-License-Identifier: Apache-2.0
"""README.md's Python blocks are tests: they run in order, in one namespace."""

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser()], patterns=["README.md"]).pytest()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """With several workers (--dist loadgroup) the page's blocks stay on one."""
    for item in items:
        if item.path.name == "README.md":
            item.add_marker(pytest.mark.xdist_group("README.md"))
