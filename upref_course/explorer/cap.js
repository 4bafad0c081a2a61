// SPDX-License-Identifier: Apache-2.0
// Probability Capacity, read off a weight as upref/weights/capacity.py reads it:
//
//     Cap(p, mu) = |p* - p|,  p* the first probability in the direction of the update from which on dJ/dlp = 0
//
// The weights themselves stand in OBJECTIVES, printed by sympy.

const HAIR = 1e-12, FAINT = 1e-10, TINY = 1e-30;
const exp = x => Math.min(Math.exp(x), Number.MAX_VALUE), sigmoid = x => x < 0 ? exp(x) / (1 + exp(x)) : 1 / (1 + exp(-x));

/** Defaults overlaid with hp; None, which is null here, is infinity. */
function resolved(name, hp = {}) {
  const h = {};
  for (const [k, of] of Object.entries(OBJECTIVES[name].hp)) h[k] = (k in hp ? hp[k] : of.default) ?? Infinity;
  return h;
}

/** w(r, A, mu) of an objective at these hyperparameters: dJ/dlp of a token by itself; mu r <= 1. */
function weigher(name, hp) {
  const { w } = OBJECTIVES[name], h = resolved(name, hp);
  return (r, A, mu) => w(r, A, mu, h);
}

// Where a weight is looked at first: every 12 % in 1e-3..1e3, every decade beyond, ever closer towards r = 1.
const SCAN = (() => {
  const grid = [1];
  for (let x = -30; x <= 30; x += 1) grid.push(10 ** x);
  for (let x = -60; x <= 60; x += 1) grid.push(10 ** (x / 20));
  for (let x = -48; x <= -4; x += 1) grid.push(1 - 10 ** (x / 4), 1 + 10 ** (x / 4));
  return Float64Array.from(new Set(grid)).sort();
})();

/** The ratios at which the weight turns to 0 or back, ascending, and whether it is alive below them all. */
function ends(w, A, mu, readsMu) {
  const reach = readsMu ? 1 / mu : Infinity, m = r => readsMu ? mu : Math.min(0.02, 0.9 / r);
  const raw = r => w(r, A, m(r)), at = r => { const x = raw(r); return x * A > 0 ? x : 0; };  // pulled back is carried no further
  const faint = FAINT * Math.max(Math.abs(at(0.5)), Math.abs(at(1)), Math.abs(at(Math.min(2, reach))));
  const found = [];
  let lo = SCAN[0], a = at(lo);
  for (const next of SCAN) {
    const hi = Math.min(next, reach), z = at(hi);
    if ((a !== 0) !== (z !== 0)) {
      let [l, h, alive] = [lo, hi, a !== 0];
      for (let n = 0; n < 64; n++) {
        const x = (l + h) / 2;
        if (x <= l || x >= h) break;
        if ((at(x) !== 0) === alive) l = x; else h = x;
      }
      const r = alive ? l : h;  // the last one alive
      const turns = raw(alive ? hi : lo) * A < 0;  // the weight changes its sign there
      if (turns || Math.abs(at(r)) > faint) found.push(r);  // else rounding made it 0 and not a cut
    }
    lo = hi; a = z;
    if (next >= reach) break;
  }
  const below = found.filter(r => r < 1).length;
  return { at: found, alive: (at(1) !== 0) === (below % 2 === 0) };
}

/** How far p may still move with the update before its own gradient vanishes; `found` is what `ends` gave. */
function goal(found, p, mu, A) {
  mu = Math.max(mu, TINY);
  const r = Math.max(p, TINY) / mu, up = A > 0;
  const ahead = Math.min(up ? r * (1 + HAIR) : r * (1 - HAIR), 1 / mu);
  let passed = 0;
  while (passed < found.at.length && found.at[passed] < ahead) passed++;
  const alive = A !== 0 && found.alive === (passed % 2 === 0);
  const end = up ? found.at[passed] ?? Infinity : found.at[passed - 1] ?? 0;
  const last = up ? found.at[passed - 1] : found.at[passed];  // the end that a dead token has passed
  const star = alive ? Math.min(end * mu, 1) : p;
  return { alive, end, last, star, cap: Math.max(up ? star - p : p - star, 0) };
}

/** Cap of an objective at one point. */
function capacity(name, hp, p, mu, A) {
  const readsMu = OBJECTIVES[name].readsMu;
  mu = Math.max(mu, TINY);
  return goal(ends(weigher(name, hp), A, mu, readsMu), p, mu, A).cap;
}

/** An axis of the square: a probability's place from 0 to 1, the probability there, the ticks. */
const AXES = {
  linear: { to: v => v, from: u => u, ticks: [[0, "0"], [0.5, "½"], [1, "1"]] },
  log: { to: v => Math.max(1 + Math.log10(v) / 4, 0), from: u => 10 ** (4 * (u - 1)), ticks: [[1e-4, "10⁻⁴"], [1e-2, "10⁻²"], [1, "1"]] },
};
const axisOf = s => s.log ? AXES.log : AXES.linear;

/** Cap on n x n cells, mu along rows and p along columns: cell [j * n + i] is (mu_i, p_j); -1 where dead. */
function capSquare(name, hp, A, n, axis = AXES.linear) {
  const out = new Float32Array(n * n).fill(-1), w = weigher(name, hp), { readsMu } = OBJECTIVES[name];
  const up = A > 0, slack = up ? 1 - HAIR : 1 + HAIR;  // a cell on a bound falls where `goal` puts it
  let found = A === 0 ? null : ends(w, A, 0.5 / n, readsMu);
  const cell = Float64Array.from({ length: n }, (_, i) => axis.from((i + 0.5) / n));
  for (let i = 0; i < n && A !== 0; i++) {
    const mu = cell[i];
    if (readsMu) found = ends(w, A, mu, true);
    const cuts = [0, ...found.at.map(r => r * mu), Infinity];
    for (let k = 0; k + 1 < cuts.length; k++) {
      if (found.alive !== (k % 2 === 0)) continue;
      const star = up ? Math.min(cuts[k + 1], 1) : cuts[k];
      const last = x => Math.min(n - 1, Math.floor(axis.to(x * slack) * n - 0.5)), to = last(cuts[k + 1]);
      for (let j = k ? last(cuts[k]) + 1 : 0; j <= to; j++) out[j * n + i] = Math.abs(star - cell[j]);
    }
  }
  return out;
}

/** What one token's own gradient does to it in a softmax of two, it and the rest: logit += eta w (1 - p). */
function stepped(p, w, eta) {
  const x = Math.log(p) - Math.log1p(-p) + eta * w * (1 - p);
  return p <= 0 || p >= 1 ? p : 1 / (1 + Math.exp(-x));
}
