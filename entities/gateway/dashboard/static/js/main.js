/** Begins: the token, the one stream, the views. */

import { arrayOf } from "./arrays.js";
import { CompareView } from "./compare_view.js";
import { CostsView } from "./costs_view.js";
import { Stream, takeToken, token } from "./door.js";
import { h, keyed, text } from "./dom.js";
import { JobsView } from "./jobs_view.js";
import { LogsView } from "./logs_view.js";
import { MeshView } from "./mesh_view.js";
import { NodesView } from "./nodes_view.js";
import { PoliciesView } from "./policies_view.js";
import { RegistryView } from "./registry_view.js";
import { ServicesView } from "./services_view.js";
import { ENDED, Store } from "./store.js";
import { TapView } from "./tap_view.js";

const VIEWS = { mesh: ["Mesh", MeshView], jobs: ["Jobs", JobsView], compare: ["Compare", CompareView], services: ["Services", ServicesView], registry: ["Registry", RegistryView], costs: ["Costs", CostsView], policies: ["Policies", PoliciesView], nodes: ["Nodes", NodesView], logs: ["Logs", LogsView], tap: ["Tap", TapView] };
const HIDDEN_MS = 30_000; // a page that nobody sees costs nobody anything after this

const store = new Store();
const at = (id) => document.getElementById(id);
let stream = null;
let view = null;
let named = null;
let waiting = new Set();
let asleep = null;

// --- the look ------------------------------------------------------------------------------------
const dark = matchMedia("(prefers-color-scheme: dark)");

function theme() {
  const chosen = localStorage.getItem("dmsc-theme");
  const now = chosen ?? (dark.matches ? "dark" : "light");
  document.documentElement.dataset.theme = now;
  at("theme").textContent = now === "dark" ? "☾" : "☀";
  at("theme").setAttribute("aria-label", `Colours: ${now}. Switch to ${now === "dark" ? "light" : "dark"}`);
  at("theme").title = at("theme").getAttribute("aria-label");
  view?.restyle?.();
}

at("theme").addEventListener("click", () => {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  if (next === (dark.matches ? "dark" : "light")) localStorage.removeItem("dmsc-theme");
  else localStorage.setItem("dmsc-theme", next);
  theme();
});
dark.addEventListener("change", theme);

// --- the way in ----------------------------------------------------------------------------------
function enter(why = "") {
  leaveView();
  named = null;
  at("job-pick").hidden = true;
  at("leave").hidden = true;
  at("views").hidden = true;
  at("banner").hidden = true;
  linkState("", "");
  const input = h("input", { type: "password", name: "token", required: true, autocomplete: "off", id: "token" });
  at("main").replaceChildren(h("div.panel.enter", {}, h("form", { submit: (event) => {
    event.preventDefault();
    if (!input.value.trim()) return;
    token.set(input.value.trim());
    begin();
  } },
    h("h1", {}, "Look into the mesh"),
    h("label", {}, "Your token", input),
    h("p.dim", {}, "It stays in this tab. ", h("code", {}, "dmsc dashboard"), " opens this page with it."),
    h("p.fault", { role: "alert" }, why),
    h("button.primary", { type: "submit" }, "Enter"))));
  input.focus();
}

at("leave").addEventListener("click", () => {
  token.forget();
  stream?.stop();
  stream = null;
  store.clear();
  enter();
});

function begin() {
  at("views").hidden = false;
  at("leave").hidden = false;
  at("main").replaceChildren(h("p.empty", {}, "Asking the gateway …"));
  stream?.stop();
  stream = new Stream("/v1/live", take, told);
}

function take(event, data) {
  if (event === "you") {
    store.you = data;
    store.tell(new Set(["you"]));
  } else if (event === "overview") {
    store.whole(data);
    if (!view) show();
  } else if (event === "delta") store.delta(data);
}

function told(state, detail) {
  if (state === "refused") {
    token.forget();
    stream = null;
    enter(detail);
    return;
  }
  if (state === "live") linkState("live", "live", store.you.gateway);
  else if (state === "connecting") linkState("connecting", "connecting");
  else linkState("lost", "away");
  banner(state === "lost" ? detail : "");
}

function linkState(state, words, where) {
  const place = at("link-state");
  const wanted = `${state} ${where ?? ""}`;
  if (place.wanted === wanted) return;
  place.wanted = wanted;
  place.replaceChildren(...(state ? [h(`span.state.s-${state}`, {}, words, where ? h("span.where", {}, ` · ${where}`) : null)] : []));
}

let lost = "";
function banner(why) {
  if (why !== undefined) lost = why;
  const alerts = [...store.jobs.values()].flatMap((job) => (ENDED.has(job.state) ? [] : job.alerts.map((alert) => `${job.job}: ${alert.text}`)));
  const lines = [lost && `${lost[0].toUpperCase()}${lost.slice(1)}; what you see is from before. Trying again.`, ...Object.values(store.trouble), ...alerts].filter(Boolean);
  const place = at("banner");
  place.hidden = lines.length === 0;
  place.classList.toggle("bad", Boolean(lost));
  text(place, lines.join("  ·  "));
}

// --- views ---------------------------------------------------------------------------------------
function leaveView() {
  view?.destroy?.();
  view = null;
}

function wanted() {
  const name = location.hash.replace(/^#\//, "");
  return name in VIEWS ? name : "mesh";
}

function show() {
  const name = wanted();
  if (view && name === named) return;
  leaveView();
  named = name;
  const [title, View] = VIEWS[name];
  document.title = `${title} · DMSC`;
  view = new View(store);
  at("main").replaceChildren(h("h1.visually-hidden", {}, `${title} of the mesh`), view.element);
  view.update(new Set(["all"]));
  showViews();
}

function showViews() {
  const open = [...store.faults.values()].filter((row) => !row.warning && !["handled", "given_up"].includes(row.state)).length;
  keyed(at("views"), Object.entries(VIEWS), ([name]) => name,
    ([name, [title]]) => Object.assign(h("a", { href: `#/${name}` }, title), {}),
    (link, [name]) => (name === named ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current")));
  document.title = `${open ? `(${open}) ` : ""}${VIEWS[named ?? "mesh"][0]} · DMSC`;
}

function showJobs() {
  const chosen = store.shown();
  const jobs = [...store.jobs.values()].reverse().filter(({ job, state }) => !arrayOf(job) || job === chosen || !(ENDED.has(state) || state === "queued"));
  at("job-pick").hidden = jobs.length === 0 || named !== "mesh";
  keyed(at("job"), jobs, (job) => job.job, (job) => h("option", { value: job.job }), (option, job) => text(option, `${job.job} · ${job.state}`));
  const shown = store.shown();
  if (shown && at("job").value !== shown) at("job").value = shown;
}

at("job").addEventListener("change", (event) => {
  store.job = event.target.value;
  store.tell(new Set(["job"]));
});

// What changed is drawn once a frame, however much came.
store.on((topics, moves) => {
  if (!waiting.size && topics.size) requestAnimationFrame(refresh);
  for (const topic of topics) waiting.add(topic);
  if (moves.length) view?.moved?.(moves);
});

function refresh() {
  const topics = waiting;
  waiting = new Set();
  if (!view) return;
  view.update(topics);
  if (["all", "jobs", "job"].some((topic) => topics.has(topic))) showJobs();
  if (["all", "jobs", "trouble"].some((topic) => topics.has(topic))) banner();
  if (["all", "faults"].some((topic) => topics.has(topic))) showViews();
}

addEventListener("hashchange", () => {
  takeToken();
  if (!store.ready) return;
  show();
  showJobs();
  // Whoever types fast is in there already, further on: they came by the skip link.
  if (!at("main").contains(document.activeElement)) at("main").focus({ preventScroll: true });
});

document.addEventListener("visibilitychange", () => {
  clearTimeout(asleep);
  if (document.hidden) {
    asleep = setTimeout(() => {
      stream?.stop();
      stream = null;
      linkState("connecting", "asleep");
    }, HIDDEN_MS);
  } else if (!stream && token.get()) stream = new Stream("/v1/live", take, told);
});

takeToken();
theme();
if (token.get()) begin();
else enter();
