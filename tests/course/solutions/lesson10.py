# SPDX-License-Identifier: Apache-2.0


def diagnosis(run):
    return {
        "A": "temperature",
        "B": "no baseline",
        "C": "nothing",
        "D": "recomputed",
        "E": "no signal",
        "F": "sign",
    }[run]
