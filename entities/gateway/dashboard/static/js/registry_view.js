/** Registered models: their versions, aliases and who moved them, where they came from, who approved them. */

import { ask } from "./door.js";
import { code, empty, h, keyed, text } from "./dom.js";
import { date, quantity } from "./format.js";
import { Note, Pages, cell, dated, datedList, query, table } from "./tables.js";

const MODELS = 50;
const VERSIONS = 25;
const MOVES = 25;
const OPERATORS = new Set(["operator", "admin"]);

export class RegistryView {
  constructor(store) {
    this.store = store;
    this.chosen = null;
    this.note = new Note();
    this.body = h("tbody", {});
    this.none = h("div", { hidden: true }, empty("No model is registered",
      h("span", {}, "Register what a job has trained: ", code("dmsc model register NAME --job JOB")),
      h("span", {}, "Or a folder as Hugging Face saves a model: ", code("dmsc model import NAME FOLDER"))));
    this.models = new Pages((cursor) => `/v1/registry/models${query({ limit: MODELS, cursor })}`, (answer) => answer.models, () => this.showModels(), (why) => this.failed(why));
    this.table = table("Models", ["Model", "#Versions", "Newest", "Aliases", "Owner", "Registered"], this.body);
    this.detail = h("div", {});
    this.element = h("div", {},
      h("section.panel", { "aria-labelledby": "models-title" },
        h("header", {}, h("h2", { id: "models-title" }, "Models"), h("span.end", {}, h("button.small", { type: "button", click: () => this.models.begin() }, "Read again"))),
        this.note.element, this.table, this.none, h("p.line-note", {}, this.models.more)),
      this.detail, this.makeSheet());
    this.models.begin();
  }

  makeSheet() {
    this.sheetTitle = h("h2", { id: "lineage-title" });
    this.line = datedList();
    this.sheet = h("dialog.sheet", { "aria-labelledby": "lineage-title" }, this.sheetTitle, this.line,
      h("div.actions", {}, h("button", { type: "button", click: () => this.sheet.close() }, "Close")));
    return this.sheet;
  }

  failed(why) {
    if (why || this.wrong) this.note.tell(why && `models can't be read: ${why}`, true);
    this.wrong = why;
  }

  update(topics) {
    if (topics.has("you")) this.showVersions?.();
  }

  showModels() {
    const rows = this.models.items;
    this.none.hidden = rows.length > 0 || Boolean(this.wrong);
    this.table.hidden = rows.length === 0;
    keyed(this.body, rows, (row) => row.name, (row) => this.makeModel(row), showModel);
    for (const line of this.body.children) {
      if (line.parts.name === this.chosen) line.setAttribute("aria-current", "true");
      else line.removeAttribute("aria-current");
    }
  }

  makeModel({ name }) {
    const parts = { name, versions: cell("#versions"), newest: cell("newest"), aliases: h("td.full", {}), owner: cell("owner"), registered: cell("registered") };
    const open = h("button.quiet", { type: "button", "aria-label": `Versions of ${name}`, click: () => this.choose(name) }, name);
    return Object.assign(h("tr", {}, h("td.full", {}, open), parts.versions, parts.newest, parts.aliases, parts.owner, parts.registered), { parts });
  }

  /** Shows a model's versions and the moves of its aliases, the newest first. */
  choose(name) {
    this.chosen = name;
    this.showModels();
    const path = `/v1/registry/models/${encodeURIComponent(name)}`;
    const note = new Note();
    const told = (why) => note.tell(why, true);
    const body = h("tbody", {});
    const moves = datedList();
    this.versions = new Pages((cursor) => `${path}${query({ limit: VERSIONS, cursor, newest: true })}`, (answer) => answer.versions, () => this.showVersions(), told);
    this.moves = new Pages((cursor) => `${path}/aliases${query({ limit: MOVES, cursor, newest: true })}`, (answer) => answer.moves, () => {
      keyed(moves, this.moves.items, (move) => `${move.alias} ${move.number}`, makeMove);
    }, told);
    this.showVersions = () => keyed(body, this.versions.items, (row) => row.version, (row) => this.makeVersion(row, note), (line, row) => this.showVersion(line, row));
    this.detail.replaceChildren(
      h("section.panel.gap", { "aria-labelledby": "versions-title" }, h("header", {}, h("h2", { id: "versions-title", tabIndex: -1 }, `Versions of ${name}`)), note.element,
        table(`Versions of ${name}`, ["Version", "Digest", "From", "Evaluations", "Approved by", "#GiB", "Registered", "Actions"], body), h("p.line-note", {}, this.versions.more)),
      h("section.panel.gap", { "aria-labelledby": "moves-title" }, h("header", {}, h("h2", { id: "moves-title" }, "Moves of its aliases")), moves,
        h("p.line-note", {}, this.moves.more, " ", "Move one: ", code(`dmsc model alias ${name} ALIAS VERSION`))));
    this.versions.begin();
    this.moves.begin();
    this.detail.querySelector("h2").focus({ preventScroll: true });
  }

  makeVersion(row, note) {
    const parts = {
      aliases: h("span.sub", {}), evaluations: h("td.full", {}), approved: cell("approved by"),
      approve: h("button.small", { type: "button", click: () => this.approve(row, note) }, "Approve"),
    };
    const { lineage } = row;
    const from = [lineage.job && `job ${lineage.job}`, lineage.parent && `began with ${lineage.parent}`, lineage.source,
      lineage.data.length && `data ${lineage.data[0].source}${lineage.data.length > 1 ? ` and ${lineage.data.length - 1} more` : ""}`].filter(Boolean);
    const device_h = row.cost.slot_s / 3600;
    return Object.assign(h("tr", {},
      h("td", {}, `@${row.version}`, parts.aliases, h("span.sub", {}, row.notes)), h("td.mono", {}, row.sha256.slice(0, 12)),
      h("td.full", {}, from.map((line) => h("span.sub", {}, line)), device_h > 0 && h("span.sub", {}, `${quantity(device_h)} device-hours`)), parts.evaluations, parts.approved,
      cell("#gib", quantity(row.bytes / 2 ** 30)), cell("registered", date(row.registered_at), h("span.sub", {}, row.registered_by)),
      h("td", {}, h("button.small", { type: "button", "aria-label": `Lineage of ${row.name}@${row.version}`, click: () => this.descend(row, note) }, "Lineage"), " ", parts.approve)), { parts });
  }

  showVersion({ parts }, row) {
    const model = this.models.items.find((each) => each.name === row.name);
    text(parts.aliases, Object.entries(model?.aliases ?? {}).filter(([, version]) => version === row.version).map(([alias]) => alias).join(", "));
    text(parts.evaluations, row.evaluations.map((each) => `${each.metric} ${quantity(each.value)}${each.data ? ` on ${each.data}` : ""}`).join(", ") || "–");
    text(parts.approved, row.approvals.map((each) => each.by).join(", ") || "–");
    const { role, user } = this.store.you;
    parts.approve.hidden = row.approvals.some((each) => each.by === user);
    parts.approve.disabled = !OPERATORS.has(role);
    parts.approve.title = OPERATORS.has(role) ? `Approve ${row.name}@${row.version}` : "Only operators approve versions";
    parts.approve.setAttribute("aria-label", `Approve ${row.name}@${row.version}${OPERATORS.has(role) ? "" : ": only operators may"}`);
  }

  async approve({ name, version }, note) {
    try {
      await ask(`/v1/registry/models/${encodeURIComponent(name)}/versions/${version}/approve${query({ note: "in the dashboard" })}`, { method: "POST" });
      note.tell(`${name}@${version} is approved`);
      await this.versions.begin();
    } catch (error) {
      note.tell(`${name}@${version} was not approved: ${error.message}`, true);
    }
  }

  /** The version, its job, what it began with, and so on. */
  async descend({ name, version }, note) {
    try {
      const line = await ask(`/v1/registry/models/${encodeURIComponent(name)}/versions/${version}/lineage`);
      text(this.sheetTitle, `Where ${name}@${version} comes from`);
      const steps = line.versions.map((each) => [each.registered_at, [`${each.name}@${each.version}`, each.sha256.slice(0, 12), each.lineage.job && `job ${each.lineage.job}`,
        each.lineage.data.map((data) => data.source).join(", "), each.lineage.source].filter(Boolean).join(" · ")]);
      if (line.missing) steps.push([null, `${line.missing} is not known here`]);
      if (line.children.length) steps.unshift([null, `began with it: ${line.children.join(", ")}`]);
      this.line.replaceChildren(...steps.map(([at, words]) => dated(at, words)));
      this.sheet.showModal();
    } catch (error) {
      note.tell(`the lineage of ${name}@${version} can't be shown: ${error.message}`, true);
    }
  }
}

function showModel({ parts }, row) {
  text(parts.versions, row.versions);
  text(parts.newest, row.newest === null ? "–" : `@${row.newest} ${row.sha256.slice(0, 12)}`);
  text(parts.aliases, Object.entries(row.aliases).map(([alias, version]) => `${alias} → ${version}`).join(", ") || "–");
  text(parts.owner, row.owner);
  text(parts.registered, row.registered_at === null ? "–" : date(row.registered_at));
}

function makeMove(move) {
  const to = move.version === null ? "nothing" : `@${move.version}`;
  const from = move.before === null ? "nothing" : `@${move.before}`;
  return dated(move.at, `${move.alias}: ${from} → ${to}, by ${move.by}${move.approved_by.length ? `, approved by ${move.approved_by.join(", ")}` : ""}${move.reason ? `: ${move.reason}` : ""}`);
}
