// What a plan looks like: pools with their roles and memory, the step as predicted, and the plans that lost.
// Shared by plan and what_if.
import {
  alpha,
  fitText,
  fmtBytes,
  fmtCount,
  fmtSeconds,
  fmtShare,
  freshId,
  H,
  hatches,
  isMissing,
  S,
  shade,
  shorten,
  swatch,
} from "./core.js";

const PLAN_LEFT = 118,
  PLAN_RIGHT = 76,
  MEMORY_WIDTH = 190,
  NARROW = 760,
  GREY = "#8b949e",
  CALL_HEIGHT = 20,
  PARTS_HEIGHT = 8;
const PART_TONES = { prefill: 0.3, decode: -0.05, forward: 0.22, backward: -0.12, optimizer: -0.35 };
const MOVES = ["reshard", "sync", "export", "export_weights", "fetch", "onload", "offload"],
  MOVE_COLOR = "#d64545";
export const fmtMoney = (x) =>
  isMissing(x) ? null : x === 0 ? "0" : Math.abs(x) >= 100 ? fmtCount(Math.round(x)) : x.toFixed(Math.abs(x) >= 1 ? 2 : 4);
// steps of plans differ by little: minutes would hide it
export const fmtStep = (s) => (!isMissing(s) && s >= 120 && s < 6000 ? s.toFixed(1) + " s" : fmtSeconds(s));
const bandText = (c) => (isMissing(c.low_s) || isMissing(c.high_s) ? null : `${fmtStep(c.low_s)} to ${fmtStep(c.high_s)}`);

// draws into `host`; `draw(view)` shows a view, keeping which of its plans is looked at where that plan is still there
export function planBoard(f, host) {
  const pools = H("div", { class: "hf-plan-pools" }, host),
    line = H("div", { class: "hf-plan-step" }, host);
  const table = H("div", { class: "hf-plan-table", style: "overflow-x:auto" }, host),
    words = H("div", { class: "hf-plan-words" }, host),
    calls = H("details", {}, host);
  H("summary", {}, calls, "Calls of the step");
  const callsBody = H("div", {}, calls);
  let view = null,
    chosen = 0,
    current = -1,
    marks = [],
    width = 0;
  const choice = () => view.choices[chosen];
  const color = (role) => (view.roles[role] ? view.roles[role].color : GREY);
  const wide = () => Math.max(520, Math.min(1180, f.root.clientWidth - 16 || 900));

  function addMark(node, heading, rows) {
    const i = marks.push({ node, heading, rows }) - 1;
    node.classList.add("hf-mark");
    node.addEventListener("pointermove", (ev) => point(i, ev.clientX, ev.clientY, false));
    node.addEventListener("pointerleave", () => f.hideTip());
  }
  function point(i, x, y, spoken) {
    f.showTip(x, y, marks[i].heading, marks[i].rows, spoken);
  }

  // ---- pools: devices, roles, memory
  function nodesOf(devices) {
    // [[number of the node, devices of it that are meant], ...]
    const found = [];
    let first = 0;
    view.node_sizes.forEach((size, node) => {
      const here = devices.reduce((n, [a, b]) => n + Math.max(0, Math.min(b, first + size) - Math.max(a, first)), 0);
      if (here) found.push([node, here, size]);
      first += size;
    });
    return found;
  }
  function devicesSvg(g, pool, x, y, room, side) {
    // squares node by node; returns the height
    const colors = pool.roles.map((r) => color(r.role)),
      gap = side > 4 ? 1 : 0;
    const fill = colors.length ? stripesOf(g, colors) : null;
    const block = S("g", { class: "hf-pool-devices", "data-pool": pool.name, "data-devices": pool.num_devices }, g);
    let cx = x,
      cy = y;
    for (const [, count, size] of nodesOf(pool.devices)) {
      if (cx > x && cx + size * (side + gap) > x + room) {
        cx = x;
        cy += side + 3;
      }
      if (side < 4)
        S(
          "rect",
          { x: cx, y: cy, width: Math.max(1, count * side - 1), height: side, ...(fill ? { fill } : { class: "hf-idlefill" }) },
          block,
        );
      else
        for (let i = 0; i < count; i++)
          S(
            "rect",
            { x: cx + i * (side + gap), y: cy, width: side, height: side, ...(fill ? { fill } : { class: "hf-idlefill" }) },
            block,
          );
      cx += size * (side + gap) + 4;
    }
    addMark(block, pool.roles.length ? `pool ${pool.name}` : "idle", [
      ["devices", `${fmtCount(pool.num_devices)}: ${pool.numbers}`],
      ["nodes", fmtCount(nodesOf(pool.devices).length)],
      ...pool.roles.map((r) => [r.name, r.layout]),
    ]);
    return cy + side - y;
  }
  function stripesOf(g, colors) {
    // one device holds a part of every role of its pool
    const id = freshId(),
      made = S("linearGradient", { id, x1: 0, y1: 0, x2: 0, y2: 1 }, S("defs", {}, g));
    colors.forEach((c, i) => {
      for (const at of [i, i + 1]) S("stop", { offset: at / colors.length, "stop-color": c }, made);
    });
    return `url(#${id})`;
  }
  function memorySvg(g, hatch, pool, x, y) {
    const m = pool.memory,
      scale = MEMORY_WIDTH / (view.memory_scale_bytes * 1.04),
      bar = S("g", { class: "hf-plan-memory", "data-pool": pool.name, "data-bytes": m.asked_bytes }, g);
    S("rect", { x, y, width: MEMORY_WIDTH, height: 12, rx: 2, class: "hf-panel" }, bar);
    let at = x;
    const rows = [];
    for (const p of m.parts) {
      rows.push([p.label, fmtBytes(p.bytes)]);
      if (isMissing(p.bytes)) continue;
      const w = p.bytes * scale,
        c = p.role < 0 ? GREY : color(p.role);
      S(
        "rect",
        {
          x: at,
          y,
          width: Math.max(0.5, w),
          height: 12,
          fill: hatch(c),
          stroke: c,
          "stroke-width": 0.6,
          class: "hf-predicted",
          "data-part": p.label,
        },
        bar,
      );
      at += w;
    }
    if (!isMissing(m.exists_bytes)) {
      const lx = x + m.exists_bytes * scale;
      S("line", { x1: lx, x2: lx, y1: y - 3, y2: y + 15, class: "hf-edge", "stroke-width": 1.6 }, bar);
    }
    const over = !isMissing(m.asked_bytes) && !isMissing(m.exists_bytes) && m.asked_bytes > m.exists_bytes;
    const text = isMissing(m.asked_bytes)
      ? "memory not predicted"
      : fmtBytes(m.asked_bytes) + (isMissing(m.exists_bytes) ? "" : ` of ${fmtBytes(m.exists_bytes)}`) + (over ? ", too much" : "");
    S("text", { x, y: y + 24, "font-size": 10, class: "hf-sub" }, bar, text);
    addMark(bar, `pool ${pool.name}: memory of its fullest device (predicted)`, [
      ...rows,
      ["in all, at most", fmtBytes(m.asked_bytes)],
      ["the device has", fmtBytes(m.exists_bytes)],
    ]);
  }
  function drawPools() {
    const c = choice(),
      all = view.node_sizes.reduce((a, b) => a + b, 0),
      side = all <= 32 ? 13 : all <= 256 ? 8 : all <= 1024 ? 5 : 3;
    const blocks = Math.max(130, Math.min(390, width * 0.34)),
      rolesAt = PLAN_LEFT + blocks + 14,
      narrow = width < NARROW, // memory then stands below the devices, and layouts have its place
      memoryAt = narrow ? PLAN_LEFT : width - MEMORY_WIDTH - 4,
      room = (narrow ? width : memoryAt) - rolesAt - 10;
    const svg = S("svg", {
      width,
      height: 10,
      role: "img",
      "font-size": 11,
      "aria-label": c.pools
        .map((p) => `pool ${p.name}, ${p.num_devices} devices: ${p.roles.map((r) => `${r.name} ${r.layout}`).join(", ")}`)
        .join("; "),
    });
    const hatch = hatches(svg);
    let y = 4;
    for (const pool of c.pools) {
      const g = S("g", { class: "hf-plan-pool", "data-pool": pool.name }, svg),
        back = S("rect", { x: 0, y, width, height: 10, rx: 5, class: "hf-paper hf-grid" }, g);
      S("text", { x: 8, y: y + 17, "font-weight": 600, class: "hf-fg" }, g, shorten(pool.title, 18));
      S(
        "text",
        { x: 8, y: y + 31, "font-size": 10, class: "hf-sub" },
        g,
        `${fmtCount(pool.num_devices)} device${pool.num_devices === 1 ? "" : "s"}`,
      );
      const tall = devicesSvg(g, pool, PLAN_LEFT, y + 8, blocks, side);
      pool.roles.forEach((r, i) => {
        S("rect", { x: rolesAt, y: y + 8 + 16 * i, width: 10, height: 10, rx: 2, fill: color(r.role) }, g);
        const t = S("text", { x: rolesAt + 15, y: y + 17 + 16 * i, class: "hf-fg" }, g);
        S("tspan", { "font-weight": 600 }, t, shorten(r.name, 20));
        S(
          "tspan",
          { class: "hf-sub", "font-size": 10.5, dx: 7 },
          t,
          shorten(r.layout, Math.max(6, Math.floor((room - 15) / 5.6) - Math.min(20, r.name.length) - 3)),
        );
      });
      if (!pool.roles.length) S("text", { x: rolesAt, y: y + 17, "font-style": "italic", class: "hf-sub" }, g, "nothing runs here");
      const below = narrow ? tall + 7 : 0;
      if (pool.memory) memorySvg(g, hatch, pool, memoryAt, y + 9 + below);
      const height = Math.max(38, tall + 16, 14 + 16 * pool.roles.length, pool.memory ? 42 + below : 0);
      back.setAttribute("height", height);
      y += height + 5;
    }
    svg.setAttribute("height", y);
    svg.setAttribute("viewBox", `0 0 ${width} ${y}`);
    pools.replaceChildren(svg);
  }

  // ---- the step
  function drawStep() {
    const c = choice(),
      known = c.calls.filter((q) => !isMissing(q.start_s) && !isMissing(q.seconds)),
      X = (s) => PLAN_LEFT + (s / view.scale_s) * (width - PLAN_LEFT - PLAN_RIGHT);
    const lanes = [...new Set(known.map((q) => q.lane))].sort((a, b) => a - b),
      bands = bandsOf(known),
      top = 4 + 15 * (bands.length ? 1 + Math.max(...bands.map((b) => b.row)) : 0);
    const laneHeight = CALL_HEIGHT + PARTS_HEIGHT + 5,
      height = top + lanes.length * laneHeight + 34;
    const svg = S("svg", {
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "font-size": 11,
      "aria-label": `The step as predicted: ${known.map((q) => `${q.call} ${fmtSeconds(q.seconds)}`).join(", ")}`,
    });
    const hatch = hatches(svg);
    for (const b of bands) {
      const p = view.phase_colors[b.phase] || GREY,
        y = 2 + 15 * b.row,
        w = Math.max(1, X(b.end) - X(b.start));
      S("rect", { x: X(b.start), y, width: w, height: 12, fill: alpha(p, 0.2) }, svg);
      S("rect", { x: X(b.start), y: y + 11, width: w, height: 2, fill: p }, svg);
      S("text", { x: X(b.start) + 4, y: y + 9.5, "font-size": 10, class: "hf-sub" }, svg, fitText(b.phase, w));
    }
    lanes.forEach((lane, i) => {
      const y = top + i * laneHeight;
      S("text", { x: 8, y: y + 14, class: "hf-fg" }, svg, shorten(c.lanes[lane], 18));
      if (!isMissing(c.step_s))
        S(
          "rect",
          {
            x: X(0),
            y,
            width: Math.max(0, X(c.step_s) - X(0)),
            height: CALL_HEIGHT + PARTS_HEIGHT + 1,
            class: "hf-idlefill",
            "fill-opacity": 0.55,
          },
          svg,
        );
    });
    for (const q of known) {
      const y = top + lanes.indexOf(q.lane) * laneHeight,
        w = Math.max(1, X(q.start_s + q.seconds) - X(q.start_s)),
        g = S("g", { class: "hf-plan-call hf-predicted", "data-row": q.row, "data-call": q.call, "data-seconds": q.seconds }, svg);
      S("rect", { x: X(q.start_s), y, width: w, height: CALL_HEIGHT, rx: 2, class: "hf-paper" }, g);
      S("rect", { x: X(q.start_s), y, width: w, height: CALL_HEIGHT, rx: 2, fill: hatch(color(q.role)), stroke: color(q.role) }, g);
      for (const p of q.parts) {
        const c2 = MOVES.includes(p.name) ? MOVE_COLOR : shade(color(q.role), PART_TONES[p.name] || 0);
        if (!isMissing(p.start_s) && !isMissing(p.seconds))
          S(
            "rect",
            {
              x: X(p.start_s),
              y: y + CALL_HEIGHT + 1,
              width: Math.max(0.8, X(p.start_s + p.seconds) - X(p.start_s)),
              height: PARTS_HEIGHT,
              fill: hatch(c2),
              stroke: c2,
              "stroke-width": 0.6,
              "data-part": p.name,
            },
            g,
          );
      }
      const text = fitText(q.call, w);
      if (text) {
        S("rect", { x: X(q.start_s) + 2, y: y + 4, width: text.length * 5.8 + 4, height: 12, class: "hf-paper" }, g);
        S("text", { x: X(q.start_s) + 4, y: y + 14, "font-size": 10, class: "hf-fg" }, g, text);
      }
      addMark(g, `${q.call} (predicted)`, [
        ["row", String(q.row)],
        ["pool", c.lanes[q.lane]],
        ["phase", q.phase || "–"],
        ["start", fmtSeconds(q.start_s)],
        ["seconds", fmtSeconds(q.seconds)],
        ["of the step", isMissing(c.step_s) || !c.step_s ? null : fmtShare(q.seconds / c.step_s)],
        ...q.parts.map((p) => [p.name, fmtSeconds(p.seconds)]),
      ]);
    }
    const axis = height - 30;
    S("line", { x1: X(0), x2: width - PLAN_RIGHT, y1: axis, y2: axis, class: "hf-grid" }, svg);
    S("text", { x: X(0), y: axis + 22, "font-size": 10, class: "hf-sub" }, svg, "0 s");
    if (!isMissing(c.step_s)) {
      whisker(svg, c, X, axis, 5);
      const end = bandText(c),
        x = X(c.step_s);
      S(
        "text",
        {
          x: Math.min(x, width - 6),
          y: axis + 22,
          "text-anchor": x > width * 0.6 ? "end" : "middle",
          "font-size": 10,
          class: "hf-fg",
        },
        svg,
        `${fmtStep(c.step_s)}${end ? ` (${end})` : ""}`,
      );
    }
    line.replaceChildren(svg);
  }
  function bandsOf(known) {
    const found = [];
    for (const phase of new Set(known.map((q) => q.phase).filter(Boolean))) {
      const mine = known.filter((q) => q.phase === phase),
        start = Math.min(...mine.map((q) => q.start_s)),
        end = Math.max(...mine.map((q) => q.start_s + q.seconds));
      const row = [0, 1, 2, 3].find((r) => !found.some((b) => b.row === r && b.start < end - 1e-9 && start < b.end - 1e-9)) || 0;
      found.push({ phase, start, end, row });
    }
    return found;
  }
  function whisker(svg, c, X, y, h) {
    // the seconds as a dot, their band as an error bar
    if (!isMissing(c.low_s) && !isMissing(c.high_s)) {
      S("line", { x1: X(c.low_s), x2: X(c.high_s), y1: y, y2: y, class: "hf-edge hf-band", "stroke-width": 1.6 }, svg);
      for (const s of [c.low_s, c.high_s])
        S("line", { x1: X(s), x2: X(s), y1: y - h, y2: y + h, class: "hf-edge", "stroke-width": 1.2 }, svg);
    }
    S("circle", { cx: X(c.step_s), cy: y, r: 3, class: "hf-paper hf-edge", "stroke-width": 1.4 }, svg);
  }

  // ---- the plans that lost
  function drawTable() {
    const t = H("table", {}),
      head = H("tr", {}, H("thead", {}, t)),
      body = H("tbody", {}, t);
    const priced = view.choices.some((c) => !isMissing(c.dollars_step)),
      run = view.choices.some((c) => !isMissing(c.dollars_run));
    for (const [i, word] of [
      "plan",
      "pools",
      "a step takes",
      "",
      ...(priced ? ["a step costs"] : []),
      ...(run ? [`${view.steps} steps cost`] : []),
      "why not",
    ].entries())
      H("th", { scope: "col", class: i < 2 || word === "why not" ? "hf-left" : null }, head, word);
    const barWidth = width < NARROW ? 80 : 130,
      X = (s) => 3 + (s / view.scale_s) * (barWidth - 6);
    view.choices.forEach((c, i) => {
      const row = H(
        "tr",
        {
          class: "hf-plan-row",
          "data-row": i,
          "aria-current": i === chosen ? "true" : null,
          style: "cursor:pointer" + (i === chosen ? ";background:var(--hf-panel)" : ""),
        },
        body,
      );
      const b = H(
        "button",
        {
          type: "button",
          "aria-pressed": String(i === chosen),
          "aria-label": `show plan ${i + 1}`,
          "data-lm-suppress-shortcuts": "true",
        },
        H("td", { class: "hf-left" }, row),
        String(i + 1),
      );
      row.onclick = () => select(i, b === document.activeElement);
      H("td", { class: "hf-wrap hf-left", style: "max-width:330px" }, row, c.text);
      H("td", { class: "hf-num" + (isMissing(c.step_s) ? " hf-missing" : "") }, row, fmtStep(c.step_s) || "–");
      const bar = S(
          "svg",
          {
            width: barWidth,
            height: 14,
            role: "img",
            "aria-label": bandText(c) || "no band",
            class: "hf-plan-bar",
            style: `min-width:${barWidth}px`,
          },
          H("td", {}, row),
        ),
        hatch = hatches(bar),
        main = view.roles.length ? "#3b76c4" : GREY;
      if (!isMissing(c.step_s)) {
        S(
          "rect",
          {
            x: 3,
            y: 3,
            width: Math.max(1, X(c.step_s) - 3),
            height: 8,
            rx: 1,
            fill: hatch(main),
            stroke: main,
            "stroke-width": 0.6,
            class: "hf-predicted",
          },
          bar,
        );
        whisker(bar, c, X, 7, 4);
      }
      addMark(bar, `plan ${i + 1}`, [
        ["a step takes", fmtStep(c.step_s)],
        ["band", bandText(c)],
        ["too close to call", c.close ? "yes" : "no"],
      ]);
      if (priced) H("td", isMissing(c.dollars_step) ? { class: "hf-missing" } : {}, row, fmtMoney(c.dollars_step) || "–");
      if (run) H("td", isMissing(c.dollars_run) ? { class: "hf-missing" } : {}, row, fmtMoney(c.dollars_run) || "–");
      H(
        "td",
        { class: "hf-wrap hf-left hf-why" },
        row,
        (c.close && i ? "too close to call. " : "") + (c.why || (i ? "" : "the plan")),
      );
    });
    table.replaceChildren(t);
  }
  function drawWords() {
    words.replaceChildren();
    if (view.close) H("p", { class: "hf-plan-close hf-busy", style: "margin:4px 0" }, words, view.close);
    for (const s of view.rejected) H("p", { class: "hf-plan-rejected", style: "margin:4px 0" }, words, s);
    if (view.sensitivity.length) {
      const ul = H("ul", { class: "hf-plan-sensitivity", style: "margin:4px 0;padding-left:20px" }, words);
      for (const s of view.sensitivity) H("li", {}, ul, s);
    }
    for (const text of [view.band_words, view.family, view.searched])
      if (text) H("p", { class: "hf-dim", style: "margin:4px 0" }, words, text);
    const legend = H("div", { class: "hf-legend" }, words),
      box = (extra) => (s) => S("rect", { x: 1, y: 1, width: 14, height: 9, rx: 2, ...extra }, s);
    for (const r of view.roles) swatch(legend, r.name, box({ fill: r.color }));
    swatch(legend, "predicted", (s) => box({ fill: hatches(s)("#77808a"), stroke: "#77808a" })(s));
    swatch(legend, "moving data", (s) => box({ fill: hatches(s)(MOVE_COLOR), stroke: MOVE_COLOR })(s));
    swatch(legend, "its pool waits", box({ class: "hf-idlefill" }));
    swatch(legend, "band of the prediction", (s) =>
      S("path", { d: "M1,6 h14 M1,2 v8 M15,2 v8", class: "hf-edge", fill: "none", "stroke-width": 1.4 }, s),
    );
    const c = choice(),
      t = H("table", {}),
      head = H("tr", {}, H("thead", {}, t)),
      body = H("tbody", {}, t);
    for (const [i, word] of ["call", "pool", "start", "seconds", "of the step", "its parts"].entries())
      H("th", { scope: "col", class: i < 2 || i > 4 ? "hf-left" : null }, head, word);
    for (const q of c.calls) {
      const row = H("tr", {}, body),
        cells = [
          q.call,
          c.lanes[q.lane],
          fmtSeconds(q.start_s),
          fmtSeconds(q.seconds),
          isMissing(q.seconds) || !c.step_s ? null : fmtShare(q.seconds / c.step_s),
          q.parts.map((p) => `${p.name} ${fmtSeconds(p.seconds) || "–"}`).join(", "),
        ];
      cells.forEach((x, i) =>
        H(
          "td",
          { class: (i < 2 || i > 4 ? "hf-left" : "") + (i > 4 ? " hf-wrap" : "") + (x === null ? " hf-missing" : "") },
          row,
          x === null ? "–" : x,
        ),
      );
    }
    callsBody.replaceChildren(t);
  }

  function drawAll() {
    width = wide();
    marks = [];
    for (const part of [pools, line, table, words, calls]) part.hidden = !view.choices.length;
    if (!view.choices.length) return;
    drawPools();
    drawStep();
    drawTable();
    drawWords();
    if (current >= marks.length) current = -1;
  }
  function select(i, focus) {
    if (i < 0 || i >= view.choices.length) return;
    chosen = i;
    current = -1;
    f.hideTip();
    drawAll();
    const c = choice();
    f.say(`plan ${i + 1}: ${c.text}, ${fmtStep(c.step_s) || "not predicted"}` + (c.why ? `. ${c.why}` : ""));
    if (focus) table.querySelectorAll("button")[i].focus();
  }
  return {
    draw(next) {
      const before = view?.choices[chosen] ? view.choices[chosen].text : null,
        at = chosen ? next.choices.findIndex((c) => c.text === before) : 0;
      chosen = Math.max(0, at);
      view = next;
      drawAll();
    },
    resized() {
      if (view && Math.abs(wide() - width) > 2) drawAll();
    },
    step(dx, dy) {
      if (!view.choices.length) return;
      if (dy) select(Math.max(0, Math.min(view.choices.length - 1, chosen + dy)), false);
      if (dx) current = Math.max(0, Math.min(marks.length - 1, current + dx));
    },
    show() {
      for (const m of marks) m.node.classList.remove("hf-current-mark");
      const m = marks[current];
      if (!m) return;
      const r = m.node.getBoundingClientRect();
      m.node.classList.add("hf-current-mark");
      point(current, r.left + r.width / 2, r.top + r.height / 2, true);
    },
  };
}
