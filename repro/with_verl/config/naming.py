# SPDX-License-Identifier: Apache-2.0
"""A run's name: what was asked, the readable part first."""

import hashlib
import json
import re

from repro.with_verl.config.model import revision_of

# Settings that may change from one start of a run to the next: they do not change what
# is trained.
FREE = (
    "hydra.",
    "ray_kwargs.",
    "trainer.default_local_dir",
    "trainer.experiment_name",
    "trainer.logger",
    "trainer.max_actor_ckpt_to_keep",
    "trainer.project_name",
    "trainer.rollout_data_dir",
    "trainer.save_freq",
    "reward.num_workers",
    "actor_rollout_ref.model.override_config.attn_implementation",
)
CACHED = re.compile(r"/models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})/?\W?$")
# by data.seed
SAID_ALREADY = (
    "actor_rollout_ref.rollout.seed",
    "actor_rollout_ref.actor.data_loader_seed",
)


def asked(overrides: list[str]) -> dict[str, str]:
    """Return setting -> value, the last one given, without the settings of FREE: two
    runs for which these are equal train the same.
    """
    pairs = (line.lstrip("+").partition("=") for line in overrides)
    return {key: model_of(value) for key, _, value in pairs if not key.startswith(FREE)}


def model_of(value: str) -> str:
    """Return REPOSITORY/NAME for a path in the hub's cache, with @COMMIT where that is
    not the pinned one. Return any other text as it is.
    """
    found = CACHED.search(value)
    if not found:
        return value
    name, revision = f"{found[1]}/{found[2]}", found[3]
    return name if revision == revision_of(name) else f"{name}@{revision}"


def name_of(first: str, own: list[str], given: list[str]) -> str:
    """Return the name of a run's folder, such as up_dapo-paper_dapo-seed3-1f2e3d4c.

    Args:
        first: objective and scale, the beginning of the name.
        own: the scale's lines, before folders are filled in.
        given: the user's lines. Short ones are in the name; all are in the hash at its
            end.
    """
    digest = hashlib.sha256(
        json.dumps([first, *sorted(asked([*own, *given]).items())]).encode()
    ).hexdigest()[:8]
    short = {
        k: v
        for k, v in asked(given).items()
        if k not in SAID_ALREADY and "/" not in v and "[" not in v
    }
    said = [f"{key.rpartition('.')[2]}{value}" for key, value in sorted(short.items())]
    readable = re.sub(r"[^\w.=-]+", "_", "-".join([first, *said]))[:80].strip("-_.")
    return f"{readable}-{digest}"
