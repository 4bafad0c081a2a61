// SPDX-License-Identifier: Apache-2.0
// The page: builds the controls once for a set of objectives, then only draws what changed, once a frame.

const $ = id => document.getElementById(id);
const LOOK = { ink: "var(--ink)", soft: "var(--soft)", axis: "var(--axis)", line: "var(--line)", paper: "var(--paper)" };
let S = start(), cards = [], flows = [], dirty = new Set(), painted = new Map(), waiting = 0, playing = 0;

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
const colour = i => (COLOURS.palette[i % COLOURS.palette.length] === "#000000" ? "var(--ink)" : COLOURS.palette[i % COLOURS.palette.length]);

// ---- one slider with its number and its sentence --------------------------------------------------------------------
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
  const e = make("div", { class: "control" }, html("label", `${letterHTML(letter)} ${name === letter.replace("_", " ") ? "" : name}`, { for: id }), exact, range,
    off && make("label", { class: "off" }, box, ` ${off.says}`), says && html("p", says, { class: "says", id: `${id}s` }));
  if (!says) range.removeAttribute("aria-describedby");
  e.refresh = refresh;
  return e;
}

// ---- drawing ---------------------------------------------------------------------------------------------------------
function draw(...what) {
  what.forEach(x => dirty.add(x));
  if (!waiting) waiting = requestAnimationFrame(frame);
}

const spent = [];  // milliseconds of the last frames
function frame() {
  const from = performance.now(), now = dirty;
  dirty = new Set();
  waiting = 0;
  if (now.has("all")) build();
  if (now.has("all") || now.has("maps")) drawMaps();
  if (now.has("all") || now.has("flow")) computeFlows();
  if (now.has("all") || now.has("flow") || now.has("time")) drawFlows();
  drawText();
  spent.push(performance.now() - from);
  if (spent.length > 300) spent.shift();
}

function facts(o) { return verdict(o.name, o.hp, S.p, S.mu, S.A, S.eta); }

function drawMaps() {
  cards.forEach((card, i) => {
    const o = S.o[i], key = JSON.stringify([o.name, o.hp, Math.sign(S.A)]);
    if (card.key !== key) {
      card.labels = regionLabels(paint(card.canvas, o.name, o.hp, S.A), S.A);
      card.key = key;
    }
    const sees = facts(o);
    card.sees = sees;
    card.svg.innerHTML = overlay({ ...S, labels: card.labels, sees, ink: LOOK.ink, soft: LOOK.axis, grip: true });
    const dead = !sees.alive && S.A !== 0;
    card.says.innerHTML = `<span class="tag${dead ? " dead" : ""}">${sees.tag}</span>${prose(sees.text)}` +
      (S.eta > 0 && sees.weight ? ` One step of η = ${num(S.eta)} takes π<sub>θ</sub> from ${num(S.p)} to ${num(sees.next)}.` : "");
    card.map.setAttribute("aria-label", `${o.name}: the token at π_old ${num(S.mu)}, π_θ ${num(S.p)}. ${sees.tag}, Cap ${num(sees.cap)}. Arrow keys move it.`);
  });
  const panels = S.o.map((o, i) => ({ ...o, colour: colour(i), label: o.name }));
  [...$("curves").children].forEach((e, i) => {
    const width = Math.max(300, Math.round(e.clientWidth) || 480);
    e.innerHTML = `<svg viewBox="0 0 ${width} 240" role="img" aria-label="Gradient weight for A = ${num(i ? -S.A : S.A)}">` +
      `${curvePanel(panels, i ? -(S.A || 1) : S.A || 1, { ...S, here: i === 0 && S.A !== 0 }, width, LOOK)}</svg>`;
  });
}

/** ε_low, π_θ, e^ε as a reader wants them. */
function prose(text) {
  return text.replace(/([πετ])_(old|θ|low|high|\+|−)/g, "$1<sub>$2</sub>").replace(/\^(−?[\dεδ]+(?:\/π<sub>old<\/sub>)?)/g, "<sup>$1</sup>");
}

let told = 0;
function drawText() {
  $("python").textContent = pythonLine(S);
  document.querySelectorAll(".control").forEach(e => e.refresh?.());
  clearTimeout(told);
  told = setTimeout(() => {
    const hash = `#${toHash(S)}`;
    if (location.hash !== hash) history.replaceState(null, "", hash);
    const said = cards.map((c, i) => c.sees ? `${S.o[i].name}: ${c.sees.tag}. ${c.sees.text}` : "").join(" ");
    if ($("say").textContent !== said) $("say").textContent = said;
  }, 400);
}

// ---- the objectives --------------------------------------------------------------------------------------------------
function build() {
  cards = S.o.map(card);
  $("cards").replaceChildren(...cards.map(c => c.element));
  $("add").disabled = S.o.length >= MOST;
  $("link").checked = S.link;
  $("curves").replaceChildren(make("div"), make("div"));
  buildTokens();
  flows = S.o.map((o, i) => {
    const parts = { chart: make("div"), who: make("p", { class: "who" }), pushes: make("div") };
    parts.element = make("article", { class: "card flow", style: `--c: ${colour(i)}` },
      make("header", {}, make("span", { class: "dot" }), make("h3", {}, o.name)), parts.chart, parts.pushes, parts.who);
    return parts;
  });
  $("flows").replaceChildren(...flows.map(f => f.element));
}

function card(o, i) {
  const base = o.name.replace(/^up\((.*)\)$/, "$1"), isUp = base !== o.name, facts = OBJECTIVES[o.name];
  const names = Object.keys(OBJECTIVES).filter(n => !n.startsWith("up("));
  const change = name => {
    const hp = Object.fromEntries(Object.entries(o.hp).filter(([k, v]) => k in OBJECTIVES[name].hp && legal(name, k, v)));
    const sameKind = Object.keys(hp).every(k => OBJECTIVES[name].hp[k].default === facts.hp[k].default);
    S.o[i] = panel(name, sameKind ? hp : {});
    draw("all");
  };
  const pick = make("select", { "aria-label": `Objective ${i + 1}`, change: e => change(isUp && `up(${e.target.value})` in OBJECTIVES ? `up(${e.target.value})` : e.target.value) },
    names.map(n => make("option", { value: n, selected: n === base }, n)));
  const up = make("button", { type: "button", class: "up", "aria-pressed": String(isUp), title: "The paper's plug-in: A log π_θ where A > 0, this objective elsewhere",
    click: () => change(isUp ? base : `up(${base})`) }, "UP(…)");
  up.disabled = !(`up(${base})` in OBJECTIVES);
  const remove = make("button", { type: "button", class: "quiet", "aria-label": `Remove ${o.name}`, click: () => { S.o.splice(i, 1); draw("all"); } }, "✕");
  remove.disabled = S.o.length < 2;
  const canvas = make("canvas"), svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 100 100");
  svg.setAttribute("aria-hidden", "true");
  const map = make("div", { class: "map", tabindex: "0", role: "application", "aria-roledescription": "map with a movable token" }, canvas, svg);
  movable(map);
  const says = make("p", { class: "verdict" });
  const element = make("article", { class: "card", style: `--c: ${colour(i)}`, "aria-label": o.name }, make("header", {}, make("span", { class: "dot" }), pick, up, remove),
    map, says, make("div", { class: "controls" }, Object.entries(facts.hp).map(([k, of]) => hyperparameter(o, k, of))), more(o, facts));
  return { element, canvas, svg, map, says };
}

function hyperparameter(o, key, of) {
  const set = x => {
    for (const other of S.o) {
      const its = OBJECTIVES[other.name].hp[key];
      if (other === o || (S.link && its && its.default === of.default)) other.hp[key] = x;
    }
    draw("maps", "flow");
  };
  return slider({ letter: of.letter, name: of.letter.replace("_", " "), says: prose(`${of.says}.`), limits: [of.low, of.high, of.step], set, legal: x => legal(o.name, key, x),
    get: () => key in o.hp ? o.hp[key] : of.default, off: key === "c" ? { value: null, on: 3, says: "dual clip on" } : undefined });
}

/** What a reader may want to know of an objective. */
function more(o, facts) {
  const said = Object.entries(facts.hp).filter(([, of]) => of.from).flatMap(([k, of]) => [html("dt", `default of ${letterHTML(of.letter)}`), make("dd", {}, of.from)]);
  return make("details", {}, make("summary", {}, "equation, source, formula"), make("dl", {},
    make("dt", {}, "equation"), make("dd", {}, facts.equation), make("dt", {}, "where it stands"), make("dd", {}, facts.source),
    facts.note ? [make("dt", {}, "note"), make("dd", {}, facts.note)] : [], said,
    make("dt", {}, "the weight that this page computes, printed by sympy"), make("dd", {}, make("code", {}, String(facts.w)))));
}

/** Drag by mouse anywhere on the map, by touch on the token; arrow keys. */
function movable(map) {
  const at = e => {
    const box = map.getBoundingClientRect(), x = (e.clientX - box.left) / box.width * 100, y = (e.clientY - box.top) / box.height * 100;
    place((x - SQUARE.x) / SQUARE.size, 1 - (y - SQUARE.y) / SQUARE.size);
  };
  map.addEventListener("pointerdown", e => {
    if (e.button) return;
    map.setPointerCapture(e.pointerId);
    at(e);
  });
  map.addEventListener("pointermove", e => { if (map.hasPointerCapture(e.pointerId)) at(e); });
  map.addEventListener("keydown", e => {
    const by = e.shiftKey ? 0.05 : 0.005, way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[e.key];
    if (!way || e.ctrlKey || e.metaKey || e.altKey) return;
    e.preventDefault();
    place(S.mu + way[0] * by, S.p + way[1] * by);
  });
}

function place(mu, p) {
  const inside = x => +Math.min(Math.max(x, LIMITS.p[0]), 1).toFixed(4);
  S.mu = inside(mu);
  S.p = inside(p);
  draw("maps");
}

// ---- the small policy ------------------------------------------------------------------------------------------------
function buildTokens() {
  const { flow } = S;
  $("tokens").replaceChildren(...flow.mu.map((_, a) => {
    const is = [make("output"), make("output")], id = `t${a}`;
    const one = (k, which, name, [low, high, step], list) => [
      make("label", { for: id + k }, html("span", name), is[which]),
      make("input", { type: "range", id: id + k, min: low, max: high, step, value: list[a], input: e => { list[a] = Number(e.target.value); draw("flow"); } })];
    const e = make("fieldset", { class: "token" }, make("legend", {}, make("span", { class: "dot", style: `--c: ${SHADES[a]}` }), TOKENS_OF()[a]),
      one("m", 0, `${letterHTML("π_old")}`, LIMITS.weight, flow.mu), one("a", 1, `${letterHTML("A")}`, LIMITS.adv, flow.A));
    e.refresh = () => {
      is[0].textContent = num(distribution(flow.mu)[a]);
      is[1].textContent = num(flow.A[a]);
      [flow.mu[a], flow.A[a]].forEach((v, k) => { e.querySelectorAll("input")[k].value = v; });
    };
    return e;
  }));
  const normal = make("button", { type: "button", click: () => { flow.A = groupNorm(distribution(flow.mu), flow.A); draw("flow"); buildTokens(); } }, "Centre and scale A");
  const rollout = make("select", { id: "rollout", change: e => { flow.k = Number(e.target.value); draw("flow"); } },
    [...new Set([...ROLLOUTS, flow.k])].map(k => make("option", { value: k, selected: k === flow.k }, k ? `every ${k} updates` : "never")));
  $("flow-controls").replaceChildren(
    slider({ letter: "η", name: "learning rate", says: "size of an update, on the logits", limits: LIMITS.lr, get: () => flow.lr, set: x => { flow.lr = x; draw("flow"); }, legal: x => x > 0 && x <= 10 }),
    slider({ letter: "N", name: "updates in all", says: "how long to go on", limits: LIMITS.n, get: () => flow.n, legal: x => Number.isInteger(x) && x >= 1 && x <= 5000,
      set: x => { flow.n = x; flow.t = Math.min(flow.t, x); draw("flow"); } }),
    make("div", { class: "control" }, make("label", { for: "rollout" }, "a new π_old"), rollout,
      html("p", "The ratio is against π<sub>old</sub>. If that stays, UP comes to rest at π<sub>old</sub> A<sup>+</sup>, the triangles at the right edge.", { class: "says" })),
    make("div", { class: "control" }, normal, html("p", "as <code>group_norm</code> does in an infinite group: mean 0, deviation 1 under π<sub>old</sub>.", { class: "says" })));
}

function TOKENS_OF() { return S.flow.mu.length === TOKENS.length ? TOKENS : S.flow.mu.map((_, a) => `token ${a + 1}`); }

function computeFlows() {
  const mu = distribution(S.flow.mu), rest = S.flow.k === 0 ? restOfUp(mu, S.flow.A) : null;
  S.o.forEach((o, i) => Object.assign(flows[i], { states: flowPath(o.name, o.hp, { ...S.flow, mu }), rest, mu }));
  $("tokens").querySelectorAll("fieldset").forEach(e => e.refresh());
  S.flow.t = Math.min(S.flow.t, S.flow.n);
  Object.assign($("time"), { max: S.flow.n, value: S.flow.t });
}

function drawFlows() {
  const { t, A } = S.flow, names = TOKENS_OF();
  $("time-is").textContent = String(t);
  flows.forEach(({ chart, who, pushes, states, rest, mu }) => {
    const width = Math.max(260, Math.round(chart.clientWidth) || 320);
    chart.innerHTML = ratioChart(states, t, mu, rest, width, LOOK);
    pushes.innerHTML = pushChart(states, t, A, names, width, LOOK);
    who.innerHTML = prose(flowWords(states, t, A, names)) + (rest ? ` From π<sub>old</sub> A<sup>+</sup>, where UP rests, π is ${num(distance(states[t].p, rest), 2)} away.` : "");
  });
}

function play() {
  playing = playing ? 0 : performance.now();
  $("play").textContent = playing ? "Pause" : "Play";
  $("play").setAttribute("aria-pressed", String(Boolean(playing)));
  if (!playing) return;
  const from = S.flow.t >= S.flow.n ? 0 : S.flow.t, mine = playing, seconds = 10;
  const tick = now => {
    if (playing !== mine) return;
    S.flow.t = Math.min(S.flow.n, Math.round(from + (now - mine) / 1000 / seconds * S.flow.n));
    $("time").value = S.flow.t;
    draw("time");
    if (S.flow.t < S.flow.n) requestAnimationFrame(tick); else play();
  };
  requestAnimationFrame(tick);
}

// ---- the page --------------------------------------------------------------------------------------------------------
function figure() {
  const settings = o => {
    const set = Object.entries(OBJECTIVES[o.name].hp).map(([k, of]) => [of, k in o.hp ? o.hp[k] : of.default]).filter(([, v]) => v !== null);
    return [S.A > 0 ? "A &gt; 0" : S.A < 0 ? "A &lt; 0" : "A = 0", ...set.map(([of, v]) => `${letterSVG(of.letter)} = ${num(v)}`)].join(", ");
  };
  const plain = i => COLOURS.palette[i % COLOURS.palette.length];
  return figureSVG(S.o.map((o, i) => ({ ...o, colour: plain(i), label: o.name, says: settings(o), image: cards[i].canvas.toDataURL("image/png"), ...cards[i] })), S);
}

function presets(list, where, about, use) {
  $(where).replaceChildren(...list.map(([name, hash, says]) => make("button", { type: "button", click: () => { use(hash); $(about).textContent = says; draw("all"); } }, name)));
}

function done(text) { $("done").textContent = text; setTimeout(() => { $("done").textContent = ""; }, 3000); }

async function copy(text) {
  try { await navigator.clipboard.writeText(text); done("Copied."); } catch { done("The browser does not let a page copy: select it by hand."); }
}

function read() {
  const { state, refused } = fromHash(location.hash);
  S = state;
  $("about").textContent = refused.length ? `Left out of the address, because this page cannot read it: ${refused.join(", ")}.` : "";
  draw("all");
}

function theme(to) { document.documentElement.dataset.theme = to; draw("maps", "time"); }

function begin() {
  $("version").textContent = VERSION;
  presets(PRESETS, "presets", "about", hash => { S = { ...fromHash(hash).state, flow: S.flow, link: S.link }; });
  presets(SCENES, "scenes", "scene-about", hash => { S.flow = fromHash(hash).state.flow; });
  $("shared").replaceChildren(
    slider({ letter: "A", name: "advantage", says: "above 0 if the response was better than its group's average: then the token is pushed up", limits: LIMITS.A,
      get: () => S.A, set: x => { S.A = x; draw("maps"); }, legal: x => Math.abs(x) <= 1000 }),
    slider({ letter: "π_old", name: "when sampled", says: "the token's probability under the policy that wrote the response", limits: LIMITS.mu,
      get: () => S.mu, set: x => { S.mu = x; draw("maps"); }, legal: x => x > 0 && x <= 1 }),
    slider({ letter: "π_θ", name: "now", says: "its probability under the policy that is trained; the ratio <i>r</i> is this over the other", limits: LIMITS.p,
      get: () => S.p, set: x => { S.p = x; draw("maps"); }, legal: x => x > 0 && x <= 1 }),
    slider({ letter: "η", name: "step", says: "learning rate of the one step that the arrow shows, in a softmax of this token and the rest", limits: LIMITS.eta,
      get: () => S.eta, set: x => { S.eta = x; draw("maps"); }, legal: x => x >= 0 && x <= 1000 }));
  const ramp = COLOURS.ramp.map((c, i) => `<stop offset="${i / (COLOURS.ramp.length - 1)}" stop-color="${c}"/>`).join("");
  $("legend").innerHTML = `<span>Cap 0 <svg width="110" height="12" aria-hidden="true"><linearGradient id="r">${ramp}</linearGradient><rect width="110" height="12" rx="2" fill="url(#r)"/></svg> 1</span>` +
    `<span><svg width="26" height="14" aria-hidden="true"><rect width="26" height="14" rx="2" fill="${COLOURS.dead[0]}"/><path d="M2 14 16 0M10 14 24 0" stroke="${COLOURS.dead[1]}"/></svg> no gradient of its own</span>` +
    `<span><svg width="14" height="14" aria-hidden="true"><circle cx="7" cy="7" r="4.5" fill="#fff" stroke="#222" stroke-width="2"/></svg> the token: drag it</span>` +
    `<span><svg width="14" height="16" aria-hidden="true"><path d="M7 1v14M3 1h8" stroke="currentColor" stroke-width="1.6"/></svg> its Cap</span>` +
    `<span><svg width="14" height="16" aria-hidden="true"><path d="M7 16V6" stroke="var(--up)" stroke-width="2.4"/><path d="M2.5 8 7 0l4.5 8z" fill="var(--up)"/></svg> the step it takes</span>`;
  const left = Object.entries(LEFT_OUT).map(([n, why]) => `<code>${n}</code> (${why})`).join(", ");
  $("notes").innerHTML = [
    ["Cap is not a bound on the policy", "It says how far a token's own gradient can carry it, all else held fixed. A large step overshoots it, and the gradients of other tokens, momentum and shared parameters move a token whose own gradient is zero."],
    ["A clip has one side", "For A &gt; 0 a token loses its gradient above 1 + ε<sub>high</sub> only, for A &lt; 0 below 1 − ε<sub>low</sub> only. Which clip is active is told by the sign of A."],
    ["Sequence level", "For an objective on whole responses π is the geometric-mean probability of its tokens, and the ratio is <i>s</i>; for one on trajectories it is the probability of the response."],
    ["The step", "One sampled token, one update of plain gradient ascent, in a softmax of two: this token and all the rest. Real steps are averages over many tokens."],
    ["The small policy", "One context, one-token responses, an infinite batch: the expected update, without noise. The advantages stay as they are set. It shows mechanisms, not sizes."],
    ["Where the formulas come from", "sympy differentiates the very function that trains and prints the result as JavaScript; a test holds it against numpy on 10,000 points for each objective, hyperparameters drawn at random. KL terms are left out: they are terms of their own."],
    ["What is not here", left ? `sympy cannot read ${left}, nor UP of them.` : "Nothing: every registered objective is here."],
  ].map(([head, text]) => `<div><h3>${head}</h3><p>${text}</p></div>`).join("");
  $("add").addEventListener("click", () => { S.o.push(panel(Object.keys(OBJECTIVES).find(n => !S.o.some(o => o.name === n)))); draw("all"); });
  $("link").addEventListener("change", e => { S.link = e.target.checked; draw(); });
  $("copy-python").addEventListener("click", () => copy(pythonLine(S)));
  $("copy-link").addEventListener("click", () => copy(`${location.href.split("#")[0]}#${toHash(S)}`));
  $("save-svg").addEventListener("click", () => { download(figure(), "cap.svg", "image/svg+xml"); done("Saved as cap.svg."); });
  $("time").addEventListener("input", e => { S.flow.t = Number(e.target.value); draw("time"); });
  $("play").addEventListener("click", play);
  $("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", e => theme(e.matches ? "dark" : "light"));
  theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  addEventListener("hashchange", read);
  new ResizeObserver(() => draw("maps", "time")).observe($("curves"));
  read();
}

begin();
window.explorer = { state: () => S, figure, python: () => pythonLine(S), spent };  // for whoever embeds or tests it
