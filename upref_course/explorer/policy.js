// SPDX-License-Identifier: Apache-2.0
// The small policy: its tokens, its player, its drawings.

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
    slider({ letter: "η", name: "learning rate", says: "<b>Learning rate</b>: size of an update of the logits", limits: LIMITS.lr, get: () => flow.lr, set: x => { flow.lr = x; draw("flow"); }, legal: x => x > 0 && x <= 10 }),
    slider({ letter: "N", name: "updates in all", says: "<b>Updates</b>: how long to go on", limits: LIMITS.n, get: () => flow.n, legal: x => Number.isInteger(x) && x >= 1 && x <= 5000,
      set: x => { flow.n = x; flow.t = Math.min(flow.t, x); draw("flow"); } }),
    make("div", { class: "control wide" }, html("label", prose("New π_old"), { for: "rollout" }), rollout,
      html("p", prose("If π_old stays, UP converges to the policy that is proportional to π_old A on the tokens with A > 0: the triangles at the right edge."), { class: "says" })),
    make("div", { class: "control wide" }, normal, html("p", prose("as <code>group_norm</code> does in an infinite group: mean 0, deviation 1 under π_old."), { class: "says" })));
}

function TOKENS_OF() { return S.flow.mu.length === TOKENS.length ? TOKENS : S.flow.mu.map((_, a) => `token ${a + 1}`); }

function computeFlows() {
  const mu = distribution(S.flow.mu), rest = S.flow.k === 0 ? restOfUp(mu, S.flow.A) : null;
  S.o.forEach((o, i) => {
    const { t: _, ...setting } = S.flow, key = JSON.stringify([o.name, o.hp, setting]);
    if (flows[i].key !== key) Object.assign(flows[i], { key, path: flowPath(o.name, o.hp, { ...S.flow, mu }), rest, mu });
  });
  $("tokens").querySelectorAll("fieldset").forEach(e => e.refresh());
  S.flow.t = Math.min(S.flow.t, S.flow.n);
  Object.assign($("time"), { max: S.flow.n, value: S.flow.t });
}

function drawFlows() {
  const { t, A } = S.flow, names = TOKENS_OF();
  $("time-is").textContent = String(t);
  const axes = commonAxes(flows.map(f => f.path), t, flows[0].mu, flows[0].rest);
  flows.forEach(({ chart, who, pushes, path, rest, mu }) => {
    const width = Math.max(260, Math.round(chart.clientWidth) || 320);
    chart.innerHTML = ratioChart(path, t, mu, rest, axes, width, LOOK);
    pushes.innerHTML = pushChart(path, t, A, names, axes, width, LOOK);
    who.innerHTML = prose(flowWords(stateAt(path, t), t, A, names)) + (rest ? prose(` The distance to UP's limit (the triangles) is ${num(distance(stateAt(path, t).p, rest), 2)} (total variation).`) : "");
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
