// Rows on a canvas. A column of pixels is as opaque as its share of busy time, from a floor that keeps the narrowest
// interval visible; nothing is drawn wider than it is.
const FLOOR = 0.18;
const EXPOSED_PX = 3;

function opacity(share) {
  return share > 0 ? FLOOR + (1 - FLOOR) * Math.min(share, 1) : 0;
}

function rgb(colour) {
  return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
}

// A tile for each pattern of a dimension, in the ink that shows on its colour.
function hatch(context, pattern) {
  if (!pattern) return null;
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const pen = tile.getContext("2d");
  pen.strokeStyle = pen.fillStyle = "rgba(0,0,0,0.55)";
  pen.lineWidth = 1;
  pen.beginPath();
  if (pattern.includes("/")) for (const k of [-4, 0, 4, 8]) (pen.moveTo(k, 8), pen.lineTo(k + 8, 0));
  if (pattern.includes("\\") || pattern.includes("x")) for (const k of [-4, 0, 4, 8]) (pen.moveTo(k, 0), pen.lineTo(k + 8, 8));
  if (pattern.includes("x")) for (const k of [-4, 0, 4, 8]) (pen.moveTo(k, 8), pen.lineTo(k + 8, 0));
  if (pattern.includes("-")) for (const y of [2.5, 6.5]) (pen.moveTo(0, y), pen.lineTo(8, y));
  pen.stroke();
  if (pattern.includes(".")) for (const [x, y] of [[1, 1], [5, 5]]) pen.fillRect(x, y, 2, 2);
  return context.createPattern(tile, "repeat");
}

class Painter {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.scratch = document.createElement("canvas");
    this.pen = this.scratch.getContext("2d");
  }

  begin(width, height, theme) {
    const ratio = window.devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
      this.canvas.style.height = `${height}px`;
    }
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.context.clearRect(0, 0, width, height);
    this.context.textBaseline = "middle";
    this.theme = theme;
  }

  patterns(classes) {
    this.hatches = classes.map((one) => hatch(this.pen, one.pattern));
  }

  // A row as one line of pixels, one for each column of the data; made once for each reply of the server.
  static strip(row, classes) {
    const count = (row.busy || row.exposed).length;
    const canvas = document.createElement("canvas");
    canvas.width = count;
    canvas.height = 2;
    const pen = canvas.getContext("2d");
    const image = pen.createImageData(count, 2);
    const colours = classes.map((one) => rgb(one.colour));
    const red = rgb(row.red);
    for (let i = 0; i < count; i++) {
      if (row.busy && row.busy[i]) {
        const kind = row.dominant ? row.dominant[i] : row.classes[0];
        image.data.set(colours[kind], 4 * i);
        image.data[4 * i + 3] = 255 * opacity(row.busy[i] / 65535);
      }
      if (row.exposed && row.exposed[i]) {
        image.data.set(red, 4 * (count + i));
        image.data[4 * (count + i) + 3] = 255 * opacity(row.exposed[i] / 65535);
      }
    }
    pen.putImageData(image, 0, 0);
    return canvas;
  }

  // Draws line `line` of a strip over [x, x + width), hatched where the row is of one dimension.
  columns(row, line, box, x, width) {
    const { left, right } = box;
    const height = line ? EXPOSED_PX : box.height;
    this.scratch.width = Math.max(1, Math.ceil(right - left));
    this.scratch.height = height;
    this.pen.imageSmoothingEnabled = row.strip.width > width;
    this.pen.drawImage(row.strip, 0, line, row.strip.width, 1, x - left, 0, width, height);
    const only = row.classes.length === 1 ? this.hatches[row.classes[0]] : null;
    if (!line && only) {
      this.pen.globalCompositeOperation = "source-atop";
      this.pen.fillStyle = only;
      this.pen.fillRect(0, 0, this.scratch.width, height);
      this.pen.globalCompositeOperation = "source-over";
    }
    this.context.drawImage(this.scratch, left, line ? box.y + box.height - EXPOSED_PX : box.y);
  }

  // Events one by one: as wide as they are; those narrower than a pixel add up to its share.
  events(row, box, toX, classes) {
    const { events } = row;
    const { left, right, y, height } = box;
    const shares = new Map();
    const pen = this.context;
    pen.save();
    pen.beginPath();
    pen.rect(left, y, right - left, height);
    pen.clip();
    for (let i = 0; i < events.start.length; i++) {
      const from = toX(events.start[i]);
      const to = toX(events.end[i]);
      if (to < left || from > right) continue;
      if (to - from < 1) {
        for (let pixel = Math.floor(from); pixel <= Math.floor(to); pixel++) {
          const share = Math.max(0, Math.min(to, pixel + 1) - Math.max(from, pixel));
          const key = pixel * 65536 + events.class[i];
          shares.set(key, (shares.get(key) || 0) + Math.max(share, 1e-6));
        }
        continue;
      }
      this.bar(classes[events.class[i]], this.hatches[events.class[i]], from, y, to - from, height, row.labelOf(i));
    }
    for (const [key, share] of shares) {
      pen.globalAlpha = opacity(share);
      pen.fillStyle = classes[key % 65536].colour;
      pen.fillRect(Math.floor(key / 65536), y, 1, height);
    }
    pen.restore();
  }

  bar(kind, pattern, x, y, width, height, name) {
    const pen = this.context;
    const first = Math.max(x, -50);
    const shown = Math.min(x + width, 20000) - first;
    pen.fillStyle = kind.colour;
    pen.fillRect(first, y, shown, height);
    if (pattern) {
      pen.fillStyle = pattern;
      pen.fillRect(first, y, shown, height);
    }
    if (width > 4) {
      pen.fillStyle = this.theme.background;
      pen.fillRect(x + width - 0.7, y, 0.7, height);
    }
    if (width > 44 && height >= 11) this.label(name, Math.max(x, 0), y, x + width, height, kind.colour);
  }

  label(name, x, y, right, height, colour) {
    const pen = this.context;
    const from = Math.max(x, this.left || 0) + 3;
    pen.font = `${Math.min(11, height - 2)}px ${this.theme.font}`;
    const room = right - from - 4;
    const letters = Math.floor(room / 5.6);
    if (letters < 4) return;
    const text = name.length > letters ? `${name.slice(0, letters - 1)}…` : name;
    pen.fillStyle = colour;
    pen.fillRect(from - 2, y + 1, Math.min(pen.measureText(text).width + 4, room + 2), height - 2);
    const [r, g, b] = rgb(colour);
    pen.fillStyle = 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#000" : "#fff";
    pen.fillText(text, from, y + height / 2 + 0.5, room);
  }

  // Levels of memory in each column, from the lowest to the highest it had: solid below the lowest allocated, pale up to
  // the highest, hatched up to the highest active, and a dashed line for the highest reserved.
  memory(strip, box, x, width) {
    const { left, right, y, height } = box;
    const pen = this.context;
    const toY = (bytes) => y + height - (bytes / strip.top) * (height - 6);
    const count = strip.allocated_high.length;
    const step = width / count;
    const first = Math.max(0, Math.floor((left - x) / step) - 1);
    const last = Math.min(count, Math.ceil((right - x) / step) + 1);
    const line = (levels) => {
      for (let i = first; i < last; i++) {
        pen.lineTo(x + i * step, toY(levels[i]));
        pen.lineTo(x + (i + 1) * step, toY(levels[i]));
      }
    };
    const area = (high, low, style, alpha) => {
      pen.beginPath();
      line(high);
      for (let i = last - 1; i >= first; i--) {
        const at = low ? toY(low[i]) : y + height;
        pen.lineTo(x + (i + 1) * step, at);
        pen.lineTo(x + i * step, at);
      }
      pen.closePath();
      pen.globalAlpha = alpha;
      pen.fillStyle = style;
      pen.fill();
    };
    const { allocated, pending } = strip.looks;
    pen.save();
    pen.beginPath();
    pen.rect(left, y, right - left, height);
    pen.clip();
    area(strip.allocated_low, null, allocated, 0.85);
    area(strip.allocated_high, strip.allocated_low, allocated, 0.45);
    area(strip.active_high, strip.allocated_high, pending, 0.85);
    area(strip.active_high, strip.allocated_high, hatch(pen, "/"), 1);
    pen.globalAlpha = 1;
    pen.strokeStyle = this.theme.text;
    pen.setLineDash([5, 3]);
    pen.beginPath();
    line(strip.reserved_high);
    pen.stroke();
    pen.restore();
    return toY;
  }

  pending(strip, box, x, width) {
    const { left, right, y, height } = box;
    const pen = this.context;
    const levels = strip.pending_high;
    const step = width / levels.length;
    pen.save();
    pen.beginPath();
    pen.rect(left, y, right - left, height);
    pen.clip();
    for (const style of [strip.looks.pending, hatch(pen, "/")]) {
      pen.fillStyle = style;
      for (let i = 0; i < levels.length; i++) {
        if (!levels[i]) continue;
        const tall = Math.max(1, (levels[i] / strip.pending_top) * (height - 2));
        pen.fillRect(x + i * step, y + height - tall, Math.max(step, 0.5), tall);
      }
    }
    pen.restore();
  }
}
