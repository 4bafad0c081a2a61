// SPDX-License-Identifier: Apache-2.0
// The small policy drawn: π/π_old of every token against updates, and what pushed each.

const SHADES = ["#2E8B57", "#44AA99", "#AA4499", "#CC6677", "#9970C8"];  // right: green; wrong: purple; no objective has them

/** Axes for panels that stand side by side: the ratios' ends, and the longest bar of all paths. */
function commonAxes(paths, t, mu, rest) {
  const goals = rest ? rest.map((x, a) => x / mu[a]).filter(x => x > 0) : [];
  const states = paths.flatMap(path => [stateAt(path, t), stateAt(path, path.r.length / path.V - 1)]);
  const most = paths.reduce((m, path) => path.r.reduce((x, y) => Math.max(x, y), m), Math.max(2, ...goals));
  const least = paths.reduce((m, path) => path.r.reduce((x, y) => Math.min(x, y), m), Math.min(0.5, ...goals));
  return { high: Math.min(most * 1.15, 1000), low: Math.max(least / 1.15, 0.02),
    push: Math.max(0.3, ...states.flatMap(s => [...s.own, ...s.others]).map(Math.abs)) };
}

/** π/π_old of every token, a log axis; rest: where UP would rest. */
function ratioChart(path, t, mu, rest, { low, high }, width, look) {
  const H = 200, left = 38, right = 14, top = 8, bottom = 22, w = width - left - right, h = H - top - bottom, n = path.r.length / path.V - 1;
  const f = v => +v.toFixed(1), state = stateAt(path, t);
  const X = i => left + w * i / n, Y = r => top + h * (Math.log(high) - Math.log(Math.min(Math.max(r, low), high))) / (Math.log(high) - Math.log(low));
  const s = [], text = (x, y, what, more = "") => s.push(`<text x="${f(x)}" y="${f(y)}" font-size="11" fill="${look.ink}" ${more}>${what}</text>`);
  const ticks = [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500].filter(v => v >= low && v <= high);
  for (const v of ticks.length > 7 ? ticks.filter(v => [0.1, 1, 10, 100].includes(v) || v === ticks[0]) : ticks) {
    s.push(`<path d="M${left} ${f(Y(v))}H${left + w}" stroke="${look.line}" stroke-width="${v === 1 ? 1.4 : 0.7}"/>`);
    text(left - 6, Y(v) + 4, num(v), 'text-anchor="end"');
  }
  text(left, H - 4, "0");
  text(left + w, H - 4, num(n, 4), 'text-anchor="end"');
  const every = Math.max(1, Math.floor(n / 150)), shown = Array.from({ length: n + 1 }, (_, i) => i).filter(i => i % every === 0 || i === n);
  mu.forEach((_, a) => s.push(`<path d="M${shown.map(i => `${f(X(i))} ${f(Y(path.r[i * path.V + a]))}`).join("L")}" fill="none" stroke="${SHADES[a]}" stroke-width="2"/>`));
  if (rest) rest.forEach((x, a) => {
    if (x > 0) s.push(`<path d="M${left + w + 2} ${f(Y(x / mu[a]))}l7 -4v8z" fill="${SHADES[a]}"/>`);
  });
  s.push(`<path class="now" d="M${f(X(t))} ${top}V${top + h}" stroke="${look.ink}" stroke-width="1"/>`);
  mu.forEach((_, a) => s.push(`<circle cx="${f(X(t))}" cy="${f(Y(state.r[a]))}" r="3.6" fill="${state.live[a] ? SHADES[a] : look.paper}" stroke="${SHADES[a]}" stroke-width="2"/>`));
  return `<svg viewBox="0 0 ${width} ${H}" role="img" aria-label="π over π_old of each token against updates">${s.join("")}</svg>`;
}

/** Log π gained by each token since the start: by its own gradient (solid), by the others' (hollow), in nats. */
function pushChart(path, t, A, names, { push }, width, look) {
  const row = 34, left = 122, right = 8, top = 4, room = 34, w = width - left - right - 2 * room, now = stateAt(path, t), f = v => +v.toFixed(1), H = top + row * names.length + 4;
  const X = v => left + room + w * (v / push + 1) / 2, s = [];
  const text = (x, y, what, more = "") => s.push(`<text x="${f(x)}" y="${f(y)}" font-size="11" fill="${look.ink}" ${more}>${what}</text>`);
  names.forEach((name, a) => {
    const y = top + row * a, bar = (v, at, hollow) => {
      s.push(`<rect x="${f(Math.min(X(0), X(v)))}" y="${f(at)}" width="${f(Math.abs(X(v) - X(0)))}" height="9" fill="${hollow ? "none" : SHADES[a]}" stroke="${SHADES[a]}" stroke-width="1.4"/>`);
      s.push(`<text class="number" x="${f(X(v) + (v < 0 ? -4 : 4))}" y="${f(at + 8.5)}" font-size="9.5" fill="${look.ink}" text-anchor="${v < 0 ? "end" : "start"}">${signed(v)}</text>`);
    };
    text(0, y + 13, name);
    const clipped = A[a] !== 0 && !now.live[a];
    s.push(`<text x="0" y="${f(y + 26)}" font-size="10.5" fill="${look.soft}">π = ${num(now.p[a])}${clipped ? " · clipped" : ""}</text>`);
    bar(now.own[a], y + 4, false);
    bar(now.others[a], y + 16, true);
  });
  s.push(`<path d="M${f(X(0))} ${top}V${H - 4}" stroke="${look.axis}"/>`);
  return `<svg viewBox="0 0 ${width} ${H}" role="img" aria-label="What pushed each token: its own gradient and the others'">${s.join("")}</svg>`;
}

/** How far π is from where UP would rest: total variation. */
function distance(p, rest) {
  const gap = rest.reduce((s, x, a) => s + Math.abs(x - p[a]), 0) / 2;
  return gap < 1e-6 ? 0 : gap;
}
