// SPDX-License-Identifier: Apache-2.0
// Arrays of numpy and of safetensors. A column is { shape, values }: numbers, or one text.

const NUMBERS = {
  f2: [2, (v, at, little) => half(v.getUint16(at, little))],
  f4: [4, (v, at, little) => v.getFloat32(at, little)],
  f8: [8, (v, at, little) => v.getFloat64(at, little)],
  b1: [1, (v, at) => v.getUint8(at)],
  i1: [1, (v, at) => v.getInt8(at)],
  i2: [2, (v, at, little) => v.getInt16(at, little)],
  i4: [4, (v, at, little) => v.getInt32(at, little)],
  i8: [8, (v, at, little) => Number(v.getBigInt64(at, little))],
  u1: [1, (v, at) => v.getUint8(at)],
  u2: [2, (v, at, little) => v.getUint16(at, little)],
  u4: [4, (v, at, little) => v.getUint32(at, little)],
  u8: [8, (v, at, little) => Number(v.getBigUint64(at, little))],
  bf: [2, (v, at, little) => wide(v.getUint16(at, little))],
};
const SAFETENSORS = {
  F64: "f8", F32: "f4", F16: "f2", BF16: "bf", I64: "i8", I32: "i4", I16: "i2", I8: "i1", U8: "u1", BOOL: "b1",
};

/** A column from the bytes of a .npy. */
function npyColumn(name, bytes) {
  const view = viewOf(bytes);
  if (bytes.length < 12 || textOf(bytes.subarray(1, 6)) !== "NUMPY") throw new InputError(CUT);
  const wideHeader = bytes[6] > 1;
  const start = (wideHeader ? 12 : 10) + (wideHeader ? view.getUint32(8, true) : view.getUint16(8, true));
  const header = textOf(bytes.subarray(10, start));
  const kind = /'descr': '([<>|=])([a-zA-Z])(\d+)'/.exec(header), shaped = /'shape': \(([\d, ]*)\)/.exec(header);
  if (!shaped) throw new InputError(CUT);
  if (!kind || kind[2] === "O") throw new InputError(`${name} holds Python objects: write numbers with numpy.savez.`);
  const shape = shaped[1].split(",").filter((n) => n.trim()).map(Number), little = kind[1] !== ">";
  const body = bytes.subarray(start);
  if (kind[2] === "U" && shape.length === 0) return { shape, values: pointsOf(body, little) };
  const values = numbersOf(name, body, kind[2] + kind[3], shape, little);
  return { shape, values: /'fortran_order': True/.test(header) ? transposed(values, shape) : values };
}

/** name -> column, and the facts, of a .safetensors. */
function safetensorsColumns(bytes, wanted) {
  if (bytes.length < 8) throw new InputError(CUT);
  const length = Number(viewOf(bytes).getBigUint64(0, true));
  if (8 + length > bytes.length) throw new InputError(CUT);
  const header = parsed(new TextDecoder().decode(bytes.subarray(8, 8 + length)));
  const { __metadata__: facts = {}, ...arrays } = header;
  const columns = new Map();
  for (const [name, { dtype, shape, data_offsets: [from, to] }] of Object.entries(arrays)) {
    if (!wanted.includes(name)) continue;
    const kind = SAFETENSORS[dtype];
    if (!kind) throw new InputError(`${name} holds ${dtype}, which this page does not read: use upref replay.`);
    columns.set(name, { shape, values: numbersOf(name, bytes.subarray(8 + length + from, 8 + length + to), kind, shape, true) });
  }
  return { columns, facts };
}

function numbersOf(name, body, kind, shape, little) {
  if (!NUMBERS[kind]) throw new InputError(`${name} holds ${kind}, not numbers.`);
  const [size, read] = NUMBERS[kind], count = shape.reduce((a, b) => a * b, 1), view = viewOf(body);
  if (count > MOST_SLOTS) throw new InputError(`${name} holds more than ${MOST_SLOTS} numbers: split the step.`);
  if (count * size !== body.length) throw new InputError(CUT);
  const values = new Float64Array(count);
  for (let i = 0; i < count; i += 1) values[i] = read(view, i * size, little);
  return values;
}

/** numpy's columns-first order of a matrix as rows first. */
function transposed(values, shape) {
  if (shape.length !== 2) return values;
  const [rows, columns] = shape;
  return values.map((_, i) => values[(i % columns) * rows + Math.floor(i / columns)]);
}

/** numpy's text: four bytes a character. */
function pointsOf(body, little) {
  const view = viewOf(body);
  const codes = Array.from({ length: body.length / 4 }, (_, i) => view.getUint32(4 * i, little));
  return codes.filter((code) => code).map((code) => String.fromCodePoint(code)).join("");
}

/** The number of sixteen bits of float16. */
function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}

/** The number of sixteen bits of bfloat16, the first half of a float32. */
function wide(bits) {
  const view = new DataView(new ArrayBuffer(4));
  view.setUint32(0, bits << 16);
  return view.getFloat32(0);
}

/** JSON as Python writes it, which may hold NaN and Infinity. */
function parsed(text) {
  try {
    return JSON.parse(text.replace(/("(?:[^"\\]|\\.)*")|-?Infinity|NaN/g, (found, quoted) => quoted ?? numberText(found)));
  } catch {
    throw new InputError(CUT);
  }
}

function numberText(found) {
  return found === "NaN" ? '"NaN"' : found.startsWith("-") ? "-1e999" : "1e999"; // JSON reads 1e999 as Infinity
}
