// SPDX-License-Identifier: Apache-2.0
// The page: builds the controls once for a set of objectives, then only draws what changed, once a frame.

const $ = id => document.getElementById(id);
const LOOK = { ink: "var(--ink)", soft: "var(--soft)", axis: "var(--axis)", line: "var(--line)", paper: "var(--paper)" };
let S = start(), cards = [], flows = [], dirty = new Set(), waiting = 0, playing = 0, later = 0, seen = false;

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
  if (now.has("all") || now.has("flow")) {
    clearTimeout(later);
    if (seen || now.has("all")) computeFlows(); else later = setTimeout(() => { computeFlows(); drawFlows(); }, 250);  // nobody looks
  }
  if (now.has("all") || (seen && now.has("flow")) || now.has("time")) drawFlows();
  drawText();
  spent.push(performance.now() - from);
  if (spent.length > 300) spent.shift();
}

function facts(o) { return verdict(o.name, o.hp, S.p, S.mu, S.A, S.eta); }

function drawMaps() {
  cards.forEach((card, i) => {
    const o = S.o[i], key = JSON.stringify([o.name, o.hp, Math.sign(S.A), S.log]);
    if (card.key !== key) {
      const at = performance.now(), hurried = OBJECTIVES[o.name].readsMu && at - card.at < 200;  // in a drag: finely later
      const n = hurried ? CELLS / 2 : CELLS;
      card.labels = regionLabels(paint(card.canvas, o.name, o.hp, S.A, axisOf(S), n), S.A, n);
      Object.assign(card, { key, at });
      clearTimeout(card.finely);
      if (hurried) card.finely = setTimeout(() => { card.key = ""; draw("maps"); }, 250);
    }
    const sees = facts(o);
    card.sees = sees;
    card.svg.innerHTML = overlay({ ...S, labels: card.labels, sees, ink: LOOK.ink, soft: LOOK.axis });
    card.grip.style.left = `${SQUARE.x + SQUARE.size * axisOf(S).to(S.mu)}%`;
    card.grip.style.top = `${SQUARE.y + SQUARE.size * (1 - axisOf(S).to(S.p))}%`;
    const dead = !sees.alive && S.A !== 0;
    card.says.innerHTML = `<span class="tag${dead ? " dead" : ""}">${sees.tag}</span>${prose(sees.text)}`;
    card.map.setAttribute("aria-label", `${o.name}: the token at π_old ${num(S.mu)}, π_θ ${num(S.p)}. ${sees.tag}, Cap ${num(sees.cap)}. Arrow keys move it.`);
  });
  const panels = S.o.map((o, i) => ({ ...o, color: color(i), label: o.name }));
  [...$("curves").children].forEach((e, i) => {
    const width = Math.max(300, Math.round(e.clientWidth) || 480);
    e.innerHTML = `<svg viewBox="0 0 ${width} 240" role="img" aria-label="Gradient weight for A = ${num(i ? -S.A : S.A)}">` +
      `${curvePanel(panels, i ? -(S.A || 1) : S.A || 1, { ...S, here: i === 0 && S.A !== 0 }, width, LOOK)}</svg>`;
  });
}

let told = 0;
function drawText() {
  $("python").textContent = `${pythonLine(S)}\n${pythonPoint(S)}`;
  document.querySelectorAll(".control").forEach(e => e.refresh?.());
  clearTimeout(told);
  told = setTimeout(() => {
    const hash = `#${toHash(S)}`;
    if (location.hash !== hash) try { history.replaceState(null, "", hash); } catch { /* a frame without an address */ }
    const said = cards.map((c, i) => c.sees ? `${S.o[i].name}: ${c.sees.tag}. ${c.sees.text}` : "").join(" ");
    if ($("say").textContent !== said) $("say").textContent = said;
  }, 400);
}

function build() {
  cards = S.o.map(card);
  $("cards").replaceChildren(...cards.map(c => c.element));
  $("cards").dataset.n = S.o.length;
  $("add").disabled = S.o.length >= MOST;
  $("link").checked = S.link;
  $("log").checked = S.log;
  $("curves").replaceChildren(make("div"), make("div"));
  buildTokens();
  flows = S.o.map((o, i) => {
    const parts = { chart: make("div"), who: make("p", { class: "who" }), pushes: make("div") };
    parts.element = make("article", { class: "card flow", style: `--c: ${color(i)}`, "aria-label": `${o.name}, the small policy` },
      make("header", {}, make("span", { class: "dot" }), make("h3", {}, o.name)), html("h4", prose("π_θ over the first π_old, against updates; hollow dots are clipped")), parts.chart,
      html("h4", 'Pushes on log π, nats: <span class="key full"></span> by its own gradient <span class="key"></span> by the others\''), parts.pushes, parts.who);
    return parts;
  });
  $("flows").replaceChildren(...flows.map(f => f.element));
}

// ---- the page --------------------------------------------------------------------------------------------------------
function figure() {
  const settings = o => {
    const set = Object.entries(OBJECTIVES[o.name].hp).map(([k, of]) => [of, k in o.hp ? o.hp[k] : of.default]).filter(([, v]) => v !== null);
    return [S.A > 0 ? "A &gt; 0" : S.A < 0 ? "A &lt; 0" : "A = 0", ...set.map(([of, v]) => `${letterSVG(of.letter)} = ${num(v)}`)].join(", ");
  };
  const plain = i => COLORS.palette[i % COLORS.palette.length];
  return figureSVG(S.o.map((o, i) => ({ ...o, color: plain(i), label: o.name, says: settings(o), image: cards[i].canvas.toDataURL("image/png"),
    labels: cards[i].labels, sees: cards[i].sees })), S);
}

function presets(list, where, about, use) {
  $(where).replaceChildren(...list.map(([name, hash, says]) => html("button", prose(name), { type: "button", click: () => { use(hash); $(about).innerHTML = prose(says); draw("all"); } })));
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
    slider({ letter: "A", name: "advantage", says: "<b>Advantage</b>: above 0 if the response was better than its group's average: then the token is pushed up", limits: LIMITS.A,
      get: () => S.A, set: x => { S.A = x; draw("maps"); }, legal: x => Math.abs(x) <= 1000 }),
    slider({ letter: "π_old", name: "when sampled", says: "<b>When sampled</b>: the token's probability under the policy that wrote the response", limits: LIMITS.mu,
      get: () => S.mu, set: x => { S.mu = x; draw("maps"); }, legal: x => x > 0 && x <= 1 }),
    slider({ letter: "π_θ", name: "now", says: "<b>Now</b>: its probability under the policy that is trained; the ratio <i>r</i> is this over the other", limits: LIMITS.p,
      get: () => S.p, set: x => { S.p = x; draw("maps"); }, legal: x => x > 0 && x <= 1 }),
    slider({ letter: "η", name: "step", says: "<b>Step</b>: learning rate of the step that the arrow shows, in a softmax of this token and the rest", limits: LIMITS.eta,
      get: () => S.eta, set: x => { S.eta = x; draw("maps"); }, legal: x => x >= 0 && x <= 1000 }));
  const ramp = COLORS.ramp.map((c, i) => `<stop offset="${i / (COLORS.ramp.length - 1)}" stop-color="${c}"/>`).join("");
  $("legend").innerHTML = `<span>Cap 0 <svg width="110" height="12" aria-hidden="true"><linearGradient id="r">${ramp}</linearGradient><rect width="110" height="12" rx="2" fill="url(#r)"/></svg> 1</span>` +
    `<span><svg width="26" height="14" aria-hidden="true"><rect width="26" height="14" rx="2" fill="${COLORS.dead[0]}"/><path d="M2 14 16 0M10 14 24 0" stroke="${COLORS.dead[1]}"/></svg> no gradient of its own</span>` +
    `<span><svg width="14" height="14" aria-hidden="true"><circle cx="7" cy="7" r="4.5" fill="#fff" stroke="#222" stroke-width="2"/></svg> the token: drag it</span>` +
    `<span><svg width="14" height="16" aria-hidden="true"><path d="M7 1v14M3 1h8" stroke="currentColor" stroke-width="1.6"/></svg> its Cap</span>` +
    `<span><svg width="14" height="16" aria-hidden="true"><path d="M7 16V6" stroke="var(--step)" stroke-width="2.4"/><path d="M2.5 8 7 0l4.5 8z" fill="var(--step)"/></svg> the step it takes</span>`;
  const left = Object.entries(LEFT_OUT).map(([n, why]) => `<code>${n}</code> (${why})`).join(", ");
  $("notes").innerHTML = [
    ["Cap is not a bound on the policy", "Cap is how far a token's own gradient can carry it while everything else is fixed. A large step overshoots it. The gradients of other tokens, momentum and shared parameters move a token whose own gradient is zero."],
    ["A clip has one side", "For A &gt; 0 a token loses its gradient above 1 + ε<sub>high</sub> only, for A &lt; 0 below 1 − ε<sub>low</sub> only. The sign of A decides which clip is active."],
    ["Sequence level", "For a sequence-level objective π is the geometric-mean probability of the response's tokens, and the ratio is <i>s</i>. At level sequence_product π is the probability of the response."],
    ["The step", "The arrow is one update of plain gradient ascent on one sampled token, in a softmax of two entries: this token and the rest. Real steps average over many tokens."],
    ["The small policy", "The small policy has one context, responses of one token, and an infinite batch: the expected update, without noise. The advantages are constant. It shows mechanisms, not sizes."],
    ["Where the formulas come from", "sympy differentiates the function that trains and prints the result as JavaScript. A test compares it with numpy on 10,000 points per objective, with random hyperparameters. KL terms are separate and not shown."],
    ["Objectives that are missing", left ? `sympy cannot read ${left}, or UP applied to them.` : "None: the page has every registered objective."],
  ].map(([head, text]) => `<div><h3>${head}</h3><p>${text}</p></div>`).join("");
  $("add").addEventListener("click", () => { S.o.push(panel(Object.keys(OBJECTIVES).find(n => !S.o.some(o => o.name === n)))); draw("all"); });
  $("link").addEventListener("change", e => { S.link = e.target.checked; draw(); });
  $("log").addEventListener("change", e => { S.log = e.target.checked; draw("maps"); });
  $("copy-python").addEventListener("click", () => copy($("python").textContent));
  $("copy-link").addEventListener("click", () => copy(`${location.href.split("#")[0]}#${toHash(S)}`));
  $("save-svg").addEventListener("click", () => { download(figure(), "cap.svg", "image/svg+xml"); done("Saved as cap.svg."); });
  $("time").addEventListener("input", e => { S.flow.t = Number(e.target.value); draw("time"); });
  $("play").addEventListener("click", play);
  $("try").addEventListener("click", e => { location.hash = e.target.dataset.state; $("maps").scrollIntoView(); });
  $("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", e => theme(e.matches ? "dark" : "light"));
  theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  addEventListener("hashchange", read);
  new ResizeObserver(() => draw("maps", "time")).observe($("curves"));
  new IntersectionObserver(([e]) => { seen = e.isIntersecting; }, { rootMargin: "100px" }).observe($("flow"));
  read();
}

begin();
window.explorer = { state: () => S, figure, python: () => pythonLine(S), spent };  // for whoever embeds or tests it
