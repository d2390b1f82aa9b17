// What pictures draw alike. A layout is plain data, made without a document: marks, which `paint` makes SVG of, in their order.
import { freshId, H, hatches, isMissing, keyboard, S, swatch } from "./core.js";

// ---- marks. A paint may be {hatched: colour}; what has an id of its own is {id: name}, and is meant by {url: name}.
export const mark = (tag, attrs, text) => ({ tag, attrs, text });
// `tip` is what hovering says of it: {heading, rows}
export const group = (attrs, marks, tip) => ({ tag: "g", attrs, marks, tip });
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
  const resolved = (value) =>
    value === null || typeof value !== "object"
      ? value
      : value.hatched
        ? hatch(value.hatched)
        : value.url
          ? `url(#${idOf(value.url)})`
          : idOf(value.id);
  const add = (m, into) => {
    const attrs = {};
    for (const k in m.attrs) attrs[k] = resolved(m.attrs[k]);
    const node = S(m.tag, attrs, into, m.text);
    if (m.marks) for (const child of m.marks) add(child, node);
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

// ---- a matrix: cells as [element, mark], whose tip has `row` and `column` beside what it says
// the cell that an arrow key comes to: the nearest one in that direction, in the same row or column
export function nextCell(tips, at, dx, dy) {
  if (at < 0) return 0;
  const here = tips[at],
    far = (c) => Math.abs(c.row - here.row) + Math.abs(c.column - here.column);
  const there = tips
    .filter((c) =>
      dx
        ? c.row === here.row && Math.sign(c.column - here.column) === dx
        : c.column === here.column && Math.sign(c.row - here.row) === dy,
    )
    .sort((a, b) => far(a) - far(b));
  return there.length ? tips.indexOf(there[0]) : at;
}
export function walkedMatrix(f, host, cells, { below, leave }) {
  let at = -1;
  const tips = cells.map(([, m]) => m.tip);
  for (const [node, { tip }] of cells) {
    node.addEventListener("mousemove", (ev) => f.showTip(ev.clientX, ev.clientY, tip.heading, tip.rows, false));
    node.addEventListener("mouseleave", () => f.hideTip());
  }
  keyboard(host, {
    step: (dx, dy) => {
      at = nextCell(tips, at, dx, dy);
    },
    show: () => {
      cells.forEach(([node], k) => node.firstChild.classList.toggle("hf-current", k === at));
      if (!cells[at]) return;
      const b = cells[at][0].getBoundingClientRect(),
        tip = tips[at];
      f.showTip(b.left + b.width / 2, b.bottom - below, tip.spoken ?? tip.heading, tip.rows, true);
    },
    keys: { Escape: leave },
  });
  host.addEventListener("blur", () => f.hideTip());
}
