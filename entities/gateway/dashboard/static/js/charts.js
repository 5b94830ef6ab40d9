/** Loss and throughput over time (uPlot), with the faults of the time line as hairs; one cursor for all. */

import uPlot from "../vendor/uplot/uPlot.esm.js";
import { palette } from "./colours.js";
import { clock } from "./format.js";

const AXIS = 52; // as wide as the time line's labels

/** A plot that keeps the size of its element. `show(data)` draws, and keeps `data` to draw it again. */
export class SizedPlot {
  constructor(element, data) {
    Object.assign(this, { element, data, plot: null });
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(element);
  }

  destroy() {
    this.observer.disconnect();
    this.clear();
  }

  clear() {
    this.plot?.destroy();
    this.plot = null;
  }

  restyle() {
    this.clear();
    this.show(this.data);
  }

  resize() {
    const { clientWidth: width, clientHeight: height } = this.element;
    if (this.plot && width) this.plot.setSize({ width, height });
    else this.show(this.data);
  }
}

export class Chart extends SizedPlot {
  /**
   * @param {{colour: (p) => string, format: (value: number) => string, name: string}} options
   * @param {{faults: () => number[], range: () => [number, number], cursor: (at: number|null) => void}} shared
   */
  constructor(element, options, shared) {
    super(element, [[], []]);
    Object.assign(this, { options, shared });
  }

  show(data) {
    this.data = data;
    if (!data[0].length) this.clear();
    else if (this.plot) this.plot.setData(data);
    else this.make();
  }

  make() {
    const { clientWidth: width, clientHeight: height } = this.element;
    if (!width) return;
    const colours = palette();
    const axis = {
      stroke: colours.ink3, font: `11px ${colours.sans}`, gap: 4,
      grid: { stroke: colours.rule, width: 1 }, ticks: { show: false },
    };
    this.plot = new uPlot({
      width, height,
      padding: [8, 14, 0, 0],
      cursor: { sync: { key: "time" }, drag: { x: false, y: false }, points: { size: 6 } },
      legend: { show: false },
      scales: { x: { time: true, range: () => this.shared.range() }, y: { range: (_, low, high) => spread(low, high) } },
      axes: [
        { ...axis, size: 24, space: 70, values: (_, values) => values.map((at) => clock(at).slice(0, values.length > 1 && values[1] - values[0] < 60 ? 8 : 5)) },
        { ...axis, size: AXIS + 12, space: 28, values: (_, values) => values.map((value) => this.options.format(value)) },
      ],
      series: [
        {},
        { stroke: this.options.colour(colours), width: 1.5, points: { show: false }, spanGaps: true },
        ...(this.data.length > 2 ? [{ stroke: colours.ink2, width: 0, points: { show: true, size: 6, fill: colours.ink2, stroke: colours.ink2 } }] : []),
      ],
      hooks: {
        drawClear: [(plot) => this.hairs(plot, colours)],
        setCursor: [(plot) => this.shared.cursor(plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : null)],
      },
    }, this.data, this.element);
  }

  hairs(plot, colours) {
    const { ctx: context } = plot;
    const { left, top, width, height } = plot.bbox;
    context.save();
    context.strokeStyle = colours.bad;
    context.globalAlpha = 0.35;
    context.lineWidth = devicePixelRatio;
    for (const at of this.shared.faults()) {
      const x = Math.round(plot.valToPos(at, "x", true)) + 0.5;
      if (x < left || x > left + width) continue;
      context.beginPath();
      context.moveTo(x, top);
      context.lineTo(x, top + height);
      context.stroke();
    }
    context.restore();
  }
}

function spread(low, high) {
  if (low === null || high === null) return [0, 1];
  const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
}
