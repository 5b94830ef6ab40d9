/** What devices were used for, and what that costs: by job, user, tenant or service; budgets. */

import { code, empty, h, keyed, text } from "./dom.js";
import { date, percent, quantity } from "./format.js";
import { Poll } from "./poll.js";
import { Note, cell, query, table } from "./tables.js";

const EVERY_MS = 30_000; // slices are a quarter of an hour; the accountant counts every few seconds
const SHOWN = 100; // lines at first, and with each "Show more"
const OPERATORS = new Set(["operator", "admin"]);
const PERIODS = { "an hour": 3600, "a day": 86_400, "7 days": 604_800, "30 days": 2_592_000, "90 days": 7_776_000 };

export class CostsView {
  constructor(store) {
    this.store = store;
    this.limit = SHOWN;
    this.statement = null;
    this.note = new Note();
    this.body = h("tbody", {});
    this.budgets = h("tbody", {});
    const again = { change: () => this.restart() };
    this.by = h("select", again, ["job", "user", "tenant", "service"].map((name) => h("option", { value: name }, name)));
    this.period = h("select", again, Object.keys(PERIODS).map((name) => h("option", { value: name, selected: name === "a day" }, name)));
    this.mine = h("input", { type: "checkbox", ...again });
    this.mineLabel = h("label.check", {}, this.mine, "only mine");
    this.more = h("button", { type: "button", hidden: true, click: () => {
      this.limit += SHOWN;
      this.show();
    } }, "Show more");
    this.sums = h("dl.figures", {});
    this.remarks = h("p.line-note", {});
    this.none = h("div", { hidden: true }, empty("Nothing was used in this time", h("span", {}, "A job that runs is here within seconds: ", code("dmsc train examples/stdlib-gpt.yaml"))));
    this.table = table("Costs", ["Name", "User", "#Device-h", "Busy", "Waiting", "Recomputed", "#kWh", "#g CO2e", "#GiB-h", "#Sent GiB", "#Price"], this.body);
    this.budgetPanel = h("section.panel.gap", { "aria-labelledby": "budgets-title", hidden: true }, h("header", {}, h("h2", { id: "budgets-title" }, "Budgets")),
      table("Budgets", ["Of", "Per", "Used", "Limits", "State", "Why"], this.budgets));
    this.element = h("div", {}, this.sums,
      h("section.panel.gap", { "aria-labelledby": "costs-title" }, h("header", {}, h("h2", { id: "costs-title" }, "Costs")),
        h("form.form", { submit: (event) => event.preventDefault() }, h("label", {}, "By", this.by), h("label", {}, "In the last", this.period), this.mineLabel),
        this.note.element, this.table, this.none, h("p.line-note", {}, this.more), this.remarks),
      this.budgetPanel);
    this.poll = new Poll(() => this.path(), EVERY_MS, (answer) => {
      this.statement = answer;
      this.show();
    }, (why) => this.failed(why));
  }

  destroy() {
    this.poll.stop();
  }

  failed(why) {
    if (why || this.wrong) this.note.tell(why, true);
    this.wrong = why;
  }

  update(topics) {
    if (topics.has("all") || topics.has("you")) this.mineLabel.hidden = !OPERATORS.has(this.store.you.role);
  }

  path() {
    const since = this.store.now() - PERIODS[this.period.value];
    return `/v1/accounts${query({ by: this.by.value, since: Math.max(0, since), all: this.mine.checked ? "false" : null })}`;
  }

  restart() {
    this.limit = SHOWN;
    this.poll.now();
  }

  show() {
    const { lines, total, idle, currency, only, offered_s, unaccounted_s, notes, budgets, counted_until } = this.statement;
    const rows = [...lines].sort((one, other) => (other.price ?? 0) - (one.price ?? 0) || other.held_s - one.held_s);
    this.none.hidden = rows.length > 0 || Boolean(this.wrong);
    this.table.hidden = rows.length === 0;
    keyed(this.body, [...rows.slice(0, this.limit), ...(idle ? [idle] : [])], (row) => `${row.name} ${row.user}`, makeLine, showLine);
    this.more.hidden = rows.length <= this.limit;
    text(this.more, `Show more of ${rows.length}`);
    const sums = [["device-hours", quantity(total.held_s / 3600)], ["busy", share(total.busy_s, total)], ["kWh", mark(total, quantity(total.kwh))],
      ["g CO2e", mark(total, quantity(total.g_co2e))], [currency ? `price, ${currency}` : "price", quantity(total.price)],
      ["in no account", offered_s ? `${((100 * unaccounted_s) / offered_s).toFixed(2)} %` : "–"]];
    keyed(this.sums, sums, ([name]) => name, ([name]) => h("div", {}, h("dt", {}, name), h("dd", {})), (part, [, value]) => text(part.lastChild, value));
    text(this.remarks, [only && `only what ${only} used`, counted_until > 0 && `counted until ${date(counted_until)}`, "~: energy by the watts of the file of prices, not by meters", ...notes].filter(Boolean).join("; "));
    this.budgetPanel.hidden = budgets.length === 0;
    keyed(this.budgets, budgets, ({ budget }) => JSON.stringify(budget), makeBudget, showBudget);
  }
}

const share = (part_s, { held_s }) => (held_s ? percent(part_s / held_s) : "–");
const mark = ({ measured }, words) => (measured >= 0.999 || words === "–" ? words : `~${words}`);

function makeLine(row) {
  const parts = { device_h: cell("#device-h"), busy: cell("busy"), waiting: cell("waiting"), recomputed: cell("recomputed"), kwh: cell("#kwh"), carbon: cell("#g co2e"), stored: cell("#gib-h"), sent: cell("#sent gib"), price: cell("#price") };
  return Object.assign(h("tr", {}, h("td.full", {}, row.name || "nobody known"), cell("user", row.user), ...Object.values(parts)), { parts });
}

function showLine({ parts }, row) {
  const worked = row.name !== "idle";
  text(parts.device_h, quantity(row.held_s / 3600));
  for (const name of ["busy", "waiting", "recomputed"]) text(parts[name], worked ? share(row[`${name}_s`], row) : "–");
  text(parts.kwh, mark(row, quantity(row.kwh)));
  text(parts.carbon, mark(row, quantity(row.g_co2e)));
  text(parts.stored, row.stored_gib_h ? quantity(row.stored_gib_h) : "–");
  text(parts.sent, row.sent_gib ? quantity(row.sent_gib) : "–");
  text(parts.price, quantity(row.price));
}

const LIMITS = { cost: "", device_hours: " device-h", kwh: " kWh", g_co2e: " g CO2e" };

function makeBudget({ budget }) {
  const parts = { used: cell("used"), state: cell("state"), why: h("td.full", {}) };
  const [kind, owner] = ["user", "tenant", "job"].map((name) => [name, budget[name]]).find(([, value]) => value) ?? ["", ""];
  const limits = Object.entries(LIMITS).filter(([name]) => budget[name]).map(([name, unit]) => `${quantity(budget[name])}${unit}`).join(", ");
  return Object.assign(h("tr", {}, h("td.full", {}, `${kind} ${owner}`), cell("per", budget.per), parts.used, cell("limits", limits), parts.state, parts.why), { parts });
}

function showBudget({ parts }, use) {
  text(parts.used, percent(use.share));
  text(parts.state, use.state);
  parts.state.classList.toggle("bad", use.state === "used up");
  parts.state.classList.toggle("wait", use.state === "near");
  text(parts.why, use.why || (use.budget.at_end === "stop" ? "its jobs are held when it is used up" : "warns only"));
}
