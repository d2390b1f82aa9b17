// Why trainer and generating engine disagree: a bar for each cause, and below them, layer by layer on a logarithmic axis, how far
// each engine's hidden states are from those of transformers in fp32.
import { drawnRows, fmtShare, frame, H, isMissing, S, shorten, swatch, titledSvg } from "./core.js";

const LEFT = 210,
  RIGHT = 150,
  ROW_HEIGHT = 22,
  LAYER_HEIGHT = 17,
  NAMED = "#b3403a";
const nats = (x) => (isMissing(x) ? "–" : `${x.toPrecision(2)} nats`);
const words = (c) => (c.named ? `${nats(c.nats)}, ${fmtShare(c.share) ?? "–"}` : c.changed ? "explains nothing" : "not needed");

function render({ model, el }) {
  const f = frame(el, "gap"),
    verdict = f.root.insertBefore(H("p", {}), f.host);
  let view,
    width = 0;
  const current = { row: -1 };
  const wide = () => Math.max(520, Math.min(1000, f.root.clientWidth - 16 || 900));

  function bar(svg, c, i) {
    const y = 6 + i * ROW_HEIGHT,
      g = S("g", { class: "hf-mark hf-row", "data-row": c.cause, "data-nats": c.nats }, svg);
    S("rect", { x: 0, y: y - 2, width, height: ROW_HEIGHT - 2, class: "hf-panel", "fill-opacity": i === current.row ? 1 : 0 }, g);
    S(
      "text",
      { x: LEFT - 8, y: y + 13, "text-anchor": "end", "font-weight": c.named ? 600 : null, class: c.named ? "hf-fg" : "hf-sub" },
      g,
      shorten(c.words, 34),
    );
    if (c.named) {
      const w = Math.max(2, ((width - LEFT - RIGHT) * Math.max(0, c.nats ?? 0)) / view.most_nats);
      S("rect", { x: LEFT, y: y + 2, width: w, height: 13, rx: 2, fill: NAMED, "data-part": c.cause }, g);
      S("text", { x: LEFT + w + 5, y: y + 13, class: "hf-fg" }, g, words(c));
    } else S("text", { x: LEFT + 2, y: y + 13, "font-size": 10, class: "hf-sub" }, g, words(c));
    g.addEventListener("pointermove", (ev) => tip(i, ev.clientX, ev.clientY, false));
    g.addEventListener("pointerleave", () => f.hideTip());
  }

  function layers(svg, top) {
    const [least, most] = view.axis.map(Math.log10),
      place = (x) =>
        LEFT + ((width - LEFT - RIGHT) * (Math.min(most, Math.max(least, Math.log10(x || view.axis[0]))) - least)) / (most - least),
      bottom = top + LAYER_HEIGHT * view.layers.length;
    S(
      "text",
      { x: 0, y: top - 8, class: "hf-fg", "font-weight": 600 },
      svg,
      "Hidden states at the worst token: relative distance from transformers in fp32",
    );
    for (let power = least; power <= most; power += 2) {
      const x = place(10 ** power);
      S("line", { x1: x, x2: x, y1: top, y2: bottom, class: "hf-grid" }, svg);
      S("text", { x, y: bottom + 13, "text-anchor": "middle", "font-size": 10, class: "hf-sub" }, svg, power ? `1e${power}` : "1");
    }
    view.layers.forEach((l, i) => {
      const y = top + i * LAYER_HEIGHT,
        g = S("g", { class: "hf-layer", "data-place": l.place }, svg);
      S("text", { x: LEFT - 8, y: y + 12, "text-anchor": "end", class: "hf-fg" }, g, l.place);
      for (const e of view.engines) {
        const x = l[e.name];
        if (isMissing(x)) continue;
        const at = {
          fill: e.name === "bf16" ? "none" : e.color,
          stroke: e.color,
          "stroke-width": 1.4,
          "data-engine": e.name,
          "data-far": x,
        };
        if (e.name === "rollout") S("rect", { x: place(x) - 4, y: y + 4, width: 8, height: 8, ...at, "fill-opacity": 0.75 }, g);
        else S("circle", { cx: place(x), cy: y + 8, r: e.name === "bf16" ? 5 : 3.5, ...at }, g);
      }
    });
  }

  function draw() {
    view = model.get("view");
    width = wide();
    f.title.textContent = view.title;
    const causes = 12 + ROW_HEIGHT * view.causes.length,
      height = causes + (view.layers.length ? 48 + LAYER_HEIGHT * view.layers.length : 0);
    const svg = titledSvg(view, width, height);
    view.causes.forEach((c, i) => bar(svg, c, i));
    if (view.layers.length) layers(svg, causes + 26);
    verdict.textContent = view.summary.slice(view.title.length + 2);
    f.host.replaceChildren(svg);
    f.below.replaceChildren();
    const legend = H("div", { class: "hf-legend" }, f.below);
    swatch(legend, "what a cause has of the gap", (s) => S("rect", { x: 1, y: 1, width: 14, height: 9, rx: 2, fill: NAMED }, s));
    if (view.layers.length)
      for (const e of view.engines)
        swatch(legend, e.words, (s) =>
          e.name === "rollout"
            ? S("rect", { x: 4, y: 1, width: 8, height: 8, fill: e.color }, s)
            : S(
                "circle",
                { cx: 8, cy: 5, r: 4, stroke: e.color, "stroke-width": 1.4, fill: e.name === "bf16" ? "none" : e.color },
                s,
              ),
        );
    if (view.left_out) H("span", {}, legend, `${view.left_out} layers in the middle are left out`);
    const w = view.worst;
    H(
      "p",
      { class: "hf-dim" },
      f.below,
      `worst token: row ${w.row}, response token ${w.token}${w.text ? `, the end of “${w.text}”` : ""}: trainer ${isMissing(w.trainer) ? "–" : w.trainer.toFixed(3)}, recorded ${isMissing(w.recorded) ? "–" : w.recorded.toFixed(3)}`,
    );
  }

  function tip(i, x, y, spoken) {
    const c = view.causes[i];
    const rows = [
      ["row", c.cause],
      ["changed", c.changed || "nothing"],
      ["comes to", words(c)],
    ];
    if (c.detail) rows.push(["exactly", c.detail]);
    f.showTip(x, y, c.words, rows, spoken);
  }
  const moved = () => Math.abs(wide() - width) > 2;
  return drawnRows({ model, f, current, rows: () => view.causes, draw, moved, tip, left: LEFT, rowHeight: ROW_HEIGHT });
}
export default { render };
