/** The services' log lines: searched at the gateway, followed while the view is open. */

import { ask } from "./door.js";
import { code, empty, h, keyed } from "./dom.js";
import { clock } from "./format.js";

const FOLLOW_MS = 2000;
const LISTED = 500;
const BACK = [["5 minutes", 300], ["15 minutes", 900], ["an hour", 3600], ["6 hours", 21600], ["a day", 86400]];

export class LogsView {
  constructor() {
    this.rows = [];
    const submit = (event) => {
      event.preventDefault();
      this.search();
    };
    this.text = h("input", { type: "search", name: "text", maxLength: 200, placeholder: "any part of a line" });
    this.level = h("select", { name: "level", change: submit }, ["info", "warning", "error", "critical"].map((level) => h("option", {}, level)));
    this.sid = h("input", { type: "text", name: "sid", maxLength: 120, placeholder: "any", size: 16 });
    this.since = h("select", { name: "since", change: submit }, BACK.map(([name, back]) => h("option", { value: back, selected: back === 900 }, name)));
    this.follow = h("input", { type: "checkbox", checked: true, change: () => this.plan() });
    this.note = h("p.line-note", { role: "status" });
    this.list = h("ol.lines", { "aria-label": "Log lines, the latest first" });
    this.none = h("div", { hidden: true }, empty("No line fits", h("span", {}, "Look further back, or for less; in a terminal: ", code("dmsc logs --since 1h"))));
    this.element = h("section.panel", { "aria-labelledby": "logs-title" },
      h("header", {}, h("h2", { id: "logs-title" }, "Logs"), h("span.end", {}, "info and above, kept for a day")),
      h("form.form", { submit }, h("label.grow", {}, "Text", this.text), h("label", {}, "At least", this.level), h("label", {}, "Service (SID)", this.sid),
        h("label", {}, "Since", this.since), h("label.check", {}, this.follow, "Follow"), h("button.primary", { type: "submit" }, "Search")),
      this.note, this.list, this.none);
    this.search();
  }

  destroy() {
    this.ended = true;
    clearTimeout(this.timer);
  }

  update() {}

  query(more) {
    const query = new URLSearchParams({ text: this.text.value.trim(), level: this.level.value, limit: LISTED, ...more });
    if (this.sid.value.trim()) query.set("sid", this.sid.value.trim());
    return ask(`/v1/logs?${query}`);
  }

  async search() {
    const turn = (this.turn = (this.turn ?? 0) + 1);
    clearTimeout(this.timer);
    this.tell("searching …");
    try {
      const found = await this.query({ since_s: this.since.value });
      if (turn !== this.turn || this.ended) return;
      this.rows = found.lines;
      this.next = found.next;
      this.show();
      const cut = found.complete ? "" : `; looked at the first ${found.scanned.toLocaleString("en")} only: choose a shorter time`;
      this.tell(`${found.found.toLocaleString("en")} of ${found.scanned.toLocaleString("en")} lines fit${found.found > found.lines.length ? `, the latest ${found.lines.length} are shown` : ""}${cut}`);
    } catch (error) {
      if (turn === this.turn) this.tell(error.message, true);
    }
    this.plan();
  }

  plan() {
    clearTimeout(this.timer);
    if (this.follow.checked && !this.ended) this.timer = setTimeout(() => this.more(), FOLLOW_MS);
  }

  async more() {
    const turn = this.turn;
    if (this.next > 1 && !document.hidden) {
      try {
        const found = await this.query({ start: this.next });
        if (turn !== this.turn || this.ended) return;
        this.next = found.next;
        if (found.lines.length) {
          this.rows = [...this.rows, ...found.lines].slice(-LISTED);
          this.show();
        }
      } catch (error) {
        this.tell(error.message, true);
      }
    }
    this.plan();
  }

  show() {
    this.none.hidden = this.rows.length > 0;
    keyed(this.list, [...this.rows].reverse(), (row) => row.sequence, (row) => h("li", {},
      h("time", {}, clock(row.at, 3)), h(`span.l-${row.level}`, {}, row.level), h("span.who", { title: row.sid }, row.sid),
      h("span.text", {}, row.event, " ", h("span.dim", {}, row.fields))));
  }

  tell(line, bad = false) {
    this.note.classList.toggle("bad", bad);
    this.note.textContent = line;
  }
}
