# SPDX-License-Identifier: Apache-2.0
"""How often the checker is right: losses written from the registry in the styles of others,
changed by one slip each.

    python -m tests.support.mutants [--mutants N] [--rewritings N] [--seed S] [--scratch
    FOLDER] [--write]

identify is asked about some of them too (naming.py).

An independent search (search.py) says which of the changed losses have another gradient
than their objective anywhere in the declared domain. Each that has must be rejected,
each that has not must be accepted. Nothing in this folder reads the checker's batches
(upref.weights.batches) or its oracles' but for asking them for the verdict.
"""
