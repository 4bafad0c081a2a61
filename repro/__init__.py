# SPDX-License-Identifier: Apache-2.0
from upref import interrupt

interrupt.handled()
