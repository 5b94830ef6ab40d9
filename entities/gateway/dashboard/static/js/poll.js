/** Asks the gateway again and again while a view is open. A page that nobody sees asks nothing. */

import { ask } from "./door.js";

export class Poll {
  /**
   * @param {() => string} path what is asked; as it is then
   * @param {(answer: any) => void} take
   * @param {(why: string) => void} told why there is no answer; empty: there is one again
   */
  constructor(path, everyMs, take, told) {
    Object.assign(this, { path, everyMs, take, told, turn: 0 });
    this.now();
  }

  stop() {
    this.turn = -1;
    clearTimeout(this.timer);
  }

  /** Asks at once; an answer that is under way counts no more. */
  async now() {
    if (this.turn < 0) return;
    clearTimeout(this.timer);
    const turn = (this.turn += 1);
    if (!document.hidden) {
      try {
        const answer = await ask(this.path());
        if (turn !== this.turn) return;
        this.told("");
        this.take(answer);
      } catch (error) {
        if (turn !== this.turn) return;
        this.told(error.message);
      }
    }
    this.timer = setTimeout(() => this.now(), this.everyMs);
  }
}
