# SPDX-License-Identifier: Apache-2.0
"""README.md's Python blocks are tests: they run in order, in one namespace."""

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser()], patterns=["README.md"]).pytest()
