/** The gateway's door: the token, requests, and server-sent events that come back by themselves. */

const KEY = "dmsc-token";

export class Refused extends Error {}

export const token = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/** A token in the fragment (`#token=…`, from `dmsc dashboard`) is taken, and out of the address at once. */
export function takeToken() {
  const found = /^#token=([^&]+)/.exec(location.hash);
  if (!found) return;
  token.set(decodeURIComponent(found[1]));
  history.replaceState(null, "", `${location.pathname}#/mesh`);
}

async function open(path, options = {}) {
  let response;
  try {
    response = await fetch(path, {
      ...options,
      headers: { Authorization: `Bearer ${token.get() ?? ""}`, ...options.headers },
      cache: "no-store",
      credentials: "omit",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the gateway does not answer");
  }
  if (response.ok) return response;
  const problem = await response.json().catch(() => ({}));
  const detail = problem.detail ?? `${response.status} ${response.statusText}`;
  if (response.status === 401) throw new Refused(detail);
  const error = new Error(detail);
  error.status = response.status;
  throw error;
}

export async function ask(path, options) {
  return parsed(await (await open(path, options)).text());
}

/** JSON in which figures that are not finite may stand as Python writes them: NaN, Infinity. They are null here. */
export function parsed(body) {
  try {
    return JSON.parse(body);
  } catch {
    return JSON.parse(body.replace(/"(?:[^"\\]|\\.)*"|-?(?:NaN|Infinity)/g, (found) => (found[0] === '"' ? found : "null")));
  }
}

/**
 * Reads an event stream until it ends. `fetch` and not `EventSource`, for a token belongs in a header.
 * @param {(event: string, data: any) => void} take
 */
export async function read(path, take, signal) {
  const response = await open(path, { signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    waiting += value;
    let end;
    while ((end = waiting.indexOf("\n\n")) >= 0) {
      const record = waiting.slice(0, end);
      waiting = waiting.slice(end + 2);
      let event = "message";
      let data = "";
      for (const line of record.split("\n")) {
        if (line.startsWith("event: ")) event = line.slice(7);
        else if (line.startsWith("data: ")) data += line.slice(6);
      }
      if (!data) continue;
      const body = JSON.parse(data);
      if (event === "refused") throw new Refused(body.detail);
      take(event, body);
    }
  }
}

const FIRST_MS = 400;
const MOST_MS = 8000;

/** Keeps a stream open: after each end it is opened again, with growing pauses; a refusal ends it for good. */
export class Stream {
  /** @param {(state: string, detail: string) => void} told `connecting`, `live`, `lost` or `refused` */
  constructor(path, take, told) {
    Object.assign(this, { path, take, told, pause: FIRST_MS, stopped: false });
    this.run();
  }

  stop() {
    this.stopped = true;
    this.abort?.abort();
    clearTimeout(this.timer);
    this.wake?.();
  }

  async run() {
    while (!this.stopped) {
      this.told("connecting", "");
      this.abort = new AbortController();
      let why = "the stream ended";
      try {
        await read(this.path, (event, data) => {
          this.pause = FIRST_MS;
          this.told("live", "");
          this.take(event, data);
        }, this.abort.signal);
      } catch (error) {
        if (this.stopped) return;
        if (error instanceof Refused || error.status === 403 || error.status === 422) {
          this.stopped = true;
          this.told("refused", error.message);
          return;
        }
        why = error.message;
      }
      if (this.stopped) return;
      const wait = this.pause * (0.75 + Math.random() / 2);
      this.pause = Math.min(MOST_MS, this.pause * 1.7);
      this.told("lost", why);
      await new Promise((resolve) => {
        this.wake = resolve;
        this.timer = setTimeout(resolve, wait);
      });
    }
  }
}
