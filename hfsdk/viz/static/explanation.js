// A configuration: what is wrong, its batches, memory by phase and a simulated step as bars, its roles, and what was not read.
// All bars are predicted: hatched.
import { drawnRows, frame, H, hatches, isMissing, S, shorten, swatch, titledSvg } from "./core.js";

const LEFT = 176,
  RIGHT = 244,
  ROW_HEIGHT = 25;

function render({ model, el }) {
  const f = frame(el, "explanation");
  const top = H("div", {});
  f.root.insertBefore(top, f.host);
  let view,
    width = 0;
  const current = { row: -1 };
  const wide = () => Math.max(480, Math.min(1100, f.root.clientWidth - 16 || 900));

  function table(parent, heads, rows) {
    if (!rows.length) return;
    const box = H("div", { style: "overflow-x:auto" }, parent),
      t = H("table", {}, box),
      head = H("tr", {}, H("thead", {}, t)),
      body = H("tbody", {}, t);
    for (const word of heads) H("th", { scope: "col", class: word === "how many" ? null : "hf-left" }, head, word);
    for (const cells of rows) {
      const tr = H("tr", {}, body);
      cells.forEach((text, k) =>
        H(
          "td",
          { class: heads[k] === "how many" ? "hf-num" : k ? "hf-left hf-wrap" : "hf-left", style: k ? "max-width:640px" : null },
          tr,
          text,
        ),
      );
    }
  }
  function drawTop() {
    top.replaceChildren();
    H("div", { class: "hf-dim" }, top, view.subtitle);
    for (const one of view.findings) {
      const p = H("p", { class: "hf-finding", "data-kind": one.kind, style: "margin:5px 0" }, top);
      H("b", { class: one.css }, p, one.kind);
      H("span", {}, p, `: ${one.text} ${one.do} `);
      if (one.source) H("span", { class: "hf-dim" }, p, one.source);
    }
    table(
      top,
      ["batch arithmetic", "how many", "how"],
      view.arithmetic.map((r) => [r.name, r.value, r.how]),
    );
  }
  function memoryBar(g, hatch, bar, y, scale) {
    let x = LEFT;
    for (const part of bar.parts) {
      const w = part.bytes * scale;
      const mark = { x, y: y + 3, width: Math.max(0.5, w), height: 13, fill: hatch(part.color), stroke: part.color };
      S("rect", { ...mark, "stroke-width": 0.6, class: "hf-predicted", "data-part": part.name, "data-bytes": part.bytes }, g);
      x += w;
    }
    if (isMissing(bar.exists_bytes)) return;
    const limit = LEFT + bar.exists_bytes * scale;
    S("line", { x1: limit, x2: limit, y1: y, y2: y + 19, class: "hf-edge", "stroke-width": 1.8 }, g);
  }
  function callBar(g, hatch, bar, y, scale) {
    if (isMissing(bar.start_s) || isMissing(bar.seconds)) return;
    const mark = { x: LEFT + bar.start_s * scale, y: y + 3, width: Math.max(1, bar.seconds * scale), height: 13, rx: 2 };
    S("rect", { ...mark, fill: hatch(bar.color), stroke: bar.color, class: "hf-predicted", "data-seconds": bar.seconds }, g);
  }
  function drawBars() {
    const height = 6 + ROW_HEIGHT * view.bars.length,
      room = width - LEFT - RIGHT,
      svg = titledSvg(view, width, height),
      hatch = hatches(svg);
    view.bars.forEach((bar, i) => {
      const y = 4 + i * ROW_HEIGHT;
      if (bar.kind === "heading") {
        S("text", { x: 2, y: y + 16, "font-weight": 600, class: "hf-fg" }, svg, shorten(bar.label, 110));
        return;
      }
      const g = S("g", { class: `hf-mark hf-row hf-${bar.kind}`, "data-row": bar.row, "data-label": bar.label }, svg);
      S("rect", { x: 0, y, width, height: ROW_HEIGHT - 2, class: "hf-panel", "fill-opacity": i === current.row ? 1 : 0 }, g);
      S("text", { x: LEFT - 8, y: y + 14, "text-anchor": "end", class: "hf-fg" }, g, shorten(bar.label, 30));
      if (bar.kind === "memory") memoryBar(g, hatch, bar, y, (room - 4) / view.most_bytes);
      else callBar(g, hatch, bar, y, room / view.step_s);
      const text = { x: width - 4, y: y + 14, "text-anchor": "end", "font-weight": bar.over ? 600 : null };
      S(
        "text",
        { ...text, class: "hf-fg", fill: bar.over ? "var(--hf-bad)" : null, style: bar.over ? "fill:var(--hf-bad)" : null },
        g,
        bar.text,
      );
      g.addEventListener("pointermove", (ev) => tip(i, ev.clientX, ev.clientY, false));
      g.addEventListener("pointerleave", () => f.hideTip());
    });
    f.host.hidden = !view.bars.length;
    f.host.replaceChildren(svg);
  }
  function folded(parent, summary) {
    const details = H("details", {}, parent);
    H("summary", {}, details, summary);
    return details;
  }
  function drawBelow() {
    f.below.replaceChildren();
    const legend = H("div", { class: "hf-legend" }, f.below);
    for (const part of view.parts)
      swatch(legend, part.label, (s) =>
        S("rect", { x: 1, y: 1, width: 14, height: 9, rx: 2, stroke: part.color, fill: hatches(s)(part.color) }, s),
      );
    if (view.parts.length)
      swatch(legend, "what the device has", (s) =>
        S("path", { d: "M8,0v11", class: "hf-edge", fill: "none", "stroke-width": 1.8 }, s),
      );
    table(f.below, ["role", "model", "pool (devices)", "layout", "state"], view.roles);
    for (const word of view.words) H("p", { class: "hf-dim", style: "margin:4px 0" }, f.below, word);
    if (view.unread.length) table(folded(f.below, `Not read (${view.unread.length})`), ["key", "said of it"], view.unread);
    if (view.defaults.length)
      table(folded(f.below, `At their defaults (${view.defaults.length})`), ["key", "default"], view.defaults);
    if (!view.code) return;
    const code = folded(f.below, "The same step in hfsdk");
    H("pre", { style: "white-space:pre-wrap;margin:4px 0" }, code, view.code);
  }
  function draw() {
    view = model.get("view");
    width = wide();
    f.title.textContent = view.title;
    drawTop();
    drawBars();
    drawBelow();
  }
  function tip(i, x, y, spoken) {
    const bar = view.bars[i];
    f.showTip(x, y, bar.kind === "heading" ? bar.label : `${bar.label} (predicted)`, bar.tip, spoken);
  }
  const moved = () => Math.abs(wide() - width) > 2;
  return drawnRows({ model, f, current, rows: () => view.bars, draw, moved, tip, left: LEFT, rowHeight: ROW_HEIGHT });
}
export default { render };
