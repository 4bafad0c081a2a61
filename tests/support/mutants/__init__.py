# SPDX-License-Identifier: Apache-2.0
"""How often the checker is right: losses written from the registry in the styles of
others, changed by one slip each.

    python -m tests.support.mutants [--mutants N] [--rewritings N] [--seed S] [--scratch
    FOLDER] [--write]

A *mutant* is a loss with one slip in it. A *rewriting* is a loss written in another
way, with the same meaning. A *subject* is one of either, with the objective that it is
meant as. The *search* (search.py) says of each subject whether its gradient is another
than its objective's anywhere in the declared domain: its *truth*. What the checker
answers is its *verdict*. Each subject that differs must be rejected, and each that does
not must be accepted. naming.py puts some subjects to `identify` too.

Nothing in this folder reads the checker's batches (upref.weights.batches) or its
oracles' except to get the verdict.
"""
