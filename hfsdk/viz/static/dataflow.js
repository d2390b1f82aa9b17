// Calls as boxes in their phases, columns as lines that end at a row of the reading box.
// An opened line shows who read what from whom.
import { alpha, coalesced, fmtBytes, fmtCount, frame, H, hatches, inkOn, keyboard, S, shade, shorten, swatch } from "./core.js";

const OUT = 17,
  PORT = 15,
  MAPPED = "#3b76c4",
  NETWORK = "#d64545";
const cut = (text, width, letter) => shorten(text, Math.max(2, Math.floor(width / letter)));

function render({ model, el }) {
  const f = frame(el, "dataflow", model);
  const hint = H(
    "span",
    { class: "hf-dim", "data-paper": "no" },
    f.bar,
    "a row of a box: what it reads. Click it, or press Enter on it, to see who reads what from whom.",
  );
  f.host.style.overflowX = "auto";
  const panel = H("div", { class: "hf-transfer" }),
    legends = H("div", {});
  f.below.append(panel, legends);
  let view,
    marks = [],
    current = -1,
    opened = null,
    lines = new Map();

  // ---- the graph
  function box(svg, call, hatch) {
    const g = S("g", { class: "hf-mark hf-call", "data-call": call.id, "data-row": call.row, "data-state": call.state }, svg);
    const dashes = call.predicted ? "5 3" : call.state === "pending" ? "2 2" : null;
    S(
      "rect",
      {
        x: call.x,
        y: call.y,
        width: call.width,
        height: call.height,
        rx: 5,
        class: "hf-paper",
        stroke: call.color,
        "stroke-dasharray": dashes,
      },
      g,
    );
    S(
      "rect",
      {
        x: call.x,
        y: call.y,
        width: 6,
        height: call.height,
        rx: 2,
        fill: call.predicted ? hatch(call.color) : call.color,
        stroke: call.predicted ? call.color : null,
        "stroke-width": 0.5,
      },
      g,
    );
    S("text", { x: call.x + 12, y: call.y + 15, class: "hf-fg", "font-weight": 600 }, g, call.title);
    const bad = call.state === "failed" || call.state === "cancelled" || call.state === "lost";
    S(
      "text",
      { x: call.x + 12, y: call.y + 29, "font-size": 10, class: "hf-sub", style: bad ? "fill:var(--hf-bad)" : null },
      g,
      cut(call.under, call.width - 18, 5.4),
    );
    if (call.out) {
      const y = call.y + call.height - OUT;
      S("line", { x1: call.x + 6, x2: call.x + call.width, y1: y, y2: y, class: "hf-grid" }, g);
      S(
        "text",
        { x: call.x + call.width - 8, y: y + OUT / 2 + 4, "font-size": 10, "text-anchor": "end", class: "hf-sub" },
        g,
        cut("writes " + call.out, call.width - 18, 5.2),
      );
      S("circle", { cx: call.x + call.width, cy: y + OUT / 2, r: 3.2, fill: call.color }, g);
    }
    addMark(g, { x: call.x, y: call.y, call, heading: call.name + (call.predicted ? " (predicted)" : ""), rows: call.details });
    for (const edge of view.edges.filter((e) => e.target === call.id)) {
      const port = S("g", { class: "hf-mark hf-port", "data-edge": edge.row, "data-row": edge.row, style: "cursor:pointer" }, svg);
      S("rect", { x: call.x + 7, y: edge.port_y - PORT / 2, width: call.width - 8, height: PORT, fill: "transparent" }, port);
      S("circle", { cx: call.x, cy: edge.port_y, r: 3.2, fill: edge.color }, port);
      S(
        "text",
        { x: call.x + 12, y: edge.port_y + 3.5, "font-size": 10, class: "hf-fg" },
        port,
        cut(edge.label, call.width - 34 - 5.4 * edge.bytes.length, 5.4),
      );
      S(
        "text",
        {
          x: call.x + call.width - 6,
          y: edge.port_y + 3.5,
          "font-size": 10,
          "text-anchor": "end",
          class: "hf-sub",
          "font-style": edge.num_bytes === null ? "italic" : null,
        },
        port,
        edge.bytes,
      );
      addMark(port, {
        x: call.x,
        y: edge.port_y,
        edge,
        heading: edge.title + (edge.predicted ? " (predicted)" : ""),
        rows: edge.details,
      });
    }
  }
  function line(svg, edge) {
    const path = S(
      "path",
      {
        d: edge.path,
        fill: "none",
        stroke: edge.color,
        "stroke-opacity": 0.75,
        "stroke-width": edge.kind === "weights" ? 3.2 : 1.5,
        "data-row": edge.row,
        "stroke-dasharray": edge.num_bytes === null ? "2 3" : edge.predicted ? "6 3" : null,
        class: "hf-edgeline" + (edge.predicted ? " hf-predicted" : ""),
      },
      svg,
    );
    const wide = S(
      "path",
      { d: edge.path, fill: "none", stroke: "transparent", "stroke-width": 9, style: "cursor:pointer", "data-line": edge.row },
      svg,
    );
    wide.addEventListener("mousemove", (ev) => {
      const i = marks.findIndex((m) => m.edge === edge);
      point(i, ev.clientX, ev.clientY, false);
    });
    wide.addEventListener("mouseleave", leave);
    wide.addEventListener("click", () => open(edge));
    lines.set(edge, path);
  }
  function addMark(node, mark) {
    const i = marks.push({ node, ...mark }) - 1;
    node.addEventListener("mousemove", (ev) => point(i, ev.clientX, ev.clientY, false));
    node.addEventListener("mouseleave", leave);
    if (mark.edge)
      node.addEventListener("click", () => {
        current = i;
        open(mark.edge);
        mark_();
      });
  }
  function touches(edge, mark) {
    return mark.edge ? edge === mark.edge : edge.source === mark.call.id || edge.target === mark.call.id;
  }
  function point(i, x, y, spoken) {
    const m = marks[i];
    if (!m) return;
    f.showTip(x, y, m.heading, m.rows, spoken);
    for (const [edge, path] of lines) {
      path.classList.toggle("hf-faded", !touches(edge, m));
      path.style.strokeOpacity = touches(edge, m) ? 1 : "";
    }
  }
  function leave() {
    f.hideTip();
    for (const path of lines.values()) {
      path.classList.remove("hf-faded");
      path.style.strokeOpacity = "";
    }
  }
  const mark_ = () => marks.forEach((m, i) => m.node.firstChild.classList.toggle("hf-current", i === current));

  function draw() {
    const first = !view;
    view = model.get("view");
    marks = [];
    lines = new Map();
    f.title.textContent = view.title;
    hint.hidden = !view.edges.length;
    const width = Math.max(view.width, 420);
    const svg = S("svg", {
      width,
      height: view.height,
      viewBox: `0 0 ${width} ${view.height}`,
      role: "img",
      "aria-label": view.summary,
      "font-size": 11,
      style: `max-width:none;width:min(100%,${width}px);min-width:${Math.round(0.76 * width)}px;height:auto`,
    }); // shrinks a little, then scrolls
    S("title", {}, svg, view.title);
    S("desc", {}, svg, view.summary);
    const hatch = hatches(svg);
    for (const b of view.bands) {
      S(
        "rect",
        {
          x: b.x,
          y: 6,
          width: b.width,
          height: view.height - 8,
          rx: 4,
          fill: alpha(b.color, 0.09),
          class: "hf-band",
          "data-phase": b.phase,
        },
        svg,
      );
      S("text", { x: b.x + 8, y: 21, "font-size": 10.5, "font-weight": 600, class: "hf-sub" }, svg, b.phase);
    }
    for (const edge of view.edges) line(svg, edge);
    for (const call of view.calls) box(svg, call, hatch);
    if (!view.calls.length) S("text", { x: 12, y: 40, class: "hf-sub", "font-style": "italic" }, svg, "no calls in this step yet");
    f.host.replaceChildren(svg);
    legend();
    if (opened !== null)
      open(
        view.edges.find((e) => e.row === opened),
        true,
      );
    if (current >= marks.length) current = -1;
    mark_();
    if (first && view.left_out)
      H("span", { class: "hf-dim" }, f.bar, `the last calls; ${view.left_out} earlier ones are in to_pandas()`);
  }
  function legend() {
    legends.replaceChildren();
    const a = H("div", { class: "hf-legend" }, legends);
    for (const r of view.roles) swatch(a, r.name, (s) => S("rect", { x: 1, y: 1, width: 6, height: 9, rx: 2, fill: r.color }, s));
    const stroke = (extra) => (s) =>
      S("line", { x1: 0, x2: 16, y1: 5, y2: 5, stroke: "#77808a", "stroke-width": 1.5, ...extra }, s);
    const has = (test) => view.edges.some(test) || view.calls.some((c) => test(c) && c.row !== null);
    if (has((e) => !e.predicted && e.num_bytes !== null)) swatch(a, "as it ran", stroke({}));
    if (has((e) => e.predicted)) swatch(a, "predicted", stroke({ "stroke-dasharray": "6 3" }));
    if (view.edges.some((e) => e.num_bytes === null)) swatch(a, "bytes not known yet", stroke({ "stroke-dasharray": "2 3" }));
    if (view.edges.some((e) => e.kind === "weights")) swatch(a, "weights", stroke({ "stroke-width": 3.2 }));
    H("div", { class: "hf-dim hf-note" }, legends, view.note);
  }

  // ---- one transfer
  function open(edge, again) {
    panel.replaceChildren();
    if (!edge || (opened === edge.row && !again)) {
      opened = null;
      return;
    }
    opened = edge.row;
    const head = H("div", { class: "hf-bar", style: "margin-top:8px" }, panel);
    H("b", {}, head, edge.title);
    H("span", { class: "hf-dim" }, head, edge.predicted ? "predicted" : edge.cells.length ? "as it was ordered and ran" : "");
    const close = H("button", { type: "button", "aria-label": "close the transfer" }, head, "×");
    close.onclick = () => open(null);
    for (const text of edge.words) H("div", { class: "hf-dim" }, panel, text);
    if (!edge.cells.length) {
      H("div", { class: "hf-missing" }, panel, edge.num_bytes === null ? "nothing has been read yet" : "no rows were read");
      return;
    }
    const both = H("div", { style: "display:flex;flex-wrap:wrap;gap:4px 36px;align-items:flex-start" }, panel);
    matrix(edge, both);
    const table = H("table", { class: "hf-columns" }, both),
      tr = H("tr", {}, H("thead", {}, table)),
      body = H("tbody", {}, table);
    H("th", { class: "hf-left", scope: "col" }, tr, edge.kind === "weights" ? "what" : "column");
    H("th", { scope: "col" }, tr, edge.kind === "weights" ? "bytes" : "bytes, each row once");
    edge.columns.forEach((name, k) => {
      const row = H("tr", {}, body);
      H("td", { class: "hf-left" }, row, name);
      H("td", { "data-bytes": edge.column_bytes[k] }, row, fmtBytes(edge.column_bytes[k]));
    });
    for (const [label, value] of [
      ["together", edge.num_bytes],
      ["read by all", edge.bytes_read],
    ]) {
      const row = H("tr", {}, body);
      H("td", { class: "hf-left hf-dim" }, row, label);
      H("td", { "data-bytes": value, class: "hf-num" }, row, fmtBytes(value));
    }
  }
  function matrix(edge, parent) {
    const host = H("div", { tabindex: 0, "data-lm-suppress-shortcuts": "true", class: "hf-matrix" }, parent);
    const W = edge.readers.length,
      R = edge.writers.length,
      cw = W <= 6 ? 84 : W <= 12 ? 58 : W <= 24 ? 30 : 14,
      ch = R <= 12 ? 30 : R <= 24 ? 20 : 12;
    const left = 16 + 6.2 * Math.max(...edge.writers.map((w) => w.label.length)),
      top = 40,
      right = 70;
    const short = (label) => label.replace(/^(ranks?|node) /, ""),
      narrow = cw < 58;
    const width = left + W * cw + right,
      height = top + R * ch + 24,
      most = Math.max(...edge.cells.map((c) => c[3]), 1);
    const svg = S(
      "svg",
      {
        width,
        height,
        viewBox: `0 0 ${width} ${height}`,
        role: "img",
        "font-size": 10,
        style: width > 1100 ? "max-width:none" : null,
        "aria-label": `${edge.title}: bytes from ${R} writers to ${W} readers, together ${fmtBytes(edge.bytes_read)}`,
      },
      host,
    );
    const hatch = hatches(svg);
    S(
      "text",
      { x: left, y: 12, class: "hf-sub" },
      svg,
      (edge.by === "rank"
        ? "read by rank"
        : edge.by === "group"
          ? "read by ranks with the same rows"
          : "read by the ranks of a node") + (narrow ? " (numbers of the ranks)" : ""),
    );
    edge.readers.forEach((r, k) => {
      if (cw >= 30 || k % 4 === 0)
        S(
          "text",
          { x: left + k * cw + cw / 2, y: 32, "text-anchor": "middle", class: "hf-fg" },
          svg,
          cut(narrow ? short(r.label) : r.label, cw, 5.4),
        );
    });
    edge.writers.forEach((w, k) => {
      if (ch >= 12) S("text", { x: left - 8, y: top + k * ch + ch / 2 + 3.5, "text-anchor": "end", class: "hf-fg" }, svg, w.label);
    });
    S("rect", { x: left, y: top, width: W * cw, height: R * ch, class: "hf-panel" }, svg);
    const sums = { w: Array(R).fill(0), r: Array(W).fill(0) },
      cells = [];
    for (const [row, [w, r, rows, bytes, far, which]] of edge.cells.entries()) {
      sums.w[w] += bytes;
      sums.r[r] += bytes;
      const color = far ? NETWORK : MAPPED,
        x = left + r * cw,
        y = top + w * ch,
        fill = shade(color, 0.8 - (0.6 * bytes) / most);
      const g = S(
        "g",
        {
          class: "hf-mark hf-cell",
          "data-writer": w,
          "data-reader": r,
          "data-bytes": bytes,
          "data-rows": rows,
          "data-row": edge.by === "rank" ? row : null,
        },
        svg,
      );
      S(
        "rect",
        {
          x: x + 1,
          y: y + 1,
          width: cw - 2,
          height: ch - 2,
          rx: 2,
          fill: edge.predicted ? hatch(color) : fill,
          stroke: edge.predicted ? color : far ? NETWORK : null,
          "stroke-dasharray": far ? "3 2" : null,
        },
        g,
      );
      const text = fmtBytes(bytes),
        roomy = cw >= 58 && ch >= 20;
      if (roomy && edge.predicted) S("rect", { x: x + cw / 2 - 30, y: y + 3, width: 60, height: ch - 6, class: "hf-paper" }, g);
      const ink = edge.predicted ? { class: "hf-fg" } : { fill: inkOn(fill) };
      if (roomy && ch >= 30 && rows)
        S(
          "text",
          { x: x + cw / 2, y: y + 12.5, "text-anchor": "middle", ...ink },
          g,
          `${fmtCount(rows)} row${rows === 1 ? "" : "s"}`,
        );
      if (roomy)
        S(
          "text",
          { x: x + cw / 2, y: y + (ch >= 30 && rows ? 24 : ch / 2 + 3.5), "text-anchor": "middle", ...ink },
          g,
          (far ? "⇄ " : "") + text,
        );
      const from = edge.writers[w],
        to = edge.readers[r];
      const link =
        far === 0 ? "same node: mapped, no copy" : far === bytes ? "network" : `${fmtBytes(far)} of it across the network`;
      const info = [
        ["from", from.label + (from.at ? `: ${from.at}` : "")],
        ["to", to.label + (to.at ? `: ${to.at}` : "")],
        ...(rows ? [["rows" + (to.count > 1 ? ", each rank" : ""), fmtCount(rows)]] : []),
        ["bytes", text],
        ...(which ? [["which rows", which]] : []),
        ["way", edge.kind === "weights" && !far ? "same node: mapped, copied into its boxes" : link],
      ];
      cells.push({ w, r, g, info });
      g.addEventListener("mousemove", (ev) =>
        f.showTip(ev.clientX, ev.clientY, `${from.label} → ${to.label}` + (edge.predicted ? " (predicted)" : ""), info, false),
      );
      g.addEventListener("mouseleave", () => f.hideTip());
    }
    sums.w.forEach((n, k) => {
      if (ch >= 12) S("text", { x: left + W * cw + 6, y: top + k * ch + ch / 2 + 3.5, class: "hf-sub" }, svg, fmtBytes(n));
    });
    if (cw >= 58)
      sums.r.forEach((n, k) =>
        S("text", { x: left + k * cw + cw / 2, y: top + R * ch + 14, "text-anchor": "middle", class: "hf-sub" }, svg, fmtBytes(n)),
      );
    S(
      "text",
      { x: left + W * cw + 6, y: top + R * ch + 14, class: "hf-fg", "font-weight": 600 },
      svg,
      fmtBytes(sums.r.reduce((a, b) => a + b, 0)),
    );
    let at = -1;
    const show = () => {
      cells.forEach((c, i) => c.g.firstChild.classList.toggle("hf-current", i === at));
      const c = cells[at],
        b = c.g.getBoundingClientRect();
      f.showTip(b.left + b.width / 2, b.bottom - 8, `${edge.writers[c.w].label} → ${edge.readers[c.r].label}`, c.info, true);
    };
    const step = (dx, dy) => {
      if (at < 0) {
        at = 0;
        return;
      }
      const here = cells[at],
        far = (c) => Math.abs(c.w - here.w) + Math.abs(c.r - here.r);
      const there = cells
        .filter((c) => (dx ? Math.sign(c.r - here.r) === dx && c.w === here.w : Math.sign(c.w - here.w) === dy && c.r === here.r))
        .sort((a, b) => far(a) - far(b));
      if (there.length) at = cells.indexOf(there[0]);
    };
    keyboard(host, {
      step,
      show,
      keys: {
        Escape: () => {
          f.hideTip();
          open(null);
          f.host.focus();
        },
      },
    });
    host.addEventListener("blur", () => f.hideTip());
    const key = H("div", { class: "hf-legend" }, host);
    const sample = (color, dashes) => (s) =>
      S(
        "rect",
        {
          x: 1,
          y: 1,
          width: 14,
          height: 9,
          rx: 2,
          fill: edge.predicted ? hatches(s)(color) : shade(color, 0.3),
          stroke: color,
          "stroke-dasharray": dashes,
        },
        s,
      );
    if (edge.cells.some((c) => c[4] < c[3]))
      swatch(
        key,
        edge.kind === "weights" ? "same node: mapped, then copied into boxes" : "same node: mapped, no copy",
        sample(MAPPED, null),
      );
    if (edge.cells.some((c) => c[4])) swatch(key, "⇄ across the network", sample(NETWORK, "3 2"));
    if (cells.length < W * R)
      swatch(key, "nothing", (s) => S("rect", { x: 1, y: 1, width: 14, height: 9, class: "hf-panel hf-grid" }, s));
  }

  // ---- keyboard: up and down within a column of boxes, left and right between columns
  function step(dx, dy) {
    if (!marks.length) return;
    if (current < 0) {
      current = 0;
      return;
    }
    const here = marks[current],
      xs = [...new Set(marks.map((m) => m.x))].sort((a, b) => a - b);
    if (dy) {
      const column = marks.filter((m) => m.x === here.x).sort((a, b) => a.y - b.y),
        next = column[column.indexOf(here) + dy];
      if (next) current = marks.indexOf(next);
    }
    const x = dx ? xs[xs.indexOf(here.x) + dx] : undefined;
    if (x !== undefined) {
      const near = marks.filter((m) => m.x === x).sort((a, b) => Math.abs(a.y - here.y) - Math.abs(b.y - here.y))[0];
      current = marks.indexOf(near);
    }
  }
  function show() {
    mark_();
    const m = marks[current];
    if (!m) return;
    m.node.scrollIntoView({ block: "nearest", inline: "nearest" });
    const b = m.node.getBoundingClientRect();
    point(current, b.left + b.width / 2, b.bottom, true);
  }
  const enter = () => {
    const m = marks[current];
    if (m?.edge) {
      f.hideTip();
      open(m.edge);
    }
  };
  keyboard(f.host, {
    step,
    show,
    keys: {
      Enter: enter,
      " ": enter,
      Escape: () => {
        leave();
        open(null);
      },
    },
  });
  f.host.addEventListener("blur", leave);

  const request = coalesced(draw);
  draw();
  model.on("change:view", request);
  return () => {
    model.off("change:view", request);
    f.leave();
  };
}
export default { render };
