// SPDX-License-Identifier: Apache-2.0
// A Cap map: a canvas of colors under an SVG of axes, names and the token. The same colors as upref.weights.plots.

const SQUARE = { x: 9, y: 2, size: 89 };  // of a box of 100 x 100
const CELLS = 400;
const LUT = rampColors(COLORS.ramp, 256), [GROUND, HATCH] = COLORS.dead.map(packed);

function rgb(hex) { return [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16)); }
function packed(color) {
  const [r, g, b] = typeof color === "string" ? rgb(color) : color;
  return (255 << 24 | b << 16 | g << 8 | r) >>> 0;
}
function rampColors(stops, n) {
  return Uint32Array.from({ length: n }, (_, i) => {
    const x = i / (n - 1) * (stops.length - 1), k = Math.min(Math.floor(x), stops.length - 2), [a, b] = [rgb(stops[k]), rgb(stops[k + 1])];
    return packed(a.map((v, c) => Math.round(v + (b[c] - v) * (x - k))));
  });
}

/** Paint Cap on the canvas; gives back the cells. */
function paint(canvas, name, hp, A, axis, n = CELLS) {
  if (canvas.width !== n) canvas.width = canvas.height = n;
  const cap = capSquare(name, hp, A, n, axis), context = canvas.getContext("2d");
  const image = context.createImageData(n, n), pixels = new Uint32Array(image.data.buffer);
  const period = Math.round(n / 32), thick = Math.max(1, Math.round(n / 250));
  for (let j = 0; j < n; j++) {
    const row = (n - 1 - j) * n;
    for (let i = 0; i < n; i++) {
      const x = cap[j * n + i];
      pixels[row + i] = x < 0 ? ((i + n - 1 - j) % period < thick ? HATCH : GROUND) : LUT[Math.min(255, x * 256 | 0)];
    }
  }
  context.putImageData(image, 0, 0);
  return cap;
}

/** Where the names of the dead regions have room: [[label, x, y]], x and y from 0 to 1. */
function regionLabels(cap, A, n = CELLS) {
  const m = 50, k = n / m, found = [];
  for (const label of A > 0 ? ["Upper Clip"] : ["Lower Clip", "Dual Clip"]) {
    const sum = Array.from({ length: m + 1 }, () => new Int32Array(m + 1));
    for (let j = 0; j < m; j++) for (let i = 0; i < m; i++) {
      const [x, y] = [Math.floor((i + 0.5) * k), Math.floor((j + 0.5) * k)];
      const inside = cap[y * n + x] < 0 && (A > 0 || region(y, x, A) === label);
      sum[j + 1][i + 1] = sum[j][i + 1] + sum[j + 1][i] - sum[j][i] + inside;
    }
    const at = roomFor(sum, m);
    if (at) found.push([label, ...at]);
  }
  return found;
}

/** Centre of the largest box of a label's proportions that is full. */
function roomFor(sum, m, width = 0.28, height = 0.09) {
  for (let scale = 3; scale >= 0.999; scale -= 0.1) {
    const h = Math.round(height * scale * m), w = Math.round(width * scale * m);
    let count = 0, x = 0, y = 0;
    for (let j = h; j <= m; j++) for (let i = w; i <= m; i++) {
      if (sum[j][i] - sum[j - h][i] - sum[j][i - w] + sum[j - h][i - w] === h * w) { count++; x += i - w / 2; y += j - h / 2; }
    }
    if (count) return [x / count / m, y / count / m];
  }
  return null;
}

/** A letter as SVG: ε_low with its index lowered. */
function letterSVG(letter) {
  const [head, index] = letter.split("_");
  return `<tspan class="math" font-style="italic">${head}</tspan>` +
    (index ? `<tspan dy=".28em" font-size="72%">${index}</tspan><tspan dy="-.2em"> </tspan>` : "");
}

/** Axes, names, the token, its Cap and its step, as the inside of an SVG of 100 x 100. */
function overlay({ labels, sees, p, mu, A, log, ink, soft }) {
  const axis = axisOf({ log }), U = u => SQUARE.x + SQUARE.size * u, V = u => SQUARE.y + SQUARE.size * (1 - u), f = v => +v.toFixed(2), s = [];
  const X = v => U(axis.to(v)), Y = v => V(axis.to(v));
  const text = (x, y, what, more = "") => s.push(`<text x="${f(x)}" y="${f(y)}" font-size="3.9" fill="${ink}" text-anchor="middle" ${more}>${what}</text>`);
  s.push(`<rect x="${SQUARE.x}" y="${SQUARE.y}" width="${SQUARE.size}" height="${SQUARE.size}" fill="none" stroke="${soft}" stroke-width=".3"/>`);
  for (const [v, tick] of axis.ticks) {
    s.push(`<path d="M${f(X(v))} ${V(0)}v1M${U(0)} ${f(Y(v))}h-1" stroke="${soft}" stroke-width=".3"/>`);
    text(X(v), V(0) + 5, tick);
    text(U(0) - 1.8, Y(v) + 1.4, tick, 'style="text-anchor:end"');
  }
  text(U(0.75), V(0) + 6, letterSVG("π_old"), 'style="font-size:4.8px"');
  text(U(0) - 4.4, V(0.75) + 1, letterSVG("π_θ"), 'style="font-size:4.8px"');
  s.push(`<path d="M${U(0)} ${V(0)}L${U(1)} ${V(1)}" stroke="#fff" stroke-opacity=".45" stroke-width=".8"/>`);
  s.push(`<path d="M${U(0)} ${V(0)}L${U(1)} ${V(1)}" stroke="#222" stroke-opacity=".75" stroke-width=".35" stroke-dasharray="1.6 1.2"/>`);
  const on = [U(0.66), V(0.61)].map(f);
  s.push(`<text x="${on[0]}" y="${on[1]}" font-size="3.3" fill="#222" stroke="#fff" stroke-opacity=".8" stroke-width=".8" paint-order="stroke" text-anchor="middle" transform="rotate(-45 ${on})">on-policy</text>`);
  for (const [label, x, y] of labels) {
    s.push(`<rect x="${f(U(x) - 10)}" y="${f(V(y) - 3.2)}" width="20" height="6.4" rx="1.2" fill="#fff" fill-opacity=".92"/>`);
    s.push(`<text x="${f(U(x))}" y="${f(V(y) + 1.3)}" font-size="3.8" fill="#222" text-anchor="middle">${label}</text>`);
  }
  const x = f(X(mu)), y = f(Y(p)), push = "#C2188B";  // no objective has this color
  const halo = (d, color, width) => s.push(`<path d="${d}" fill="none" stroke="#fff" stroke-opacity=".85" stroke-width="${width + 0.9}"/>`,
    `<path d="${d}" fill="none" stroke="${color}" stroke-width="${width}"/>`);
  if (sees.alive) halo(`M${x} ${y}V${f(Y(sees.star))}m-2 0h4`, "#222", 0.5);
  const stepY = Y(sees.next), way = Math.sign(y - stepY), xs = axis.to(mu) < 0.93 ? f(X(mu) + 3.2) : f(X(mu) - 3.2);
  if (Math.abs(stepY - y) > 0.8) {
    halo(`M${xs} ${y}V${f(stepY + way * 1.4)}`, push, 1);
    s.push(`<path d="M${xs} ${f(stepY)}l-1.5 ${f(way * 2.6)}h3z" fill="${push}" stroke="#fff" stroke-width=".3"/>`);
  }
  s.push(`<circle cx="${x}" cy="${y}" r="2" fill="#fff" stroke="#222" stroke-width=".8"/>`);
  return s.join("");
}
