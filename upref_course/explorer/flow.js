// SPDX-License-Identifier: Apache-2.0
// A softmax policy over a few tokens under the expected objective, plain ascent, as in repro/exact:
//
//     z += lr Σ_a π_old(a) w(r_a, A_a) (e_a - π),   r = π/π_old;  a new π_old after every k updates (0: never)
//
// What happens to log π of one token is linear in the gradient, so it is its own push plus those of the others.

/** The path: flat arrays of n + 1 rows, one column a token. own and others add up what pushed log π, now is the others'
    push of that update, r is π against the first π_old. `stateAt` gives one row. */
function flowPath(name, hp, { mu, A, lr, k, n }) {
  const w = weigher(name, hp), V = mu.length, array = () => new Float64Array((n + 1) * V);
  const path = { V, p: array(), r: array(), own: array(), others: array(), now: array(), live: new Uint8Array((n + 1) * V) };
  const z = Float64Array.from(mu, Math.log), old = Float64Array.from(mu), g = new Float64Array(V);
  const own = new Float64Array(V), others = new Float64Array(V);
  for (let t = 0, row = 0; t <= n; t++, row += V) {
    const p = path.p.subarray(row, row + V);
    let top = -Infinity, sum = 0, G = 0, square = 0, mean = 0;
    for (let a = 0; a < V; a++) top = Math.max(top, z[a]);
    for (let a = 0; a < V; a++) sum += p[a] = Math.exp(z[a] - top);
    for (let a = 0; a < V; a++) p[a] /= sum;
    if (k && t && t % k === 0) old.set(p);
    for (let a = 0; a < V; a++) {
      const weight = w(p[a] / old[a], A[a], old[a]);
      path.live[row + a] = weight !== 0;
      path.r[row + a] = p[a] / mu[a];
      G += g[a] = old[a] * weight;
      square += p[a] * p[a];
    }
    for (let a = 0; a < V; a++) mean += p[a] * (g[a] - p[a] * G);
    for (let a = 0; a < V; a++) {
      const all = lr * (g[a] - p[a] * G - mean), mine = lr * g[a] * (1 - 2 * p[a] + square);
      path.own[row + a] = own[a];
      path.others[row + a] = others[a];
      path.now[row + a] = all - mine;
      own[a] += mine;
      others[a] += all - mine;
      z[a] += lr * (g[a] - p[a] * G);
    }
  }
  return path;
}

/** The state after t updates: { p, r, live, own, others, now }, a number for each token. */
function stateAt(path, t) {
  const row = key => Array.from(path[key].subarray(t * path.V, (t + 1) * path.V));
  return { p: row("p"), r: row("r"), live: row("live").map(Boolean), own: row("own"), others: row("others"), now: row("now") };
}

/** Where UP rests if π_old stays: π_old A+, normalized; null where no A is positive. */
function restOfUp(mu, A) {
  const goal = mu.map((m, a) => m * Math.max(A[a], 0)), sum = goal.reduce((a, b) => a + b);
  return sum > 0 ? goal.map(x => x / sum) : null;
}

/** Advantages as group_norm gives them in an infinite group: centered and scaled under π_old. */
function groupNorm(mu, A) {
  const mean = mu.reduce((s, m, a) => s + m * A[a], 0), sd = Math.sqrt(mu.reduce((s, m, a) => s + m * (A[a] - mean) ** 2, 0));
  return sd > 1e-12 ? A.map(x => +((x - mean) / sd).toFixed(3)) : A.map(() => 0);
}

/** Who takes the mass, in a sentence: of the clipped token that the others carried furthest, else of none. */
function flowWords(s, t, A, names) {
  const stopped = s.live.map((live, a) => !live && A[a] !== 0 ? a : -1).filter(a => a >= 0);
  if (t === 0) return "Every token is at π_old. Move the slider, or press Play.";
  if (!stopped.length) return "No token is clipped here: each has a gradient of its own.";
  const a = stopped.reduce((best, x) => Math.abs(s.others[x]) > Math.abs(s.others[best]) ? x : best);
  const all = stopped.length === A.filter(x => x !== 0).length;
  const list = all ? "Every token" : stopped.map(x => `“${names[x]}”`).join(", "), verb = all || stopped.length === 1 ? "is" : "are";
  const goes = Math.abs(s.now[a]) < 1e-9 ? "it no longer moves" : `they still push it ${s.now[a] > 0 ? "up" : "down"}`;
  return `${list} ${verb} clipped. “${names[a]}” is at ${num(s.r[a])} times π_old: its own gradient gave its log π ` +
    `${signed(s.own[a])}, those of the others ${signed(s.others[a])}; ${goes}.`;
}

function signed(x) {
  return (x > 0 ? "+" : "") + num(Math.abs(x) < 5e-4 ? 0 : x, 2);
}
