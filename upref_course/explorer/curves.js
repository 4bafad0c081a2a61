// SPDX-License-Identifier: Apache-2.0
// Gradient weights against the ratio, one line an objective, as upref.weights.plots.weights draws them.

const WIDE = Math.log(6);

/** Half-width of the axis in log r: a few windows where the window is narrow, else a factor of 6. */
function halfWidth(name, hp, mu) {
  const { readsMu } = OBJECTIVES[name], w = weigher(name, hp);
  const far = [1, -1].flatMap(A => ends(w, A, mu, readsMu).at).map(r => Math.abs(Math.log(r))).filter(x => x < WIDE);
  return far.length && Math.max(...far) < 0.02 && Math.max(...far) > 0 ? 2.6 * Math.max(...far) : WIDE;
}

/** [[r, w]], with both sides of every end. */
function weightLine(name, hp, A, mu, reach, many = 160) {
  const { readsMu } = OBJECTIVES[name], w = weigher(name, hp), r = [];
  for (let i = 0; i <= many; i++) r.push(Math.exp(reach * (2 * i / many - 1)));
  for (const x of A === 0 ? [] : ends(w, A, mu, readsMu).at) r.push(x * (1 - 1e-9), x * (1 + 1e-9));
  return r.filter(x => Math.abs(Math.log(x)) <= reach * 1.0001 && (!readsMu || x * mu <= 1)).sort((a, b) => a - b).map(x => [x, w(x, A, mu)]);
}

/** One panel as SVG, width x 240; `panels` are { name, hp, color, label }. */
function curvePanel(panels, A, { mu, p, here }, width, look) {
  const H = 240, left = 34, top = 26, right = 132, bottom = 36, w = width - left - right, h = H - top - bottom, f = v => +v.toFixed(1);
  const reach = Math.max(...panels.map(o => halfWidth(o.name, o.hp, mu))), lines = panels.map(o => weightLine(o.name, o.hp, A, mu, reach));
  const opposite = panels.map(o => weightLine(o.name, o.hp, -A, mu, reach));  // its panel stands beside this one, on the same scale
  const highest = Math.max(...[...lines, ...opposite].flatMap(l => l.map(([, y]) => Math.abs(y))));
  const lasts = lines.map(l => l.length ? l[l.length - 1][1] : 0), size = Math.abs(A) || 1;
  const bound = Math.min(Math.max(1.25 * size, highest), 4 * size) * 1.08;
  const [low, high] = A < 0 ? [-bound, 0.06 * bound] : [-0.06 * bound, bound];
  const X = r => left + w * (Math.log(r) / reach + 1) / 2, Y = v => top + h * (high - v) / (high - low), s = [], id = `clip${A < 0 ? "d" : "u"}${width}`;
  const text = (x, y, what, more = "") => s.push(`<text x="${f(x)}" y="${f(y)}" font-size="11.5" fill="${look.ink}" ${more}>${what}</text>`);
  text(left, 14, `<tspan class="math" font-style="italic">A</tspan> = ${num(A)}`, `font-weight="650"`);
  s.push(`<path d="M${left} ${top}V${top + h}H${left + w}" fill="none" stroke="${look.axis}" stroke-width=".8"/>`);
  s.push(`<path d="M${left} ${f(Y(0))}H${left + w}" stroke="${look.axis}" stroke-width=".8"/>`);
  const wide = reach === WIDE, edge = Math.expm1(reach), tick = Number((edge * 0.75).toExponential(0));
  for (const r of wide ? [0.2, 0.5, 1, 2, 5] : [1 - tick, 1, 1 + tick]) {
    s.push(`<path d="M${f(X(r))} ${top + h}v4" stroke="${look.axis}" stroke-width=".8"/>`);
    text(X(r), top + h + 16, num(r), 'text-anchor="middle"');
  }
  for (const v of tickValues(low, high)) {
    s.push(`<path d="M${left} ${f(Y(v))}h-4" stroke="${look.axis}" stroke-width=".8"/>`);
    text(left - 7, Y(v) + 4, num(v), 'text-anchor="end"');
  }
  const unit = panels.every(o => OBJECTIVES[o.name].level === "sequence_mean") ? "s" : "r", reads = panels.some(o => OBJECTIVES[o.name].readsMu);
  text(left + w / 2, H - 4, `ratio <tspan class="math" font-style="italic">${unit}</tspan>` + (reads ? ` (at ${letterSVG("π_old")} = ${num(mu)})` : ""), 'text-anchor="middle"');
  s.push(`<clipPath id="${id}"><rect x="${left}" y="${top - 2}" width="${w}" height="${h + 4}"/></clipPath><g clip-path="url(#${id})">`);
  const r = p / mu;
  if (here && Math.abs(Math.log(r)) < reach) s.push(`<path d="M${f(X(r))} ${top}V${top + h}" stroke="${look.axis}" stroke-dasharray="2 3"/>`);
  const key = lines.map(l => l.map(([x, y]) => `${x.toFixed(6)},${y.toFixed(9)}`).join());
  lines.forEach((l, i) => {
    const same = key.map((x, j) => x === key[i] ? j : -1).filter(j => j >= 0), n = same.length, turn = same.indexOf(i);
    const dash = n > 1 ? `stroke-dasharray="7 ${7 * (n - 1)}" stroke-dashoffset="${-7 * turn}"` : "";  // equal lines take turns
    s.push(`<path d="M${l.map(([x, y]) => `${f(X(x))} ${f(Y(Math.min(Math.max(y, -99 * size), 99 * size)))}`).join("L")}" fill="none" stroke="${panels[i].color}" stroke-width="2" ${dash}/>`);
  });
  if (here && Math.abs(Math.log(r)) < reach) panels.forEach(o => {
    const v = weigher(o.name, o.hp)(r, A, mu), at = Y(Math.min(Math.max(v, low), high));
    s.push(`<circle cx="${f(X(r))}" cy="${f(at)}" r="4" fill="${look.paper}" stroke="${o.color}" stroke-width="2"/>`);
  });
  s.push("</g>");
  const at = spread(lasts.map(v => Y(Math.min(Math.max(v, low), high))), 15, top, top + h);
  panels.forEach((o, i) => {
    const from = Y(Math.min(Math.max(lasts[i], low), high));
    s.push(`<path d="M${left + w} ${f(from)}L${left + w + 10} ${f(at[i])}" stroke="${o.color}" stroke-width="1"/><circle cx="${left + w + 13}" cy="${f(at[i])}" r="3" fill="${o.color}"/>`);
    text(left + w + 20, at[i] + 4, o.label);
  });
  return s.join("");
}

function tickValues(low, high) {
  const step = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 500, 1000].find(x => (high - low) / x <= 5) ?? 5000, out = [];
  for (let v = Math.ceil(low / step) * step; v <= high; v += step) out.push(+v.toFixed(6) + 0);
  return out;
}

/** Heights moved apart where labels would touch. */
function spread(y, step, low, high) {
  const order = y.map((_, i) => i).sort((a, b) => y[a] - y[b] || a - b), at = order.map(i => y[i]);
  for (let n = 0; n < 100; n++) {
    for (let k = 0; k + 1 < at.length; k++) {
      const lack = step - (at[k + 1] - at[k]);
      if (lack > 0.01) { at[k] -= lack / 2; at[k + 1] += lack / 2; }
    }
    const under = Math.max(low - at[0], 0), over = Math.max(at[at.length - 1] - high, 0);
    for (let k = 0; k < at.length; k++) at[k] += under - over;
  }
  const out = [];
  order.forEach((i, k) => { out[i] = at[k]; });
  return out;
}
