// SPDX-License-Identifier: Apache-2.0
// All that can be set is one object, and the part of the address after # is the same object as text.

const MOST = 6;  // panels
const TOKENS = ["rare, right", "common, right", "wrong 1", "wrong 2", "wrong 3"];
const POINT = { A: 1, mu: 0.25, p: 0.25, eta: 1, link: true, log: false };
const FLOW = { mu: [0.01, 0.24, 0.45, 0.2, 0.1], A: [1.732, 1.732, -0.577, -0.577, -0.577], lr: 0.1, k: 0, n: 1200, t: 1200 };
const LIMITS = {  // least, most, step of each slider
  A: [-3, 3, 0.1], mu: [0.001, 1, 0.001], p: [0.001, 1, 0.001], eta: [0, 10, 0.1],
  lr: [0.01, 1, 0.01], n: [100, 5000, 100], weight: [0.002, 1, 0.002], adv: [-4, 4, 0.1],
};
const ROLLOUTS = [0, 1, 4, 16, 64, 256];

const PRESETS = [
  ["Fig. 1: DAPO vs UP-DAPO", "o=dapo;up_dapo&A=1&mu=0.25&p=0.25",
    "The paper's Fig. 1, right tokens. DAPO's Cap ends at r = 1 + ε_high; UP's is all of the rest, 1 − π_θ."],
  ["Fig. 1, A < 0", "o=dapo~c:3;up_dapo~c:3&A=-1&mu=0.4&p=0.36",
    "Wrong tokens: both have the same lower clip. The paper also draws a dual clip without a value; here it is on, at verl's default c = 3."],
  ["UP is a plug-in", "o=sapo;up(sapo);cispo;up(cispo)&A=1&mu=0.1&p=0.3",
    "up(X) keeps X for A ≤ 0 and replaces it by A log π_θ for A > 0. If the weight of X is never 0, up(X) changes only the weight, not Cap."],
  ["Bounds that depend on π_old", "o=dppo_tv;bandpo_tv;bandpo_chi2;dppo_kl&A=1&mu=0.05&p=0.08",
    "A clip of the ratio leaves rare tokens the least room. These four bound a distance between probabilities instead."],
  ["One response at a time", "o=gspo;up_gspo;gmpo&A=1&mu=0.3&p=0.3001",
    "Sequence level: π is the geometric mean over a response, and GSPO's window is about 700 times narrower."],
  ["Rare tokens", "o=dapo;up_dapo;dppo_tv&A=1&mu=0.001&p=0.001&log=1",
    "The same squares on logarithmic axes. For a token of probability 0.001, DAPO's clip leaves almost no room; UP leaves all of the rest."],
  ["A step beyond Cap", "o=dapo;dapo~eps_high:0.6&A=1&mu=0.2&p=0.24&eta=6",
    "Cap is where a token's own gradient ends, not where the token stops: one large step overshoots it."],
];
const SCENES = [
  ["A rare right token", "", "Two right tokens, one rare; the wrong ones lose their mass to both."],
  ["All right, graded", "pi=0.5,0.3,0.2&adv=1,2,4&lr=0.25&n=3000&t=3000",
    "A = 1, 2, 4. Under UP each token ends with a probability proportional to π_old A. Under importance sampling the best token takes all."],
  ["Two right, one wrong", "pi=0.3,0.15,0.55&adv=1.106,1.106,-0.905&lr=0.25&n=3000&t=3000",
    "UP converges to π_old restricted to the right answers. Rejection sampling has the same target."],
  ["New rollouts", "k=16", "A new π_old after every 16 updates: each rollout opens the clip again."],
];

function panel(name, hp = {}) { return { name, hp }; }

function start() {
  return { o: [panel("dapo"), panel("up_dapo")], ...POINT, flow: copied(FLOW) };
}

function copied(x) { return JSON.parse(JSON.stringify(x)); }

/** Whether a value is one that Python's registry takes. */
function legal(name, key, value) {
  const of = OBJECTIVES[name].hp[key];
  if (!of) return false;
  if (key === "c") return value === null || value > 1;
  return Number.isFinite(value) && (of.low > 0 ? value > 0 : value >= 0);
}

/** The state as text: only what differs from the defaults, but always the objectives. */
function toHash(s) {
  const one = ({ name, hp }) => [name, ...Object.entries(hp)
    .filter(([k, v]) => v !== OBJECTIVES[name].hp[k].default).map(([k, v]) => `${k}:${v === null ? "None" : v}`)].join("~");
  const parts = [`o=${s.o.map(one).join(";")}`];
  for (const k of ["A", "mu", "p", "eta"]) if (s[k] !== POINT[k]) parts.push(`${k}=${s[k]}`);
  if (!s.link) parts.push("link=0");
  if (s.log) parts.push("log=1");
  const same = (a, b) => a.length === b.length && a.every((x, i) => x === b[i]);
  if (!same(s.flow.mu, FLOW.mu)) parts.push(`pi=${s.flow.mu.join(",")}`);
  if (!same(s.flow.A, FLOW.A)) parts.push(`adv=${s.flow.A.join(",")}`);
  for (const k of ["lr", "k", "n", "t"]) if (s.flow[k] !== FLOW[k]) parts.push(`${k}=${s.flow[k]}`);
  return parts.join("&");
}

/** { state, refused }: whatever cannot be read is left out and named. */
function fromHash(text) {
  const s = start(), refused = [];
  let plain = String(text).replace(/^#/, "");
  try { plain = decodeURIComponent(plain); } catch { refused.push("the address is not well written"); }
  for (const part of plain.split("&").filter(Boolean)) {
    const at = part.indexOf("="), key = part.slice(0, at), value = part.slice(at + 1);
    if (key === "o") {
      const panels = value.split(";").filter(Boolean).map(x => readPanel(x, refused)).filter(Boolean);
      if (panels.length > MOST) refused.push(`more than ${MOST} objectives`);
      if (panels.length) s.o = panels.slice(0, MOST);
    } else if ((key === "link" || key === "log") && (value === "0" || value === "1")) s[key] = value === "1";
    else if (!readNumber(s, key, value)) refused.push(part);
  }
  if (s.flow.A.length !== s.flow.mu.length) {
    refused.push("pi and adv of different lengths");
    Object.assign(s.flow, { mu: [...FLOW.mu], A: [...FLOW.A] });
  }
  s.flow.t = Math.min(s.flow.t, s.flow.n);
  return { state: s, refused };
}

function readPanel(text, refused) {
  const [name, ...pairs] = text.split("~");
  if (!Object.hasOwn(OBJECTIVES, name)) {
    refused.push(name in LEFT_OUT ? `${name} (${LEFT_OUT[name]})` : name);
    return null;
  }
  const hp = {};
  for (const pair of pairs) {
    const [key, value] = pair.split(":"), x = value === "None" ? null : number(value);
    if (Object.hasOwn(OBJECTIVES[name].hp, key) && legal(name, key, x)) hp[key] = x; else refused.push(`${name} ${pair}`);
  }
  return panel(name, hp);
}

function number(text) { return text === undefined || String(text).trim() === "" ? NaN : Number(text); }

function readNumber(s, key, value) {
  const list = value.split(",").map(number), x = list[0];
  if (key === "A" && Math.abs(x) <= 1000) s.A = x;
  else if ((key === "mu" || key === "p") && x > 0 && x <= 1) s[key] = x;
  else if (key === "eta" && x >= 0 && x <= 1000) s.eta = x;
  else if (key === "pi" && list.length > 1 && list.length <= TOKENS.length && list.every(v => v > 0 && v <= 1)) s.flow.mu = list;
  else if (key === "adv" && list.length > 1 && list.length <= TOKENS.length && list.every(v => Math.abs(v) <= 100)) s.flow.A = list;
  else if (key === "lr" && x > 0 && x <= 10) s.flow.lr = x;
  else if ((key === "n" || key === "t" || key === "k") && Number.isInteger(x) && x >= (key === "n" ? 1 : 0) && x <= 5000) s.flow[key] = x;
  else return false;
  return true;
}

/** π_old of the small policy: what the sliders say, made to add up to 1. */
function distribution(weights) {
  const sum = weights.reduce((a, b) => a + b);
  return weights.map(x => x / sum);
}
