// Calls as boxes in their phases, columns as lines that end at a row of the reading box.
// An opened line shows who read what from whom.
import { group, hatched, legend, mark, paint, redrawn, sample, tableOf } from "./chart.js";
import { alpha, coalesced, fmtBytes, fmtCount, frame, H, hatches, inkOn, keyboard, S, shade, shorten, titledSvg } from "./core.js";
import { walkedMatrix } from "./matrix.js";

const OUT = 17,
  PORT = 15,
  MAPPED = "#3b76c4",
  NETWORK = "#d64545";
const cut = (text, width, letter) => shorten(text, Math.max(2, Math.floor(width / letter)));
const predictedName = (name, predicted) => name + (predicted ? " (predicted)" : "");

// ---- layout: marks whose tip has {path: edge}, {line: edge}, or {x, y, call or edge, heading, rows}; edges by their number
function layout(view) {
  const none = { x: 12, y: 40, class: "hf-sub", "font-style": "italic" };
  return [
    ...view.bands.flatMap((b) => bandMarks(view, b)),
    ...view.edges.flatMap(lineMarks),
    ...view.calls.flatMap((call) => [boxMark(call), ...portMarks(view, call)]),
    ...(view.calls.length ? [] : [mark("text", none, "no calls in this step yet")]),
  ];
}
function bandMarks(view, b) {
  const box = { x: b.x, y: 6, width: b.width, height: view.height - 8, rx: 4, fill: alpha(b.color, 0.09), class: "hf-band" };
  return [
    mark("rect", { ...box, "data-phase": b.phase }),
    mark("text", { x: b.x + 8, y: 21, "font-size": 10.5, "font-weight": 600, class: "hf-sub" }, b.phase),
  ];
}
function lineMarks(edge, k) {
  const seen = {
    d: edge.path,
    fill: "none",
    stroke: edge.color,
    "stroke-opacity": 0.75,
    "stroke-width": edge.kind === "weights" ? 3.2 : 1.5,
    "data-row": edge.row,
    "stroke-dasharray": edge.num_bytes === null ? "2 3" : edge.predicted ? "6 3" : null,
    class: "hf-edgeline" + (edge.predicted ? " hf-predicted" : ""),
  };
  const wide = { d: edge.path, fill: "none", stroke: "transparent", "stroke-width": 9, style: "cursor:pointer" };
  return [mark("path", seen, undefined, { path: k }), mark("path", { ...wide, "data-line": edge.row }, undefined, { line: k })];
}
function boxMark(call) {
  const { x, y, width, height, color, predicted } = call,
    bad = ["failed", "cancelled", "lost"].includes(call.state),
    dashes = predicted ? "5 3" : call.state === "pending" ? "2 2" : null,
    stripe = { x, y, width: 6, height, rx: 2, fill: predicted ? hatched(color) : color, stroke: predicted ? color : null },
    under = { x: x + 12, y: y + 29, "font-size": 10, class: "hf-sub", style: bad ? "fill:var(--hf-bad)" : null };
  const marks = [
    mark("rect", { x, y, width, height, rx: 5, class: "hf-paper", stroke: color, "stroke-dasharray": dashes }),
    mark("rect", { ...stripe, "stroke-width": 0.5 }),
    mark("text", { x: x + 12, y: y + 15, class: "hf-fg", "font-weight": 600 }, call.title),
    mark("text", under, cut(call.under, width - 18, 5.4)),
  ];
  if (call.out) {
    const top = y + height - OUT,
      words = { x: x + width - 8, y: top + OUT / 2 + 4, "font-size": 10, "text-anchor": "end", class: "hf-sub" };
    marks.push(
      mark("line", { x1: x + 6, x2: x + width, y1: top, y2: top, class: "hf-grid" }),
      mark("text", words, cut("writes " + call.out, width - 18, 5.2)),
      mark("circle", { cx: x + width, cy: top + OUT / 2, r: 3.2, fill: color }),
    );
  }
  const tip = { x, y, call: call.id, heading: predictedName(call.name, predicted), rows: call.details };
  return group({ class: "hf-mark hf-call", "data-call": call.id, "data-row": call.row, "data-state": call.state }, marks, tip);
}
function portMarks(view, call) {
  const { x, width } = call,
    read = view.edges.map((edge, k) => [edge, k]).filter(([edge]) => edge.target === call.id);
  return read.map(([edge, k]) => {
    const y = edge.port_y,
      small = { y: y + 3.5, "font-size": 10 },
      bytes = { x: x + width - 6, ...small, "text-anchor": "end", class: "hf-sub" };
    const marks = [
      mark("rect", { x: x + 7, y: y - PORT / 2, width: width - 8, height: PORT, fill: "transparent" }),
      mark("circle", { cx: x, cy: y, r: 3.2, fill: edge.color }),
      mark("text", { x: x + 12, ...small, class: "hf-fg" }, cut(edge.label, width - 34 - 5.4 * edge.bytes.length, 5.4)),
      mark("text", { ...bytes, "font-style": edge.num_bytes === null ? "italic" : null }, edge.bytes),
    ];
    const tip = { x, y, edge: k, heading: predictedName(edge.title, edge.predicted), rows: edge.details },
      name = { class: "hf-mark hf-port", "data-edge": edge.row, "data-row": edge.row, style: "cursor:pointer" };
    return group(name, marks, tip);
  });
}
function legendOf(view) {
  const entries = view.roles.map((r) => [r.name, [mark("rect", { x: 1, y: 1, width: 6, height: 9, rx: 2, fill: r.color })]]),
    line = { x1: 0, x2: 16, y1: 5, y2: 5, stroke: "#77808a", "stroke-width": 1.5 },
    stroke = (more) => [mark("line", { ...line, ...more })],
    has = (test) => view.edges.some(test) || view.calls.some((c) => test(c) && c.row !== null);
  if (has((e) => !e.predicted && e.num_bytes !== null)) entries.push(["as it ran", stroke({})]);
  if (has((e) => e.predicted)) entries.push(["predicted", stroke({ "stroke-dasharray": "6 3" })]);
  if (view.edges.some((e) => e.num_bytes === null)) entries.push(["bytes not known yet", stroke({ "stroke-dasharray": "2 3" })]);
  if (view.edges.some((e) => e.kind === "weights")) entries.push(["weights", stroke({ "stroke-width": 3.2 })]);
  return entries;
}
// whether a line is of what is looked at: of a row itself, or of what a box reads and writes
const touches = (view, k, tip) =>
  tip.edge === undefined ? view.edges[k].source === tip.call || view.edges[k].target === tip.call : k === tip.edge;
// the tip that an arrow key comes to: up and down within a column of boxes, left and right between columns
function stepped(tips, current, dx, dy) {
  if (!tips.length || current < 0) return tips.length ? 0 : current;
  const here = tips[current],
    xs = [...new Set(tips.map((t) => t.x))].sort((a, b) => a - b),
    x = dx ? xs[xs.indexOf(here.x) + dx] : undefined;
  if (dy) {
    const column = tips.filter((t) => t.x === here.x).sort((a, b) => a.y - b.y),
      next = column[column.indexOf(here) + dy];
    return next ? tips.indexOf(next) : current;
  }
  if (x === undefined) return current;
  const near = tips.filter((t) => t.x === x).sort((a, b) => Math.abs(a.y - here.y) - Math.abs(b.y - here.y));
  return tips.indexOf(near[0]);
}

// ---- one transfer: who reads what from whom
const READ_BY = { rank: "read by rank", group: "read by ranks with the same rows" };
function matrixOf(edge) {
  const W = edge.readers.length,
    R = edge.writers.length,
    cw = W <= 6 ? 84 : W <= 12 ? 58 : W <= 24 ? 30 : 14,
    ch = R <= 12 ? 30 : R <= 24 ? 20 : 12,
    left = 16 + 6.2 * Math.max(...edge.writers.map((w) => w.label.length)),
    top = 40,
    narrow = cw < 58,
    m = { edge, cw, ch, left, top, most: Math.max(...edge.cells.map((c) => c[3]), 1) };
  const by = (READ_BY[edge.by] ?? "read by the ranks of a node") + (narrow ? " (numbers of the ranks)" : "");
  const marks = [mark("text", { x: left, y: 12, class: "hf-sub" }, by)];
  edge.readers.forEach((r, k) => {
    const label = narrow ? r.label.replace(/^(ranks?|node) /, "") : r.label,
      place = { x: left + k * cw + cw / 2, y: 32, "text-anchor": "middle", class: "hf-fg" };
    if (cw >= 30 || k % 4 === 0) marks.push(mark("text", place, cut(label, cw, 5.4)));
  });
  edge.writers.forEach((w, k) => {
    const place = { x: left - 8, y: top + k * ch + ch / 2 + 3.5, "text-anchor": "end", class: "hf-fg" };
    if (ch >= 12) marks.push(mark("text", place, w.label));
  });
  marks.push(mark("rect", { x: left, y: top, width: W * cw, height: R * ch, class: "hf-panel" }));
  marks.push(...edge.cells.map((cell, row) => cellMark(m, cell, row)), ...sumMarks(m));
  return { width: left + W * cw + 70, height: top + R * ch + 24, marks };
}
function cellMark({ edge, cw, ch, left, top, most }, [w, r, rows, bytes, far, which], row) {
  const color = far ? NETWORK : MAPPED,
    x = left + r * cw,
    y = top + w * ch,
    fill = shade(color, 0.8 - (0.6 * bytes) / most),
    text = fmtBytes(bytes),
    roomy = cw >= 58 && ch >= 20,
    middle = { x: x + cw / 2, "text-anchor": "middle" },
    ink = edge.predicted ? { class: "hf-fg" } : { fill: inkOn(fill) };
  const at = (y) => ({ x: middle.x, y, "text-anchor": "middle", ...ink }),
    box = { x: x + 1, y: y + 1, width: cw - 2, height: ch - 2, rx: 2, fill: edge.predicted ? hatched(color) : fill },
    edged = { stroke: edge.predicted ? color : far ? NETWORK : null, "stroke-dasharray": far ? "3 2" : null },
    marks = [mark("rect", { ...box, ...edged })];
  if (roomy && edge.predicted)
    marks.push(mark("rect", { x: x + cw / 2 - 30, y: y + 3, width: 60, height: ch - 6, class: "hf-paper" }));
  if (roomy && ch >= 30 && rows) marks.push(mark("text", at(y + 12.5), `${fmtCount(rows)} row${rows === 1 ? "" : "s"}`));
  if (roomy) marks.push(mark("text", at(y + (ch >= 30 && rows ? 24 : ch / 2 + 3.5)), (far ? "⇄ " : "") + text));
  const from = edge.writers[w],
    to = edge.readers[r],
    heading = `${from.label} → ${to.label}`;
  const link = far === 0 ? "same node: mapped, no copy" : far === bytes ? "network" : `${fmtBytes(far)} of it across the network`;
  const told = [
    ["from", from.label + (from.at ? `: ${from.at}` : "")],
    ["to", to.label + (to.at ? `: ${to.at}` : "")],
    ...(rows ? [["rows" + (to.count > 1 ? ", each rank" : ""), fmtCount(rows)]] : []),
    ["bytes", text],
    ...(which ? [["which rows", which]] : []),
    ["way", edge.kind === "weights" && !far ? "same node: mapped, copied into its boxes" : link],
  ];
  const name = { class: "hf-mark hf-cell", "data-writer": w, "data-reader": r, "data-bytes": bytes, "data-rows": rows };
  return group({ ...name, "data-row": edge.by === "rank" ? row : null }, marks, {
    row: w,
    column: r,
    heading: predictedName(heading, edge.predicted),
    spoken: heading,
    rows: told,
  });
}
// bytes by writer at the right, by reader below, and all of them
function sumMarks({ edge, cw, ch, left, top }) {
  const W = edge.readers.length,
    R = edge.writers.length,
    written = Array(R).fill(0),
    read = Array(W).fill(0),
    right = left + W * cw + 6,
    marks = [];
  for (const [w, r, , bytes] of edge.cells) {
    written[w] += bytes;
    read[r] += bytes;
  }
  written.forEach((n, k) => {
    if (ch >= 12) marks.push(mark("text", { x: right, y: top + k * ch + ch / 2 + 3.5, class: "hf-sub" }, fmtBytes(n)));
  });
  const below = top + R * ch + 14;
  read.forEach((n, k) => {
    const place = { x: left + k * cw + cw / 2, y: below, "text-anchor": "middle", class: "hf-sub" };
    if (cw >= 58) marks.push(mark("text", place, fmtBytes(n)));
  });
  const all = fmtBytes(read.reduce((a, b) => a + b, 0));
  return [...marks, mark("text", { x: right, y: below, class: "hf-fg", "font-weight": 600 }, all)];
}
function matrixLegendOf(edge) {
  const fill = (color) => (edge.predicted ? hatched(color) : shade(color, 0.3)),
    box = (color, dashes) => [sample({ rx: 2, fill: fill(color), stroke: color, "stroke-dasharray": dashes })];
  const entries = [],
    mapped = edge.kind === "weights" ? "same node: mapped, then copied into boxes" : "same node: mapped, no copy";
  if (edge.cells.some((c) => c[4] < c[3])) entries.push([mapped, box(MAPPED, null)]);
  if (edge.cells.some((c) => c[4])) entries.push(["⇄ across the network", box(NETWORK, "3 2")]);
  if (edge.cells.length < edge.readers.length * edge.writers.length)
    entries.push(["nothing", [sample({ class: "hf-panel hf-grid" })]]);
  return entries;
}

// ---- draw
function drawGraph(view, host) {
  const width = Math.max(view.width, 420);
  // shrinks a little, then scrolls
  const style = `max-width:none;width:min(100%,${width}px);min-width:${Math.round(0.76 * width)}px;height:auto`,
    svg = titledSvg(view, width, view.height, { style }),
    drawn = paint(layout(view), svg, hatches(svg));
  host.replaceChildren(svg);
  return drawn;
}
function drawMatrix(f, edge, parent, close) {
  const host = H("div", { tabindex: 0, "data-lm-suppress-shortcuts": "true", class: "hf-matrix" }, parent),
    { width, height, marks } = matrixOf(edge),
    size = { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "font-size": 10 },
    words = `${edge.title}: bytes from ${edge.writers.length} writers to ${edge.readers.length} readers`;
  const svg = S(
    "svg",
    { ...size, style: width > 1100 ? "max-width:none" : null, "aria-label": `${words}, together ${fmtBytes(edge.bytes_read)}` },
    host,
  );
  const leave = () => {
    f.hideTip();
    close();
    f.host.focus();
  };
  walkedMatrix(f, host, paint(marks, svg, hatches(svg)), { below: 8, leave });
  legend(host, matrixLegendOf(edge));
}
function drawTransfer(f, edge, panel, close) {
  const head = H("div", { class: "hf-bar", style: "margin-top:8px" }, panel);
  H("b", {}, head, edge.title);
  H("span", { class: "hf-dim" }, head, edge.predicted ? "predicted" : edge.cells.length ? "as it was ordered and ran" : "");
  H("button", { type: "button", "aria-label": "close the transfer" }, head, "×").onclick = close;
  for (const text of edge.words) H("div", { class: "hf-dim" }, panel, text);
  if (!edge.cells.length) {
    H("div", { class: "hf-missing" }, panel, edge.num_bytes === null ? "nothing has been read yet" : "no rows were read");
    return;
  }
  const both = H("div", { style: "display:flex;flex-wrap:wrap;gap:4px 36px;align-items:flex-start" }, panel);
  drawMatrix(f, edge, both, close);
  const heads = edge.kind === "weights" ? ["what", "bytes"] : ["column", "bytes, each row once"],
    body = tableOf(both, heads, (k) => k === 0, { class: "hf-columns" });
  const line = (label, bytes, more = "", cls = null) => {
    const row = H("tr", {}, body);
    H("td", { class: "hf-left" + more }, row, label);
    H("td", { "data-bytes": bytes, class: cls }, row, fmtBytes(bytes));
  };
  edge.columns.forEach((name, k) => line(name, edge.column_bytes[k]));
  line("together", edge.num_bytes, " hf-dim", "hf-num");
  line("read by all", edge.bytes_read, " hf-dim", "hf-num");
}

function render({ model, el }) {
  const f = frame(el, "dataflow", model);
  const words = "a row of a box: what it reads. Click it, or press Enter on it, to see who reads what from whom.",
    hint = H("span", { class: "hf-dim", "data-paper": "no" }, f.bar, words);
  f.host.style.overflowX = "auto";
  const panel = H("div", { class: "hf-transfer" }),
    legends = H("div", {});
  f.below.append(panel, legends);
  let view,
    marks = [], // boxes and their rows, as [element, tip]
    lines = [], // the seen paths, as [element, number of the edge]
    current = -1,
    opened = null;

  function draw() {
    const first = !view;
    view = model.get("view");
    f.title.textContent = view.title;
    hint.hidden = !view.edges.length;
    const drawn = drawGraph(view, f.host).map(([node, m]) => [node, m.tip]);
    lines = drawn.filter(([, tip]) => tip.path !== undefined).map(([node, tip]) => [node, tip.path]);
    marks = drawn.filter(([, tip]) => tip.rows);
    listen(drawn.filter(([, tip]) => tip.line !== undefined));
    legends.replaceChildren();
    legend(legends, legendOf(view));
    H("div", { class: "hf-dim hf-note" }, legends, view.note);
    const again = view.edges.find((e) => e.row === opened);
    if (opened !== null) open(again, true);
    if (current >= marks.length) current = -1;
    outline();
    if (first && view.left_out)
      H("span", { class: "hf-dim" }, f.bar, `the last calls; ${view.left_out} earlier ones are in to_pandas()`);
  }

  // ---- interact
  function listen(wide) {
    const over = (node, i) => {
      node.addEventListener("mousemove", (ev) => point(i, ev.clientX, ev.clientY, false));
      node.addEventListener("mouseleave", leave);
    };
    marks.forEach(([node, tip], i) => {
      over(node, i);
      if (tip.edge === undefined) return;
      node.addEventListener("click", () => {
        current = i;
        open(view.edges[tip.edge]);
        outline();
      });
    });
    for (const [node, { line }] of wide) {
      const edge = view.edges[line]; // of this drawing
      over(
        node,
        marks.findIndex(([, tip]) => tip.edge === line),
      );
      node.addEventListener("click", () => open(edge));
    }
  }
  function point(i, x, y, spoken) {
    if (!marks[i]) return;
    const [, tip] = marks[i];
    f.showTip(x, y, tip.heading, tip.rows, spoken);
    for (const [path, k] of lines) {
      const is = touches(view, k, tip);
      path.classList.toggle("hf-faded", !is);
      path.style.strokeOpacity = is ? 1 : "";
    }
  }
  function leave() {
    f.hideTip();
    for (const [path] of lines) {
      path.classList.remove("hf-faded");
      path.style.strokeOpacity = "";
    }
  }
  const outline = () => marks.forEach(([node], i) => node.firstChild.classList.toggle("hf-current", i === current));
  // shows a transfer below, or none; once more closes it, unless it is only drawn again
  function open(edge, again) {
    panel.replaceChildren();
    const closes = !edge || (opened === edge.row && !again);
    opened = closes ? null : edge.row;
    if (!closes) drawTransfer(f, edge, panel, () => open(null));
  }
  function show() {
    outline();
    if (!marks[current]) return;
    const [node] = marks[current];
    node.scrollIntoView({ block: "nearest", inline: "nearest" });
    const b = node.getBoundingClientRect();
    point(current, b.left + b.width / 2, b.bottom, true);
  }
  const enter = () => {
    const edge = marks[current]?.[1].edge;
    if (edge === undefined) return;
    f.hideTip();
    open(view.edges[edge]);
  };
  const close = () => {
    leave();
    open(null);
  };
  keyboard(f.host, {
    step: (dx, dy) => {
      current = stepped(
        marks.map(([, tip]) => tip),
        current,
        dx,
        dy,
      );
    },
    show,
    keys: { Enter: enter, " ": enter, Escape: close },
  });
  f.host.addEventListener("blur", leave);
  draw();
  return redrawn({ model, f, onView: coalesced(draw) });
}
export default { render };
