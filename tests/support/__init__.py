# SPDX-License-Identifier: Apache-2.0
"""What several tests share: the laws, the zoo, the mutants, the fuzzer."""
