// SPDX-License-Identifier: Apache-2.0
// Maps and curves as one SVG that stands by itself.

const PLAIN = { ink: "#222222", soft: "#666666", axis: "#888888", line: "#dddddd", paper: "#ffffff" };

/** panels: { name, hp, color, label, says, image (a data URL), labels, sees }. */
function figureSVG(panels, s) {
  const side = 260, gap = 18, W = Math.max(panels.length * (side + gap) + 84, 720), s2 = [], esc = x => x.replace(/&/g, "&amp;").replace(/</g, "&lt;");
  panels.forEach((o, i) => {
    const x = 10 + i * (side + gap);
    s2.push(`<text x="${x + side / 2}" y="22" font-size="15" font-weight="700" fill="${PLAIN.ink}" text-anchor="middle">${esc(o.label)}</text>`);
    s2.push(`<text x="${x + side / 2}" y="39" font-size="11.5" fill="${PLAIN.soft}" text-anchor="middle">${o.says}</text>`);
    s2.push(`<svg x="${x}" y="48" width="${side}" height="${side}" viewBox="0 0 100 100"><image x="${SQUARE.x}" y="${SQUARE.y}" width="${SQUARE.size}" height="${SQUARE.size}" ` +
      `href="${o.image}" preserveAspectRatio="none" style="image-rendering:pixelated"/>${overlay({ ...s, labels: o.labels, sees: o.sees, ink: PLAIN.ink, soft: PLAIN.soft })}</svg>`);
  });
  const x = 10 + panels.length * (side + gap), stops = COLORS.ramp.map((c, i) => `<stop offset="${i / (COLORS.ramp.length - 1)}" stop-color="${c}"/>`).join("");
  s2.push(`<linearGradient id="ramp" x1="0" y1="1" x2="0" y2="0">${stops}</linearGradient><rect x="${x}" y="60" width="12" height="210" fill="url(#ramp)" stroke="#888" stroke-width=".5"/>`);
  ["0", "¼", "½", "¾", "1"].forEach((t, i) => s2.push(`<text x="${x + 18}" y="${274 - i * 52.5}" font-size="11.5" fill="${PLAIN.ink}">${t}</text>`));
  s2.push(`<text x="${x + 34}" y="170" font-size="12" fill="${PLAIN.ink}">Cap</text>`);
  const half = (W - 40) / 2;
  [s.A, -s.A].forEach((A, i) => s2.push(`<g transform="translate(${10 + i * (half + 20)} 330)">${curvePanel(panels, A, { ...s, here: i === 0 }, half, PLAIN)}</g>`));
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${W} 580" width="${W}" height="580"><title>${esc(panels.map(o => o.label).join(", "))}</title>` +
    `<rect width="${W}" height="580" fill="#fff"/><style>text { font-family: system-ui, "DejaVu Sans", sans-serif } .math { font-family: "STIX Two Text", Georgia, "DejaVu Serif", serif }</style>` +
    `${s2.join("")}<desc>${esc(pythonLine(s))}</desc></svg>`;
}

function download(text, file, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = file;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
