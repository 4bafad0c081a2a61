// SPDX-License-Identifier: Apache-2.0
// The entries of a zip archive, which .npz is. Its sizes are checked before anything is allocated.

/** A sentence for the visitor: what is wrong with the file, and what to do. */
class InputError extends Error {}

const END = 0x06054b50, ENTRY = 0x02014b50, CONTENT = 0x04034b50;
const STORED = 0, DEFLATED = 8;
const CUT = "the file is damaged or cut off: write it again.";

/** name -> { method, packed, size, crc, at } of each entry, from the directory at the end of the archive. */
function entriesOf(bytes) {
  const view = viewOf(bytes);
  let end = bytes.length - 22;
  while (end >= 0 && view.getUint32(end, true) !== END) end -= 1;
  if (end < 0) throw new InputError(CUT);
  const entries = new Map();
  let at = view.getUint32(end + 16, true), announced = 0;
  for (let left = view.getUint16(end + 10, true); left > 0; left -= 1) {
    if (at + 46 > end || view.getUint32(at, true) !== ENTRY) throw new InputError(CUT);
    const [method, crc, packed, size] = [view.getUint16(at + 10, true), ...[16, 20, 24].map((n) => view.getUint32(at + n, true))];
    const [name, extra, comment] = [28, 30, 32].map((n) => view.getUint16(at + n, true));
    announced += size;
    if (announced > MOST_BYTES) throw new InputError(`the columns announce more than ${MOST_BYTES / 2 ** 30} GiB: use upref replay.`);
    const start = view.getUint32(at + 42, true);
    if (start + 30 > bytes.length || view.getUint32(start, true) !== CONTENT) throw new InputError(CUT);
    const content = start + 30 + view.getUint16(start + 26, true) + view.getUint16(start + 28, true);
    if (content + packed > bytes.length || ![STORED, DEFLATED].includes(method)) throw new InputError(CUT);
    entries.set(textOf(bytes.subarray(at + 46, at + 46 + name)), { method, crc, size, packed: bytes.subarray(content, content + packed) });
    at += 46 + name + extra + comment;
  }
  return entries;
}

/** The bytes of an entry that is stored as it is. */
function stored(entry) {
  return intact(entry.packed, entry);
}

/** The bytes of any entry; the browser inflates them. */
async function unpacked(entry) {
  if (entry.method === STORED) return stored(entry);
  const out = new Uint8Array(entry.size);
  let filled = 0;
  try {
    const reader = new Blob([entry.packed]).stream().pipeThrough(new DecompressionStream("deflate-raw")).getReader();
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      if (filled + part.value.length > out.length) throw new InputError(CUT);
      out.set(part.value, filled);
      filled += part.value.length;
    }
  } catch {
    throw new InputError(CUT);
  }
  return intact(out.subarray(0, filled), entry);
}

function intact(content, entry) {
  if (content.length !== entry.size || checksum(content) !== entry.crc) throw new InputError(CUT);
  return content;
}

const CRC = Uint32Array.from({ length: 256 }, (_, byte) => {
  for (let bit = 0; bit < 8; bit += 1) byte = byte & 1 ? (byte >>> 1) ^ 0xedb88320 : byte >>> 1;
  return byte;
});

/** CRC-32. */
function checksum(bytes) {
  let sum = 0xffffffff;
  for (const byte of bytes) sum = (sum >>> 8) ^ CRC[(sum ^ byte) & 255];
  return (sum ^ 0xffffffff) >>> 0;
}

function viewOf(bytes) {
  return new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
}

/** ASCII bytes as text. */
function textOf(bytes) {
  return Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
}
