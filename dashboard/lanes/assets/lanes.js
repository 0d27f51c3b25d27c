// The timeline: state, pointer and keys. The server is asked for finer data when the view has come to rest.
const ASK_AFTER_MS = 120;
const KEYS = "Wheel or W S: zoom · drag, A D or ← →: move · Shift+drag: zoom to a range · double click: to the event · Home: all";

class Timeline {
  constructor(root) {
    this.root = root;
    root.textContent = "";
    const make = (tag, name, parent = root) => {
      const element = document.createElement(tag);
      element.className = name;
      parent.append(element);
      return element;
    };
    const bar = make("div", "bar");
    this.where = make("output", "where", bar);
    for (const [text, label, act] of [
      ["−", "Zoom out", () => this.zoom(2)],
      ["+", "Zoom in", () => this.zoom(0.5)],
      ["◀", "Earlier", () => this.pan(-0.25)],
      ["▶", "Later", () => this.pan(0.25)],
      ["All", "Whole recording", () => this.show(...this.extent)],
    ]) {
      const button = make("button", "", bar);
      button.type = "button";
      button.textContent = text;
      button.title = label;
      button.setAttribute("aria-label", label);
      button.onclick = act;
    }
    this.canvas = make("canvas", "lanes");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.legend = make("ul", "legend");
    make("div", "keys").textContent = KEYS;
    this.tip = make("div", "tip");
    this.tip.hidden = true;
    this.painter = new Painter(this.canvas);
    this.listen();
    this.watch = new ResizeObserver(() => this.resized());
    this.watch.observe(root);
    // The theme changes without a reply of the server.
    this.scheme = setInterval(() => this.themed(), 1000);
  }

  end() {
    this.watch.disconnect();
    clearInterval(this.scheme);
    clearTimeout(this.asking);
  }

  update(data, emit) {
    this.emit = emit;
    const { header, array } = unpack(data);
    this.header = header;
    this.extent = header.extent;
    this.window = header.window;
    this.rows = header.rows.map((row) => {
      const read = (ref) => (ref ? array(ref) : null);
      const events = row.events && Object.fromEntries(Object.entries(row.events).map(([k, ref]) => [k, array(ref)]));
      const made = { ...row, red: header.red, events, busy: read(row.busy), exposed: read(row.exposed), dominant: read(row.dominant) };
      made.name = (i) => header.names[events.name[i]];
      made.labelOf = (i) => header.names[events.label[i]];
      if (made.busy || made.exposed) made.strip = Painter.strip(made, header.classes);
      return made;
    });
    this.strips = header.memory.map((strip) => ({
      ...strip,
      ...Object.fromEntries(Object.entries(strip.columns).map(([name, ref]) => [name, array(ref)])),
    }));
    if (header.view_id !== this.viewId) {
      this.viewId = header.view_id;
      this.view = [...header.view];
    }
    this.painter.patterns(header.classes);
    this.canvas.setAttribute("aria-label", header.alt);
    this.drawLegend();
    this.layout();
    this.draw();
    this.root.dataset.replies = (Number(this.root.dataset.replies) || 0) + 1;
    // The first picture is made for a width that the server can only guess.
    if (!this.known || Math.abs(header.width - this.plot()) > 0.25 * this.plot()) this.ask();
    this.known = true;
  }

  plot() {
    return Math.max(60, this.width - this.left - 8);
  }

  layout() {
    this.width = this.root.clientWidth || 900;
    this.left = this.width < 560 ? 92 : 168;
    this.painter.left = this.left;
    let y = 22;
    let group = null;
    for (const row of this.rows) {
      if (row.group !== group) {
        group = row.group;
        y += 6;
        row.heading = { y, height: 15 };
        y += 16;
      } else row.heading = null;
      row.box = { left: this.left, right: this.width - 8, y, height: row.height };
      y += row.height + 2;
    }
    for (const strip of this.strips) {
      y += 28;
      strip.box = { left: this.left, right: this.width - 8, y, height: strip.height };
      y += strip.height + 4;
      strip.pendingBox = strip.pending_top ? { left: this.left, right: this.width - 8, y, height: 34 } : null;
      if (strip.pendingBox) y += 38;
    }
    this.height = y + 6;
  }

  toX(ns) {
    return this.left + ((ns - this.view[0]) / (this.view[1] - this.view[0])) * this.plot();
  }

  toTime(x) {
    return this.view[0] + ((x - this.left) / this.plot()) * (this.view[1] - this.view[0]);
  }

  themed() {
    const style = getComputedStyle(this.root);
    const read = (name, other) => style.getPropertyValue(name).trim() || other;
    const theme = {
      text: read("--st-text-color", style.color),
      background: read("--st-background-color", "#fff"),
      grid: read("--st-border-color", "rgba(128,128,128,0.3)"),
      font: read("--st-font", "sans-serif"),
    };
    if (JSON.stringify(theme) === JSON.stringify(this.theme)) return;
    this.theme = theme;
    if (this.header) this.draw();
  }

  draw() {
    if (!this.theme) return this.themed();
    this.painter.begin(this.width, this.height, this.theme);
    const pen = this.painter.context;
    this.drawAxis(pen);
    const [from, to] = this.window.map((ns) => this.toX(ns));
    for (const row of this.rows) this.drawRow(pen, row, from, to - from);
    for (const strip of this.strips) this.drawStrip(pen, strip, from, to - from);
    this.drawSteps(pen);
    if (this.dragging && this.dragging.range) {
      pen.fillStyle = this.theme.text;
      pen.globalAlpha = 0.15;
      pen.fillRect(Math.min(this.dragging.x, this.dragging.at), 20, Math.abs(this.dragging.at - this.dragging.x), this.height);
      pen.globalAlpha = 1;
    }
    const [start, end] = this.view;
    this.where.textContent = `${this.say(start)} to ${this.say(end)} · ${this.say(end - start)} shown`;
    this.root.dataset.view = `${Math.round(start)}-${Math.round(end)}`;
    this.root.dataset.drawn = (Number(this.root.dataset.drawn) || 0) + 1;
  }

  // A moment or a duration in words; histories without a clock count events.
  say(at) {
    return this.header.axis === "event" ? `${Math.round(at).toLocaleString("en")} events` : time(at);
  }

  drawAxis(pen) {
    const [start, end] = this.view;
    const { found, step } = ticks(start, end, Math.max(2, this.plot() / 110));
    pen.font = `11px ${this.theme.font}`;
    pen.textAlign = "center";
    const event = this.header.axis === "event";
    const unit = event ? [1, ""] : [[1, "ns"], [1e3, "µs"], [1e6, "ms"], [1e9, "s"]].filter(([k]) => k <= step).pop() || [1, "ns"];
    for (const at of found) {
      const x = Math.round(this.toX(at)) + 0.5;
      pen.strokeStyle = this.theme.grid;
      pen.beginPath();
      pen.moveTo(x, 18);
      pen.lineTo(x, this.height);
      pen.stroke();
      pen.fillStyle = this.theme.text;
      if (x > this.left + 16 && x < this.width - 30) pen.fillText(`${Number((at / unit[0]).toFixed(6)).toLocaleString("en")} ${unit[1]}`, x, 9);
    }
    pen.textAlign = "left";
  }

  text(pen, words, x, y, room, bold = false) {
    pen.font = `${bold ? "600 " : ""}11px ${this.theme.font}`;
    pen.fillStyle = this.theme.text;
    while (words.length > 3 && pen.measureText(words).width > room) words = `${words.slice(0, -2)}…`;
    pen.fillText(words, x, y);
  }

  drawRow(pen, row, x, width) {
    const { box } = row;
    if (row.heading) this.text(pen, row.group, 2, row.heading.y + 8, this.left - 6, true);
    this.text(pen, row.label, 10, box.y + box.height / 2 + 0.5, this.left - 16);
    pen.globalAlpha = 0.06;
    pen.fillStyle = this.theme.text;
    pen.fillRect(box.left, box.y, box.right - box.left, box.height);
    pen.globalAlpha = 1;
    if (row.events) this.painter.events(row, box, (ns) => this.toX(ns), this.header.classes);
    else if (row.busy) this.painter.columns(row, 0, box, x, width);
    if (row.exposed) this.painter.columns(row, 1, box, x, width);
    const { mark } = this.header;
    if (mark && mark.row === row.id) {
      pen.strokeStyle = this.theme.text;
      pen.lineWidth = 2;
      const from = Math.max(this.toX(mark.start), box.left - 2);
      const to = Math.min(this.toX(mark.end), box.right + 2);
      if (to > box.left && from < box.right) pen.strokeRect(from - 1, box.y - 1, Math.max(to - from, 1) + 2, box.height + 2);
      pen.lineWidth = 1;
    }
  }

  drawStrip(pen, strip, x, width) {
    // Nothing is known outside the history.
    const left = Math.max(strip.box.left, this.toX(strip.known[0]));
    const right = Math.min(strip.box.right, Math.max(this.toX(strip.known[1]), left + 1));
    const box = { ...strip.box, left, right };
    this.text(pen, strip.label, 2, box.y - 17, this.width, true);
    if (right <= left) return this.text(pen, "no history in this range", this.left + 6, box.y + 12, this.plot());
    const toY = this.painter.memory(strip, box, x, width);
    pen.font = `10px ${this.theme.font}`;
    pen.textAlign = "right";
    pen.fillStyle = this.theme.text;
    for (const bytes of ticks(0, strip.top / strip.unit, Math.max(2, box.height / 32)).found.map((k) => k * strip.unit)) {
      const y = toY(bytes);
      pen.fillText(`${Number((bytes / strip.unit).toFixed(4))} ${strip.unit_name}`, this.left - 6, Math.max(y, box.y + 4));
      pen.globalAlpha = 0.25;
      pen.fillRect(strip.box.left, Math.round(y), strip.box.right - strip.box.left, 0.5);
      pen.globalAlpha = 1;
    }
    pen.textAlign = "left";
    this.drawMarks(pen, strip.marks, box, toY);
    if (strip.pendingBox) {
      const band = { ...strip.pendingBox, left, right };
      this.text(pen, `pending, to ${size(strip.pending_top)}`, 10, band.y + 17, this.left - 16);
      this.painter.pending(strip, band, x, width);
      this.drawMarks(pen, strip.pending_marks, band, () => band.y + 8);
    }
  }

  // A triangle at each moment, its words beside it, none over another's.
  drawMarks(pen, marks, box, toY) {
    pen.font = `11px ${this.theme.font}`;
    const taken = [];
    for (const mark of marks) {
      const at = this.toX(mark.time);
      if (at < box.left - 1 || at > box.right + 1) continue;
      const y = toY(mark.bytes);
      pen.fillStyle = this.theme.text;
      pen.beginPath();
      pen.moveTo(at, y);
      pen.lineTo(at - 4, y - 7);
      pen.lineTo(at + 4, y - 7);
      pen.fill();
      const wide = pen.measureText(mark.label).width;
      const x = at + 7 + wide < this.width - 8 ? at + 7 : at - 7 - wide;
      let line = Math.max(y - 3, box.y + 6);
      while (taken.some((one) => Math.abs(one.line - line) < 12 && x < one.to && x + wide > one.from)) line += 12;
      taken.push({ line, from: x, to: x + wide });
      this.outlined(pen, mark.label, x, line);
    }
  }

  outlined(pen, words, x, y) {
    pen.strokeStyle = this.theme.background;
    pen.lineWidth = 3;
    pen.strokeText(words, x, y);
    pen.lineWidth = 1;
    pen.fillStyle = this.theme.text;
    pen.fillText(words, x, y);
  }

  // Steps as bands: every other one shaded over the rows of its rank, its number above them.
  drawSteps(pen) {
    for (const band of this.header.steps) {
      const boxes = this.rows.filter((row) => row.band === band.group).map((row) => row.box);
      this.drawBand(pen, band, boxes);
      for (const strip of this.strips) if (strip.band === band.group) this.drawBand(pen, band, [strip.box]);
    }
  }

  drawBand(pen, band, boxes) {
    const from = Math.max(this.toX(band.start), this.left);
    const to = Math.min(this.toX(band.end), this.width - 8);
    if (!boxes.length || to <= from) return;
    const top = boxes[0].y - 1;
    const last = boxes[boxes.length - 1];
    const bottom = last.y + last.height;
    pen.fillStyle = this.theme.text;
    pen.globalAlpha = band.shaded ? 0.07 : 0;
    pen.fillRect(from, top, to - from, bottom - top + 1);
    pen.globalAlpha = 0.6;
    pen.fillRect(from, top - 13, 1, bottom - top + 14);
    pen.fillRect(from, top - 1, to - from, 1);
    pen.globalAlpha = 1;
    if (to - from > 40) this.text(pen, band.label, from + 4, top - 8, to - from - 6);
  }

  drawLegend() {
    this.legend.textContent = "";
    for (const item of this.header.legend) {
      const entry = document.createElement("li");
      const swatch = document.createElement("canvas");
      swatch.width = 22;
      swatch.height = 12;
      const pen = swatch.getContext("2d");
      pen.fillStyle = item.colour;
      if (item.dashed) for (const x of [0, 8, 16]) pen.fillRect(x, 5, 5, 2);
      else if (item.line) pen.fillRect(0, 12 - EXPOSED_PX, 22, EXPOSED_PX);
      else pen.fillRect(0, 0, 22, 12);
      if (item.pattern) {
        pen.fillStyle = hatch(pen, item.pattern);
        pen.fillRect(0, 0, 22, 12);
      }
      entry.append(swatch, item.label);
      this.legend.append(entry);
    }
  }

  resized() {
    if (!this.header || this.root.clientWidth === this.width) return;
    this.layout();
    this.draw();
    this.ask();
  }

  show(start, end) {
    const [low, high] = this.extent;
    const length = Math.min(Math.max(end - start, 20), high - low);
    const from = Math.min(Math.max(start, low), high - length);
    this.view = [from, from + length];
    this.tip.hidden = true;
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
    this.ask();
  }

  zoom(factor, at = (this.view[0] + this.view[1]) / 2) {
    const [start, end] = this.view;
    this.show(at - (at - start) * factor, at + (end - at) * factor);
  }

  pan(share) {
    const by = share * (this.view[1] - this.view[0]);
    this.show(this.view[0] + by, this.view[1] + by);
  }

  ask() {
    clearTimeout(this.asking);
    this.asking = setTimeout(() => {
      this.emit("range", { start: Math.round(this.view[0]), end: Math.round(this.view[1]), width: Math.round(this.plot()) });
    }, ASK_AFTER_MS);
  }
}
