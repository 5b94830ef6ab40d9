/**
 * Drawing in turns. What one piece changes is laid out, painted and rasterised in the frame in which it changed:
 * two pieces in one frame are what makes a frame late. So each frame draws one of those that wait.
 */

const waiting = new Set();
let asked = 0;

/** Calls `draw` in a frame of its own, once for however often it was asked for until then. */
export function inTurn(draw) {
  waiting.add(draw);
  asked ||= requestAnimationFrame(next);
}

export function notAnyMore(draw) {
  waiting.delete(draw);
}

function next() {
  const [draw] = waiting;
  waiting.delete(draw);
  asked = waiting.size ? requestAnimationFrame(next) : 0;
  draw?.();
}
