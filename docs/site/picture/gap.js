// SPDX-License-Identifier: Apache-2.0
// The gap between the two columns: the numbers of upref/replay/gap.py before a cause is undone.

/** d = log ρ = x - y of each token, in nats. */
function gapOf({ x, y }) {
  const n = x.length, d = x.map((value, i) => value - y[i]);
  const mean = (f) => d.reduce((sum, value) => sum + f(value), 0) / n;
  const rho = (value) => Math.exp(Math.min(value, LARGE_EXPONENT));
  return {
    tokens: n,
    mean: mean((v) => v),
    mean_abs: mean(Math.abs),
    largest: d.reduce((most, v) => Math.max(most, Math.abs(v)), 0),
    rho_mean: mean(rho),
    rho_se: Math.sqrt(mean((v) => (rho(v) - 1) ** 2) / n),
    k3: mean((v) => Math.min(Math.expm1(v) - v, 1e12)),
    effective: mean(rho) ** 2 / mean((v) => rho(v) ** 2),
  };
}

/** Probabilities by the trainer and by the sampler, a pair for each token. */
function pointsFrom({ x, y }) {
  return { trainer: x.map(Math.exp), sampler: y.map(Math.exp) };
}

/** The numbers of the tokens that are drawn: all, or so many evenly spread. */
function chosen(count, most) {
  const shown = Math.min(count, most);
  return Array.from({ length: shown }, (_, i) => (shown > 1 ? Math.floor((i * (count - 1)) / (shown - 1)) : 0));
}
