# SPDX-License-Identifier: Apache-2.0
"""Lesson 10's six training runs, with one thing wrong in each but one.

`python -m docs.course.runs` prints them and writes them into the exercise.

A policy that is a table, 32 prompts of 12 answers, 2 of them right; groups of 8, 8
updates on each batch, DAPO's own J. What is logged is what a trainer would log; reward,
entropy and pass@8 are exact, over all answers.
"""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

import upref
import upref_course
from upref import advantages
from upref.files import write_atomically
from upref_course.lessons.reading_a_run import KEY

FILE = Path(upref_course.__file__).parent / "exercises/lesson10.py"
HEAD = "run  batch  reward  entropy  pass@8  signal   r, first update   r, last update   clipped  gradient"
BATCHES, UPDATES, PROMPTS, ANSWERS, G = 41, 8, 32, 12, 8
F64 = torch.float64
DOC_END = '"""'
DAPO = upref.get("dapo")


def group_norm(R: Tensor, group: Tensor) -> Tensor:
    """Return (R - mean) / std over each group, at the defaults of upref.advantages."""
    return advantages.group_norm(R, group)


# what is wrong, by its name in the exercise -> how it is done
WRONG: dict[str, dict] = {
    "nothing": {},
    "sign": {"advantage": lambda R, group: -group_norm(R, group)},
    "no baseline": {"advantage": lambda R, group: R + 3},
    "no signal": {"hard": True},
    "recomputed": {"recompute": True},
    "temperature": {"temperature": 0.7},
}


@cache
def run(name: str) -> list[dict[str, float]]:
    """Return what a run of the exercise logged at each batch; `name` is its letter in
    KEY.
    """
    return train(**WRONG[KEY[name]])


REWARD = (torch.arange(ANSWERS) < 2).to(F64)  # of each answer


def train(
    advantage=group_norm,
    temperature: float = 1.0,
    recompute=False,
    hard=False,
    lr=4.0,
    seed=0,
) -> list[dict[str, float]]:
    """Train a table of logits, and return what is logged at each batch.

    Args:
        advantage: the estimator, of rewards and groups.
        temperature: the trainer's; the sampler's is 1.
        recompute: compute lp_old anew before every update.
        hard: start where hardly any answer is right.
        lr: the learning rate.
        seed: of the start and of the samples.
    """
    generator = torch.Generator().manual_seed(seed)
    z = 1.5 * torch.randn(PROMPTS, ANSWERS, generator=generator, dtype=F64)
    z = z - (9.0 if hard else 1.0) * REWARD
    prompt = torch.arange(PROMPTS).repeat_interleave(G)
    mask = torch.ones(len(prompt), 1, dtype=torch.bool)
    log = []
    for _ in range(BATCHES):
        pi = z.softmax(-1)
        drawn = torch.multinomial(pi, G, replacement=True, generator=generator)
        answer = drawn.reshape(-1)
        metrics = metrics_of_batch(pi, REWARD[drawn])
        lp_sampler = z.log_softmax(-1)[prompt, answer]
        A = advantage(REWARD[answer], prompt)
        clipped, norms, ratios = [], [], []
        for _ in range(UPDATES):
            theta = z.clone().requires_grad_()
            lp = (theta / temperature).log_softmax(-1)[prompt, answer]
            lp_old = lp.detach() if recompute else lp_sampler
            J = DAPO.J(lp[:, None], lp_old[:, None], A[:, None], mask)
            (g,) = torch.autograd.grad(J, theta)
            r = (lp.detach() - lp_old).exp()
            dead = DAPO.weight(r, A) == 0
            clipped.append(float((dead & (A != 0)).sum() / (A != 0).sum().clamp(min=1)))
            norms.append(float(g.norm()))
            ratios.append(float(r.max()))
            z = z + lr * g
        metrics |= {
            "first": ratios[0],
            "last": ratios[-1],
            "clipped": sum(clipped) / UPDATES,
            "norm": sum(norms) / UPDATES,
        }
        log.append(metrics)
    return log


def metrics_of_batch(pi: Tensor, R: Tensor) -> dict[str, float]:
    """Return what is logged of a batch before its updates.

    Args:
        pi: probabilities of the answers [PROMPTS, ANSWERS].
        R: rewards of the samples [PROMPTS, G].
    """
    p = (pi * REWARD).sum(1)
    share = R.mean(1)
    return {
        "reward": float(p.mean()),
        "entropy": float(-(pi * pi.log()).sum(1).mean()),
        "pass@8": float((1 - (1 - p) ** 8).mean()),
        "signal": float(((share > 0) & (share < 1)).double().mean()),
    }


def table(every: int = 8) -> str:
    """Return all runs as text, a row for every so many batches."""
    rows = [HEAD]
    for name in KEY:
        for n, x in list(enumerate(run(name)))[::every]:
            rows.append(
                f"{name:3}  {n:5}  {x['reward']:6.2f}  {x['entropy']:7.2f}  {x['pass@8']:6.2f}  {x['signal']:6.2f}   "
                f"{x['first']:15.3f}   {x['last']:14.3f}   {x['clipped']:7.2f}  {x['norm']:8.3f}"
            )
        rows.append("")
    return "\n".join(rows)


def written(text: str) -> str:
    """Return the text of the exercise with the runs in it, in place of the
    table there.
    """
    head, _, rest = text.partition("without a gradient.\n\n")
    return f'{head}without a gradient.\n\n{table()}"""{rest.partition(DOC_END)[2]}'


def main() -> None:
    """Write the runs into the exercise, and print them."""
    torch.set_num_threads(1)
    write_atomically(FILE, written(FILE.read_text(encoding="utf-8")))
    print(table())


if __name__ == "__main__":
    main()
