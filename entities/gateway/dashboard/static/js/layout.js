/**
 * Where everything stands in the picture of a mesh. Pure: instances and a size in, boxes out.
 *
 * Stages are columns from left to right (on narrow screens rows from top to bottom), clusters the bands across.
 * Where a stage meets a cluster, its instances stand as cards; where there are too many, as tiles.
 */

import { unitName } from "./format.js";

const PAD = 12;
const HEAD = 26; // stage names
const LABEL = 20; // a cluster's name
const CARD = 46;
const DENSE_TALL = 380; // of all tiles of a stage together, about
const CARD_GAP = 6;

/**
 * @param {{sid: string, stage: number, cluster: string, state: string}[]} instances of one job
 * @param {number} width
 * @returns {{width, height, vertical, dense, columns, bands, boxes: Map<string, Box>, cells: Map<string, Box>}}
 */
export function arrange(instances, width) {
  const vertical = width < 560;
  const stages = [...new Set(instances.map((row) => row.stage))].sort((one, other) => one - other);
  const clusters = [...new Set(instances.map((row) => row.cluster))].sort();
  const cells = new Map();
  for (const row of instances) {
    const key = `${row.stage} ${row.cluster}`;
    if (!cells.has(key)) cells.set(key, { stage: row.stage, cluster: row.cluster, rows: [] });
    cells.get(key).rows.push(row);
  }
  let most = 0;
  for (const cell of cells.values()) {
    cell.rows.sort((one, other) => compare(one.sid, other.sid));
    most = Math.max(most, cell.rows.length);
  }
  const shape = vertical
    ? downwards(stages, clusters, cells, most, width)
    : across(stages, clusters, cells, most, width);
  const names = new Map(instances.map((row) => [row.stage, unitName(row)]));
  for (const each of shape.columns) each.name = names.get(each.stage);
  return shape;
}

function across(stages, clusters, cells, most, width) {
  const inner = width - 2 * PAD;
  const pitch = inner / Math.max(1, stages.length);
  const gap = Math.min(150, Math.max(26, pitch * 0.36));
  const column = pitch - gap;
  const dense = most > 5 || column < 92 || stages.length > 9;
  const tall = Math.max(48, DENSE_TALL / Math.max(1, clusters.length));
  const tile = dense ? Math.max(5, Math.min(16, Math.floor(Math.sqrt((column * tall) / Math.max(1, most))))) : 0;
  const perRow = dense ? Math.max(1, Math.floor(column / tile)) : 1;
  const columns = stages.map((stage, index) => ({ stage, x: PAD + gap / 2 + index * pitch, width: column }));
  const bands = [];
  const boxes = new Map();
  let y = HEAD + 4;
  for (const cluster of clusters) {
    const inside = stages.map((stage) => cells.get(`${stage} ${cluster}`)?.rows.length ?? 0);
    const tallest = Math.max(...inside, 1);
    const content = dense ? Math.ceil(tallest / perRow) * tile : tallest * (CARD + CARD_GAP) - CARD_GAP;
    const height = LABEL + content + 12;
    bands.push({ cluster, x: PAD, y, width: inner, height });
    for (const { stage, x } of columns) {
      const cell = cells.get(`${stage} ${cluster}`);
      if (!cell) continue;
      const used = dense ? Math.ceil(cell.rows.length / perRow) * tile : cell.rows.length * (CARD + CARD_GAP) - CARD_GAP;
      const top = y + LABEL + (content - used) / 2;
      const broad = dense ? Math.min(perRow, cell.rows.length) * tile : column;
      Object.assign(cell, { x, y: top, width: broad, height: used });
      place(cell, boxes, dense, tile, perRow, column);
    }
    y += height + 10;
  }
  return { width, height: Math.max(y + 2, 120), vertical: false, dense, columns, bands, boxes, cells };
}

function downwards(stages, clusters, cells, most, width) {
  const inner = width - 2 * PAD;
  const pitch = inner / Math.max(1, clusters.length);
  const column = pitch - 8;
  const dense = most > 4 || column < 96;
  const tile = dense ? Math.max(5, Math.min(14, Math.floor(Math.sqrt((column * 110) / Math.max(1, most))))) : 0;
  const perRow = dense ? Math.max(1, Math.floor(column / tile)) : 1;
  const boxes = new Map();
  const columns = [];
  let y = HEAD + 8;
  for (const stage of stages) {
    const inside = clusters.map((cluster) => cells.get(`${stage} ${cluster}`)?.rows.length ?? 0);
    const tallest = Math.max(...inside, 1);
    const content = dense ? Math.ceil(tallest / perRow) * tile : tallest * (CARD + CARD_GAP) - CARD_GAP;
    columns.push({ stage, x: PAD, y, width: inner });
    clusters.forEach((cluster, index) => {
      const cell = cells.get(`${stage} ${cluster}`);
      if (!cell) return;
      Object.assign(cell, { x: PAD + 4 + index * pitch, y: y + 18, width: column, height: content });
      place(cell, boxes, dense, tile, perRow, column);
    });
    y += 18 + content + 34;
  }
  const bands = clusters.map((cluster, index) => ({
    cluster, x: PAD + index * pitch, y: 4, width: pitch - 2, height: y - 22,
  }));
  return { width, height: Math.max(y - 10, 120), vertical: true, dense, columns, bands, boxes, cells };
}

function place(cell, boxes, dense, tile, perRow, column) {
  const [left, top] = [Math.round(cell.x), Math.round(cell.y)]; // tiles have sharp edges
  cell.rows.forEach((row, index) => {
    const box = dense
      ? {
          x: left + (index % perRow) * tile,
          y: top + Math.floor(index / perRow) * tile,
          width: tile - (tile > 7 ? 2 : 1),
          height: tile - (tile > 7 ? 2 : 1),
        }
      : { x: cell.x, y: cell.y + index * (CARD + CARD_GAP), width: column, height: CARD };
    boxes.set(row.sid, { ...box, stage: row.stage, cluster: row.cluster, cell });
  });
}

/** `r10` after `r9`. */
export const { compare } = new Intl.Collator("en", { numeric: true });

/** The curve from one box to another: its ends and the two points that bend it. */
export function curve(from, to, vertical, lane = 0) {
  if (vertical) {
    const down = to.y >= from.y;
    const x1 = from.x + from.width / 2 + lane;
    const x2 = to.x + to.width / 2 + lane;
    const y1 = down ? from.y + from.height : from.y;
    const y2 = down ? to.y : to.y + to.height;
    const bend = (y2 - y1) * 0.5;
    return [x1, y1, x1, y1 + bend, x2, y2 - bend, x2, y2];
  }
  const right = to.x >= from.x;
  const x1 = right ? from.x + from.width : from.x;
  const x2 = right ? to.x : to.x + to.width;
  const y1 = from.y + from.height / 2 + lane;
  const y2 = to.y + to.height / 2 + lane;
  const bend = (x2 - x1) * 0.5;
  return [x1, y1, x1 + bend, y1, x2 - bend, y2, x2, y2];
}

/** A point of a curve, `t` from 0 to 1. */
export function along([x1, y1, x2, y2, x3, y3, x4, y4], t) {
  const u = 1 - t;
  const a = u * u * u;
  const b = 3 * u * u * t;
  const c = 3 * u * t * t;
  const d = t * t * t;
  return [a * x1 + b * x2 + c * x3 + d * x4, a * y1 + b * y2 + c * y3 + d * y4];
}
