# SPDX-License-Identifier: Apache-2.0
"""The table of docs/howto/tokens-teachers-critics.md: what each estimator of tokens and
turns takes, read from the code.
"""

from upref import markdown
from upref.token_advantages import TOKEN_ADVANTAGES
from upref.verify.formulas.token_faults import SETTINGS
from upref.verify.formulas.tokens import OPTIONAL, READS


def token_advantages() -> str:
    """Each estimator with the arguments and settings that it has."""
    rows = []
    for name, estimator in TOKEN_ADVANTAGES.items():
        summary = (estimator.__doc__ or "").partition("\n")[0].removeprefix("Return ")
        arguments = ", ".join(
            f"`{role}`" + (" (optional)" if role in OPTIONAL else "")
            for role in READS[name]
        )
        settings = ", ".join(f"`{key}`" for key in SETTINGS[name])
        rows.append([f"`{name}`", summary, arguments, settings])
    return markdown.table(["`--as-advantage`", "A", "arguments", "settings"], rows)
