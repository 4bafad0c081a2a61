// SPDX-License-Identifier: Apache-2.0
// What the picture says, in words.

const MINUS = "−";

/** A number for a reader: three digits, a real minus. */
function num(x, digits = 3) {
  if (!isFinite(x)) return x > 0 ? "∞" : x < 0 ? `${MINUS}∞` : "undefined";
  const size = Math.abs(x);
  let text = size !== 0 && (size < 1e-4 || size >= 1e5) ? x.toExponential(digits - 1) : String(+x.toPrecision(digits));
  if (size > 0.99 && size < 1.01 && size !== 1) text = String(+x.toPrecision(6));  // GSPO's 1.0004
  return text.replace("-", MINUS).replace(/e\+?/, "·10^").replace("^-", `^${MINUS}`).replace("^" + MINUS + "0", "^0");
}

/** "1 + ε_high = 1.28": the ratio by the name that sympy found for it, where it has one. */
function named(name, hp, ratio, mu) {
  const h = resolved(name, hp);
  for (const [label, f] of OBJECTIVES[name].edges) {
    const x = f(mu, h);
    if (Math.abs(x - ratio) <= 1e-9 * ratio) return label === num(x) ? label : `${label} = ${num(x)}`;
  }
  return num(ratio);
}

/** The paper's name of a dead region. */
function region(p, mu, A) {
  return A > 0 ? "Upper Clip" : p < mu ? "Lower Clip" : "Dual Clip";
}

const RATIO = { token: "r", custom: "r", sequence_mean: "s", sequence_product: "S" };

/** What becomes of the token at (mu, p): { tag, alive, text, weight, cap, star, next, overshoots }. */
function verdict(name, hp, p, mu, A, eta) {
  const o = OBJECTIVES[name], w = weigher(name, hp), r = p / mu, unit = RATIO[o.level];
  const found = ends(w, A, mu, o.readsMu), at = goal(found, p, mu, A);
  const weight = at.alive ? w(r, A, mu) : 0, next = stepped(p, weight, eta);
  const overshoots = at.alive && (A > 0 ? next > at.star + 1e-9 : next < at.star - 1e-9);
  const facts = { r, weight, cap: at.cap, star: at.star, alive: at.alive, next, overshoots };
  if (A === 0) return { ...facts, tag: "no update", text: "A = 0: nothing pushes this token." };
  const bound = x => named(name, hp, x, mu);
  if (!at.alive) {
    const side = at.last === undefined ? "" : `${unit} = ${num(r)} is ${A > 0 ? "above" : "below"} ${bound(at.last)}`;
    const dual = A < 0 && at.last === undefined && found.at.length > 0;
    const past = dual || (A < 0 && p > mu) ? `${unit} = ${num(r)} is above ${bound(found.at[found.at.length - 1])}` : side;
    return { ...facts, tag: region(p, mu, A), text: `${past}: no gradient of its own, Cap 0. Others may still move it.` };
  }
  const way = A > 0 ? "up" : "down", wall = A > 0 ? at.star < 1 : at.star > 0;
  const until = wall
    ? `until ${unit} = ${bound(at.end)}, that is π_θ = ${num(at.star)}`
    : `and nothing ends that before π_θ = ${A > 0 ? 1 : 0}`;
  const step = eta > 0 && weight ? ` One step of η = ${num(eta)} takes it to ${num(next)}${overshoots ? ", past that point: Cap does not bound a step" : ""}.` : "";
  return { ...facts, tag: wall ? "has a gradient" : "has a gradient, no bound",
    text: `Pushed ${way} with weight ${num(weight)}, ${until}: Cap ${num(at.cap)}.${step}` };
}
