// SPDX-License-Identifier: Apache-2.0
// The same picture as a line of Python.

/** `import upref; upref.cap_map("dapo", ...)`, with upref.weights.curve.make_curve where a hyperparameter is not the default. */
function pythonLine(s, file = "cap.svg") {
  const literal = x => x === null ? "None" : String(x);
  const own = ({ name, hp }) => Object.entries(hp).filter(([k, v]) => v !== OBJECTIVES[name].hp[k].default);
  const one = o => {
    const set = own(o).map(([k, v]) => `, ${k}=${literal(v)}`).join("");
    return set ? `make_curve("${o.name}"${set})` : `"${o.name}"`;
  };
  const needs = s.o.some(o => own(o).length) ? "; from upref.weights.curve import make_curve" : "";
  const axes = s.log ? "  # on linear axes" : "";
  return `import upref${needs}; upref.cap_map(${s.o.map(one).join(", ")}, adv=${literal(s.A)}).savefig("${file}")${axes}`;
}

/** The numbers at the point: Cap and weight of each. */
function pythonPoint(s) {
  const one = ({ name, hp }) => {
    const set = Object.entries(hp).filter(([k, v]) => v !== OBJECTIVES[name].hp[k].default).map(([k, v]) => `, ${k}=${v === null ? "None" : v}`);
    return `upref.capacity("${name}", ${s.p}, ${s.mu}, ${s.A}${set.join("")})`;
  };
  return `import upref; print(${s.o.map(one).join(", ")})`;
}
