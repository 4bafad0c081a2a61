// SPDX-License-Identifier: Apache-2.0
// A softmax policy over a few tokens under the expected objective, plain ascent, as in repro/exact:
//
//     z += lr Σ_a π_old(a) w(r_a, A_a) (e_a - π),   r = π/π_old;  a new π_old after every k updates (0: never)
//
// What happens to log π of one token is linear in the gradient, so it is its own push plus those of the others.

function softmax(z) {
  const top = Math.max(...z), e = z.map(x => Math.exp(x - top)), sum = e.reduce((a, b) => a + b);
  return e.map(x => x / sum);
}

/** n + 1 states: { p, r (against the first π_old), live, own, others }; own and others add up what pushed log π. */
function flowPath(name, hp, { mu, A, lr, k, n }) {
  const w = weigher(name, hp), states = [];
  let z = mu.map(Math.log), old = mu, own = mu.map(() => 0), others = mu.map(() => 0);
  for (let t = 0; t <= n; t++) {
    const p = softmax(z);
    if (k && t && t % k === 0) old = p;
    const weights = p.map((x, a) => w(x / old[a], A[a], old[a]));
    states.push({ p, r: p.map((x, a) => x / mu[a]), live: weights.map(x => x !== 0), own, others });
    const g = weights.map((x, a) => old[a] * x), G = g.reduce((a, b) => a + b), square = p.reduce((s, x) => s + x * x, 0);
    const push = (a, c) => lr * g[c] * ((a === c) - p[a] - p[c] + square);  // on log p_a, by the rows of c
    const mine = p.map((_, a) => push(a, a)), all = p.map((_, a) => p.reduce((s, _, c) => s + push(a, c), 0));
    own = own.map((x, a) => x + mine[a]);
    others = others.map((x, a) => x + all[a] - mine[a]);
    z = z.map((x, a) => x + lr * (g[a] - p[a] * G));
  }
  return states;
}

/** Where UP rests if π_old stays: π_old A+, normalised; null where no A is positive. */
function restOfUp(mu, A) {
  const goal = mu.map((m, a) => m * Math.max(A[a], 0)), sum = goal.reduce((a, b) => a + b);
  return sum > 0 ? goal.map(x => x / sum) : null;
}

/** Advantages as group_norm gives them in an infinite group: centred and scaled under π_old. */
function groupNorm(mu, A) {
  const mean = mu.reduce((s, m, a) => s + m * A[a], 0), sd = Math.sqrt(mu.reduce((s, m, a) => s + m * (A[a] - mean) ** 2, 0));
  return sd > 1e-12 ? A.map(x => +((x - mean) / sd).toFixed(3)) : A.map(() => 0);
}

/** Who takes the mass, in a sentence: of the clipped token that the others carried furthest, else of none. */
function flowWords(states, t, A, names) {
  const s = states[t], stopped = s.live.map((live, a) => !live && A[a] !== 0 ? a : -1).filter(a => a >= 0);
  if (t === 0) return "Every token stands at π_old. Move the slider, or play.";
  if (!stopped.length) return "No token is clipped here: each has a gradient of its own.";
  const a = stopped.reduce((best, x) => Math.abs(s.others[x]) > Math.abs(s.others[best]) ? x : best);
  const way = s.others[a] > 0 ? "up" : "down", list = stopped.map(x => names[x]).join(", ");
  const verb = stopped.length > 1 ? "are" : "is";
  return `${list} ${verb} clipped. ${names[a]} is at ${num(s.r[a])} times π_old: its own gradient gave log π ` +
    `${signed(s.own[a])}, the others' ${signed(s.others[a])}, which goes on pushing it ${way}.`;
}

function signed(x) {
  return (x > 0 ? "+" : "") + num(Math.abs(x) < 5e-4 ? 0 : x, 2);
}
