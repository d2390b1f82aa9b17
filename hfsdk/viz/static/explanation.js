// A configuration: what is wrong, its batches, memory by phase and a simulated step as bars, its roles, and what was not read.
// All bars are predicted: hatched.
import { drawnRows, group, hatched, legend, mark, paint, roomOf, sample, tableOf } from "./chart.js";
import { frame, H, hatches, isMissing, shorten, titledSvg } from "./core.js";

const LEFT = 176,
  RIGHT = 244,
  ROW_HEIGHT = 25;

// ---- layout: a row for each bar, and headings between them
function layout(view, width, current) {
  return view.bars.map((bar, i) => {
    const y = 4 + i * ROW_HEIGHT;
    if (bar.kind !== "heading") return rowMark(view, bar, i, y, width, i === current);
    return mark("text", { x: 2, y: y + 16, "font-weight": 600, class: "hf-fg" }, shorten(bar.label, 110));
  });
}
function rowMark(view, bar, i, y, width, isCurrent) {
  const room = width - LEFT - RIGHT,
    back = { x: 0, y, width, height: ROW_HEIGHT - 2, class: "hf-panel", "fill-opacity": isCurrent ? 1 : 0 },
    bars = bar.kind === "memory" ? memoryMarks(bar, y, (room - 4) / view.most_bytes) : callMarks(bar, y, room / view.step_s),
    bad = { fill: bar.over ? "var(--hf-bad)" : null, style: bar.over ? "fill:var(--hf-bad)" : null },
    text = { x: width - 4, y: y + 14, "text-anchor": "end", "font-weight": bar.over ? 600 : null, class: "hf-fg", ...bad };
  const marks = [
    mark("rect", back),
    mark("text", { x: LEFT - 8, y: y + 14, "text-anchor": "end", class: "hf-fg" }, shorten(bar.label, 30)),
    ...bars,
    mark("text", text, bar.text),
  ];
  return group({ class: `hf-mark hf-row hf-${bar.kind}`, "data-row": bar.row, "data-label": bar.label }, marks, { row: i });
}
function memoryMarks(bar, y, scale) {
  const marks = [];
  let x = LEFT;
  for (const part of bar.parts) {
    const w = part.bytes * scale,
      box = {
        x,
        y: y + 3,
        width: Math.max(0.5, w),
        height: 13,
        fill: hatched(part.color),
        stroke: part.color,
        "stroke-width": 0.6,
      };
    marks.push(mark("rect", { ...box, class: "hf-predicted", "data-part": part.name, "data-bytes": part.bytes }));
    x += w;
  }
  if (isMissing(bar.exists_bytes)) return marks;
  const limit = LEFT + bar.exists_bytes * scale;
  return [...marks, mark("line", { x1: limit, x2: limit, y1: y, y2: y + 19, class: "hf-edge", "stroke-width": 1.8 })];
}
function callMarks(bar, y, scale) {
  if (isMissing(bar.start_s) || isMissing(bar.seconds)) return [];
  const box = { x: LEFT + bar.start_s * scale, y: y + 3, width: Math.max(1, bar.seconds * scale), height: 13, rx: 2 },
    look = { fill: hatched(bar.color), stroke: bar.color, class: "hf-predicted", "data-seconds": bar.seconds };
  return [mark("rect", { ...box, ...look })];
}
function legendOf({ parts }) {
  const limit = mark("path", { d: "M8,0v11", class: "hf-edge", fill: "none", "stroke-width": 1.8 });
  return [
    ...parts.map((part) => [part.label, [sample({ rx: 2, stroke: part.color, fill: hatched(part.color) })]]),
    ...(parts.length ? [["what the device has", [limit]]] : []),
  ];
}

// ---- draw
function drawTable(parent, heads, rows) {
  if (!rows.length) return;
  const isNumber = (k) => heads[k] === "how many",
    body = tableOf(H("div", { style: "overflow-x:auto" }, parent), heads, (k) => !isNumber(k));
  for (const cells of rows) {
    const tr = H("tr", {}, body);
    cells.forEach((text, k) => {
      const names = isNumber(k) ? "hf-num" : k ? "hf-left hf-wrap" : "hf-left";
      H("td", { class: names, style: k ? "max-width:640px" : null }, tr, text);
    });
  }
}
function drawTop(view, top) {
  top.replaceChildren();
  H("div", { class: "hf-dim" }, top, view.subtitle);
  for (const one of view.findings) {
    const p = H("p", { class: "hf-finding", "data-kind": one.kind, style: "margin:5px 0" }, top);
    H("b", { class: one.css }, p, one.kind);
    H("span", {}, p, `: ${one.text} ${one.do} `);
    if (one.source) H("span", { class: "hf-dim" }, p, one.source);
  }
  const rows = view.arithmetic.map((r) => [r.name, r.value, r.how]);
  drawTable(top, ["batch arithmetic", "how many", "how"], rows);
}
function drawBelow(view, below) {
  below.replaceChildren();
  legend(below, legendOf(view));
  drawTable(below, ["role", "model", "pool (devices)", "layout", "state"], view.roles);
  for (const word of view.words) H("p", { class: "hf-dim", style: "margin:4px 0" }, below, word);
  const folded = (summary) => {
    const details = H("details", {}, below);
    H("summary", {}, details, summary);
    return details;
  };
  if (view.unread.length) drawTable(folded(`Not read (${view.unread.length})`), ["key", "said of it"], view.unread);
  if (view.defaults.length) drawTable(folded(`At their defaults (${view.defaults.length})`), ["key", "default"], view.defaults);
  if (view.code) H("pre", { style: "white-space:pre-wrap;margin:4px 0" }, folded("The same step in hfsdk"), view.code);
}

function render({ model, el }) {
  const f = frame(el, "explanation"),
    top = H("div", {}),
    current = { row: -1 },
    wide = () => roomOf(f, 480, 1100);
  f.root.insertBefore(top, f.host);
  let view,
    width = 0;
  function draw() {
    view = model.get("view");
    width = wide();
    f.title.textContent = view.title;
    drawTop(view, top);
    const svg = titledSvg(view, width, 6 + ROW_HEIGHT * view.bars.length),
      rows = paint(layout(view, width, current.row), svg, hatches(svg));
    f.host.hidden = !view.bars.length;
    f.host.replaceChildren(svg);
    drawBelow(view, f.below);
    return rows;
  }
  function tip(i, x, y, spoken) {
    const bar = view.bars[i];
    f.showTip(x, y, bar.kind === "heading" ? bar.label : `${bar.label} (predicted)`, bar.tip, spoken);
  }
  const moved = () => Math.abs(wide() - width) > 2;
  return drawnRows({ model, f, current, rows: () => view.bars, draw, moved, tip, left: LEFT, rowHeight: ROW_HEIGHT });
}
export default { render };
