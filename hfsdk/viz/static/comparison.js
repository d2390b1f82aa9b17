// Two accounts of the same calls as paired bars; measured solid, predicted and guessed hatched; signed errors at the right.
import { drawnRows, group, hatched, legend, mark, paint, roomOf, sample } from "./chart.js";
import { fmtSeconds, frame, hatches, isMissing, shorten, titledSvg } from "./core.js";

const LEFT = 210,
  RIGHT = 190,
  ROW_HEIGHT = 34,
  SIDES = ["this", "other"];
function errorText(r) {
  if (isMissing(r.error_s)) return "";
  const sign = r.error_s >= 0 ? "+" : "−",
    share = isMissing(r.error) ? "" : `${sign}${Math.abs(100 * r.error).toFixed(0)} % `;
  return share + `(${sign}${fmtSeconds(Math.abs(r.error_s))})`;
}

// ---- layout: a row for each call, the last one all of them together
const layout = (view, width, current) => view.rows.map((r, i) => rowMark(view, r, i, width, i === current));
function rowMark(view, r, i, width, isCurrent) {
  const y = 6 + i * ROW_HEIGHT,
    scale = (width - LEFT - RIGHT) / view.most_s,
    total = i === view.rows.length - 1,
    back = { x: 0, y: y - 2, width, height: ROW_HEIGHT - 3, class: "hf-panel", "fill-opacity": isCurrent ? 1 : 0 },
    name = { x: LEFT - 8, y: y + 17, "text-anchor": "end", "font-weight": total ? 600 : null, class: "hf-fg" };
  const marks = [
    mark("rect", back),
    ...(total ? [mark("line", { x1: 8, x2: width - 8, y1: y - 4, y2: y - 4, class: "hf-grid" })] : []),
    mark("text", name, shorten(r.call, 32)),
    ...SIDES.flatMap((side, k) => sideMarks(view, side, r[side + "_s"], y + 1 + 13 * k, scale)),
    mark("text", { x: width - 8, y: y + 17, "text-anchor": "end", class: "hf-fg hf-error-text" }, errorText(r)),
  ];
  const names = "hf-mark hf-row" + (isCurrent ? " hf-current-row" : "");
  return group({ class: names, "data-row": i, "data-error": r.error_s }, marks, { row: i });
}
function sideMarks(view, side, seconds, y, scale) {
  const color = view.colors[side],
    predicted = view[side].source !== "measured",
    none = { x: LEFT + 2, y: y + 10, "font-size": 10, "font-style": "italic", class: "hf-sub" };
  if (isMissing(seconds)) return [mark("text", none, "no such call")];
  const bar = { x: LEFT, y, width: Math.max(1, seconds * scale), height: 11, rx: 2, fill: predicted ? hatched(color) : color };
  return [
    mark("rect", { ...bar, stroke: color, class: `hf-bar-${side}` + (predicted ? " hf-predicted" : "") }),
    mark("text", { x: LEFT + seconds * scale + 5, y: y + 9.5, "font-size": 10, class: "hf-sub" }, fmtSeconds(seconds)),
  ];
}
const legendOf = (view) =>
  SIDES.map((side) => {
    const { title, source } = view[side],
      color = view.colors[side];
    return [
      source === "guess" ? title : `${title} (${source})`,
      [sample({ rx: 2, stroke: color, fill: source === "measured" ? color : hatched(color) })],
    ];
  });
const tipRows = (view, i) => [
  ["row", String(i)],
  [view.this.title, fmtSeconds(view.rows[i].this_s)],
  [view.other.title, fmtSeconds(view.rows[i].other_s)],
  ["error", errorText(view.rows[i]) || null],
];

function render({ model, el }) {
  const f = frame(el, "comparison"),
    current = { row: -1 };
  let view;
  function draw() {
    view = model.get("view");
    f.title.textContent = view.title;
    const width = roomOf(f, 520, 1000),
      svg = titledSvg(view, width, 10 + ROW_HEIGHT * view.rows.length),
      rows = paint(layout(view, width, current.row), svg, hatches(svg));
    f.host.replaceChildren(svg);
    f.below.replaceChildren();
    legend(f.below, legendOf(view));
    return rows;
  }
  const tip = (i, x, y, spoken) => f.showTip(x, y, view.rows[i].call, tipRows(view, i), spoken);
  return drawnRows({ model, f, current, rows: () => view.rows, draw, tip, left: LEFT, rowHeight: ROW_HEIGHT });
}
export default { render };
