// A performance model before and after it was fitted: every call's seconds as measured (solid) and as predicted (hatched), the
// errors beside them; below, the constants that changed and how far the phases spread.
import { drawnRows, fmtCount, fmtSeconds, frame, H, hatches, isMissing, S, shorten, swatch, titledSvg } from "./core.js";

const LEFT = 190,
  RIGHT = 190,
  BAR = 10,
  ROW_HEIGHT = 48,
  WORDS = { measured: "measured", before: "predicted before", after: "predicted after" };
const percent = (e) => (isMissing(e) ? "–" : `${e >= 0 ? "+" : "−"}${Math.abs(100 * e).toFixed(0)} %`);

function render({ model, el }) {
  const f = frame(el, "calibration");
  let view,
    width = 0;
  const current = { row: -1 };
  const wide = () => Math.max(520, Math.min(1000, f.root.clientWidth - 16 || 900));
  const errors = (r) => `${percent(r.error_before)} → ${percent(r.error_after)}`;

  function row(svg, hatch, r, i) {
    const y = 6 + i * ROW_HEIGHT,
      scale = (width - LEFT - RIGHT) / view.most_s,
      g = S("g", { class: "hf-mark hf-row", "data-row": i, "data-error": r.error_after }, svg);
    S("rect", { x: 0, y: y - 3, width, height: ROW_HEIGHT - 6, class: "hf-panel", "fill-opacity": i === current.row ? 1 : 0 }, g);
    S("text", { x: LEFT - 8, y: y + 22, "text-anchor": "end", class: "hf-fg" }, g, shorten(r.call, 28));
    Object.keys(view.colors).forEach((side, k) => {
      const seconds = r[side + "_s"],
        color = view.colors[side],
        top = y + k * (BAR + 3),
        measured = side === "measured";
      if (isMissing(seconds)) {
        S("text", { x: LEFT + 2, y: top + 9, "font-size": 10, "font-style": "italic", class: "hf-sub" }, g, "not known");
        return;
      }
      const bar = { x: LEFT, y: top, width: Math.max(1, seconds * scale), height: BAR, rx: 2, stroke: color };
      S("rect", { ...bar, fill: measured ? color : hatch(color), class: `hf-bar-${side}` + (measured ? "" : " hf-predicted") }, g);
      S("text", { x: LEFT + seconds * scale + 5, y: top + 9, "font-size": 10, class: "hf-sub" }, g, fmtSeconds(seconds));
    });
    S("text", { x: width - 8, y: y + 22, "text-anchor": "end", class: "hf-fg hf-error-text" }, g, errors(r));
    g.addEventListener("pointermove", (ev) => tip(i, ev.clientX, ev.clientY, false));
    g.addEventListener("pointerleave", () => f.hideTip());
  }

  function table(host, caption, head, rows) {
    if (!rows.length) return;
    const box = H("div", {}, host),
      t = H("table", {}, box);
    box.insertBefore(H("b", {}, null, caption), t);
    const tr = H("tr", {}, H("thead", {}, t)),
      body = H("tbody", {}, t);
    head.forEach((text, i) => H("th", { class: i ? null : "hf-left", scope: "col" }, tr, text));
    for (const cells of rows) {
      const line = H("tr", {}, body);
      cells.forEach((text, i) => H("td", { class: i ? null : "hf-left" }, line, text));
    }
  }

  function draw() {
    view = model.get("view");
    width = wide();
    f.title.textContent = view.title;
    const height = 8 + ROW_HEIGHT * view.calls.length;
    const svg = titledSvg(view, width, height);
    const hatch = hatches(svg);
    view.calls.forEach((r, i) => row(svg, hatch, r, i));
    f.host.replaceChildren(svg);
    f.below.replaceChildren();
    const legend = H("div", { class: "hf-legend" }, f.below);
    for (const [side, color] of Object.entries(view.colors))
      swatch(legend, WORDS[side], (s) =>
        S(
          "rect",
          { x: 1, y: 1, width: 14, height: 9, rx: 2, stroke: color, fill: side === "measured" ? color : hatches(s)(color) },
          s,
        ),
      );
    H("span", {}, legend, "at the right: predicted over measured - 1, before → after");
    const grid = H("div", { style: "display:flex;flex-wrap:wrap;align-items:flex-start;gap:0 36px" }, f.below);
    const fitted = view.constants.filter((c) => c.determined),
      others = view.constants.filter((c) => !c.determined);
    table(
      grid,
      "Constants",
      ["fitted", "before", "after"],
      fitted.map((c) => [c.name, fmtCount(c.before) ?? "–", fmtCount(c.after) ?? "–"]),
    );
    table(
      grid,
      "Four in five of measured over predicted",
      ["kind", "from", "to", "left out in turn: within"],
      view.bands.map((b) => [b.kind, ...[b.low, b.high].map((x) => (isMissing(x) ? "–" : `× ${x.toFixed(2)}`)), b.kept || "–"]),
    );
    if (others.length)
      H(
        "p",
        { class: "hf-dim" },
        f.below,
        `The run says too little of ${others.map((c) => c.name).join(", ")}: they stand as they were.`,
      );
  }

  function tip(i, x, y, spoken) {
    const r = view.calls[i];
    f.showTip(
      x,
      y,
      r.call,
      [
        ["row", String(i)],
        ...Object.keys(view.colors).map((side) => [WORDS[side], fmtSeconds(r[side + "_s"])]),
        ["error before → after", errors(r)],
      ],
      spoken,
    );
  }
  const moved = () => Math.abs(wide() - width) > 2;
  return drawnRows({ model, f, current, rows: () => view.calls, draw, moved, tip, left: LEFT, rowHeight: ROW_HEIGHT });
}
export default { render };
