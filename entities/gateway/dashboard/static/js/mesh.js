/**
 * The live picture: two canvases. Below, instances and links, drawn anew when they change; above, the
 * microbatches on their way, drawn while any move. So a frame costs what moves, not what there is.
 */

import { isDark, palette, stageColour } from "./colours.js";
import { h, say } from "./dom.js";
import { bytesPerS, ms, percent, shortName, stageName } from "./format.js";
import { along, arrange, curve } from "./layout.js";

const MOVE_MS = 620;
const DOTS = 300;
const DENSE_MS = 30; // between two drawings of what moves where there are many: software draws some canvases
const LINKS_DRAWN = 320; // above it, links are drawn by bundles of stage and cluster
const BUNDLED_MS = 1000; // between two sums over them
const BASE_MS = 240; // between two drawings of what stands

export class MeshPicture {
  /** @param {(sid: string|null) => void} chosen */
  constructor(store, chosen) {
    this.store = store;
    this.chosen = chosen;
    this.selected = null;
    this.hovered = null;
    this.dots = [];
    this.curves = new Map();
    this.sprites = new Map();
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.base = h("canvas", { "aria-hidden": "true" });
    this.over = h("canvas.over", { "aria-hidden": "true" });
    this.element = h("div.stagebox", {
      tabIndex: 0,
      role: "application",
      "aria-roledescription": "picture of the mesh",
      keydown: (event) => this.key(event),
      click: (event) => this.select(this.at(event)),
      mousemove: (event) => this.hover(this.at(event)),
      mouseleave: () => this.hover(null),
    }, this.base, this.over);
    this.element.style.height = "300px";
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.element);
    this.frame = (at) => this.draw(at);
  }

  destroy() {
    this.observer.disconnect();
    cancelAnimationFrame(this.pending);
    this.gone = true;
  }

  /** The instances of the job changed. */
  update() {
    this.stale = true;
    this.wake();
  }

  restyle() {
    this.colours = null;
    this.sprites.clear();
    this.update();
  }

  resize() {
    const width = this.element.clientWidth;
    if (!width || width === this.width) return;
    this.width = width;
    this.shape = null;
    this.update();
  }

  /** Microbatches that went from one instance to another within the last tick: `[from, to, direction, count]`. */
  moved(moves) {
    if (this.still.matches || document.hidden || !this.shape) return;
    const now = performance.now();
    const room = DOTS - this.dots.length;
    const all = moves.reduce((sum, move) => sum + move[3], 0);
    const share = Math.min(1, room / Math.max(1, all));
    for (const [from, to, direction, count] of moves) {
      const start = this.shape.boxes.get(from);
      const end = this.shape.boxes.get(to);
      if (!start || !end) continue;
      const shown = share === 1 ? Math.min(count, 8) : Number(Math.random() < share * count);
      const forward = direction === "forward";
      const path = this.path(from, to, start, end, forward);
      for (let index = 0; index < shown; index += 1) {
        this.dots.push({ path, at: now + Math.random() * 250, stage: forward ? end.stage : start.stage, forward });
      }
    }
    if (this.dots.length) this.wake();
  }

  path(from, to, start, end, forward) {
    const key = `${from} ${to}`;
    let path = this.curves.get(key);
    if (!path) {
      path = curve(start, end, this.shape.vertical, this.shape.dense ? 0 : forward ? -3 : 3);
      this.curves.set(key, path);
    }
    return path;
  }

  wake() {
    if (!this.pending && !this.gone) this.pending = requestAnimationFrame(this.frame);
  }

  // --- drawing ----------------------------------------------------------------------------------
  draw(at) {
    this.pending = 0;
    if (this.gone || !this.width) return;
    let again = false;
    if (this.stale) {
      if (!this.drawnAt || at - this.drawnAt >= (this.shape?.dense ? 2 : 1) * BASE_MS || !this.shape) {
        this.drawnAt = at;
        this.stale = false;
        this.drawBase();
      } else again = true;
    }
    if (this.dots.length || this.dirty) {
      if (!this.shape.dense || at - (this.movedAt ?? 0) >= DENSE_MS) {
        this.movedAt = at;
        this.drawDots(at);
      }
      again ||= this.dots.length > 0 || Boolean(this.dirty);
    }
    if (again) this.wake();
  }

  rows() {
    const job = this.store.shown();
    return job === null ? [] : this.store.instancesOf(job);
  }

  drawBase() {
    const rows = this.rows();
    this.colours ??= palette();
    const key = rows.map((row) => `${row.sid} ${row.cluster}`).sort().join();
    if (!this.shape || this.key_ !== key) {
      this.key_ = key;
      this.shape = arrange(rows, this.width);
      this.curves.clear();
      this.bundles = null;
      this.dots.length = 0;
      this.fit();
    }
    const context = this.context;
    const { width, height } = this.shape;
    context.clearRect(0, 0, width, height);
    this.drawBands(context);
    this.drawLinks(context, rows);
    if (this.shape.dense) this.drawTiles(context, rows);
    else for (const row of rows) this.drawCard(context, row);
    this.drawMarked(context, rows);
    this.describe(rows);
  }

  fit() {
    const scale = Math.min(2, devicePixelRatio || 1);
    const { width, height } = this.shape;
    this.element.style.height = `${Math.round(height)}px`;
    for (const canvas of [this.base, this.over]) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
    }
    this.context = this.base.getContext("2d");
    this.overContext = this.over.getContext("2d");
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    this.overContext.setTransform(scale, 0, 0, scale, 0, 0);
  }

  drawBands(context) {
    const { bands, columns, vertical } = this.shape;
    const { colours } = this;
    for (const band of bands) {
      context.fillStyle = colours.raised;
      context.strokeStyle = colours.rule;
      context.lineWidth = 1;
      rounded(context, band.x + 0.5, band.y + 0.5, band.width - 1, band.height - 1, 7);
      context.fill();
      context.stroke();
      context.font = `11px ${colours.sans}`;
      context.fillStyle = colours.ink3;
      context.textBaseline = "middle";
      context.textAlign = "left";
      context.fillText(`cluster ${band.cluster}`, band.x + 9, band.y + 12);
    }
    for (const column of columns) {
      context.font = `600 12px ${colours.sans}`;
      context.fillStyle = stageColour(column.stage);
      context.textBaseline = "middle";
      context.textAlign = "left";
      context.fillText(stageName(column.stage), column.x + (vertical ? 9 : 0), vertical ? column.y + 5 : 14);
    }
  }

  drawLinks(context, rows) {
    const { vertical } = this.shape;
    if (!this.bundles || !this.shape.dense || this.drawnAt - this.bundledAt > BUNDLED_MS) {
      this.bundledAt = this.drawnAt;
      this.bundles = this.bundle(rows);
    }
    const { groups, bundled, most } = this.bundles;
    context.lineCap = "butt";
    for (const group of groups) {
      const load = Math.sqrt(group.rate / most);
      const [x1, y1, x2, y2, x3, y3, x4, y4] = curve(group.from, group.to, vertical);
      context.beginPath();
      context.moveTo(x1, y1);
      context.bezierCurveTo(x2, y2, x3, y3, x4, y4);
      context.strokeStyle = stageColour(group.stage, (bundled ? 0.1 : 0.16) + 0.3 * load);
      context.lineWidth = 1 + (bundled ? 8 : 5) * load;
      if (group.lossy) context.setLineDash([5, 4]);
      context.stroke();
      context.setLineDash([]);
    }
  }

  /** Links one by one, or, where there are too many to be told apart, summed by stage and cluster. */
  bundle(rows) {
    const { boxes } = this.shape;
    const links = [];
    for (const row of rows) {
      for (const link of row.links ?? []) {
        const from = boxes.get(row.sid);
        const to = boxes.get(link[0]);
        if (from && to && from.stage < to.stage) links.push([row.sid, link[0], link[1], from, to, link]);
      }
    }
    const bundled = links.length > LINKS_DRAWN;
    const groups = new Map();
    if (bundled) {
      for (const [, , rate, from, to] of links) {
        const key = `${from.stage} ${from.cluster} ${to.stage} ${to.cluster}`;
        const group = groups.get(key) ?? { from: from.cell, to: to.cell, stage: to.stage, rate: 0 };
        group.rate += rate;
        groups.set(key, group);
      }
    } else {
      for (const [from, to, rate, start, end, link] of links) {
        groups.set(`${from} ${to}`, { from: start, to: end, stage: end.stage, rate, lossy: link[3] > 0.005 });
      }
    }
    const all = [...groups.values()];
    return { groups: all, bundled, most: all.reduce((most, group) => Math.max(most, group.rate), 1) };
  }

  drawCard(context, row) {
    const box = this.shape.boxes.get(row.sid);
    const { colours } = this;
    const hue = stageColour(row.stage);
    const faulted = row.state === "faulted";
    context.fillStyle = colours.surface;
    context.strokeStyle = faulted ? colours.bad : row.state === "active" ? colours.ruleStrong : colours.wait;
    context.lineWidth = faulted ? 1.5 : 1;
    if (row.state === "pending") context.setLineDash([4, 3]);
    rounded(context, box.x + 0.5, box.y + 0.5, box.width - 1, box.height - 1, 6);
    context.fill();
    context.stroke();
    context.setLineDash([]);
    const left = box.x + 10;
    const right = box.x + box.width - 9;
    mark(context, left + 4, box.y + 14.5, row.state, colours, hue);
    context.textBaseline = "middle";
    context.textAlign = "left";
    context.font = `600 12px ${colours.sans}`;
    context.fillStyle = colours.ink;
    const share = row.share === null || row.share === undefined ? "" : percent(row.share);
    context.font = `12px ${colours.sans}`;
    const shareWidth = share ? context.measureText(share).width + 8 : 0;
    context.font = `600 12px ${colours.sans}`;
    context.fillText(clipped(context, shortName(row), right - left - 14 - shareWidth), left + 14, box.y + 15);
    if (share) {
      context.textAlign = "right";
      context.font = `12px ${colours.sans}`;
      context.fillStyle = colours.ink2;
      context.fillText(share, right, box.y + 15);
    }
    const y = box.y + 29;
    context.fillStyle = colours.rule;
    rounded(context, left, y - 2, right - left, 4, 2);
    context.fill();
    if (row.busy > 0) {
      context.fillStyle = hue;
      rounded(context, left, y - 2, Math.max(4, (right - left) * Math.min(1, row.busy)), 4, 2);
      context.fill();
    }
    context.font = `11px ${colours.sans}`;
    context.fillStyle = faulted ? colours.bad : colours.ink3;
    context.textAlign = "left";
    const told = row.state !== "active" ? row.state : row.service_ms ? ms(row.service_ms) : "";
    context.fillText(told, left, box.y + 39);
    if (row.queue !== undefined && row.state === "active") {
      const waiting = Math.min(row.queue, Math.max(0, Math.floor((right - left - 62) / 6)));
      for (let index = 0; index < waiting; index += 1) {
        context.fillStyle = hue;
        context.fillRect(right - 4 - index * 6, box.y + 37, 4, 5);
      }
    }
  }

  /** Many instances: a tile each, as full as it is busy; states stand out by colour and shape. */
  drawTiles(context, rows) {
    const { boxes } = this.shape;
    const { colours } = this;
    const shades = new Map();
    const odd = [];
    for (const row of rows) {
      const box = boxes.get(row.sid);
      if (row.state !== "active") {
        odd.push([row, box]);
        continue;
      }
      const level = row.busy === undefined ? 0 : Math.round(Math.min(1, row.busy) * 5) + 1;
      const key = `${row.stage} ${level}`;
      if (!shades.has(key)) shades.set(key, { stage: row.stage, level, list: [] });
      shades.get(key).list.push(box);
    }
    for (const { stage, level, list } of shades.values()) {
      context.fillStyle = stageColour(stage, 0.16 + 0.14 * level);
      for (const box of list) context.fillRect(box.x, box.y, box.width, box.height);
    }
    for (const [row, box] of odd) {
      if (row.state === "faulted") {
        context.fillStyle = colours.bad;
        context.beginPath();
        context.moveTo(box.x + box.width / 2, box.y);
        context.lineTo(box.x + box.width, box.y + box.height);
        context.lineTo(box.x, box.y + box.height);
        context.fill();
      } else {
        context.strokeStyle = colours.wait;
        context.lineWidth = 1.5;
        context.strokeRect(box.x + 1, box.y + 1, box.width - 2, box.height - 2);
      }
    }
  }

  /** What is pointed at, and what is chosen: an outline, and its own links. */
  drawMarked(context, rows) {
    const { colours } = this;
    const { boxes, vertical, dense } = this.shape;
    for (const [sid, colour] of [[this.hovered, colours.ink3], [this.selected, colours.focus]]) {
      const box = sid && boxes.get(sid);
      if (!box) continue;
      if (dense) {
        for (const row of rows) {
          for (const link of row.links ?? []) {
            if (row.sid !== sid && link[0] !== sid) continue;
            const from = boxes.get(row.sid);
            const to = boxes.get(link[0]);
            if (!from || !to || from.stage >= to.stage) continue;
            const [x1, y1, x2, y2, x3, y3, x4, y4] = curve(from, to, vertical);
            context.beginPath();
            context.moveTo(x1, y1);
            context.bezierCurveTo(x2, y2, x3, y3, x4, y4);
            context.strokeStyle = colour;
            context.lineWidth = 1;
            context.stroke();
          }
        }
      }
      context.strokeStyle = colour;
      context.lineWidth = 2;
      rounded(context, box.x - 1, box.y - 1, box.width + 2, box.height + 2, dense ? 2 : 7);
      context.stroke();
    }
  }

  drawDots(at) {
    const context = this.overContext;
    if (!context) return;
    // Only where dots were: clearing all of a large canvas costs more than drawing them.
    if (this.dirty) context.clearRect(...this.dirty);
    let [left, top, right, bottom] = [Infinity, Infinity, -Infinity, -Infinity];
    const size = this.shape.dense ? 2.4 : 3.6;
    let kept = 0;
    for (const dot of this.dots) {
      const t = (at - dot.at) / MOVE_MS;
      if (t > 1) continue;
      this.dots[kept] = dot;
      kept += 1;
      if (t < 0) continue;
      const [x, y] = along(dot.path, t);
      context.drawImage(this.sprite(dot.stage, dot.forward, size), x - 6, y - 6, 12, 12);
      left = Math.min(left, x);
      right = Math.max(right, x);
      top = Math.min(top, y);
      bottom = Math.max(bottom, y);
    }
    this.dots.length = kept;
    this.dirty = right >= left ? [left - 8, top - 8, right - left + 16, bottom - top + 16] : null;
  }

  /** A microbatch: full on its way forward, a ring on its way back. */
  sprite(stage, forward, size) {
    const key = `${stage} ${forward} ${size}`;
    let image = this.sprites.get(key);
    if (!image) {
      image = document.createElement("canvas");
      image.width = image.height = 24;
      const context = image.getContext("2d");
      context.scale(2, 2);
      context.beginPath();
      context.arc(6, 6, size, 0, 7);
      context.fillStyle = forward ? stageColour(stage) : isDark() ? "#0d1117" : "#ffffff";
      context.fill();
      context.strokeStyle = stageColour(stage);
      context.lineWidth = 1.4;
      context.stroke();
      this.sprites.set(key, image);
    }
    return image;
  }

  // --- pointing and keys ------------------------------------------------------------------------
  at(event) {
    const area = this.element.getBoundingClientRect();
    const x = event.clientX - area.left;
    const y = event.clientY - area.top;
    for (const [sid, box] of this.shape?.boxes ?? []) {
      if (x >= box.x - 1 && x <= box.x + box.width + 1 && y >= box.y - 1 && y <= box.y + box.height + 1) return sid;
    }
    return null;
  }

  hover(sid) {
    if (sid === this.hovered) return;
    this.hovered = sid;
    this.element.style.cursor = sid ? "pointer" : "";
    const row = sid && this.store.instances.get(sid);
    this.element.title = row ? summary(row) : "";
    this.drawnAt = 0;
    this.update();
  }

  select(sid) {
    this.selected = sid === this.selected ? null : sid;
    this.drawnAt = 0;
    this.update();
    this.chosen(this.selected);
  }

  key(event) {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (event.key === "Escape" && this.selected) {
      this.select(this.selected);
      say("nothing chosen");
    }
    if (!step || !this.shape?.boxes.size) return;
    event.preventDefault();
    const boxes = [...this.shape.boxes];
    const here = this.shape.boxes.get(this.selected);
    const next = here ? nearest(boxes, here, step) : boxes[0][0];
    if (next && next !== this.selected) {
      this.select(next);
      const row = this.store.instances.get(next);
      if (row) say(summary(row));
    }
  }

  describe(rows) {
    const faulted = rows.filter((row) => row.state === "faulted").length;
    const label = `${rows.length} instances in ${this.shape.columns.length} stages and ${this.shape.bands.length} clusters, ${faulted} faulted. Arrow keys go from one to the next; the table of shares has the same as text.`;
    if (this.element.getAttribute("aria-label") !== label) this.element.setAttribute("aria-label", label);
  }
}

export function summary(row) {
  const parts = [`${shortName(row)}, ${stageName(row.stage)}, ${row.cluster}/${row.node}: ${row.state}`];
  if (row.share !== null && row.share !== undefined) parts.push(`share ${percent(row.share)}`);
  if (row.busy !== undefined) parts.push(`busy ${percent(row.busy)}, queue ${row.queue}`);
  if (row.service_ms) parts.push(`${ms(row.service_ms)} per microbatch`);
  const sent = (row.links ?? []).reduce((sum, link) => sum + (link[1] ?? 0), 0);
  if (sent) parts.push(`sends ${bytesPerS(sent)}`);
  return parts.join(" · ");
}

function nearest(boxes, here, [dx, dy]) {
  let best = null;
  let least = Infinity;
  const cx = here.x + here.width / 2;
  const cy = here.y + here.height / 2;
  for (const [sid, box] of boxes) {
    const x = box.x + box.width / 2 - cx;
    const y = box.y + box.height / 2 - cy;
    const ahead = x * dx + y * dy;
    if (ahead <= 1) continue;
    const aside = Math.abs(x * dy) + Math.abs(y * dx);
    const cost = ahead + 3 * aside;
    if (cost < least) [best, least] = [sid, cost];
  }
  return best;
}

function rounded(context, x, y, width, height, radius) {
  context.beginPath();
  context.roundRect(x, y, width, height, radius);
}

/** A state by shape and colour: full, ring, half, triangle. */
function mark(context, x, y, state, colours, hue) {
  context.beginPath();
  if (state === "faulted") {
    context.moveTo(x, y - 5);
    context.lineTo(x + 5, y + 4.5);
    context.lineTo(x - 5, y + 4.5);
    context.fillStyle = colours.bad;
    context.fill();
  } else if (state === "pending") {
    context.arc(x, y, 3.6, 0, 7);
    context.strokeStyle = colours.wait;
    context.lineWidth = 1.8;
    context.stroke();
  } else if (state === "draining") {
    context.arc(x, y, 4, Math.PI / 2, -Math.PI / 2);
    context.fillStyle = colours.wait;
    context.fill();
  } else {
    context.arc(x, y, 4, 0, 7);
    context.fillStyle = state === "active" ? hue : colours.ink3;
    context.fill();
  }
}

function clipped(context, value, width) {
  if (context.measureText(value).width <= width) return value;
  let cut = value;
  while (cut.length > 1 && context.measureText(`${cut}…`).width > width) cut = cut.slice(0, -1);
  return `${cut}…`;
}
