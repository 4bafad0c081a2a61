// SPDX-License-Identifier: Apache-2.0
// A card for each objective: which one, its map, its hyperparameters; the token on the map.

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
  const canvas = make("canvas"), grip = make("div", { class: "grip" }), svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 100 100");
  svg.setAttribute("aria-hidden", "true");
  const map = make("div", { class: "map", tabindex: "0", role: "application", "aria-roledescription": "map with a movable token" }, canvas, svg, grip);
  movable(map);
  const says = make("p", { class: "verdict" });
  const element = make("article", { class: "card", style: `--c: ${color(i)}`, "aria-label": o.name }, make("header", {}, make("span", { class: "dot" }), pick, up, remove),
    map, says, make("div", { class: "controls" }, Object.entries(facts.hp).map(([k, of]) => hyperparameter(o, k, of))), more(o, facts));
  return { element, canvas, svg, map, grip, says, at: 0 };
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
    place((x - SQUARE.x) / SQUARE.size, 1 - (y - SQUARE.y) / SQUARE.size, 3);
  };
  map.addEventListener("pointerdown", e => {
    if (e.button || (e.pointerType === "touch" && !e.target.classList.contains("grip"))) return;  // a finger beside it scrolls
    map.setPointerCapture(e.pointerId);
    at(e);
  });
  map.addEventListener("pointermove", e => { if (map.hasPointerCapture(e.pointerId)) at(e); });
  map.addEventListener("click", at);
  map.addEventListener("keydown", e => {
    const by = e.shiftKey ? 0.05 : 0.005, way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[e.key];
    if (!way || e.ctrlKey || e.metaKey || e.altKey) return;
    e.preventDefault();
    place(axisOf(S).to(S.mu) + way[0] * by, axisOf(S).to(S.p) + way[1] * by, 4);
  });
}

/** The token at this place of the square. */
function place(x, y, digits) {
  const axis = axisOf(S), inside = u => Math.max(+axis.from(Math.min(Math.max(u, 0), 1)).toPrecision(digits), S.log ? 1e-4 : LIMITS.p[0]);
  S.mu = inside(x);
  S.p = inside(y);
  draw("maps");
}
