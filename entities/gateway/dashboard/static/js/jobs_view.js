/** Every job, how far it is; parking it, resuming it, and its end with a question first. */

import { SHOWN, counts, folded, nameOf, stateOfAll } from "./arrays.js";
import { ask } from "./door.js";
import { code, empty, h, keyed, say, setState, text } from "./dom.js";
import { bounded, progress, quantity } from "./format.js";
import { QueueView } from "./queue_view.js";
import { ENDED } from "./store.js";
import { yaml } from "./yaml.js";

/** States in which a job holds slots. */
const BEGUN = new Set(["deploying", "running", "recovering", "finishing"]);

export class JobsView {
  constructor(store) {
    this.store = store;
    this.opened = new Set();
    this.body = h("tbody", {});
    this.note = h("p.line-note", { role: "status", hidden: true });
    this.none = h("div", { hidden: true }, empty("No job has been submitted", h("span", {}, "Start one: ", code("dmsc train examples/stdlib-gpt.yaml"), ", or ", code("POST /v1/jobs"))));
    this.table = h("div.scroll", { tabIndex: 0, role: "group", "aria-label": "Jobs" }, h("table.stack", {},
      h("thead", {}, h("tr", {}, ["Job", "State", "Progress", "Loss", "Tokens/s", "What it says", "Actions"].map((name, index) =>
        h(index === 3 || index === 4 ? "th.num" : "th", { scope: "col" }, name)))), this.body));
    this.queue = new QueueView(store);
    this.element = h("div", {}, h("section.panel", { "aria-labelledby": "jobs-title" },
      h("header", {}, h("h2", { id: "jobs-title" }, "Jobs"), (this.count = h("span.end", {}))), this.note, this.table, this.none, this.makeDialog(), this.makeConfiguration()),
    ...this.queue.elements);
  }

  makeConfiguration() {
    this.configured = h("h2", { id: "configuration-title" });
    this.configuration = h("pre.configuration", { tabIndex: 0, role: "group", "aria-labelledby": "configuration-title" });
    this.sheet = h("dialog.sheet", { "aria-labelledby": "configuration-title" }, this.configured, this.configuration,
      h("div.actions", {}, h("button", { type: "button", click: () => this.sheet.close() }, "Close")));
    return this.sheet;
  }

  /** What the job was submitted with; the gateway hides what is secret. */
  async configure(job) {
    try {
      const record = await ask(`/v1/jobs/${encodeURIComponent(job)}`);
      text(this.configured, `${job}, as it was submitted`);
      text(this.configuration, yaml(record.spec));
      this.sheet.showModal();
    } catch (error) {
      this.tell(`the configuration of ${job} can't be shown: ${error.message}`, true);
    }
  }

  makeDialog() {
    this.question = h("p", {});
    this.dialog = h("dialog", { "aria-labelledby": "cancel-title" },
      h("h2", { id: "cancel-title" }, "Cancel this job?"), this.question,
      h("div.actions", {},
        h("button", { type: "button", click: () => this.dialog.close() }, "Keep it running"),
        h("button.danger", { type: "button", id: "confirm-cancel", click: () => this.cancel() }, "Cancel the job")));
    return this.dialog;
  }

  update(topics) {
    this.queue.update(topics);
    if (!["all", "jobs", "steps", "you"].some((topic) => topics.has(topic))) return;
    const jobs = [...this.store.jobs.values()].reverse();
    const going = jobs.filter((job) => !ENDED.has(job.state));
    const waiting = going.filter((job) => job.state === "queued").length;
    text(this.count, `${going.length - waiting} at work, ${waiting} waiting, ${jobs.length - going.length} ended`);
    this.none.hidden = jobs.length > 0;
    this.table.hidden = jobs.length === 0;
    const order = [...going, ...jobs.filter((job) => ENDED.has(job.state))];
    keyed(this.body, folded(order, this.opened), (line) => line.key,
      (line) => (line.array ? this.makeArray(line) : this.make(line.job)),
      (row, line) => (line.array ? this.showArray(row, line) : this.show(row, line.job)));
  }

  makeArray({ array, jobs }) {
    const parts = {
      state: h("span.state", {}), bar: h("i", {}), progress: h("span", {}), counts: h("span", {}),
      open: h("button.small", { type: "button", click: () => {
        if (!this.opened.delete(array)) this.opened.add(array);
        this.update(new Set(["jobs"]));
      } }),
    };
    const line = h("tr", {},
      h("td.full", {}, nameOf(jobs[0].name), h("span.sub.mono", {}, array)),
      h("td", {}, parts.state),
      h("td", {}, h("span.meter", {}, h("span.track", { "aria-hidden": "true" }, parts.bar), parts.progress)),
      h("td.num", { "data-name": "loss" }, "–"), h("td.num", { "data-name": "tokens/s" }, "–"), h("td.full", {}, parts.counts),
      h("td", {}, parts.open));
    return Object.assign(line, { parts });
  }

  showArray({ parts }, { array, jobs }) {
    const ended = jobs.filter((job) => ENDED.has(job.state)).length;
    const opened = this.opened.has(array);
    setState(parts.state, stateOfAll(jobs));
    parts.bar.style.transform = `scaleX(${ended / jobs.length})`;
    text(parts.progress, `${ended} of ${jobs.length} ended`);
    text(parts.counts, opened && jobs.length > SHOWN ? `${counts(jobs)}; ${SHOWN} are shown, dmsc jobs ${array} lists all` : counts(jobs));
    text(parts.open, opened ? "Fold" : `Show ${jobs.length === 1 ? "its job" : `${Math.min(SHOWN, jobs.length)} jobs`}`);
    parts.open.setAttribute("aria-expanded", String(opened));
    parts.open.setAttribute("aria-label", `${opened ? "Fold" : "Show"} the jobs of ${array}`);
  }

  make(job) {
    const parts = {
      state: h("span.state", {}), bar: h("i", {}), progress: h("span", {}), loss: h("td.num", { "data-name": "loss" }), rate: h("td.num", { "data-name": "tokens/s" }),
      reason: h("span", {}),
      cancel: h("button.small.danger", { type: "button", click: () => this.confirm(job.job) }, "Cancel"),
      park: h("button.small", { type: "button", click: () => this.park(job.job) }, "Park"),
      resume: h("button.small", { type: "button", click: () => this.resume(job.job) }, "Resume"),
      watch: h("button.small", { type: "button", click: () => {
        this.store.job = job.job;
        this.store.tell(new Set(["job", "jobs"]));
        location.hash = "#/mesh";
      } }, "Watch"),
      configuration: h("button.small", { type: "button", "aria-label": `Configuration of ${job.job}`, click: () => this.configure(job.job) }, "Configuration"),
    };
    const line = h("tr", {},
      h("td.full", {}, job.name, h("span.sub.mono", {}, job.job)),
      h("td", {}, parts.state),
      h("td", {}, h("span.meter", {}, h("span.track", { "aria-hidden": "true" }, parts.bar), parts.progress)),
      parts.loss, parts.rate, h("td.full", {}, parts.reason),
      h("td", {}, parts.watch, " ", parts.configuration, " ", parts.park, parts.resume, " ", parts.cancel));
    return Object.assign(line, { parts });
  }

  show({ parts }, job) {
    const last = this.store.curves.get(job.job)?.points.at(-1);
    const done = Math.max(job.step, last ? last[0] + 1 : 0);
    setState(parts.state, job.state);
    parts.bar.style.transform = `scaleX(${bounded(job.steps) ? done / job.steps : 0})`;
    text(parts.progress, progress(done, job.steps, ENDED.has(job.state)));
    text(parts.loss, last ? last[2]?.toFixed(4) : "–");
    text(parts.rate, last && !ENDED.has(job.state) ? quantity(last[3]) : "–");
    text(parts.reason, [...job.alerts.map((alert) => `alert: ${alert.text}`), job.reason].filter(Boolean).join("; "));
    parts.cancel.hidden = ENDED.has(job.state);
    parts.park.hidden = !BEGUN.has(job.state);
    parts.resume.hidden = job.state !== "parked";
    for (const name of ["cancel", "park", "resume"]) this.allow(parts[name], name, job.job);
  }

  /** A button says what it does, or why one may not. */
  allow(button, verb, job) {
    const mayNot = this.store.you.role === "viewer";
    const label = `${verb[0].toUpperCase()}${verb.slice(1)} ${job}`;
    button.disabled = mayNot;
    button.title = mayNot ? `A viewer may not ${verb} jobs: ask the job's owner, or an operator` : label;
    button.setAttribute("aria-label", mayNot ? `${label}: a viewer may not` : label);
  }

  async park(job) {
    await this.order(job, "park?reason=" + encodeURIComponent("in the dashboard"), "will be parked at the end of the open step", "parked");
  }

  async resume(job) {
    await this.order(job, "resume", "goes on as soon as there is room", "resumed");
  }

  confirm(job) {
    this.asked = job;
    text(this.question, `${job} ends now, and its instances with it. Its checkpoints stay; a new job can go on from them.`);
    this.dialog.showModal();
    this.dialog.querySelector("button").focus();
  }

  async cancel() {
    this.dialog.close();
    await this.order(this.asked, "cancel?reason=" + encodeURIComponent("cancelled in the dashboard"), "is cancelled", "cancelled");
  }

  async order(job, what, done, participle) {
    try {
      await ask(`/v1/jobs/${encodeURIComponent(job)}/${what}`, { method: "POST" });
      this.tell(`${job} ${done}`, false);
    } catch (error) {
      this.tell(`${job} was not ${participle}: ${error.message}`, true);
    }
  }

  tell(line, bad) {
    this.note.hidden = false;
    this.note.classList.toggle("bad", bad);
    text(this.note, line);
    say(line);
  }
}
