# SPDX-License-Identifier: Apache-2.0
"""Which framework corrects for the sampler how: each framework's own function against
`upref.transforms`.

    python -m docs.samplers FOLDER     FOLDER holds owner+name/ at the commits below; writes docs/sampler-corrections.md

A row is a setting of a framework, read in its source, and what its function makes of
random log-probabilities of π_old and of the engine. Of the fetched code nothing but the
function is run.
"""

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

import upref
from docs.fetched import Fetched
from upref import markdown
from upref.files import write_atomically

PAGE = Path(__file__).parent / "sampler-corrections.md"
COMMITS = {
    "verl-project/verl": "1dda039b9c6311889a9c9a26040677e1254814f9",
    "huggingface/trl": "f2cd57710ae345ea6428ae95363267fcf38a3dc8",
    "THUDM/slime": "624b824a898ab0ec1fcb4d373004c7f3852bf515",
    "allenai/open-instruct": "e6c3044aa6201c8bfa4573c1b03142af599e730d",
    "inclusionAI/AReaL": "4aef98d8d818af55b43621aaadba047ae10f4e77",
    "PrimeIntellect-ai/prime-rl": "559b44772e471d1538537b8805cc77f3824a5e64",
}


Batch = dict[str, torch.Tensor]
# a repository and a batch -> the factor of each token
Factors = Callable[[Fetched, Batch], torch.Tensor]


class Row(NamedTuple):
    """A setting of a framework, and what it is in upref.

    Args:
        repo: the repository.
        setting: as the framework writes it.
        default: whether it is the default.
        transform: the transform of upref, or "" where upref has none.
        hp: the hyperparameters of the transform.
        file: the file of the repository that has the setting.
        factors: the framework's own function, if there is one to run.
    """

    repo: str
    setting: str
    default: str
    transform: str
    hp: dict[str, float]
    file: str
    factors: Factors | None = None


# ---- the frameworks' own functions ---------------------------------------------------
def masked_sum(x: torch.Tensor, mask: torch.Tensor, axis=None) -> torch.Tensor:
    """Stand in for verl's function of this name."""
    return (x * mask).sum(axis)


def masked_mean(x: torch.Tensor, mask: torch.Tensor, axis=None) -> torch.Tensor:
    """Stand in for verl's function of this name."""
    return masked_sum(x, mask, axis) / mask.sum(axis)


def no_metrics(**tensors: Any) -> dict:
    """Stand in for a function that computes metrics."""
    return {}


def record(**fields: Any) -> SimpleNamespace:
    """Stand in for a dataclass."""
    return SimpleNamespace(**fields)


def verl(file: str, **settings: Any) -> Factors:
    """Return verl's factors: of rejection where `rollout_rs` is set, else of weights."""
    functions = (
        "_parse_rollout_is_threshold",
        "_parse_rollout_rs_thresholds",
        "compute_rollout_rejection_mask",
        "compute_rollout_correction_weights",
    )
    names = dict(
        SAFETY_BOUND=20.0,
        verl_F=SimpleNamespace(masked_sum=masked_sum, masked_mean=masked_mean),
        Optional=None,
        compute_is_metrics=no_metrics,
        compute_rs_metrics=no_metrics,
        TOKEN_LEVEL_ROLLOUT_RS_OPTIONS={"token_k1", "token_k2", "token_k3"},
        SUPPORTED_ROLLOUT_RS_OPTIONS={"token_k1", "seq_mean_k1", "seq_sum_k1"},
    )

    def factors(repo: Fetched, b: Batch) -> torch.Tensor:
        log_rho, mask = b["old"] - b["engine"], b["mask"].double()
        module = repo.take(file, *functions, **names)
        if "rollout_rs" in settings:
            return module.compute_rollout_rejection_mask(log_rho, mask, **settings)[0]
        return module.compute_rollout_correction_weights(log_rho, mask, **settings)[0]

    return factors


def trl(
    file: str, mode: str, low: float | None = None, high: float | None = 3.0
) -> Factors:
    """Return TRL's factors, from lines in the middle of its trainer."""
    trainer = SimpleNamespace(
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
    )

    def factors(repo: Fetched, b: Batch) -> torch.Tensor:
        names = dict(
            self=trainer,
            old_per_token_logps=b["old"],
            sampling_per_token_logps=b["engine"],
            mask=b["mask"],
        )
        text = (repo.folder / file).read_text(encoding="utf-8").splitlines()
        first = next(i for i, x in enumerate(text) if "per_token_logps_diff = (" in x)
        error = next(
            i
            for i, x in enumerate(text)
            if i > first and "Unknown vLLM importance sampling" in x
        )
        # counted from 1, with the line that closes the raise of the error
        made = repo.lines(file, first + 1, error + 2, **names)
        return made.vllm_importance_sampling_ratio

    return factors


def slime(file: str, name: str, **settings: Any) -> Factors:
    """Return slime's factors, by its function of this name."""

    def factors(repo: Fetched, b: Batch) -> torch.Tensor:
        function = getattr(repo.take(file, name, Namespace=None, Any=None), name)
        loss, *_ = function(
            SimpleNamespace(**settings),
            pg_loss=torch.ones_like(b["old"]),
            train_log_probs=[b["old"]],
            rollout_log_probs=[b["engine"]],
            loss_masks=[b["mask"]],
        )
        return loss

    return factors


def open_instruct(file: str, **settings: Any) -> Factors:
    """Return open-instruct's factors, with its defaults for other settings."""
    functions = ("_rho_drop_masks", "_sequence_level_mean", "compute_rho_correction")
    defaults = dict(
        use_rho_correction=True,
        rho_clamp_lower_bound=0.0,
        rho_clamp_upper_bound=2.0,
        rho_mask_lower_bound=0.0,
        rho_mask_upper_bound=0.0,
        rho_mask_sequence_level=False,
        rho_mask_tv_divergence=False,
    )

    def factors(repo: Fetched, b: Batch) -> torch.Tensor:
        module = repo.take(file, *functions, RhoCorrection=record)
        config = SimpleNamespace(**defaults | settings)
        correction = module.compute_rho_correction(
            b["old"], b["engine"], b["mask"], torch.ones_like(b["old"]), config
        )
        return correction.weights

    return factors


def areal(file: str, **settings: Any) -> Factors:
    """Return AReaL's factors, with its defaults for other settings."""
    functions = ("_check_bounds", "apply_rejection_sampling")
    names = dict(RejectionSamplingResult=record, logger=logging.getLogger("areal"))
    defaults = dict(
        level="token", action="mask", metric="ratio", agg="mean", upper=5.0, lower=None
    )

    def factors(repo: Fetched, b: Batch) -> torch.Tensor:
        module = repo.take(file, *functions, **names)
        config = SimpleNamespace(**defaults | settings)
        result = module.apply_rejection_sampling(
            b["old"], b["engine"], b["mask"].int(), None, config
        )
        return result.behave_imp_weight

    return factors


# repositories, and in each the file of the function
VERL, VERL_FILE = "verl-project/verl", "verl/trainer/ppo/rollout_corr_helper.py"
TRL, TRL_FILE = "huggingface/trl", "trl/trainer/grpo_trainer.py"
SLIME, SLIME_FILE = "THUDM/slime", "slime/backends/megatron_utils/loss.py"
OPEN, OPEN_FILE = "allenai/open-instruct", "open_instruct/grpo_utils.py"
AREAL, AREAL_FILE = "inclusionAI/AReaL", "areal/utils/functional/functional.py"
PRIME, PRIME_FILE = "PrimeIntellect-ai/prime-rl", "src/prime_rl/trainer/rl/loss.py"
DEFAULT, NO_CORRECTION = "default", "default: no correction"
SEQUENCE_MODE = "vllm_importance_sampling_mode=sequence_"
TOKEN_MODE = "vllm_importance_sampling_mode=token_"
ROWS = [
    Row(
        VERL,
        "rollout_correction.rollout_is=null, rollout_rs=null",
        NO_CORRECTION,
        "",
        {},
        "verl/trainer/config/algorithm/rollout_correction.yaml",
    ),
    Row(
        VERL,
        "rollout_is=token, rollout_is_threshold=2.0",
        "threshold: 2.0",
        "tis",
        {"is_max": 2.0},
        VERL_FILE,
        verl(VERL_FILE, rollout_is="token", rollout_is_threshold=2.0),
    ),
    Row(
        VERL,
        "rollout_is=sequence",
        "",
        "tis_seq",
        {"is_max": 2.0},
        VERL_FILE,
        verl(VERL_FILE, rollout_is="sequence", rollout_is_threshold=2.0),
    ),
    Row(
        VERL,
        "rollout_is=token, rollout_is_threshold=0.5_5.0",
        "",
        "icepop",
        {"is_min": 0.5, "is_max": 5.0},
        VERL_FILE,
        verl(VERL_FILE, rollout_is="token", rollout_is_threshold="0.5_5.0"),
    ),
    Row(
        VERL,
        "rollout_rs=seq_mean_k1, rollout_rs_threshold=0.9_1.2 (bounds of 1/s)",
        "",
        "seq_mask",
        {"is_min": 1 / 1.2, "is_max": 1 / 0.9},
        VERL_FILE,
        verl(VERL_FILE, rollout_rs="seq_mean_k1", rollout_rs_threshold="0.9_1.2"),
    ),
    Row(
        TRL,
        SEQUENCE_MODE + "mask, clip_max=3.0",
        DEFAULT,
        "mis_seq",
        {"is_max": 3.0},
        "trl/trainer/grpo_config.py",
        trl(TRL_FILE, "sequence_mask"),
    ),
    Row(
        TRL,
        SEQUENCE_MODE + "truncate",
        "",
        "tis_seq",
        {"is_max": 3.0},
        TRL_FILE,
        trl(TRL_FILE, "sequence_truncate"),
    ),
    Row(
        TRL,
        TOKEN_MODE + "truncate",
        "",
        "tis",
        {"is_max": 3.0},
        TRL_FILE,
        trl(TRL_FILE, "token_truncate"),
    ),
    Row(
        TRL,
        TOKEN_MODE + "mask",
        "",
        "mis",
        {"is_max": 3.0},
        TRL_FILE,
        trl(TRL_FILE, "token_mask"),
    ),
    Row(
        TRL,
        TOKEN_MODE + "mask, clip_min=0.5, clip_max=5.0",
        "",
        "icepop",
        {"is_min": 0.5, "is_max": 5.0},
        TRL_FILE,
        trl(TRL_FILE, "token_mask", 0.5, 5.0),
    ),
    Row(SLIME, "use_tis off", NO_CORRECTION, "", {}, "slime/utils/arguments.py"),
    Row(
        SLIME,
        "--use-tis, tis_clip=2.0, tis_clip_low=0",
        "bounds: 0, 2.0",
        "tis",
        {"is_max": 2.0},
        SLIME_FILE,
        slime(SLIME_FILE, "vanilla_tis_function", tis_clip=2.0, tis_clip_low=0),
    ),
    Row(
        SLIME,
        "icepop_function, tis_clip_low=0.5, tis_clip=5.0",
        "",
        "icepop",
        {"is_min": 0.5, "is_max": 5.0},
        SLIME_FILE,
        slime(SLIME_FILE, "icepop_function", tis_clip=5.0, tis_clip_low=0.5),
    ),
    Row(
        OPEN,
        "use_rho_correction=True, rho_clamp_upper_bound=2.0",
        DEFAULT,
        "tis",
        {"is_max": 2.0},
        OPEN_FILE,
        open_instruct(OPEN_FILE),
    ),
    Row(
        OPEN,
        "rho_mask_lower_bound=0.5, rho_mask_upper_bound=5.0, no clamp",
        "",
        "icepop",
        {"is_min": 0.5, "is_max": 5.0},
        OPEN_FILE,
        open_instruct(
            OPEN_FILE,
            rho_clamp_upper_bound=0.0,
            rho_mask_lower_bound=0.5,
            rho_mask_upper_bound=5.0,
        ),
    ),
    Row(
        AREAL,
        "use_decoupled_loss=False",
        NO_CORRECTION,
        "",
        {},
        "areal/api/cli_args.py",
    ),
    Row(
        AREAL,
        "use_decoupled_loss=True, rejection_sampling=null",
        "then the default",
        "decoupled",
        {},
        "areal/api/cli_args.py",
    ),
    Row(
        AREAL,
        "use_decoupled_loss=True, rejection_sampling: {}",
        "its upper: 5.0",
        "mis",
        {"is_max": 5.0},
        AREAL_FILE,
        areal(AREAL_FILE),
    ),
    Row(
        PRIME,
        "type=default: π_old is μ, DPPO bounds π_θ-μ",
        DEFAULT,
        "",
        {},
        PRIME_FILE,
    ),
]


# ---- the comparison ------------------------------------------------------------------
def batch(seed: int = 0) -> Batch:
    """Return log-probabilities of 64 responses of up to 9 tokens; ρ near 1 in a third
    of them, up to e^±2 in another.
    """
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(64, 9, generator=g, dtype=torch.float64) * 4 - 2.5
    spreads = torch.tensor([0.01, 0.2, 1.0], dtype=torch.float64)
    log_rho = spreads[torch.arange(64) % 3, None] * torch.randn(
        64, 9, generator=g, dtype=torch.float64
    )
    return {
        "old": old,
        "engine": (old - log_rho).clamp(max=-1e-3),
        "mask": torch.arange(9) < torch.randint(1, 10, (64, 1), generator=g),
    }


def largest_difference(row: Row, folder: Path) -> float:
    """Return the largest difference of a framework's factors from upref's, on tokens of
    the mask.

    Args:
        row: the setting; it has factors.
        folder: holds the repositories.
    """
    b = batch()
    expected = upref.get(f"{row.transform}(reinforce)").sampler_weights(
        b["old"], b["engine"], b["mask"], **row.hp
    )
    repo = Fetched(folder / row.repo.replace("/", "+"))
    factors = row.factors(repo, b).expand_as(expected)
    return (factors.double() - expected)[b["mask"]].abs().max().item()


def page(folder: Path) -> str:
    """Return the table of all settings; the folder holds the repositories."""
    rows = []
    for row in ROWS:
        name = row.repo.partition("/")[2]
        link = f"https://github.com/{row.repo}/blob/{COMMITS[row.repo]}/{row.file}"
        in_upref = f"`{row.transform}(X)`" if row.transform else "none"
        for hyperparameter, value in row.hp.items():
            in_upref += f", {hyperparameter}={value:.4g}"
        difference = "read"
        if row.factors:
            difference = f"{largest_difference(row, folder):.0e}"
        cells = (
            f"[{name}]({link})",
            f"`{row.setting}`",
            row.default,
            in_upref,
            difference,
        )
        rows.append(cells)
    columns = ["framework", "setting", "default", "in upref", "difference"]
    return markdown.table(columns, rows)


def main():
    """Write the table into its page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "folder", type=Path, help="where owner+name/ of each repository is"
    )
    folder = parser.parse_args().folder
    start = "<!-- the table of python -m docs.samplers -->\n"
    end = "\n<!-- end -->"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(start)
    after = rest.partition(end)[2]
    write_atomically(PAGE, before + start + page(folder) + end + after)


if __name__ == "__main__":
    main()
