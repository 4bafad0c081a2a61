// SPDX-License-Identifier: Apache-2.0
// The field, the picture, and the sentences under it.

const MOST_POINTS = 4000, SIDE = 340, EDGE = 44, TOP = Math.E; // no probability taken for its logarithm is drawn above e
const $ = (id) => document.getElementById(id);

/** The step of a file that a visitor gave. */
async function read(file) {
  if (file.size > MOST_BYTES) throw new InputError(`the file is larger than ${MOST_BYTES / 2 ** 30} GiB: use upref replay.`);
  const kind = /\.[^.]*$/.exec(file.name)?.[0].toLowerCase();
  if (kind === ".jsonl") return jsonlStep(await file.text(), file.name);
  if (kind === ".npz") {
    const arrays = new Map();
    for (const [name, entry] of entriesOf(await bytesOf(file))) arrays.set(name, await unpacked(entry));
    return npzStep(arrays);
  }
  if (kind === ".safetensors") return safetensorsStep(await bytesOf(file));
  throw new InputError("this page reads .npz, .safetensors and NeMo-RL's .jsonl; upref replay reads other trainers' files too.");
}

async function bytesOf(file) {
  return new Uint8Array(await file.arrayBuffer());
}

/** Draw a file, or say why it cannot be drawn. */
async function show(files) {
  $("found").hidden = true;
  $("wrong").textContent = "";
  $("state").textContent = "reading ...";
  try {
    if (files.length !== 1) throw new InputError("give one file.");
    const step = await read(files[0]);
    if (!step.x.length) throw new InputError("the sampler's column has no number on any token that trains.");
    const gap = gapOf(step);
    $("found").hidden = false;
    draw(pointsFrom(step), $("picture"));
    words(files[0].name, step, gap);
    window.picture = { step, gap };
    $("state").textContent = "drawn";
  } catch (error) {
    $("state").textContent = "refused";
    $("wrong").textContent = `${files[0]?.name ?? "nothing"}: ${error instanceof InputError ? error.message : `this page cannot read it (${error}).`}`;
  }
}

/** The scatter on a white ground, so that a copy of it can be pasted anywhere. */
function draw({ trainer, sampler }, canvas) {
  const scale = window.devicePixelRatio || 1, side = SIDE - EDGE - 12;
  canvas.width = canvas.height = SIDE * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.fillStyle = "#ffffff";
  pen.fillRect(0, 0, SIDE, SIDE);
  const top = Math.min(TOP, Math.max(1, sampler.reduce((most, y) => Math.max(most, y), 0)));
  const across = (p) => EDGE + p * side, up = (q) => 12 + side * (1 - Math.min(q, top) / top);
  pen.strokeStyle = "#cccccc";
  pen.strokeRect(EDGE, 12, side, side);
  pen.strokeStyle = "#888888";
  pen.beginPath();
  pen.moveTo(across(0), up(0));
  pen.lineTo(across(1), up(1));
  pen.stroke();
  pen.fillStyle = "#222222";
  pen.font = "12px system-ui, sans-serif";
  pen.textAlign = "center";
  for (const p of [0, 0.5, 1]) pen.fillText(String(p), across(p), SIDE - 18);
  pen.fillText("by the trainer", across(0.5), SIDE - 4);
  pen.textAlign = "right";
  for (const q of top > 1 ? [0, 1, 2].filter((q) => q <= top) : [0, 0.5, 1]) pen.fillText(String(q), EDGE - 5, up(q) + 4);
  pen.save();
  pen.translate(12, 12 + side / 2);
  pen.rotate(-Math.PI / 2);
  pen.textAlign = "center";
  pen.fillText("by the sampler", 0, 0);
  pen.restore();
  pen.fillStyle = COLOR;
  pen.globalAlpha = 0.45;
  for (const i of chosen(trainer.length, MOST_POINTS)) {
    pen.beginPath();
    pen.arc(across(trainer[i]), up(sampler[i]), 1.6, 0, 2 * Math.PI);
    pen.fill();
  }
}

/** The numbers, as the report of `upref replay` has them. */
function words(name, step, gap) {
  const digits = (x, n = 3) => String(Number(x.toPrecision(n)));
  const missing = step.trained - gap.tokens;
  $("name").textContent = step.step === null ? name : `${name}, step ${step.step}`;
  $("numbers").textContent =
    `${gap.tokens} tokens, mean |log ρ| ${digits(gap.mean_abs)}, largest ${digits(gap.largest)}, E[ρ] ${gap.rho_mean.toFixed(4)} ± ${gap.rho_se.toFixed(4)}, ` +
    `KL ${digits(gap.k3, 2)}, effective ${Math.round(100 * gap.effective)}%`;
  const more = [];
  if (missing) more.push(`${missing} of ${step.trained} trained tokens have no log-probability of the sampler and are not drawn.`);
  if (step.other) more.push(`${step.other} trained tokens have other ids than the sampler drew.`);
  if (step.y.some((y) => y > 1)) more.push("Numbers of the sampler above 1 nat are drawn at the upper edge.");
  if (gap.tokens > MOST_POINTS) more.push(`${MOST_POINTS} of the tokens are drawn, evenly spread; the numbers are of all.`);
  $("more").textContent = more.join(" ");
  $("picture").setAttribute("aria-label", `Probability by the sampler against probability by the trainer, ${$("numbers").textContent}`);
}

addEventListener("DOMContentLoaded", () => {
  $("file").addEventListener("change", (event) => show(event.target.files));
  for (const kind of ["dragover", "drop"]) addEventListener(kind, (event) => event.preventDefault());
  addEventListener("dragover", () => $("field").classList.add("over"));
  for (const kind of ["dragleave", "drop"]) addEventListener(kind, () => $("field").classList.remove("over"));
  addEventListener("drop", (event) => show(event.dataTransfer.files));
});
// The page around tells its theme, and is told the height.
addEventListener("message", ({ data }) => {
  if (["dark", "light"].includes(data)) document.documentElement.dataset.theme = data;
});
if (parent !== window) {
  document.documentElement.style.overflow = "hidden";
  new ResizeObserver(() => parent.postMessage(document.body.scrollHeight, "*")).observe(document.body);
}
