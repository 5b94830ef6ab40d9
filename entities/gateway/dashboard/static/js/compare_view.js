/** Several jobs beside each other: their curves at equal steps, and where their job files differ. */

import { stageColour } from "./colours.js";
import { CurveChart } from "./curve_chart.js";
import { ask } from "./door.js";
import { code, empty, h, keyed, setState, text } from "./dom.js";
import { progress, quantity } from "./format.js";
import { ENDED } from "./store.js";

const HUES = [0, 1, 2, 4, 6, 7, 5, 3]; // of stages, with those that differ most first
const MOST = HUES.length;
const LISTED = 200;
const AGAIN_MS = 2000; // between questions about a job that goes on
const DASHES = [[], [6, 4], [2, 3], [8, 3, 2, 3]];

/** Dotted path → value of each leaf of a job file; a list is one value. */
export function leaves(value, prefix = "", found = new Map()) {
  const inner = value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length > 0;
  if (!inner) found.set(prefix, value);
  else for (const [key, below] of Object.entries(value)) leaves(below, prefix ? `${prefix}.${key}` : key, found);
  return found;
}

/** Takes what came since the last answer: a step that comes again replaces itself and all later ones. */
export function extend(curve, answer) {
  const [first] = answer.steps;
  if (first !== undefined) {
    while (curve.steps.length && curve.steps.at(-1) >= first) {
      curve.steps.pop();
      curve.loss.pop();
    }
    for (const [index, step] of answer.steps.entries()) {
      curve.steps.push(step);
      curve.loss.push(answer.loss[index]);
    }
  }
  for (const point of answer.validations) curve.validations = [...curve.validations.filter((known) => known.step < point.step), point];
  curve.next = answer.next;
}

export class CompareView {
  constructor(store) {
    this.store = store;
    store.compared ??= new Map(); // job → {record, curve, why}; it outlives the view
    this.filter = h("input", { type: "search", id: "compare-filter", placeholder: "name, id, state", input: () => this.list() });
    this.choices = h("ul.choices", {});
    this.count = h("span.end", { role: "status" });
    this.lossBox = h("div.chart.tall", { role: "img", "aria-label": "Training loss of the chosen jobs by step" });
    this.validationBox = h("div.chart.tall", { role: "img", "aria-label": "Validation loss of the chosen jobs by step" });
    this.at = h("span.now", {});
    this.heads = h("tr", {});
    this.figures = h("tbody", {});
    this.keyHeads = h("tr", {});
    this.keys = h("tbody", {});
    this.same = h("p.line-note", { hidden: true }, "Their job files do not differ, but for the name.");
    this.none = h("div", {}, empty("Choose two or more jobs", h("span", {}, "In a terminal: ", code("dmsc runs compare JOB JOB"))));
    const table = (label, head, body) => h("div.scroll", { tabIndex: 0, role: "group", "aria-label": label }, h("table", {}, h("thead", {}, head), body));
    this.curves = h("div", {},
      h("div.chart-title", {}, h("h3", {}, "Training loss by step"), this.at), this.lossBox,
      h("div.chart-title", {}, h("h3", {}, "Validation loss by step")), this.validationBox,
      table("Figures of the chosen jobs", this.heads, this.figures));
    this.differences = h("section.panel.gap", { "aria-labelledby": "differences-title" },
      h("header", {}, h("h2", { id: "differences-title" }, "Where the job files differ")), this.same, table("Keys that differ", this.keyHeads, this.keys));
    this.element = h("div.view-compare", {},
      h("section.panel", { "aria-labelledby": "choose-title" },
        h("header", {}, h("h2", { id: "choose-title" }, "Jobs"), this.count),
        h("div.form", {}, h("label.grow", {}, "Filter", this.filter)), this.choices),
      h("div", {}, h("section.panel", { "aria-labelledby": "compare-title" },
        h("header", {}, h("h2", { id: "compare-title" }, "Side by side")), this.none, this.curves), this.differences));
    const hovered = (step) => text(this.at, step === null ? "" : this.valuesAt(step));
    this.loss = new CurveChart(this.lossBox, { points: false, hovered });
    this.validation = new CurveChart(this.validationBox, { points: true, hovered: () => {} });
    this.timer = setInterval(() => this.again(), AGAIN_MS);
  }

  destroy() {
    clearInterval(this.timer);
    this.loss.destroy();
    this.validation.destroy();
  }

  restyle() {
    for (const chart of [this.loss, this.validation]) chart.restyle();
    this.list();
    this.show();
  }

  update(topics) {
    if (!["all", "jobs"].some((topic) => topics.has(topic))) return;
    this.list();
    this.show();
  }

  // --- choosing ------------------------------------------------------------------------------------
  list() {
    const wanted = this.filter.value.trim().toLowerCase();
    const fits = (job) => !wanted || `${job.job} ${job.name} ${job.state}`.toLowerCase().includes(wanted);
    const jobs = [...this.store.jobs.values()].reverse().filter((job) => this.store.compared.has(job.job) || fits(job));
    text(this.count, jobs.length > LISTED ? `${LISTED} of ${jobs.length}` : `${this.store.compared.size} chosen`);
    keyed(this.choices, jobs.slice(0, LISTED), (job) => job.job, (job) => {
      const box = h("input", { type: "checkbox", change: () => this.choose(job.job, box.checked) });
      const parts = { box, swatch: h("i.swatch", {}), state: h("span.state", {}), name: h("span", {}), id: h("span.sub.mono", {}) };
      return Object.assign(h("li", {}, h("label", {}, box, parts.swatch, h("span.what", {}, parts.name, parts.id), parts.state)), { parts });
    }, ({ parts }, job) => {
      const chosen = this.store.compared.has(job.job);
      parts.box.checked = chosen;
      parts.box.disabled = !chosen && this.store.compared.size >= MOST;
      parts.swatch.style.background = chosen ? this.colour(job.job) : "transparent";
      text(parts.name, job.name);
      text(parts.id, job.job);
      setState(parts.state, job.state);
    });
  }

  choose(job, chosen) {
    if (chosen) {
      const used = new Set([...this.store.compared.values()].map((row) => row.hue));
      const hue = [...Array(MOST).keys()].find((index) => !used.has(HUES[index]));
      this.store.compared.set(job, { hue: HUES[hue], record: null, curve: { steps: [], loss: [], validations: [], next: 1 }, why: "" });
      this.fetch(job);
    } else this.store.compared.delete(job);
    this.list();
    this.show();
  }

  colour(job) {
    return stageColour(this.store.compared.get(job).hue);
  }

  // --- what is known -------------------------------------------------------------------------------
  async fetch(job) {
    const row = this.store.compared.get(job);
    if (!row || row.asking) return;
    row.asking = true;
    try {
      const path = `/v1/jobs/${encodeURIComponent(job)}`;
      const [record, answer] = await Promise.all([ask(path), ask(`${path}/curve?start=${row.curve.next}`)]);
      row.record = record;
      row.why = "";
      extend(row.curve, answer);
    } catch (error) {
      row.why = error.message;
    }
    row.asking = false;
    if (this.store.compared.get(job) === row) this.show();
  }

  again() {
    if (document.hidden) return;
    for (const [job, row] of this.store.compared) if (row.why || !row.record || !ENDED.has(row.record.state)) this.fetch(job);
  }

  // --- what is shown -------------------------------------------------------------------------------
  show() {
    const rows = [...this.store.compared].map(([job, row]) => ({ job, ...row }));
    this.none.hidden = rows.length > 0;
    this.curves.hidden = rows.length === 0;
    const style = (row) => ({ job: row.job, colour: () => stageColour(row.hue), dash: DASHES[row.hue % DASHES.length] });
    this.loss.show(rows.map((row) => ({ ...style(row), steps: row.curve.steps, values: row.curve.loss })));
    this.validation.show(rows.map((row) => ({
      ...style(row), steps: row.curve.validations.map((point) => point.step), values: row.curve.validations.map((point) => point.loss),
    })));
    this.showFigures(rows);
    this.showDifferences(rows.filter((row) => row.record));
  }

  showFigures(rows) {
    this.head(this.heads, ["Job", "State", "Step", "Loss", "Best validation", "Tokens/s", "Recoveries", "Slot-hours"], 2);
    const finite = (curve) => curve.validations.filter((point) => point.loss !== null);
    const best = Math.min(...rows.flatMap((row) => finite(row.curve).map((point) => point.loss)));
    const cells = (row) => {
      const { record, curve } = row;
      if (!record) return [row.why || "asking …", "", "", "", "", "", ""];
      const low = finite(curve).reduce((least, point) => (least === null || point.loss < least.loss ? point : least), null);
      return [record.state.replaceAll("_", " "), progress(record.step, record.spec.training.steps, ENDED.has(record.state)), record.loss_last?.toFixed(4) ?? "–",
        low ? `${low.loss.toFixed(4)} at ${low.step}${rows.length > 1 && low.loss === best ? " ★" : ""}` : "–",
        quantity(record.tokens_per_s), record.recoveries, quantity((record.usage?.slot_s ?? 0) / 3600)];
    };
    this.rows(this.figures, rows, (row) => row.job, (row) => [`${row.record?.spec.name ?? ""} ${row.job}`, ...cells(row)], (row) => stageColour(row.hue), 2);
  }

  showDifferences(rows) {
    const found = rows.map((row) => leaves(row.record.spec));
    const paths = [...new Set(found.flatMap((one) => [...one.keys()]))].filter((path) => path !== "name");
    const differ = paths.filter((path) => new Set(found.map((one) => JSON.stringify(one.get(path)))).size > 1);
    this.differences.hidden = rows.length < 2;
    this.same.hidden = rows.length < 2 || differ.length > 0;
    this.head(this.keyHeads, ["Key", ...rows.map((row) => row.job)], 99);
    const value = (one, path) => (one.has(path) ? (typeof one.get(path) === "string" ? one.get(path) : JSON.stringify(one.get(path))) : "–");
    this.rows(this.keys, differ, (path) => path, (path) => [path, ...found.map((one) => value(one, path))], () => null, 99);
  }

  head(line, names, numbersFrom) {
    if (line.shown === names.join("\n")) return;
    line.shown = names.join("\n");
    line.replaceChildren(...names.map((name, index) => h(index >= numbersFrom ? "th.num" : "th", { scope: "col" }, name)));
  }

  rows(body, rows, key, cells, colour, numbersFrom) {
    keyed(body, rows, key, () => h("tr", {}), (line, row) => {
      const values = cells(row);
      while (line.children.length > values.length) line.lastChild.remove();
      values.forEach((value, index) => {
        if (!line.children[index]) line.append(h(index >= numbersFrom ? "td.num" : "td", {}));
        const cell = line.children[index];
        if (index === 0 && colour(row)) {
          if (!cell.firstElementChild) cell.append(h("i.swatch", {}), h("span", {}));
          cell.firstElementChild.style.background = colour(row);
          text(cell.lastElementChild, value);
        } else text(cell, value);
      });
    });
  }

  valuesAt(step) {
    const values = [...this.store.compared].map(([job, { curve }]) => {
      const loss = curve.loss[curve.steps.indexOf(step)];
      return loss === undefined ? null : `${job} ${loss?.toFixed(4) ?? "not finite"}`;
    });
    return [`step ${step}`, ...values.filter(Boolean)].join("  ·  ");
  }
}
