// SPDX-License-Identifier: Apache-2.0
// Elements, and one slider with its number and its sentence.

/** An element: tag, attributes (functions are listeners), children. */
function make(tag, attributes = {}, ...children) {
  const e = document.createElement(tag);
  for (const [k, v] of Object.entries(attributes)) {
    if (typeof v === "function") e.addEventListener(k, v);
    else if (k in e && typeof v === "boolean") e[k] = v;
    else if (v !== undefined && v !== false) e.setAttribute(k, v);
  }
  e.append(...children.flat().filter(x => x !== null && x !== undefined));
  return e;
}
function html(tag, text, attributes = {}) { const e = make(tag, attributes); e.innerHTML = text; return e; }
function letterHTML(letter) { const [head, index] = letter.split("_"); return `<span class="letter">${head}${index ? `<sub>${index}</sub>` : ""}</span>`; }
const color = i => (COLORS.palette[i % COLORS.palette.length] === "#000000" ? "var(--ink)" : COLORS.palette[i % COLORS.palette.length]);

let count = 0;
function slider({ letter, name, says, limits: [low, high, step], get, set, legal: allowed, off }) {
  const id = `c${++count}`, range = make("input", { type: "range", id, min: low, max: high, step, "aria-describedby": `${id}s` });
  const exact = make("input", { type: "number", step: "any", "aria-label": `${name}, typed` });
  const use = x => { if (allowed(x)) { set(x); refresh(); } };
  range.addEventListener("input", () => use(Number(range.value)));
  exact.addEventListener("change", () => { use(exact.value === "" ? NaN : Number(exact.value)); refresh(true); });
  const box = off && make("input", { type: "checkbox", change: () => use(box.checked ? off.on : off.value) });
  const refresh = (force = false) => {
    const x = get(), is = off && x === off.value;
    range.disabled = exact.disabled = Boolean(is);
    if (off) box.checked = !is;
    if (is) { exact.value = ""; return; }
    range.value = x;
    range.setAttribute("aria-valuetext", `${name} ${num(x, 4)}`);
    if (force || document.activeElement !== exact) exact.value = String(+Number(x).toPrecision(6));
  };
  refresh();
  const label = html("label", `${letterHTML(letter)}<span class="unseen">${letter.startsWith(name[0]) ? "" : `, ${name}`}</span>`, { for: id });
  const e = make("div", { class: "control" }, label, range, exact, html("p", says, { class: "says", id: `${id}s` }),
    off && make("label", { class: "off" }, box, ` ${off.says}`));
  e.refresh = refresh;
  return e;
}

/** ε_low, π_θ, e^ε as a reader wants them. */
function prose(text) {
  return text.replace(/η/g, "<i>η</i>").replace(/\br = c\b/g, "<i>r</i> = <i>c</i>").replace(/\b([rsSAc]) (?=[=<>≤]|is )/g, "<i>$1</i> ").replace(/([πετ])_(old|θ|low|high|\+|−)/g, "<i>$1</i><sub>$2</sub>")
    .replace(/\^(−?[\dεδ]+(?:\/<i>π<\/i><sub>old<\/sub>)?)/g, "<sup>$1</sup>");
}
