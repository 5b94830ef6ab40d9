/** Model services: their versions, who answers which part, how fast, and what was decided about them. */

import { ask } from "./door.js";
import { code, empty, h, keyed, setState, text } from "./dom.js";
import { date, percent, quantity, seconds } from "./format.js";
import { Poll } from "./poll.js";
import { Note, Question, cell, dated, datedList, query, table } from "./tables.js";

const EVERY_MS = 2000;
const SHOWN = 200; // services that one answer has
const OPERATORS = new Set(["operator", "admin"]);
const COLUMNS = ["Version", "State", "#Traffic", "Replicas", "#Requests/s", "#Errors/s", "First token", "#Tokens/s", "#Answers", "Cache", "Actions"];

export class ServicesView {
  constructor(store) {
    this.store = store;
    this.rows = [];
    this.note = new Note();
    this.question = new Question("service-question");
    this.list = h("div", {});
    this.waiting = h("p.empty", {}, "Asking the gateway …");
    this.none = h("div.panel", { hidden: true }, empty("No model is served",
      h("span", {}, "Serve what a job has trained: ", code("dmsc serve JOB --service NAME")),
      h("span", {}, "Then ask it: ", code("dmsc ask NAME 'a prompt'"))));
    this.element = h("div", {}, this.note.element, this.waiting, this.none, this.list, this.question.element);
    this.poll = new Poll(() => "/v1/overview?part=services", EVERY_MS, (answer) => {
      this.rows = answer.services;
      this.show();
    }, (why) => this.failed(why));
  }

  destroy() {
    this.poll.stop();
  }

  failed(why) {
    if (why || this.wrong) this.note.tell(why && `services as last known: ${why}`, true);
    this.wrong = why;
    if (why) this.waiting.hidden = true;
  }

  update(topics) {
    if (topics.has("you")) this.show();
  }

  show() {
    this.waiting.hidden = true;
    this.none.hidden = this.rows.length > 0;
    keyed(this.list, this.rows, (row) => row.service, (row) => this.make(row), (element, row) => this.showService(element, row));
    if (this.rows.length === SHOWN) this.note.tell(`the first ${SHOWN} services by name; dmsc service list lists all`);
  }

  make({ service }) {
    const id = `service-${service}`;
    const parts = {
      state: h("span.state", {}), owner: h("span.dim", {}), body: h("tbody", {}), more: h("p.line-note", { hidden: true }), history: datedList(), changes: h("summary", {}),
      rollback: h("button.small", { type: "button" }, "Roll back"),
      stop: h("button.small.danger", { type: "button" }, "Stop"),
    };
    const element = h("section.panel.gap", { "aria-labelledby": id },
      h("header", {}, h("h2", { id }, service), parts.state, parts.owner, h("span.end", {}, parts.rollback, parts.stop)),
      table(`Versions of ${service}`, COLUMNS, parts.body), parts.more,
      h("details.changes", {}, parts.changes, parts.history));
    parts.rollback.addEventListener("click", () => this.rollBack(element.row));
    parts.stop.addEventListener("click", () => this.stop(element.row));
    return Object.assign(element, { parts });
  }

  showService(element, row) {
    const { parts } = element;
    element.row = row;
    setState(parts.state, row.state);
    text(parts.owner, [row.user, row.tenant, row.stable && `stable: ${row.stable}`].filter(Boolean).join(" · "));
    this.allow(parts.rollback, row, "roll back", row.service);
    this.allow(parts.stop, row, "stop", row.service);
    parts.rollback.hidden = !row.stable || row.versions.some(({ stable, weight }) => stable && weight === 1);
    keyed(parts.body, row.versions, (version) => version.version, (version) => this.makeVersion(element, version), (line, version) => this.showVersion(line, row, version));
    parts.more.hidden = !row.more_versions;
    text(parts.more, `${row.more_versions} more versions without traffic: dmsc service show ${row.service}`);
    text(parts.changes, row.history.length ? `Changes of traffic; the last ${date(row.history[0].at)}: ${change(row.history[0])}` : "No change of traffic yet");
    keyed(parts.history, row.history, (each) => `${each.at} ${each.by} ${each.why}`, makeChange);
  }

  makeVersion(element, { version }) {
    const parts = {
      state: h("span.state", {}), reason: h("span.sub", {}), traffic: cell("#traffic"), replicas: cell("replicas"), requests: cell("#requests/s"),
      errors: cell("#errors/s"), first: cell("first token"), tokens: cell("#tokens/s"), answers: cell("#answers"), cache: cell("cache"), about: h("span.sub", {}),
      promote: h("button.small", { type: "button" }, "Promote"), shadow: h("button.small", { type: "button" }),
    };
    const line = h("tr", {}, h("td.full", {}, version, parts.about), h("td.full", {}, parts.state, parts.reason), parts.traffic, parts.replicas, parts.requests, parts.errors,
      parts.first, parts.tokens, parts.answers, parts.cache, h("td", {}, parts.promote, " ", parts.shadow));
    parts.promote.addEventListener("click", () => this.promote(element.row, line.row));
    parts.shadow.addEventListener("click", () => this.shadow(element.row, line.row));
    return Object.assign(line, { parts });
  }

  showVersion(line, service, row) {
    const { parts } = line;
    line.row = row;
    setState(parts.state, row.state);
    text(parts.reason, row.reason);
    text(parts.about, [row.job, row.sha256, row.exact === false ? `not exact: ${row.inexact_because}` : row.exact && "exact", row.uncached_because && `without a cache: ${row.uncached_because}`, row.stable && "stable"].filter(Boolean).join(" · "));
    text(parts.traffic, row.shadow ? "shadow" : percent(row.weight));
    text(parts.replicas, row.replicas.join(" · ") || "–");
    text(parts.requests, quantity(row.requests_per_s));
    text(parts.errors, quantity(row.errors_per_s));
    parts.errors.classList.toggle("bad", row.errors_per_s > 0);
    parts.errors.title = Object.entries(row.errors ?? {}).map(([name, times]) => `${times} ${name}`).join(", ");
    text(parts.first, row.first_token_s?.[0] ? `${seconds(row.first_token_s[0])} · 95 %: ${seconds(row.first_token_s[1])}` : "–");
    text(parts.tokens, quantity(row.tokens_per_s));
    text(parts.answers, row.sessions === undefined ? "–" : row.waiting ? `${row.sessions} (${row.waiting} wait)` : row.sessions);
    text(parts.cache, row.cache_rows ? `${percent(row.cache_used)} of ${quantity(row.cache_rows)}` : "–");
    const over = ["retired", "refused"].includes(row.state);
    parts.promote.hidden = over || row.weight === 1;
    parts.shadow.hidden = over || row.weight === 1;
    text(parts.shadow, row.shadow ? "End shadow" : "Shadow");
    const name = `${service.service}@${row.version}`;
    this.allow(parts.promote, service, "promote", name);
    this.allow(parts.shadow, service, row.shadow ? "end the shadow of" : "shadow", name);
  }

  /** A button says what it does, or why one may not; the gateway decides in any case. */
  allow(button, { user }, verb, name) {
    const { role, user: me } = this.store.you;
    const may = OPERATORS.has(role) || (role === "researcher" && user === me);
    const label = `${verb[0].toUpperCase()}${verb.slice(1)} ${name}`;
    button.disabled = !may;
    button.title = may ? label : `Only ${user} and operators may ${verb} this`;
    button.setAttribute("aria-label", may ? label : `${label}: only ${user} and operators may`);
  }

  promote({ service, revision }, { version, weight }) {
    this.question.ask(`Promote ${version}?`, `${service}@${version} gets all traffic (${percent(weight)} now). The former version stays, to be rolled back to.`, "Promote it",
      () => this.order(service, "promote", { version, expected: revision }, `${version} gets all traffic`));
  }

  rollBack({ service, revision, stable }) {
    this.question.ask(`Roll back to ${stable}?`, `All traffic of ${service} goes to ${stable}.`, "Roll back",
      () => this.order(service, "rollback", { expected: revision }, `all traffic goes to ${stable}`));
  }

  shadow({ service, revision }, { version, shadow }) {
    this.order(service, shadow ? "unshadow" : "shadow", { version, expected: revision },
      shadow ? `${version} answers no copies any more` : `${version} answers copies of requests`);
  }

  stop({ service }) {
    this.question.ask(`Stop ${service}?`, `Nobody answers for ${service} any more, and what its versions hold is free.`, "Stop the service",
      () => this.order(service, "stop", {}, "it stops"));
  }

  async order(service, verb, values, done) {
    try {
      await ask(`/v1/services/${encodeURIComponent(service)}/${verb}${query({ ...values, why: "in the dashboard" })}`, { method: "POST" });
      this.note.tell(`${service}: ${done}`);
    } catch (error) {
      this.note.tell(`${service} stays as it is: ${error.message}`, true);
    }
    this.poll.now();
  }
}

function change({ by, why, weights, shadow }) {
  const shares = Object.entries(weights).map(([version, weight]) => `${version} ${percent(weight)}`).join(", ") || "nobody answers";
  return `${shares}${shadow.length ? `, in shadow ${shadow.join(", ")}` : ""}, by ${by}${why ? `: ${why}` : ""}`;
}

function makeChange(row) {
  return dated(row.at, change(row));
}
