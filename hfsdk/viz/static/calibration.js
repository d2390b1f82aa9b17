// A performance model before and after it was fitted: every call's seconds as measured (solid) and as predicted (hatched), the
// errors beside them; below, the constants that changed and how far the phases spread.
import { drawnRows, group, hatched, legend, mark, paint, roomOf, sample, tableOf } from "./chart.js";
import { fmtCount, fmtSeconds, frame, H, hatches, isMissing, shorten, titledSvg } from "./core.js";

const LEFT = 190,
  RIGHT = 190,
  BAR = 10,
  ROW_HEIGHT = 48,
  WORDS = { measured: "measured", before: "predicted before", after: "predicted after" };
const percent = (e) => (isMissing(e) ? "–" : `${e >= 0 ? "+" : "−"}${Math.abs(100 * e).toFixed(0)} %`);
const errors = (r) => `${percent(r.error_before)} → ${percent(r.error_after)}`;

// ---- layout: a row for each call, in it a bar for each side
const layout = (view, width, current) => view.calls.map((r, i) => rowMark(view, r, i, width, i === current));
function rowMark(view, r, i, width, isCurrent) {
  const y = 6 + i * ROW_HEIGHT,
    scale = (width - LEFT - RIGHT) / view.most_s,
    back = { x: 0, y: y - 3, width, height: ROW_HEIGHT - 6, class: "hf-panel", "fill-opacity": isCurrent ? 1 : 0 };
  const marks = [
    mark("rect", back),
    mark("text", { x: LEFT - 8, y: y + 22, "text-anchor": "end", class: "hf-fg" }, shorten(r.call, 28)),
    ...Object.keys(view.colors).flatMap((side, k) => sideMarks(side, r[side + "_s"], view.colors[side], y + k * (BAR + 3), scale)),
    mark("text", { x: width - 8, y: y + 22, "text-anchor": "end", class: "hf-fg hf-error-text" }, errors(r)),
  ];
  return group({ class: "hf-mark hf-row", "data-row": i, "data-error": r.error_after }, marks, { row: i });
}
function sideMarks(side, seconds, color, y, scale) {
  const measured = side === "measured",
    none = { x: LEFT + 2, y: y + 9, "font-size": 10, "font-style": "italic", class: "hf-sub" };
  if (isMissing(seconds)) return [mark("text", none, "not known")];
  const bar = { x: LEFT, y, width: Math.max(1, seconds * scale), height: BAR, rx: 2, stroke: color },
    look = { fill: measured ? color : hatched(color), class: `hf-bar-${side}` + (measured ? "" : " hf-predicted") };
  return [
    mark("rect", { ...bar, ...look }),
    mark("text", { x: LEFT + seconds * scale + 5, y: y + 9, "font-size": 10, class: "hf-sub" }, fmtSeconds(seconds)),
  ];
}
const legendOf = (view) =>
  Object.entries(view.colors).map(([side, color]) => [
    WORDS[side],
    [sample({ rx: 2, stroke: color, fill: side === "measured" ? color : hatched(color) })],
  ]);
// [caption, heads, rows]
function tablesOf(view) {
  const fitted = view.constants.filter((c) => c.determined),
    times = (x) => (isMissing(x) ? "–" : `× ${x.toFixed(2)}`);
  return [
    ["Constants", ["fitted", "before", "after"], fitted.map((c) => [c.name, fmtCount(c.before) ?? "–", fmtCount(c.after) ?? "–"])],
    [
      "Four in five of measured over predicted",
      ["kind", "from", "to", "left out in turn: within"],
      view.bands.map((b) => [b.kind, times(b.low), times(b.high), b.kept || "–"]),
    ],
  ];
}
const tipRows = (view, i) => [
  ["row", String(i)],
  ...Object.keys(view.colors).map((side) => [WORDS[side], fmtSeconds(view.calls[i][side + "_s"])]),
  ["error before → after", errors(view.calls[i])],
];

// ---- draw
function drawBelow(view, below) {
  below.replaceChildren();
  H("span", {}, legend(below, legendOf(view)), "at the right: predicted over measured - 1, before → after");
  const grid = H("div", { style: "display:flex;flex-wrap:wrap;align-items:flex-start;gap:0 36px" }, below);
  for (const [caption, heads, rows] of tablesOf(view)) {
    if (!rows.length) continue;
    const box = H("div", {}, grid);
    H("b", {}, box, caption);
    const body = tableOf(box, heads);
    for (const cells of rows) {
      const line = H("tr", {}, body);
      cells.forEach((text, i) => H("td", { class: i ? null : "hf-left" }, line, text));
    }
  }
  const others = view.constants.filter((c) => !c.determined).map((c) => c.name);
  if (others.length)
    H("p", { class: "hf-dim" }, below, `The run says too little of ${others.join(", ")}: they stand as they were.`);
}

function render({ model, el }) {
  const f = frame(el, "calibration"),
    current = { row: -1 },
    wide = () => roomOf(f, 520, 1000);
  let view,
    width = 0;
  function draw() {
    view = model.get("view");
    width = wide();
    f.title.textContent = view.title;
    const svg = titledSvg(view, width, 8 + ROW_HEIGHT * view.calls.length),
      rows = paint(layout(view, width, current.row), svg, hatches(svg));
    f.host.replaceChildren(svg);
    drawBelow(view, f.below);
    return rows;
  }
  const tip = (i, x, y, spoken) => f.showTip(x, y, view.calls[i].call, tipRows(view, i), spoken),
    moved = () => Math.abs(wide() - width) > 2;
  return drawnRows({ model, f, current, rows: () => view.calls, draw, moved, tip, left: LEFT, rowHeight: ROW_HEIGHT });
}
export default { render };
