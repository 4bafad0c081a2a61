# SPDX-License-Identifier: Apache-2.0
"""Training loops of thirteen public repositories, each checked by `check_step`.

`python -m tests.trainers FOLDER` reads checkouts and fetches nothing.
"""
