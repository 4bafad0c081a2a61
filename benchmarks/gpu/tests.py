# SPDX-License-Identifier: Apache-2.0
"""The tests that skip without a GPU: tests/gpu."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET

from benchmarks.gpu.place import PartSetup


def main(place: PartSetup) -> None:
    report = place.folder / "tests.xml"
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE", f"--junitxml={report}",
        "tests/gpu",
    ]  # fmt: skip
    device = os.environ | {"UPREF_TEST_DEVICE": place.device}
    done = subprocess.run(command, check=False, env=device)
    for case in ET.parse(report).getroot().iter("testcase"):
        kinds = [child.tag for child in case]
        said = [(child.text or "")[-1500:] for child in case]
        place.write(
            test=case.get("name"),
            seconds=float(case.get("time", 0)),
            outcome=kinds[0] if kinds else "passed",
            said=said[0] if said else "",
        )
    print(json.dumps({"status": done.returncode}))
