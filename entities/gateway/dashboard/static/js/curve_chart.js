/** Curves of several jobs over the number of their steps (uPlot): equal steps stand above each other. */

import uPlot from "../vendor/uplot/uPlot.esm.js";
import { SizedPlot } from "./charts.js";
import { palette } from "./colours.js";

/** One x for all: the union of the steps, with a gap where a job has no such step. Pure. */
export function aligned(curves) {
  const steps = [...new Set(curves.flatMap((curve) => curve.steps))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  return [steps, ...curves.map((curve) => {
    const values = new Array(steps.length).fill(null);
    curve.steps.forEach((step, index) => { values[place.get(step)] = curve.values[index]; });
    return values;
  })];
}

export class CurveChart extends SizedPlot {
  /** @param {{points: boolean, hovered: (step: number|null) => void}} options */
  constructor(element, options) {
    super(element, []);
    Object.assign(this, { options, drawn: "" });
  }

  /** @param {{job: string, colour: () => string, dash: number[], steps: number[], values: number[]}[]} curves */
  show(curves) {
    this.data = curves;
    const jobs = curves.map((curve) => curve.job).join(" ");
    if (jobs !== this.drawn) this.clear();
    this.drawn = jobs;
    if (!curves.length) return;
    const data = aligned(curves);
    if (this.plot) this.plot.setData(data);
    else this.make(data);
  }

  make(data) {
    const { clientWidth: width, clientHeight: height } = this.element;
    if (!width) return;
    const colours = palette();
    const axis = { stroke: colours.ink3, font: `11px ${colours.sans}`, gap: 4, grid: { stroke: colours.rule, width: 1 }, ticks: { show: false } };
    this.plot = new uPlot({
      width, height,
      padding: [8, 14, 0, 0],
      cursor: { sync: { key: "steps" }, drag: { x: true, y: false }, points: { size: 6 } },
      legend: { show: false },
      scales: { x: { time: false } },
      axes: [{ ...axis, size: 24, space: 60 }, { ...axis, size: 56, space: 28, values: (_, values) => values.map((value) => Number(value.toPrecision(4))) }],
      series: [{}, ...this.data.map((curve) => ({
        stroke: curve.colour(), width: 1.5, dash: curve.dash, spanGaps: true,
        points: { show: (_, index) => this.options.points || this.data[index - 1].steps.length < 3, size: 5, fill: curve.colour() },
      }))],
      hooks: { setCursor: [(plot) => this.options.hovered(plot.cursor.idx === null || plot.cursor.idx === undefined ? null : plot.data[0][plot.cursor.idx])] },
    }, data, this.element);
  }
}
