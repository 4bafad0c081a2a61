# SPDX-License-Identifier: Apache-2.0
"""What a step is checked on: the rows and the model.

In: the user's rows and model, or none of them.
Out: validated rows, a `Row` per response and one `Padded` batch of them, and a `Model`
that computes its logits in float64, one row at a time.
First file: rows.py.
"""
