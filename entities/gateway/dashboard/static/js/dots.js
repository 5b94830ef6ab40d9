/** Microbatches on their way, on a canvas of their own above the picture: a frame costs what moves. */

import { isDark, stageColour } from "./colours.js";
import { along, curve } from "./layout.js";

const MOVE_MS = 620;
const MOST = 300;
const DENSE_MS = 30; // between two drawings where there are many: software draws some canvases
const SPRITE = 12;

export class Dots {
  constructor(canvas) {
    this.canvas = canvas;
    this.dots = [];
    this.paths = new Map();
    this.sprites = new Map();
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.frame = (at) => this.draw(at);
  }

  /** Where instances stand now; what was on its way is not any more. */
  fit(shape, scale) {
    this.shape = shape;
    this.scale = scale;
    this.canvas.width = Math.round(shape.width * scale);
    this.canvas.height = Math.round(shape.height * scale);
    this.context = this.canvas.getContext("2d");
    this.dots.length = 0;
    this.dirty = null;
    this.paths.clear();
    this.sprites.clear();
  }

  restyle() {
    this.sprites.clear();
  }

  destroy() {
    cancelAnimationFrame(this.pending);
    this.gone = true;
  }

  /** Microbatches that went from one instance to another within the last tick: `[from, to, direction, count]`. */
  moved(moves) {
    if (this.still.matches || document.hidden || !this.shape) return;
    const now = performance.now();
    const room = MOST - this.dots.length;
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
    this.wake();
  }

  path(from, to, start, end, forward) {
    const key = `${from} ${to}`;
    let path = this.paths.get(key);
    if (!path) {
      path = curve(start, end, this.shape.vertical, this.shape.dense ? 0 : forward ? -3 : 3);
      this.paths.set(key, path);
    }
    return path;
  }

  wake() {
    if (!this.pending && !this.gone && (this.dots.length || this.dirty)) this.pending = requestAnimationFrame(this.frame);
  }

  draw(at) {
    this.pending = 0;
    if (this.gone) return;
    if (!this.shape.dense || at - (this.drawnAt ?? 0) >= DENSE_MS) {
      this.drawnAt = at;
      this.drawAll(at);
    }
    this.wake();
  }

  drawAll(at) {
    const { context, scale } = this;
    // Only where dots were: clearing all of a large canvas costs more than drawing them.
    if (this.dirty) context.clearRect(...this.dirty);
    let [left, top, right, bottom] = [Infinity, Infinity, -Infinity, -Infinity];
    const half = (SPRITE * scale) / 2;
    let kept = 0;
    for (const dot of this.dots) {
      const t = (at - dot.at) / MOVE_MS;
      if (t > 1) continue;
      this.dots[kept] = dot;
      kept += 1;
      if (t < 0) continue;
      const point = along(dot.path, t);
      // whole pixels, in the sprite's own size: copied, not resampled
      const x = Math.round(point[0] * scale - half);
      const y = Math.round(point[1] * scale - half);
      context.drawImage(this.sprite(dot.stage, dot.forward), x, y);
      left = Math.min(left, x);
      right = Math.max(right, x);
      top = Math.min(top, y);
      bottom = Math.max(bottom, y);
    }
    this.dots.length = kept;
    this.dirty = right >= left ? [left, top, right - left + 2 * half + 1, bottom - top + 2 * half + 1] : null;
  }

  /** A microbatch: full on its way forward, a ring on its way back. */
  sprite(stage, forward) {
    const key = forward ? stage : stage + 0.5;
    let image = this.sprites.get(key);
    if (!image) {
      image = document.createElement("canvas");
      image.width = image.height = Math.ceil(SPRITE * this.scale);
      const context = image.getContext("2d");
      context.scale(this.scale, this.scale);
      context.beginPath();
      context.arc(SPRITE / 2, SPRITE / 2, this.shape.dense ? 2.4 : 3.6, 0, 7);
      context.fillStyle = forward ? stageColour(stage) : isDark() ? "#0d1117" : "#ffffff";
      context.fill();
      context.strokeStyle = stageColour(stage);
      context.lineWidth = 1.4;
      context.stroke();
      this.sprites.set(key, image);
    }
    return image;
  }
}
