# SPDX-License-Identifier: Apache-2.0
"""One objective, from proof to picture: what `repro/run.sh OBJECTIVE` runs. Writes
repro/out/OBJECTIVE/.

Each step takes the objective and returns whether it holds, and a sentence for the
report. Some print what they do.
"""

import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console

import upref
from upref.derivation import derive
from upref.files import write_atomically
from upref.rollouts import autograd_gradient
from upref.weights.batches import batch
from upref_frameworks import audits

ROOT = Path(__file__).parent
say = Console(highlight=False, soft_wrap=True).print


def proof(o: upref.Objective) -> tuple[bool, str]:
    """Derive the weight by sympy from the very function that trains, and print it."""
    derivation = derive(o)
    say(f"{derivation}\n", markup=False)
    return (
        derivation.ok,
        "dJ/dlp derived by sympy equals the weight written by hand, regime by regime",
    )


def claims(_: upref.Objective) -> tuple[bool, str]:
    """Run the scripts of derivations/, each of which derives a claim of the paper; a
    false one ends with a status that is not 0.
    """
    scripts = sorted((ROOT.parent / "derivations").glob("*.py"))
    # these two derive nothing: one writes the page, the others import the second
    scripts = [s for s in scripts if s.name not in ("make_page.py", "weights.py")]
    ok = True
    for script in scripts:
        run = subprocess.run(
            [sys.executable, script], capture_output=True, text=True, check=False
        )
        ok &= run.returncode == 0
        say(
            f"  {'holds' if run.returncode == 0 else 'FAILS':6} {script.stem}",
            markup=False,
        )
    return ok, f"{len(scripts)} claims of the paper derived (derivations/README.md)"


def gradients(o: upref.Objective) -> tuple[bool, str]:
    """Compare autograd with weight x aggregation over the regime grid, and with UP of
    the base where the objective is one.
    """
    b = batch(o)
    expected = o.gradient(b)
    largest = (autograd_gradient(o, b) - expected).abs().max()
    error = (largest / expected.abs().max()).item()
    text = f"autograd = weight x aggregation on {int(b.mask.sum())} tokens, off by {error:.1e} (float64)"
    ok = error <= 1e-12  # rounding of float64 is below
    base = o.name.removeprefix("up_")
    if base != o.name and base in upref.names():
        of_base = autograd_gradient(upref.up(upref.get(base)), b)
        same = torch.equal(of_base, autograd_gradient(o, b))
        ok = ok and same
        text += f"; up({base}) {'is' if same else 'IS NOT'} {o.name}, bit for bit"
    return ok, text


def plugged(o: upref.Objective) -> tuple[bool, str]:
    """Compare the gradient of the loss that verl calls with the reference's, which must
    be equal to the bit.
    """
    from verl.workers.config import ActorConfig

    from upref_frameworks.verl.training import register

    b = batch(o)
    config = ActorConfig(strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=1)
    loss = register(o)

    def zero_if_masked(x):
        return x.masked_fill(~b.mask, 0)

    found = autograd_gradient(
        lambda x: (
            -loss(
                zero_if_masked(b.logp_old),
                x.logp,
                zero_if_masked(b.adv),
                b.mask,
                "",
                config,
            )[0]
        ),
        b,
    )
    expected = autograd_gradient(lambda x: o.J(x.logp, x.logp_old, x.adv, x.mask), b)
    error = (found - expected).abs().max().item()
    return (
        error == 0,
        f"verl's loss_mode=upref/{o.name} gives the reference's gradient, off by {error:.1e}",
    )


def audit(_: upref.Objective) -> tuple[bool, str]:
    """Compare verl's and TRL's own losses with the papers, and print the tables."""
    tables = [audits.audit(framework) for framework in ("verl", "trl")]
    for table in tables:
        Console(width=160).print(table)
    return (
        all(tables),
        "every difference of verl's and TRL's losses has a name, a number and an entry (tables above)",
    )


def maps(o: upref.Objective) -> tuple[bool, str]:
    """Draw Cap and weights of the objective, beside its base if it has one; the sentence
    names the files.

    Raises:
        InputError: the objective has no map.
    """
    from figures.make import save
    from upref.weights.plots import cap_map, weights

    out = ROOT / "out" / o.name
    base = o.name.removeprefix("up_")
    pair = [base, o.name] if base != o.name and base in upref.names() else [o.name]
    save(cap_map(*pair, adv=+1), out / "cap_positive.svg")
    save(cap_map(*pair, adv=-1), out / "cap_negative.svg")
    save(weights(*pair), out / "weights.svg")
    return (
        True,
        f"drawn: {', '.join(str(p.relative_to(ROOT.parent)) for p in sorted(out.glob('*.svg')))}",
    )


STEPS = {
    "proof": proof,
    "claims": claims,
    "gradients": gradients,
    "plug-in": plugged,
    "audit": audit,
    "maps": maps,
}


def main(name: str) -> int:
    """Run all STEPS on an objective; print and write the report.

    A step that cannot run on this objective does not count.

    Returns:
        0; 1 if a step failed; 2 if there is no such objective, or no folder for the
        report.
    """
    try:
        o = upref.get(name)
        out = ROOT / "out" / o.name
        out.mkdir(parents=True, exist_ok=True)
    except (upref.InputError, OSError) as error:
        print(f"run.sh: {error}", file=sys.stderr)
        return 2
    lines, well = [], True
    for i, (title, step) in enumerate(STEPS.items(), 1):
        say(f"[bold]\\[{i}/{len(STEPS)}] {title}[/bold]")
        start = time.perf_counter()
        try:
            ok, text = step(o)
        except (
            upref.InputError
        ) as error:  # an objective that has no map, or that verl cannot feed
            ok, text = True, f"not for {o.name}: {error}"
        well &= ok
        lines.append(
            f"{'ok    ' if ok else 'FAILED'}  {title:10} {text}  ({time.perf_counter() - start:.0f} s)"
        )
    report = "\n".join([f"{o.name}: {o.equation}", "", *lines])
    write_atomically(out / "report.txt", report + "\n")
    say(f"\n{report}\n\nTo train it: bash repro/run.sh {o.name}.", markup=False)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
