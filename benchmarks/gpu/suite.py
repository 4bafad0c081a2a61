# SPDX-License-Identifier: Apache-2.0
"""The conformance suite on TRL's trainer, whose model and batches are on the GPU."""

from typing import Any

from benchmarks.gpu.place import ROOT, PartSetup
from upref.conformance import Case, Status, cases, run
from upref.conformance.results import read_expected_failures

SHARDS = 4
LEVEL = 3  # the cases of one process
TRIAL = ("objective/dapo", "micro/2/seq-mean")
EXPECTED_ON_CPU = ROOT / "tests/conformance/trl_xfails.toml"


def trl_on(device: str) -> Any:
    """Return upref's adapter of TRL, changed to train on a device.

    Args:
        device: "cuda", or "cpu" for a trial.
    """
    from upref_frameworks.trl import adapter

    class TRLOnDevice(adapter.TRL):
        """GRPOTrainer, told whether to use the CPU."""

        def config(self, case: Case) -> dict[str, Any]:
            """Return the fields of GRPOConfig, with the device."""
            return super().config(case) | {"use_cpu": device == "cpu"}

    return TRLOnDevice()


def main(place: PartSetup, shard: str) -> None:
    """Run a part of the cases, and write a row of each."""
    adapter = trl_on(place.device)
    expected = read_expected_failures(EXPECTED_ON_CPU)
    chosen = cases(LEVEL)[int(shard) :: SHARDS]
    if place.small:
        chosen = [case for case in chosen if case.id in TRIAL]
    for case in chosen:
        with place.row(case=case.id) as row:
            row["status"] = str(Status.COULD_NOT_RUN)  # until it has run
            row["fails_on_cpu"] = case.id in expected
            outcome = run(adapter, case, explain=False)
            row["status"] = str(outcome.status)
            row["said"] = outcome.reason
            if outcome.report is not None:
                row["error"] = outcome.report.error
            if outcome.status is Status.COULD_NOT_RUN:
                row["failed"] = outcome.reason
