/** The first view: figures, the picture, shares and why, the curves, and what happened. */

import { Chart } from "./charts.js";
import { code, empty, h, text } from "./dom.js";
import { bounded, quantity, seconds } from "./format.js";
import { MeshPicture } from "./mesh.js";
import { Shares } from "./shares.js";
import { ENDED } from "./store.js";
import { Timeline } from "./timeline.js";
import { inTurn, notAnyMore } from "./turns.js";

const SHARES_MS = 450; // between two rounds through the table, which nobody reads faster
const WINDOWS = [["5 min", 300], ["30 min", 1800], ["all", null]];

export class MeshView {
  constructor(store) {
    this.store = store;
    this.span = null;
    this.shares = new Shares((sid) => this.picture.select(sid));
    this.shares.again = () => this.showShares();
    this.picture = new MeshPicture(store, () => this.showShares());
    this.timeline = new Timeline(store);
    const shared = {
      range: () => this.range(),
      faults: () => this.store.events.filter((row) => row.kind === "fault" && row.job === this.store.shown()).map((row) => row.at),
      cursor: (at) => this.cursor(at),
    };
    const loss = h("div.chart", { "aria-hidden": "true" });
    const rate = h("div.chart", { "aria-hidden": "true" });
    this.charts = [
      new Chart(loss, { colour: (p) => p.accent, format: (value) => value.toFixed(2) }, shared),
      new Chart(rate, { colour: (p) => p.ink2, format: (value) => quantity(value) }, shared),
    ];
    this.lossNow = h("span.now", {});
    this.validationNow = h("span.now", {});
    this.rateNow = h("span.now", {});
    this.noCurve = h("div.fill", { hidden: true });
    this.curves = h("div", {},
      h("div.chart-title", {}, h("h3", {}, "Loss"), this.lossNow, this.validationNow), loss,
      h("div.chart-title", {}, h("h3", {}, "Throughput"), this.rateNow), rate, this.timeline.element);
    this.noMesh = h("div.fill", { hidden: true });
    this.pieces = {
      figures: () => this.showFigures(),
      shares: () => this.showShares(),
      loss: () => this.showCurve(0, 2),
      rate: () => this.showCurve(1, 3),
      happened: () => this.showHappened(),
    };
    this.element = h("div.view-mesh", {},
      this.makeFigures(),
      h("section.panel", { "aria-labelledby": "mesh-title" },
        h("header", {}, h("h2", { id: "mesh-title" }, "Mesh"), this.legend()), this.picture.element, this.noMesh),
      h("section.panel.side", { "aria-labelledby": "shares-title" },
        h("header", {}, h("h2", { id: "shares-title" }, "Shares, and why"), h("span.end", {}, "last 10 steps")),
        h("div.body", { tabIndex: 0, role: "group", "aria-label": "Shares of each instance" }, this.shares.element)),
      h("section.panel", { "aria-labelledby": "curves-title" },
        h("header", {}, h("h2", { id: "curves-title" }, "Loss, throughput, and what happened"), this.makeWindows()), this.curves, this.noCurve),
      h("section.panel.side", { "aria-labelledby": "happened-title" },
        h("header", {}, h("h2", { id: "happened-title" }, "Time line"), h("span.end", {}, "latest first")),
        h("div.body", { tabIndex: 0, role: "group", "aria-label": "What happened" }, this.timeline.list, (this.nothing = h("div", {})))));
  }

  destroy() {
    clearTimeout(this.later);
    Object.values(this.pieces).forEach(notAnyMore);
    this.picture.destroy();
    for (const chart of this.charts) chart.destroy();
  }

  legend() {
    return h("span.end.legend", {},
      h("span", {}, h("i.dot", { "aria-hidden": "true" }), "forward"),
      h("span", {}, h("i.dot.hollow", { "aria-hidden": "true" }), "backward"),
      h("span", {}, "width: load of a link"));
  }

  makeFigures() {
    const names = ["Loss", "Throughput", "Step", "Step time", "Instances", "Faults"];
    this.figures = names.map((name) => {
      const value = h("dd", {});
      const number = document.createTextNode("–");
      const unit = h("small", {});
      value.append(number, unit);
      const note = h("p.note", {});
      return { value, number, unit, note, element: h("div", {}, h("dt", {}, name), value, h("dd.note", {}, note)) };
    });
    this.bar = h("i", {});
    return h("dl.figures.wide", { "aria-label": "Figures of the job" }, this.figures.map((figure) => figure.element));
  }

  makeWindows() {
    const buttons = WINDOWS.map(([name, span]) => h("button.quiet.small", { type: "button", click: () => {
      this.span = span;
      this.showWindows();
      this.update(new Set(["steps", "events"]));
    } }, name));
    this.windows = buttons;
    this.showWindows();
    return h("span.end", { role: "group", "aria-label": "How far back" }, buttons);
  }

  showWindows() {
    WINDOWS.forEach(([, span], index) => this.windows[index].setAttribute("aria-pressed", String(span === this.span)));
    WINDOWS.forEach(([, span], index) => { this.windows[index].style.background = span === this.span ? "var(--accent-soft)" : ""; });
  }

  /** From when to when the curves go. */
  range() {
    const job = this.store.shown();
    const points = this.store.curves.get(job)?.points ?? [];
    const ended = ENDED.has(this.store.jobs.get(job)?.state);
    const last = this.store.events.filter((row) => row.job === job).at(-1)?.at ?? 0;
    const to = ended ? Math.max(points.at(-1)?.[1] ?? 0, last) || this.store.now() : this.store.now();
    const first = points[0]?.[1] ?? to - 60;
    const begin = this.span === null ? first : to - this.span;
    return [Math.min(begin, to - 10), to];
  }

  update(topics) {
    const every = topics.has("all") || topics.has("job");
    const { pieces } = this;
    if (every || topics.has("instances") || topics.has("jobs") || topics.has("nodes")) {
      this.picture.update();
      if (every) clearTimeout(this.later);
      if (every || performance.now() - this.sharedAt > SHARES_MS) inTurn(pieces.shares);
      else this.later ??= setTimeout(() => inTurn(pieces.shares), SHARES_MS);
      this.showEmptiness();
    }
    if (every || topics.has("steps") || topics.has("events") || topics.has("faults") || topics.has("jobs")) {
      for (const piece of [pieces.loss, pieces.rate, pieces.happened]) inTurn(piece);
    }
    inTurn(pieces.figures);
  }

  moved(moves) {
    this.picture.moved(moves);
  }

  restyle() {
    this.picture.restyle();
    for (const chart of this.charts) chart.restyle();
    this.showShares();
  }

  showShares() {
    this.sharedAt = performance.now();
    clearTimeout(this.later);
    this.later = null;
    this.shares.show(this.picture.rows(), this.picture.selected);
  }

  showEmptiness() {
    const rows = this.picture.rows();
    const kind = rows.length ? "" : this.store.jobs.size ? "idle" : this.store.nodes.size ? "jobless" : "nodeless";
    if (kind === this.kind) return;
    this.kind = kind;
    this.picture.element.hidden = kind !== "";
    this.noMesh.hidden = kind === "";
    if (kind === "idle") this.noMesh.replaceChildren(empty("No instances run for this job", h("span", {}, "It has ended, or waits for slots; ", h("a", { href: "#/jobs" }, "see the queue"), ".")));
    if (kind === "jobless") this.noMesh.replaceChildren(empty("The mesh is ready, and no job runs", h("span", {}, "Start one: ", code("dmsc train examples/stdlib-gpt.yaml"))));
    if (kind === "nodeless") this.noMesh.replaceChildren(empty("No node has joined yet", h("span", {}, "On any machine: ", code("dmsc join nats://HOST:4222 --token …"))));
  }

  showFigures() {
    const { store } = this;
    const job = store.jobs.get(store.shown());
    const points = store.curves.get(store.shown())?.points ?? [];
    const last = points.at(-1);
    const [loss, rate, step, time, instances, faults] = this.figures;
    put(loss, last ? last[2]?.toFixed(4) ?? "–" : "–", "", points.length > 1 ? `from ${points[0][2]?.toFixed(3)}` : "");
    const recent = points.slice(-10);
    const spent = recent.reduce((sum, point) => sum + point[4], 0);
    const tokens = recent.reduce((sum, point) => sum + point[3] * point[4], 0);
    put(rate, spent ? quantity(tokens / spent) : "–", spent ? "tokens/s" : "", spent ? "mean of 10 steps" : "");
    const done = Math.max(job?.step ?? 0, last ? last[0] + 1 : 0);
    put(step, job ? String(done) : "–", bounded(job?.steps) ? `of ${job.steps}` : "", "");
    if (!step.bar) {
      step.bar = true;
      step.note.replaceWith(h("div.progress", { "aria-hidden": "true" }, this.bar));
    }
    this.bar.style.transform = `scaleX(${bounded(job?.steps) ? done / job.steps : 0})`;
    const mean = recent.length ? spent / recent.length : null;
    put(time, mean === null ? "–" : mean < 1 ? String(Math.round(1000 * mean)) : mean.toFixed(2), mean === null ? "" : mean < 1 ? "ms" : "s", mean !== null && bounded(job?.steps) && !ENDED.has(job.state) ? `${seconds(mean * (job.steps - done))} left` : "");
    const rows = this.picture.rows();
    const active = rows.filter((row) => row.state === "active").length;
    put(instances, String(active), rows.length ? `of ${rows.length}` : "", [...store.nodes.values()].length ? `${store.nodes.size} node${store.nodes.size === 1 ? "" : "s"}` : "");
    instances.value.classList.toggle("wait", active < rows.length);
    const mine = [...store.faults.values()].filter((row) => row.job === store.shown() && !row.warning);
    const open = mine.filter((row) => row.state !== "handled" && row.state !== "given_up").length;
    put(faults, String(mine.length), open ? `${open} open` : "", mine.length ? `${mine.filter((row) => row.state === "handled").length} recovered` : "none so far");
    faults.value.classList.toggle("bad", open > 0);
  }

  points() {
    return this.store.curves.get(this.store.shown())?.points ?? [];
  }

  validations() {
    return this.store.curves.get(this.store.shown())?.validations ?? [];
  }

  /** @param {number} column of a point, see `/v1/overview` */
  showCurve(chart, column) {
    const points = this.points();
    this.curves.hidden = points.length === 0 && !this.store.events.length;
    this.noCurve.hidden = !this.curves.hidden;
    if (this.curves.hidden && !this.noCurve.firstChild) this.noCurve.replaceChildren(empty("No step has been committed yet", "Loss and throughput appear here with the first one."));
    this.charts[chart].show(chart === 0 ? withValidations(points, this.validations()) : [points.map((point) => point[1]), points.map((point) => point[column])]);
  }

  showHappened() {
    this.timeline.show(this.store.shown(), this.range());
    const quiet = this.timeline.list.childElementCount === 0;
    if (quiet !== this.quiet) {
      this.quiet = quiet;
      this.nothing.replaceChildren(...(quiet ? [empty("Nothing has happened yet", "Faults, recoveries, policies and checkpoints will stand here.")] : []));
    }
    this.cursor(null);
  }

  /** Figures at the cursor, else the latest. */
  cursor(at) {
    const point = latest(this.points(), at);
    const validation = latest(this.validations(), at);
    this.timeline.cursor(at, this.range());
    text(this.lossNow, point ? `step ${point[0] + 1}: ${point[2]?.toFixed(4) ?? "not finite"}` : "");
    text(this.validationNow, validation ? `validation, ● at step ${validation[0]}: ${validation[2]?.toFixed(4) ?? "not finite"}` : "");
    text(this.rateNow, point ? `${quantity(point[3])} tokens/s, ${seconds(point[4])}` : "");
  }
}

/** The last point up to this moment; the very last without one. Both kinds of points have their time second. */
function latest(points, at) {
  if (at === null) return points.at(-1);
  let [low, high] = [0, points.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][1] <= at) low = middle + 1;
    else high = middle;
  }
  return points[Math.max(0, low - 1)];
}

/** Times, losses and validation losses on one axis of times, as uPlot wants them. */
function withValidations(points, validations) {
  const marks = validations.map((point) => [point[1], null, point[2]]);
  const rows = [...points.map((point) => [point[1], point[2], null]), ...marks].sort((a, b) => a[0] - b[0]);
  return [0, 1, 2].map((column) => rows.map((row) => row[column]));
}

function put(figure, value, unit, note) {
  if (figure.number.data !== value) figure.number.data = value;
  text(figure.unit, unit);
  text(figure.note, note);
}

