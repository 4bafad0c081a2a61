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
from docs.in_the_wild.fetched import Fetched
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


class Row(NamedTuple):
    """A setting: what it is called there, whether it is the default, what it is here,
    the file that says so.
    """

    repo: str
    setting: str
    default: str
    ours: str  # a transform, or "" where upref has none
    hp: dict[str, float]
    file: str
    run: Callable[[Fetched, dict[str, torch.Tensor]], torch.Tensor] | None = None


# ---- the frameworks' own functions ---------------------------------------------------
def verl(file: str, **settings: Any):
    masked_sum = lambda x, m, axis=None: (x * m).sum(axis)
    masked_mean = lambda x, m, axis=None: (x * m).sum(axis) / m.sum(axis)
    given = dict(
        SAFETY_BOUND=20.0,
        verl_F=SimpleNamespace(masked_sum=masked_sum, masked_mean=masked_mean),
        Optional=None,
        compute_is_metrics=lambda **k: {},
        compute_rs_metrics=lambda **k: {},
        TOKEN_LEVEL_ROLLOUT_RS_OPTIONS={"token_k1", "token_k2", "token_k3"},
        SUPPORTED_ROLLOUT_RS_OPTIONS={"token_k1", "seq_mean_k1", "seq_sum_k1"},
    )

    def run(repo: Fetched, b):
        log_rho, mask = b["old"] - b["engine"], b["mask"].double()
        names = (
            "_parse_rollout_is_threshold",
            "_parse_rollout_rs_thresholds",
            "compute_rollout_rejection_mask",
            "compute_rollout_correction_weights",
        )
        theirs = repo.take(file, *names, **given)
        if "rollout_rs" in settings:
            return theirs.compute_rollout_rejection_mask(log_rho, mask, **settings)[0]
        return theirs.compute_rollout_correction_weights(log_rho, mask, **settings)[0]

    return run


def trl(file: str, mode: str, low: float | None = None, high: float | None = 3.0):
    def run(repo: Fetched, b):
        text = (repo.folder / file).read_text(encoding="utf-8").splitlines()
        first = next(i for i, x in enumerate(text) if "per_token_logps_diff = (" in x)
        last = (
            next(
                i
                for i, x in enumerate(text)
                if i > first and "Unknown vLLM importance sampling" in x
            )
            + 1
        )
        settings = {"mode": mode, "clip_min": low, "clip_max": high}
        me = SimpleNamespace(
            **{f"vllm_importance_sampling_{k}": v for k, v in settings.items()}
        )
        given = dict(
            self=me,
            old_per_token_logps=b["old"],
            sampling_per_token_logps=b["engine"],
            mask=b["mask"],
        )
        return repo.lines(
            file, first + 1, last + 1, **given
        ).vllm_importance_sampling_ratio

    return run


def slime(file: str, name: str, **settings: Any):
    def run(repo: Fetched, b):
        theirs = getattr(repo.take(file, name, Namespace=None, Any=None), name)
        lists = dict(
            train_log_probs=[b["old"]],
            rollout_log_probs=[b["engine"]],
            loss_masks=[b["mask"]],
        )
        return theirs(
            SimpleNamespace(**settings), pg_loss=torch.ones_like(b["old"]), **lists
        )[0]

    return run


def open_instruct(file: str, **settings: Any):
    defaults = dict(
        use_rho_correction=True,
        rho_clamp_lower_bound=0.0,
        rho_clamp_upper_bound=2.0,
        rho_mask_lower_bound=0.0,
        rho_mask_upper_bound=0.0,
        rho_mask_sequence_level=False,
        rho_mask_tv_divergence=False,
    )

    def run(repo: Fetched, b):
        names = ("_rho_drop_masks", "_sequence_level_mean", "compute_rho_correction")
        theirs = repo.take(file, *names, RhoCorrection=lambda **k: SimpleNamespace(**k))
        config = SimpleNamespace(**defaults | settings)
        return theirs.compute_rho_correction(
            b["old"], b["engine"], b["mask"], torch.ones_like(b["old"]), config
        ).weights

    return run


def areal(file: str, **settings: Any):
    defaults = dict(
        level="token", action="mask", metric="ratio", agg="mean", upper=5.0, lower=None
    )

    def run(repo: Fetched, b):
        given = dict(
            RejectionSamplingResult=lambda **k: SimpleNamespace(**k),
            logger=logging.getLogger("areal"),
        )
        theirs = repo.take(file, "_check_bounds", "apply_rejection_sampling", **given)
        config = SimpleNamespace(**defaults | settings)
        return theirs.apply_rejection_sampling(
            b["old"], b["engine"], b["mask"].int(), None, config
        ).behave_imp_weight

    return run


VERL, TRL = "verl/trainer/ppo/rollout_corr_helper.py", "trl/trainer/grpo_trainer.py"
SLIME, OPEN = "slime/backends/megatron_utils/loss.py", "open_instruct/grpo_utils.py"
AREAL, PRIME = "areal/utils/functional/functional.py", "src/prime_rl/trainer/rl/loss.py"
_v, _t, _s, _o, _a = (
    "verl-project/verl",
    "huggingface/trl",
    "THUDM/slime",
    "allenai/open-instruct",
    "inclusionAI/AReaL",
)
DEFAULT, NO_CORRECTION = "default", "default: no correction"
SEQ, MODE = (
    "vllm_importance_sampling_mode=sequence_",
    "vllm_importance_sampling_mode=token_",
)
ROWS = [
    Row(
        _v,
        "rollout_correction.rollout_is=null, rollout_rs=null",
        NO_CORRECTION,
        "",
        {},
        "verl/trainer/config/algorithm/rollout_correction.yaml",
    ),
    Row(
        _v,
        "rollout_is=token, rollout_is_threshold=2.0",
        "threshold: 2.0",
        "tis",
        {"is_max": 2.0},
        VERL,
        verl(VERL, rollout_is="token", rollout_is_threshold=2.0),
    ),
    Row(
        _v,
        "rollout_is=sequence",
        "",
        "tis_seq",
        {"is_max": 2.0},
        VERL,
        verl(VERL, rollout_is="sequence", rollout_is_threshold=2.0),
    ),
    Row(
        _v,
        "rollout_is=token, rollout_is_threshold=0.5_5.0",
        "",
        "icepop",
        {"is_min": 0.5, "is_max": 5.0},
        VERL,
        verl(VERL, rollout_is="token", rollout_is_threshold="0.5_5.0"),
    ),
    Row(
        _v,
        "rollout_rs=seq_mean_k1, rollout_rs_threshold=0.9_1.2 (bounds of 1/s)",
        "",
        "seq_mask",
        {"is_min": 1 / 1.2, "is_max": 1 / 0.9},
        VERL,
        verl(VERL, rollout_rs="seq_mean_k1", rollout_rs_threshold="0.9_1.2"),
    ),
    Row(
        _t,
        SEQ + "mask, clip_max=3.0",
        DEFAULT,
        "mis_seq",
        {"is_max": 3.0},
        "trl/trainer/grpo_config.py",
        trl(TRL, "sequence_mask"),
    ),
    Row(
        _t,
        SEQ + "truncate",
        "",
        "tis_seq",
        {"is_max": 3.0},
        TRL,
        trl(TRL, "sequence_truncate"),
    ),
    Row(
        _t,
        MODE + "truncate",
        "",
        "tis",
        {"is_max": 3.0},
        TRL,
        trl(TRL, "token_truncate"),
    ),
    Row(_t, MODE + "mask", "", "mis", {"is_max": 3.0}, TRL, trl(TRL, "token_mask")),
    Row(
        _t,
        MODE + "mask, clip_min=0.5, clip_max=5.0",
        "",
        "icepop",
        {"is_min": 0.5, "is_max": 5.0},
        TRL,
        trl(TRL, "token_mask", 0.5, 5.0),
    ),
    Row(_s, "use_tis off", NO_CORRECTION, "", {}, "slime/utils/arguments.py"),
    Row(
        _s,
        "--use-tis, tis_clip=2.0, tis_clip_low=0",
        "bounds: 0, 2.0",
        "tis",
        {"is_max": 2.0},
        SLIME,
        slime(SLIME, "vanilla_tis_function", tis_clip=2.0, tis_clip_low=0),
    ),
    Row(
        _s,
        "icepop_function, tis_clip_low=0.5, tis_clip=5.0",
        "",
        "icepop",
        {"is_min": 0.5, "is_max": 5.0},
        SLIME,
        slime(SLIME, "icepop_function", tis_clip=5.0, tis_clip_low=0.5),
    ),
    Row(
        _o,
        "use_rho_correction=True, rho_clamp_upper_bound=2.0",
        DEFAULT,
        "tis",
        {"is_max": 2.0},
        OPEN,
        open_instruct(OPEN),
    ),
    Row(
        _o,
        "rho_mask_lower_bound=0.5, rho_mask_upper_bound=5.0, no clamp",
        "",
        "icepop",
        {"is_min": 0.5, "is_max": 5.0},
        OPEN,
        open_instruct(
            OPEN,
            rho_clamp_upper_bound=0.0,
            rho_mask_lower_bound=0.5,
            rho_mask_upper_bound=5.0,
        ),
    ),
    Row(_a, "use_decoupled_loss=False", NO_CORRECTION, "", {}, "areal/api/cli_args.py"),
    Row(
        _a,
        "use_decoupled_loss=True, rejection_sampling=null",
        "then the default",
        "decoupled",
        {},
        "areal/api/cli_args.py",
    ),
    Row(
        _a,
        "use_decoupled_loss=True, rejection_sampling: {}",
        "its upper: 5.0",
        "mis",
        {"is_max": 5.0},
        AREAL,
        areal(AREAL),
    ),
    Row(
        "PrimeIntellect-ai/prime-rl",
        "type=default: π_old is μ, DPPO bounds π_θ-μ",
        DEFAULT,
        "",
        {},
        PRIME,
    ),
]


# ---- the comparison ------------------------------------------------------------------
def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Log-probabilities of 64 responses of up to 9 tokens; ρ near 1 in a third of them,
    up to e^±2 in another.
    """
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(64, 9, generator=g, dtype=torch.float64) * 4 - 2.5
    spread = torch.tensor([0.01, 0.2, 1.0], dtype=torch.float64)[
        torch.arange(64) % 3, None
    ]
    engine = (
        old - spread * torch.randn(64, 9, generator=g, dtype=torch.float64)
    ).clamp(max=-1e-3)
    return {
        "old": old,
        "engine": engine,
        "mask": torch.arange(9) < torch.randint(1, 10, (64, 1), generator=g),
    }


def apart(row: Row, folder: Path) -> float:
    """The largest difference of a factor, on tokens of the mask."""
    b = batch()
    ours = upref.get(f"{row.ours}(reinforce)").sampler_weights(
        b["old"], b["engine"], b["mask"], **row.hp
    )
    theirs = row.run(Fetched(folder / row.repo.replace("/", "+")), b).expand_as(ours)
    return (theirs.double() - ours)[b["mask"]].abs().max().item()


def page(folder: Path) -> str:
    lines = []
    for row in ROWS:
        link = f"https://github.com/{row.repo}/blob/{COMMITS[row.repo]}/{row.file}"
        far = f"{apart(row, folder):.0e}" if row.run else "read"
        hp = ", ".join(f"{k}={v:.4g}" for k, v in row.hp.items())
        ours = f"`{row.ours}(X)`" + (f", {hp}" if hp else "") if row.ours else "none"
        name = row.repo.partition("/")[2]
        lines.append(
            f"| [{name}]({link}) | `{row.setting}` | {row.default} | {ours} | {far} |"
        )
    return "\n".join(
        [
            "| framework | setting | default | in upref | difference |",
            "|---|---|---|---|---|",
            *lines,
        ]
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "folder", type=Path, help="where owner+name/ of each repository is"
    )
    text, start, end = (
        PAGE.read_text(encoding="utf-8"),
        "<!-- the table of python -m docs.samplers -->\n",
        "\n<!-- end -->",
    )
    before, _, rest = text.partition(start)
    after = rest.partition(end)[2]
    write_atomically(
        PAGE, before + start + page(parser.parse_args().folder) + end + after
    )


if __name__ == "__main__":
    main()
