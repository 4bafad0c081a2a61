# SPDX-License-Identifier: Apache-2.0
"""How `upref check` ends where a loss does not just answer: name of the loss in
tests/verify/test_guard.py -> (what it does, exit status, what stderr says, whether
stdout has a report). docs/what-check-sees.md prints this table."""

COMMAND = {
    "leaves": ("it calls os._exit(0), at whichever call", 2, "ends the program (Ended)", False),
    "leaves_by_c": ("C code ends the process with status 0", 2, "ended the process with exit status 0 before", False),
    "crashes": ("it crashes", 2, "died of signal 11 before", False),
    "loops": ("it does not end", 2, "timed out after 12 s", False),
    "exits": ("it calls sys.exit(0), at whichever call", 2, "ends the program (SystemExit)", False),
    "asks": ("it asks for more memory than there is, at whichever call", 2, "more memory than there is", False),
    "stumbles": ("it raises an exception at one call alone", 2, "it has no one answer", False),
    "shouts": ("it writes to file descriptor 1", 0, "shouted", True),
    "later": ("it registers os._exit for the end of the process", 0, "printed at import", True),
    "forks": ("it forks", 0, "printed at import", True),
    "stays": ("it leaves a process running, in a session of its own too", 0, "printed at import", True),
    "garbles": ("it writes into every open pipe", 2, "garbled the report", False),
    "forges": ("it writes a report of its own into every open pipe", 2, "garbled the report", False),
    "stops": ("it writes half a message into every open pipe, and does not end", 2, "timed out after 12 s", False),
    "writes": ("it writes into its inputs", 1, "printed at import", True),
    "wrong": ("it is wrong", 1, "printed at import", True),
}  # fmt: skip
