/**
 * The live picture: two canvases. Below, instances and links, drawn anew where they changed; above, the microbatches
 * on their way (`dots.js`). So a frame costs what moves, not what there is.
 */

import { bundle, differ } from "./bundles.js";
import { palette, stageColour } from "./colours.js";
import { h, say } from "./dom.js";
import { Dots } from "./dots.js";
import { bytesPerS, ms, percent, shortName, unitName } from "./format.js";
import { arrange, curve } from "./layout.js";
import { inTurn, notAnyMore } from "./turns.js";

const BUNDLED_MS = 1000; // between two sums over all links, where there are many
const BASE_MS = 240; // between two drawings of what stands

export class MeshPicture {
  /** @param {(sid: string|null) => void} chosen */
  constructor(store, chosen) {
    this.store = store;
    this.chosen = chosen;
    this.selected = null;
    this.hovered = null;
    this.drawn = new Map();
    this.turn = () => this.draw();
    this.base = h("canvas", { "aria-hidden": "true" });
    const over = h("canvas.over", { "aria-hidden": "true" });
    this.dots = new Dots(over);
    this.element = h("div.stagebox", {
      tabIndex: 0,
      role: "application",
      "aria-roledescription": "picture of the mesh",
      keydown: (event) => this.key(event),
      click: (event) => this.select(this.at(event)),
      mousemove: (event) => this.hover(this.at(event)),
      mouseleave: () => this.hover(null),
    }, this.base, over);
    this.element.style.height = "300px";
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.element);
  }

  destroy() {
    this.observer.disconnect();
    this.dots.destroy();
    clearTimeout(this.later);
    notAnyMore(this.turn);
    this.gone = true;
  }

  /** The instances of the job changed. */
  update() {
    if (this.later || this.gone) return;
    const early = BASE_MS - (performance.now() - (this.drawnAt ?? -BASE_MS));
    if (early <= 0) inTurn(this.turn);
    else this.later = setTimeout(() => inTurn(this.turn), early);
  }

  /** Something in it is to be seen at once. */
  updateNow() {
    clearTimeout(this.later);
    this.later = null;
    this.whole = true;
    inTurn(this.turn);
  }

  restyle() {
    this.colours = null;
    this.ground = null;
    this.dots.restyle();
    this.updateNow();
  }

  resize() {
    const width = this.element.clientWidth;
    if (!width || width === this.width) return;
    this.width = width;
    this.shape = null;
    this.updateNow();
  }

  moved(moves) {
    this.dots.moved(moves);
  }

  rows() {
    const job = this.store.shown();
    return job === null ? [] : this.store.instancesOf(job);
  }

  // --- drawing ----------------------------------------------------------------------------------
  draw() {
    this.later = null;
    if (this.gone || !this.width) return;
    this.drawnAt = performance.now();
    const rows = this.rows();
    this.colours ??= palette();
    if (!this.fits(rows)) {
      this.shape = arrange(rows, this.width);
      this.bundles = this.ground = null;
      this.fit();
    }
    if (!this.shape.dense) this.drawCards(rows);
    else if (this.groundIsNew(rows)) this.updateNow(); // drawing that was enough for one frame
    else this.drawTiles(rows);
    this.describe(rows);
  }

  /** Whether these instances stand where they are. */
  fits(rows) {
    const boxes = this.shape?.boxes;
    return boxes?.size === rows.length && rows.every((row) => {
      const box = boxes.get(row.sid);
      return box && box.stage === row.stage && box.cluster === row.cluster;
    });
  }

  fit() {
    const scale = Math.min(2, devicePixelRatio || 1);
    const { width, height } = this.shape;
    this.element.style.height = `${Math.round(height)}px`;
    this.base.width = Math.round(width * scale);
    this.base.height = Math.round(height * scale);
    this.context = this.base.getContext("2d");
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    this.whole = true;
    this.dots.fit(this.shape, scale);
  }

  drawCards(rows) {
    const { context } = this;
    context.clearRect(0, 0, this.shape.width, this.shape.height);
    this.drawBands(context);
    this.drawLinks(context, bundle(rows, this.shape.boxes));
    for (const row of rows) this.drawCard(context, row);
    this.drawMarked(context, rows);
  }

  /** Bands and links of a dense picture are kept as an image, and drawn when they would look different. */
  groundIsNew(rows) {
    if (this.ground && this.drawnAt - this.bundledAt < BUNDLED_MS) return false;
    this.bundledAt = this.drawnAt;
    const bundles = bundle(rows, this.shape.boxes);
    if (this.ground && !differ(this.bundles, bundles)) return false;
    this.bundles = bundles;
    const canvas = new OffscreenCanvas(this.base.width, this.base.height);
    const context = canvas.getContext("2d");
    context.setTransform(this.context.getTransform());
    this.drawBands(context);
    this.drawLinks(context, bundles);
    this.ground = canvas.transferToImageBitmap();
    return true;
  }

  /** What stands behind a box of the picture. */
  drawGround(box) {
    const { a: scale } = this.context.getTransform();
    const [x, y, width, height] = [box.x, box.y, box.width, box.height].map((value) => Math.round(value * scale));
    this.context.clearRect(box.x, box.y, box.width, box.height);
    this.context.save();
    this.context.resetTransform(); // pixel by pixel
    this.context.drawImage(this.ground, x, y, width, height, x, y, width, height);
    this.context.restore();
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
      context.fillText(column.name, column.x + (vertical ? 9 : 0), vertical ? column.y + 5 : 14);
    }
  }

  drawLinks(context, { groups, bundled }) {
    const { vertical } = this.shape;
    context.lineCap = "butt";
    for (const group of groups) {
      const [x1, y1, x2, y2, x3, y3, x4, y4] = curve(group.from, group.to, vertical);
      context.beginPath();
      context.moveTo(x1, y1);
      context.bezierCurveTo(x2, y2, x3, y3, x4, y4);
      context.strokeStyle = stageColour(group.stage, (bundled ? 0.1 : 0.16) + 0.3 * group.load);
      context.lineWidth = 1 + (bundled ? 8 : 5) * group.load;
      if (group.lossy) context.setLineDash([5, 4]);
      context.stroke();
      context.setLineDash([]);
    }
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

  /** Many instances: a tile each, as bright as it is busy; states stand out by colour and shape. */
  drawTiles(rows) {
    const { context, drawn } = this;
    const { boxes, width, height } = this.shape;
    const marked = this.hovered !== null || this.selected !== null;
    const whole = this.whole || marked;
    if (whole) {
      this.drawGround({ x: 0, y: 0, width, height });
      drawn.clear();
      this.whole = marked; // an outline reaches beyond its tile
    }
    const looks = new Map();
    for (const row of rows) {
      const look = row.state === "active" ? `${row.stage} ${row.busy === undefined ? 0 : Math.round(Math.min(1, row.busy) * 5) + 1}` : row.state;
      if (drawn.get(row.sid) === look) continue;
      drawn.set(row.sid, look);
      if (!looks.has(look)) looks.set(look, []);
      looks.get(look).push(boxes.get(row.sid));
    }
    if (!whole) for (const list of looks.values()) for (const box of list) this.drawGround(box);
    for (const [look, list] of looks) {
      const [stage, level] = look.split(" ").map(Number);
      if (level !== undefined) {
        context.fillStyle = stageColour(stage, 0.16 + 0.14 * level);
        for (const box of list) context.fillRect(box.x, box.y, box.width, box.height);
      } else for (const box of list) this.drawOdd(context, box, look);
    }
    this.drawMarked(context, rows);
  }

  drawOdd(context, box, state) {
    const { colours } = this;
    if (state === "faulted") {
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
    this.updateNow();
  }

  select(sid) {
    this.selected = sid === this.selected ? null : sid;
    this.updateNow();
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
  const parts = [`${shortName(row)}, ${unitName(row)}, ${row.cluster}/${row.node}: ${row.state}`];
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
