// What pictures draw alike. A layout is plain data, made without a document: marks, which `paint` makes SVG of, in their order.
import { coalesced, freshId, H, hatches, isMissing, keyboard, S, swatch } from "./core.js";

// ---- marks. A paint may be {hatched: colour}; what has an id of its own is {id: name}, and is meant by {url: name}.
// `inside` is its text or the marks in it, `tip` what is told of it: {heading, rows}
export const mark = (tag, attrs, inside, tip) => ({ tag, attrs, inside, tip });
export const group = (attrs, marks, tip) => mark("g", attrs, marks, tip);
export const hatched = (color) => ({ hatched: color });
export const sample = (attrs) => mark("rect", { x: 1, y: 1, width: 14, height: 9, ...attrs });
export const planned = (color, more) => sample({ ...more, fill: hatched(color), stroke: color });

// returns [element, mark] of those with a tip
export function paint(marks, parent, hatch = hatches(parent)) {
  const ids = new Map(),
    tips = [];
  const idOf = (name) => {
    if (!ids.has(name)) ids.set(name, freshId());
    return ids.get(name);
  };
  const resolved = ({ hatched: color, url, id }) => (color ? hatch(color) : url ? `url(#${idOf(url)})` : idOf(id));
  const add = (m, into) => {
    let attrs = m.attrs;
    for (const [k, value] of Object.entries(m.attrs))
      if (value !== null && typeof value === "object") attrs = { ...attrs, [k]: resolved(value) };
    const marksInside = Array.isArray(m.inside),
      node = S(m.tag, attrs, into, marksInside ? undefined : m.inside);
    if (marksInside) for (const child of m.inside) add(child, node);
    if (m.tip) tips.push([node, m]);
  };
  for (const m of marks) add(m, parent);
  return tips;
}

// a legend of [label, marks]
export function legend(parent, entries) {
  const host = H("div", { class: "hf-legend" }, parent);
  for (const [label, marks] of entries) swatch(host, label, (svg) => paint(marks, svg, lazyHatch(svg)));
  return host;
}
function lazyHatch(svg) {
  let made = null;
  return (color) => {
    made ??= hatches(svg);
    return made(color);
  };
}

// ---- curves and axes
// the line through points, lifted where one has no value
export function penPath(points, X, Y) {
  let d = "",
    pen = false;
  for (const [x, y] of points) {
    if (isMissing(y)) {
      pen = false;
      continue;
    }
    d += `${pen ? "L" : "M"}${X(x).toFixed(1)},${Y(y).toFixed(1)}`;
    pen = true;
  }
  return d;
}

// ---- tables of HTML: `left` says which columns stand at the left; returns the body
export function tableOf(parent, heads, left = (k) => k === 0, attrs = {}) {
  const t = H("table", attrs, parent),
    tr = H("tr", {}, H("thead", {}, t)),
    body = H("tbody", {}, t);
  heads.forEach((text, k) => H("th", { class: left(k, text) ? "hf-left" : null, scope: "col" }, tr, text));
  return body;
}

// ---- controls
// a label with a range and what it is at; `set` is called with each new value
export function sliderOf(parent, name, label, range, set) {
  const l = H("label", {}, parent);
  H("span", {}, l, label);
  const more = { "aria-label": name, class: "hf-" + name, "data-lm-suppress-shortcuts": "true" },
    input = H("input", { type: "range", ...range, ...more }, l),
    output = H("output", {}, l);
  input.oninput = () => set(Number(input.value));
  return (x, digits) => {
    input.value = x;
    output.textContent = x.toFixed(digits);
  };
}

// ---- pointer, keyboard, kernel
// shows what a mark says while the pointer is over it
export function hovered(f, node, tell) {
  node.addEventListener("pointermove", (ev) => tell(ev.clientX, ev.clientY, false));
  node.addEventListener("pointerleave", () => f.hideTip());
}
// how wide a picture may be drawn
export const roomOf = (f, least, most) => Math.max(least, Math.min(most, f.root.clientWidth - 16 || 900));

// has a picture take each new view, and each other room for it; returns what ends both
export function redrawn({ model, f, onView, onResize }) {
  model.on("change:view", onView);
  const resize = onResize && new ResizeObserver(onResize);
  if (resize) resize.observe(f.root);
  return () => {
    model.off("change:view", onView);
    f.leave();
    if (resize) resize.disconnect();
  };
}

// a picture of rows; arrow keys move `current.row`, `draw` returns its rows as [element, mark], and `tip` tells of one. Returns what
// ends it.
export function drawnRows({ model, f, current, rows, draw, moved = () => true, tip, left, rowHeight }) {
  const show = () => {
    for (const [node, m] of draw()) hovered(f, node, (x, y, spoken) => tip(m.tip.row, x, y, spoken));
  };
  keyboard(f.host, {
    step: (dx, dy) => {
      current.row = Math.max(0, Math.min(rows().length - 1, current.row + (dx || dy)));
    },
    show: () => {
      if (!rows().length) return;
      show();
      const box = f.host.getBoundingClientRect();
      tip(current.row, box.left + left, box.top + 6 + current.row * rowHeight + 20, true);
    },
    keys: { Escape: () => f.hideTip() },
  });
  f.host.addEventListener("blur", () => f.hideTip());
  show();
  const again = coalesced(show);
  return redrawn({ model, f, onView: again, onResize: () => moved() && again() });
}
