// The bytes that payload.py packs: u32 length of the header, the header as JSON, then arrays at multiples of 8.
const ARRAYS = { u1: Uint8Array, u2: Uint16Array, i4: Int32Array, f4: Float32Array, f8: Float64Array };

function unpack(data) {
  const bytes = data instanceof Uint8Array ? data : new Uint8Array(data);
  const aligned = bytes.byteOffset % 8 ? bytes.slice() : bytes;
  const length = new DataView(aligned.buffer, aligned.byteOffset, 4).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(aligned.subarray(4, 4 + length)));
  const first = Math.ceil((4 + length) / 8) * 8;
  const array = ([type, offset, count]) => new ARRAYS[type](aligned.buffer, aligned.byteOffset + first + offset, count);
  return { header, array };
}

// Numbers in words, with the units of the command line.
function time(ns) {
  const size = Math.abs(ns);
  if (size < 1e3) return `${Math.round(ns)} ns`;
  if (size < 1e6) return `${(ns / 1e3).toFixed(size < 1e4 ? 2 : 1)} µs`;
  if (size < 1e9) return `${(ns / 1e6).toFixed(size < 1e7 ? 3 : 2)} ms`;
  return `${(ns / 1e9).toFixed(3)} s`;
}

function size(bytes) {
  const magnitude = Math.abs(bytes);
  if (magnitude > 0 && magnitude < 2 ** 20 / 10) return `${bytes.toLocaleString("en")} B`;
  return magnitude >= 2 ** 30 / 10 ? `${(bytes / 2 ** 30).toFixed(4)} GiB` : `${(bytes / 2 ** 20).toFixed(3)} MiB`;
}

function percent(share) {
  if (share > 0 && share < 0.001) return "<0.1 %";
  return `${(100 * share).toFixed(1)} %`;
}

// Ticks at 1, 2 or 5 times a power of ten.
function ticks(low, high, wanted) {
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) found.push(at);
  return { found, step };
}
