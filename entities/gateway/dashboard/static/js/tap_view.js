/** The tap: messages of the bus as they travel, decoded, as far as one's role may see them. */

import { Stream } from "./door.js";
import { code, empty, h, say } from "./dom.js";
import { clock } from "./format.js";

const LISTED = 300;
const NO_ANSWERS = "; requests show, their answers do not: they go to the asker's inbox, which the bus lets only operators and admins hear";
const USUAL = ["signal.>", "step.>", "data.notice.>", "telemetry.>", "policy.>", "fault.>", "job.>", "log.>", "registry.>", ">"];

export class TapView {
  constructor() {
    this.subject = h("input", { type: "text", name: "subject", id: "tap-subject", value: "signal.>", list: "usual", autocomplete: "off", spellcheck: false });
    this.where = h("input", { type: "text", name: "where", placeholder: "step>3, sender.name=gateway-*", autocomplete: "off", spellcheck: false });
    this.replies = h("input", { type: "checkbox" });
    this.pauseButton = h("button", { type: "button", disabled: true, click: () => this.pause(!this.paused) }, "Pause");
    this.startButton = h("button.primary", { type: "submit" }, "Tap");
    this.note = h("p.line-note", { role: "status" });
    this.list = h("ol.lines.tapped", { "aria-label": "Messages, the latest first" });
    this.none = h("div", {}, empty("Nothing tapped yet", h("span", {}, "Choose subjects, as ", code("dmsc tap"), " takes them, and press Tap: ", code("*"), " is one token, ", code(">"), " the rest."), "A tap only listens: the mesh does not notice it."));
    this.element = h("section.panel", { "aria-labelledby": "tap-title" },
      h("header", {}, h("h2", { id: "tap-title" }, "Tap"), (this.scope = h("span.end", {}))),
      h("form.form", { submit: (event) => {
        event.preventDefault();
        this.start();
      } },
        h("datalist", { id: "usual" }, USUAL.map((one) => h("option", { value: one }))),
        h("label.grow", {}, "Subjects", this.subject), h("label.grow", {}, "Where (field=value, separated by commas)", this.where),
        h("label.check", {}, this.replies, "Replies"), this.startButton, this.pauseButton,
        h("button.quiet", { type: "button", click: () => this.clear() }, "Clear")),
      this.note, this.list, this.none);
  }

  destroy() {
    this.stream?.stop();
  }

  update() {}

  start() {
    this.stream?.stop();
    this.pause(false);
    this.clear();
    const query = new URLSearchParams();
    for (const one of split(this.subject.value)) query.append("subject", one);
    for (const one of split(this.where.value)) query.append("where", one);
    if (this.replies.checked) query.set("replies", "true");
    this.pauseButton.disabled = false;
    this.stream = new Stream(`/v1/tap?${query}`, (event, data) => this.take(event, data), (state, detail) => this.told(state, detail));
  }

  told(state, detail) {
    this.state = state;
    if (state === "refused") {
      this.pauseButton.disabled = true;
      this.tell(detail, true);
      say(detail);
    } else if (state === "lost") this.tell(`${detail}; trying again`, true);
    else if (state === "connecting") this.tell("connecting …");
  }

  take(event, data) {
    if (event === "ready") {
      this.seen = this.dropped = 0;
      const missing = [...(data.answers ? [] : ["answers"]), ...data.hidden];
      this.scope.textContent = missing.length ? `not for a ${data.role}: ${missing.join(", ")}` : `${data.role}: everything`;
      this.tell(`listening on ${data.patterns.join(", ")}${this.replies.checked && !data.answers ? NO_ANSWERS : ""}`);
      return;
    }
    this.seen = data.seen;
    this.dropped = data.dropped;
    if (this.paused) this.held = [...this.held, ...data.messages].slice(-LISTED);
    else this.add(data.messages);
    this.count();
  }

  add(messages) {
    this.none.hidden = true;
    this.list.prepend(...messages.map(makeMessage).reverse());
    while (this.list.childElementCount > LISTED) this.list.lastElementChild.remove();
  }

  count() {
    const held = this.paused ? `; paused, ${this.held.length} wait` : "";
    this.tell(`${this.seen.toLocaleString("en")} seen${this.dropped ? `, ${this.dropped.toLocaleString("en")} passed over: narrow the subjects to see all` : ""}${held}`);
  }

  pause(on) {
    this.paused = on;
    this.pauseButton.textContent = on ? "Go on" : "Pause";
    this.pauseButton.setAttribute("aria-pressed", String(on));
    if (!on && this.held?.length) this.add(this.held);
    this.held = [];
    if (this.seen !== undefined) this.count();
  }

  clear() {
    this.list.replaceChildren();
    this.held = [];
    this.none.hidden = false;
  }

  tell(line, bad = false) {
    this.note.classList.toggle("bad", bad);
    this.note.textContent = line;
  }
}

const split = (value) => value.split(/[,\s]+/).filter(Boolean);

function makeMessage(row) {
  const details = h("details", { toggle: () => {
    if (details.open && !details.querySelector("pre")) details.append(h("pre", { tabIndex: 0 }, JSON.stringify(row.message, null, 2)));
  } },
    h("summary", {}, h("time", {}, clock(row.at, 3)), h("span.who", { title: row.sender }, row.sender),
      h(`span.what.t-${row.tone}`, { title: row.subject }, row.subject), h("span.sum", { title: row.what }, row.summary)));
  return h("li", {}, details);
}
