// Pointer, wheel and keys of a timeline, and what is under the pointer.
Object.assign(Timeline.prototype, {
  listen() {
    const { canvas } = this;
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => this.release(event));
    canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    canvas.addEventListener("dblclick", (event) => this.enter(event));
    canvas.addEventListener("keydown", (event) => this.key(event));
  },

  // The page scrolls until the timeline has been clicked.
  wheel(event) {
    const focused = this.root.getRootNode().activeElement === this.canvas;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      this.pan(event.deltaX / this.plot());
    } else if (focused || event.ctrlKey || event.metaKey) {
      event.preventDefault();
      this.zoom(1.0015 ** Math.max(-400, Math.min(400, event.deltaY)), this.toTime(event.offsetX));
    }
  },

  press(event) {
    if (event.button) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.dragging = { x: event.offsetX, at: event.offsetX, view: [...this.view], range: event.shiftKey, moved: false };
  },

  move(event) {
    const drag = this.dragging;
    if (!drag) return this.hover(event);
    drag.at = event.offsetX;
    drag.moved ||= Math.abs(drag.at - drag.x) > 3;
    if (!drag.moved) return;
    if (drag.range) return this.draw();
    const by = ((drag.x - drag.at) / this.plot()) * (drag.view[1] - drag.view[0]);
    this.show(drag.view[0] + by, drag.view[1] + by);
  },

  release(event) {
    const drag = this.dragging;
    this.dragging = null;
    if (!drag) return;
    if (drag.range && drag.moved) {
      const ends = [this.toTime(drag.x), this.toTime(drag.at)];
      this.show(Math.min(...ends), Math.max(...ends));
    } else if (!drag.moved) {
      const found = this.under(event.offsetX, event.offsetY);
      if (found && found.event !== undefined) {
        const { row, event: i } = found;
        const words = this.words(found);
        this.emit("selected", { row: row.id, start: row.events.start[i], end: row.events.end[i], words });
      }
    }
  },

  enter(event) {
    const found = this.under(event.offsetX, event.offsetY);
    if (found && found.event !== undefined) {
      const start = found.row.events.start[found.event];
      const end = found.row.events.end[found.event];
      const margin = Math.max(end - start, 200) * 0.6;
      this.show(start - margin, end + margin);
    } else this.zoom(0.25, this.toTime(event.offsetX));
  },

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act = {
      w: () => this.zoom(0.6),
      s: () => this.zoom(1 / 0.6),
      a: () => this.pan(-0.2),
      d: () => this.pan(0.2),
      ArrowLeft: () => this.pan(-0.2),
      ArrowRight: () => this.pan(0.2),
      "+": () => this.zoom(0.6),
      "-": () => this.zoom(1 / 0.6),
      Home: () => this.show(...this.extent),
    }[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  },

  // The row and event, column or strip at a place.
  under(x, y) {
    if (x < this.left || x > this.width - 8) return null;
    const at = this.toTime(x);
    const [start, end] = this.window;
    const column = (count) => Math.floor(((at - start) / (end - start)) * count);
    const row = this.rows.find(({ box }) => y >= box.y && y <= box.y + box.height);
    if (row && row.events) {
      const reach = 2 * (this.view[1] - this.view[0]) / this.plot();
      let best, nearest = reach;
      for (let i = 0; i < row.events.start.length; i++) {
        const away = Math.max(row.events.start[i] - at, at - row.events.end[i], 0);
        if (away < nearest || (away === 0 && best === undefined)) [best, nearest] = [i, away];
      }
      return { row, event: best, at };
    }
    if (row && row.strip) {
      const i = column(row.strip.width);
      return i >= 0 && i < row.strip.width ? { row, column: i, at } : null;
    }
    const inside = (box) => box && y >= box.y && y <= box.y + box.height;
    const strip = this.strips.find((one) => inside(one.box) || inside(one.pendingBox));
    if (!strip) return null;
    const i = column(strip.allocated_high.length);
    return i >= 0 && i < strip.allocated_high.length ? { strip, column: i, at } : null;
  },

  hover(event) {
    const found = this.under(event.offsetX, event.offsetY);
    const lines = found ? this.words(found) : [];
    this.tip.hidden = !lines.length;
    if (!lines.length) return;
    this.tip.textContent = "";
    lines.forEach((line, index) => {
      const element = document.createElement(index ? "div" : "b");
      element.textContent = line;
      this.tip.append(element);
    });
    const left = event.offsetX + 14 + this.tip.offsetWidth > this.width ? event.offsetX - this.tip.offsetWidth - 14 : event.offsetX + 14;
    this.tip.style.left = `${Math.max(0, left)}px`;
    this.tip.style.top = `${this.canvas.offsetTop + event.offsetY + 16}px`;
  },

  words({ row, event, column, strip }) {
    if (strip) return this.levels(strip, column);
    const { classes, units } = this.header;
    if (event !== undefined) {
      const { start, end, class: kinds, bytes, exposed_ns: exposed, unit, step } = row.events;
      const length = end[event] - start[event];
      const kind = classes[kinds[event]];
      const lines = [row.name(event), `${row.group} · ${kind.label}`, `${time(length)} from ${time(start[event])}`];
      if (kind.role === "communication") {
        lines.push(length ? `exposed ${time(exposed[event])} (${percent(exposed[event] / length)})` : "exposed 0 ns");
        lines.push(bytes[event] >= 0 ? `${size(bytes[event])} unsharded` : "size not in the trace");
      }
      if (unit[event] >= 0) lines.push(units[unit[event]]);
      if (step[event] >= 0) lines.push(`launched in step ${step[event]}`);
      return lines;
    }
    if (column === undefined) return [];
    const [start, end] = this.window;
    const wide = (end - start) / row.strip.width;
    const lines = [`${row.group} · ${row.label}`, `${time(wide)} at ${time(start + column * wide)}`];
    if (row.busy) lines.push(`busy ${percent(row.busy[column] / 65535)}`);
    if (row.exposed) lines.push(`exposed ${percent(row.exposed[column] / 65535)}`);
    if (row.dominant && row.busy[column]) lines.push(`mostly ${classes[row.dominant[column]].label}`);
    if (row.count) lines.push(`${row.count.toLocaleString("en")} events in view: zoom in for each`);
    return lines;
  },

  levels(strip, i) {
    const [start, end] = this.window;
    const wide = (end - start) / strip.allocated_high.length;
    const range = (name) => {
      const [low, high] = [strip[`${name}_low`][i], strip[`${name}_high`][i]];
      return low === high ? size(high) : `${size(low)} to ${size(high)}`;
    };
    const lines = [strip.label, `${this.say(wide)} from ${this.say(start + i * wide)}`];
    for (const name of ["reserved", "active", "allocated", "pending"]) lines.push(`${name} ${range(name)}`);
    return lines;
  },
});

const timelines = new WeakMap();

export default function ({ data, parentElement, setTriggerValue }) {
  const root = parentElement.querySelector(".timeline");
  if (!timelines.has(root)) timelines.set(root, new Timeline(root));
  timelines.get(root).update(data, setTriggerValue);
  return () => {
    timelines.get(root)?.end();
    timelines.delete(root);
  };
}
