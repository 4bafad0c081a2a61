# SPDX-License-Identifier: Apache-2.0
"""The tests that skip without a GPU: tests/gpu."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET

from benchmarks.gpu.place import PartSetup


def main(place: PartSetup) -> None:
    """Run the tests of tests/gpu on the device, write a row of each, and print pytest's
    exit status.
    """
    report = place.folder / "tests.xml"
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE", f"--junitxml={report}",
        "tests/gpu",
    ]  # fmt: skip
    device = os.environ | {"UPREF_TEST_DEVICE": place.device}
    done = subprocess.run(command, check=False, env=device)
    for case in ET.parse(report).getroot().iter("testcase"):
        outcome, message = "passed", ""
        if len(case) > 0:  # it failed, or was skipped
            outcome, message = case[0].tag, (case[0].text or "")[-1500:]
        place.write(
            test=case.get("name"),
            seconds=float(case.get("time", 0)),
            outcome=outcome,
            said=message,
        )
    print(json.dumps({"status": done.returncode}))
