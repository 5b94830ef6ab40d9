/** Elements without a framework. All text goes in as text: nothing that the mesh says is ever markup. */

/** `h("p.dim", {title: "…"}, "text", child)`: functions become listeners, `data-…`/`aria-…` attributes. */
export function h(spec, props, ...children) {
  const [tag, ...classes] = spec.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else if (name in element && !name.includes("-") && name !== "list" && name !== "form") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function text(element, value) {
  const next = value ?? "";
  if (element.textContent !== String(next)) element.textContent = next;
}

/** Keeps a container's children in step with rows by key: nothing that stays is made anew, so focus stays, too. */
export function keyed(container, rows, key, make, update) {
  const known = (container.known ??= new Map());
  const wanted = new Set();
  let place = container.firstElementChild;
  for (const row of rows) {
    const name = key(row);
    wanted.add(name);
    let element = known.get(name);
    if (!element) {
      element = make(row);
      known.set(name, element);
    }
    update?.(element, row);
    if (element === place) place = place.nextElementSibling;
    else container.insertBefore(element, place);
  }
  for (const [name, element] of known) {
    if (!wanted.has(name)) {
      element.remove();
      known.delete(name);
    }
  }
}

/** What is here when nothing is: what that means, and what to do next. */
export function empty(title, ...advice) {
  return h("div.empty", {}, h("strong", {}, title), ...advice.map((line) => h("p", {}, line)));
}

export const code = (value) => h("code", {}, value);

/** A state in words, with its shape and colour. */
export function stateOf(value) {
  return h(`span.state.s-${value}`, {}, words(value));
}

export function setState(element, value) {
  const wanted = `state s-${value}`;
  if (element.className !== wanted) element.className = wanted;
  text(element, words(value));
}

function words(value) {
  return String(value).replaceAll("_", " ");
}

let speaker;
/** Says something to screen readers; sparingly. */
export function say(line) {
  speaker ??= document.getElementById("said");
  speaker.textContent = line;
}
