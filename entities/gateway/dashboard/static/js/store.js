/** What the page knows: the picture and what changed of it, as the gateway sends them. Nothing of the DOM in here. */

const TABLES = { instances: "sid", entities: "sid", jobs: "job", queue: "job", reservations: "name" };
const POINTS = 4000;
const KEPT = 500;

export class Store {
  constructor() {
    this.listeners = [];
    this.job = null;
    this.you = {};
    this.skew = 0;
    this.clear();
  }

  clear() {
    this.instances = new Map();
    this.entities = new Map();
    this.nodes = new Map();
    this.jobs = new Map();
    this.modules = new Map();
    this.queue = new Map();
    this.reservations = new Map();
    this.capacity = {};
    this.curves = new Map();
    this.events = [];
    this.faults = new Map();
    this.decisions = new Map();
    this.trouble = {};
    this.ready = false;
  }

  /** @param {(topics: Set<string>, moves: any[]) => void} listener */
  on(listener) {
    this.listeners.push(listener);
  }

  tell(topics, moves = []) {
    for (const listener of this.listeners) listener(topics, moves);
  }

  /** Seconds since the epoch by the gateway's clock. */
  now() {
    return Date.now() / 1000 - this.skew;
  }

  whole(data) {
    this.clear();
    this.skew = Date.now() / 1000 - data.at;
    for (const [name, key] of Object.entries(TABLES)) for (const row of data[name]) this[name].set(row[key], row);
    for (const row of data.nodes) this.nodes.set(nodeKey(row), row);
    for (const row of data.modules) this.modules.set(moduleKey(row), row);
    for (const [job, curve] of Object.entries(data.curves)) this.curves.set(job, curve);
    this.events = data.events;
    for (const row of data.faults) this.faults.set(row.id, row);
    for (const row of data.decisions) this.decisions.set(row.id, row);
    this.capacity = data.capacity;
    this.trouble = data.trouble;
    this.ready = true;
    this.tell(new Set(["all", ...Object.keys(TABLES), "capacity", "nodes", "modules", "steps", "events", "faults", "decisions", "trouble"]));
  }

  delta(data) {
    if (!this.ready) return;
    const topics = new Set();
    const put = (name, key) => {
      for (const row of data[name] ?? []) {
        this[name].set(key(row), row);
        topics.add(name);
      }
      for (const gone of data.gone?.[name] ?? []) {
        this[name].delete(gone);
        topics.add(name);
      }
    };
    for (const [name, key] of Object.entries(TABLES)) put(name, (row) => row[key]);
    put("nodes", nodeKey);
    put("modules", moduleKey);
    put("faults", (row) => row.id);
    for (const row of data.decisions ?? []) {
      this.decisions.delete(row.id); // it moves to the end
      this.decisions.set(row.id, row);
      topics.add("decisions");
    }
    for (const [job, ...point] of data.steps ?? []) {
      if (!this.curves.has(job)) this.curves.set(job, { points: [], validations: [] });
      const { points } = this.curves.get(job);
      while (points.length && points.at(-1)[0] >= point[0]) points.pop(); // taken up again after a roll-back
      points.push(point);
      if (points.length > POINTS) this.curves.get(job).points = points.filter((_, index) => index % 2 === 0);
      topics.add("steps");
    }
    for (const [job, ...point] of data.validations ?? []) {
      if (!this.curves.has(job)) this.curves.set(job, { points: [], validations: [] });
      const { validations } = this.curves.get(job);
      while (validations.length && validations.at(-1)[0] >= point[0]) validations.pop();
      validations.push(point);
      topics.add("steps");
    }
    for (const row of data.events ?? []) {
      if (this.events.some((known) => known.id === row.id)) continue;
      this.events.push(row);
      topics.add("events");
    }
    if (this.events.length > KEPT) this.events.splice(0, this.events.length - KEPT);
    for (const map of [this.faults, this.decisions]) for (const id of map.keys()) {
      if (map.size <= KEPT) break;
      map.delete(id);
    }
    if (data.capacity) {
      this.capacity = data.capacity;
      topics.add("capacity");
    }
    if (data.trouble) {
      this.trouble = data.trouble;
      topics.add("trouble");
    }
    if (topics.size || data.moves) this.tell(topics, data.moves ?? []);
  }

  /** The job that is looked at: as chosen, else the one that runs, else the latest. */
  shown() {
    if (this.job && (this.jobs.has(this.job) || this.curves.has(this.job))) return this.job;
    const all = [...this.jobs.values()];
    const busy = all.filter((job) => ["running", "recovering", "finishing", "deploying"].includes(job.state));
    return (busy.at(-1) ?? all.filter((job) => job.state !== "queued").at(-1) ?? all.at(-1))?.job ?? null;
  }

  instancesOf(job) {
    return [...this.instances.values()].filter((row) => row.job === job && row.state !== "gone");
  }
}

export const nodeKey = (row) => `${row.cluster} ${row.node}`;
export const moduleKey = (row) => `${row.module} ${row.version}`;
export const ENDED = new Set(["done", "failed", "cancelled"]);
