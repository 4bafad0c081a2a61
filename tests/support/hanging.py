# SPDX-License-Identifier: Apache-2.0
"""The deadline of tests that wait for other processes."""

# Seconds. It only guards against hanging: a busy machine imports torch for minutes.
HANGING = 1800
