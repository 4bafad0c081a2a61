// SPDX-License-Identifier: Apache-2.0
// From columns to the tokens that are drawn: what upref/replay/batch.py checks of them, checked here too.

const READ = ["ids", "mask", "old", "now", "sampler", "sampler_ids"]; // columns of the picture

/** The step of a .npz: name -> bytes of each array. */
function npzStep(arrays) {
  const columns = new Map(), facts = {};
  let offsets = null;
  for (const [file, bytes] of arrays) {
    const name = file.replace(/\.npy$/, "");
    if (FACTS.includes(name)) {
      const { values } = npyColumn(name, bytes);
      facts[name] = typeof values === "string" ? values : String(values[0]);
    } else if (name === "offsets") offsets = npyColumn(name, bytes).values;
    else if (!(name in COLUMNS)) throw new InputError(`${name} is no column of a recorded batch: leave it out, or put it into meta.`);
    else if (READ.includes(name)) columns.set(name, npyColumn(name, bytes));
  }
  return tokensOf(columns, facts, offsets);
}

function safetensorsStep(bytes) {
  const { columns, facts } = safetensorsColumns(bytes, [...READ, "offsets"]);
  const offsets = columns.get("offsets")?.values ?? null;
  columns.delete("offsets");
  return tokensOf(columns, facts, offsets);
}

/** The step of NeMo-RL's train_data_step*.jsonl. */
function jsonlStep(text, name) {
  const lines = text.split("\n").filter((line) => line.trim());
  if (!lines.length || NEMO_NEEDED.some((key) => !lines[0].includes(`"${key}"`))) {
    throw new InputError(`this is no train_data_step*.jsonl of NeMo-RL: its lines have ${NEMO_NEEDED.join(", ")}.`);
  }
  const held = Object.fromEntries(["mask", ...Object.values(NEMO)].map((column) => [column, []]));
  const offsets = [0];
  lines.forEach((line, number) => nemoRow(parsed(line), number + 1, held, offsets));
  const columns = new Map();
  for (const [column, values] of Object.entries(held)) {
    if (values.length === offsets.at(-1)) columns.set(column, { shape: [values.length], values: Float64Array.from(values) });
  }
  const { values: mask } = columns.get("mask"), old = columns.get("old")?.values;
  if (old && !old.some((x, i) => x && mask[i])) columns.delete("old"); // of a run that forced r = 1
  const step = /step(\d+)/.exec(name);
  return tokensOf(columns, { schema: String(SCHEMA), ...(step && { step: step[1] }) }, offsets);
}

/** Append the tokens of a line to the columns. */
function nemoRow(line, number, held, offsets) {
  for (const key of NEMO_NEEDED) if (!(key in line)) throw new InputError(`line ${number} lacks ${key}: was the file altered?`);
  const ids = unbatched(line.token_ids), count = ids.length;
  const [inside, sample] = NEMO_NEEDED.slice(1).map((key) => spread(unbatched(line[key]), count));
  const row = { mask: inside.map((x, i) => (i && x * sample[i] ? 1 : 0)) }; // position 0 has no log-probability
  for (const [key, column] of Object.entries(NEMO)) if (key in line) row[column] = spread(unbatched(line[key]), count);
  for (const [column, values] of Object.entries(row)) {
    if (values.length !== count) throw new InputError(`line ${number}: ${column} has ${values.length} numbers, token_ids ${count}.`);
    for (const value of values) held[column].push(Number(value));
  }
  offsets.push(offsets.at(-1) + count);
}

/** The value without its batch axis of one. */
function unbatched(value) {
  return Array.isArray(value) && value.length === 1 ? value[0] : value;
}

/** One number as that of each token. */
function spread(value, count) {
  if (!Array.isArray(value)) return Array(count).fill(value);
  return value.length === 1 ? Array(count).fill(value[0]) : value;
}

/** The tokens that train and that the sampler drew: x by the trainer, y by the sampler, in nats. */
function tokensOf(columns, facts, offsets) {
  if (facts.schema !== String(SCHEMA)) {
    throw new InputError(`the file has the schema version ${facts.schema ?? "none"}; this page reads ${SCHEMA}.`);
  }
  for (const name of ["ids", "mask"]) needed(columns, name, "the picture", {});
  const { shape, values: mask } = columns.get("mask");
  const hints = facts.meta ? parsed(facts.meta) : {};
  needed(columns, "sampler", "the picture", hints);
  const trainer = columns.has("old") ? "old" : "now";
  if (!columns.has(trainer)) needed(columns, "old", "the picture", hints);
  checkShapes(columns, shape, offsets);
  if (mask.some((x) => x !== 0 && x !== 1)) throw new InputError("mask must hold 0 and 1.");
  if (!mask.includes(1)) throw new InputError("mask is false everywhere, so no token trains.");
  const place = placeOf(shape, offsets);
  const [old, sampler, ids, drawn] = [trainer, "sampler", "ids", "sampler_ids"].map((name) => columns.get(name)?.values);
  const x = [], y = [];
  let trained = 0, other = 0;
  mask.forEach((on, i) => {
    if (!on) return;
    trained += 1;
    other += drawn ? drawn[i] !== ids[i] : 0;
    const mu = sampler[i] === -Infinity ? NaN : sampler[i];
    if (mu === Infinity) throw new InputError(`sampler is inf at ${place(i)}, which trains.`);
    const value = trainersNumber(old[i], trainer, () => place(i));
    if (Number.isNaN(mu)) return;
    x.push(value);
    y.push(mu);
  });
  return { x: Float64Array.from(x), y: Float64Array.from(y), trained, other, step: facts.step ?? null };
}

/** A log-probability of the trainer, which is finite and at most 0; a fused softmax may round it to a little above. */
function trainersNumber(value, name, place) {
  if (!Number.isFinite(value)) throw new InputError(`${name} is ${value} at ${place()}, which trains.`);
  if (value <= 0) return value;
  if (value <= ROUNDING) return 0;
  throw new InputError(`${name} is ${value.toPrecision(4)} > 0 at ${place()}: log-probabilities are never positive.`);
}

function needed(columns, name, purpose, hints) {
  if (columns.has(name)) return;
  const hint = hints[`hint: ${name}`] ?? "record it as the page Recorded batches describes.";
  throw new InputError(`${purpose} needs the column ${name} (${COLUMNS[name]}), which the file lacks: ${hint}`);
}

function checkShapes(columns, shape, offsets) {
  const flat = shape.length === 1 && offsets, total = shape[0];
  if (!flat && (shape.length !== 2 || offsets)) throw new InputError(`mask has shape [${shape}]; give [B, T], or [N] with offsets.`);
  if (flat && !(offsets[0] === 0 && offsets.at(-1) === total && offsets.every((x, i) => !i || x >= offsets[i - 1]))) {
    throw new InputError(`offsets must rise from 0 to the number of tokens, ${total}.`);
  }
  for (const [name, column] of columns) {
    if (String(column.shape) !== String(shape)) throw new InputError(`${name} has shape [${column.shape}], expected [${shape}].`);
  }
}

/** Words for the place of a slot. */
function placeOf(shape, offsets) {
  return (i) => {
    if (!offsets) return `response ${Math.floor(i / shape[1])}, token ${i % shape[1]}`;
    const row = offsets.findIndex((end) => end > i) - 1;
    return `response ${row}, token ${i - offsets[row]}`;
  };
}
