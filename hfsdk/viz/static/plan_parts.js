// What a plan looks like: pools with their roles and memory, the step as predicted, and the plans that lost.
// Shared by plan and what_if.
import { group, hatched, hovered, legend, mark, paint, planned, roomOf, sample, tableOf } from "./chart.js";
import { alpha, fitText, fmtBytes, fmtCount, fmtSeconds, fmtShare, H, hatches, isMissing, S, shade, shorten } from "./core.js";

const PLAN_LEFT = 118,
  PLAN_RIGHT = 76,
  MEMORY_WIDTH = 190,
  NARROW = 760,
  GREY = "#8b949e",
  CALL_HEIGHT = 20,
  PARTS_HEIGHT = 8,
  LANE_HEIGHT = CALL_HEIGHT + PARTS_HEIGHT + 5;
const PART_TONES = { prefill: 0.3, decode: -0.05, forward: 0.22, backward: -0.12, optimizer: -0.35 };
const MOVES = ["reshard", "sync", "export", "export_weights", "fetch", "onload", "offload"],
  MOVE_COLOR = "#d64545";
export const fmtMoney = (x) =>
  isMissing(x) ? null : x === 0 ? "0" : Math.abs(x) >= 100 ? fmtCount(Math.round(x)) : x.toFixed(Math.abs(x) >= 1 ? 2 : 4);
// steps of plans differ by little: minutes would hide it
export const fmtStep = (s) => (!isMissing(s) && s >= 120 && s < 6000 ? s.toFixed(1) + " s" : fmtSeconds(s));
const bandText = (c) => (isMissing(c.low_s) || isMissing(c.high_s) ? null : `${fmtStep(c.low_s)} to ${fmtStep(c.high_s)}`);

const roleColor = (view, role) => (view.roles[role] ? view.roles[role].color : GREY);

// ---- layout of pools: devices, roles, memory
function poolsLayout(view, c, width) {
  const all = view.node_sizes.reduce((a, b) => a + b, 0),
    blocks = Math.max(130, Math.min(390, width * 0.34)),
    narrow = width < NARROW, // memory then stands below the devices, and layouts have its place
    memoryAt = narrow ? PLAN_LEFT : width - MEMORY_WIDTH - 4,
    rolesAt = PLAN_LEFT + blocks + 14,
    room = (narrow ? width : memoryAt) - rolesAt - 10,
    side = all <= 32 ? 13 : all <= 256 ? 8 : all <= 1024 ? 5 : 3,
    place = { width, blocks, narrow, memoryAt, rolesAt, room, side },
    marks = [];
  let y = 4;
  for (const pool of c.pools) {
    const { height, pool: one } = poolMark(view, pool, place, y, `pool ${marks.length}`);
    marks.push(one);
    y += height + 5;
  }
  const words = (p) => `pool ${p.name}, ${p.num_devices} devices: ${p.roles.map((r) => `${r.name} ${r.layout}`).join(", ")}`;
  return { width, height: y, words: c.pools.map(words).join("; "), marks };
}
function poolMark(view, pool, place, y, id) {
  const { width, narrow, memoryAt, rolesAt, room } = place,
    count = `${fmtCount(pool.num_devices)} device${pool.num_devices === 1 ? "" : "s"}`,
    { height: tall, marks: devices } = devicesLayout(view, pool, place, y + 8, id),
    below = narrow ? tall + 7 : 0;
  const height = Math.max(38, tall + 16, 14 + 16 * pool.roles.length, pool.memory ? 42 + below : 0);
  const roles = pool.roles.flatMap((r, i) => {
    const most = Math.max(6, Math.floor((room - 15) / 5.6) - Math.min(20, r.name.length) - 3),
      words = [
        mark("tspan", { "font-weight": 600 }, shorten(r.name, 20)),
        mark("tspan", { class: "hf-sub", "font-size": 10.5, dx: 7 }, shorten(r.layout, most)),
      ];
    return [
      mark("rect", { x: rolesAt, y: y + 8 + 16 * i, width: 10, height: 10, rx: 2, fill: roleColor(view, r.role) }),
      mark("text", { x: rolesAt + 15, y: y + 17 + 16 * i, class: "hf-fg" }, words),
    ];
  });
  const none = { x: rolesAt, y: y + 17, "font-style": "italic", class: "hf-sub" };
  return {
    height,
    pool: group({ class: "hf-plan-pool", "data-pool": pool.name }, [
      mark("rect", { x: 0, y, width, height, rx: 5, class: "hf-paper hf-grid" }),
      mark("text", { x: 8, y: y + 17, "font-weight": 600, class: "hf-fg" }, shorten(pool.title, 18)),
      mark("text", { x: 8, y: y + 31, "font-size": 10, class: "hf-sub" }, count),
      ...devices,
      ...roles,
      ...(pool.roles.length ? [] : [mark("text", none, "nothing runs here")]),
      ...(pool.memory ? [poolMemoryMark(view, pool, memoryAt, y + 9 + below)] : []),
    ]),
  };
}
// [[number of the node, devices of it that are meant, all of its devices], ...]
function nodesOf(view, devices) {
  const found = [];
  let first = 0;
  view.node_sizes.forEach((size, node) => {
    const here = devices.reduce((n, [a, b]) => n + Math.max(0, Math.min(b, first + size) - Math.max(a, first)), 0);
    if (here) found.push([node, here, size]);
    first += size;
  });
  return found;
}
// squares node by node, with a stripe for every role: one device holds a part of each
function devicesLayout(view, pool, { blocks: room, side }, y, id) {
  const x = PLAN_LEFT,
    colors = pool.roles.map((r) => roleColor(view, r.role)),
    look = colors.length ? { fill: { url: id } } : { class: "hf-idlefill" },
    gap = side > 4 ? 1 : 0,
    nodes = nodesOf(view, pool.devices),
    marks = [];
  let cx = x,
    cy = y;
  for (const [, count, size] of nodes) {
    if (cx > x && cx + size * (side + gap) > x + room) {
      cx = x;
      cy += side + 3;
    }
    if (side < 4) marks.push(mark("rect", { x: cx, y: cy, width: Math.max(1, count * side - 1), height: side, ...look }));
    else
      for (let i = 0; i < count; i++)
        marks.push(mark("rect", { x: cx + i * (side + gap), y: cy, width: side, height: side, ...look }));
    cx += size * (side + gap) + 4;
  }
  const rows = [
    ["devices", `${fmtCount(pool.num_devices)}: ${pool.numbers}`],
    ["nodes", fmtCount(nodes.length)],
    ...pool.roles.map((r) => [r.name, r.layout]),
  ];
  const name = { class: "hf-pool-devices hf-mark", "data-pool": pool.name, "data-devices": pool.num_devices },
    block = group(name, marks, { heading: pool.roles.length ? `pool ${pool.name}` : "idle", rows });
  return { height: cy + side - y, marks: [...(colors.length ? [stripesMark(id, colors)] : []), block] };
}
function stripesMark(id, colors) {
  const stops = colors.flatMap((c, i) => [i, i + 1].map((at) => mark("stop", { offset: at / colors.length, "stop-color": c })));
  const gradient = mark("linearGradient", { id: { id }, x1: 0, y1: 0, x2: 0, y2: 1 }, stops);
  return mark("defs", {}, [gradient]);
}
function poolMemoryMark(view, pool, x, y) {
  const m = pool.memory,
    scale = MEMORY_WIDTH / (view.memory_scale_bytes * 1.04),
    marks = [mark("rect", { x, y, width: MEMORY_WIDTH, height: 12, rx: 2, class: "hf-panel" })];
  let at = x;
  for (const p of m.parts) {
    if (isMissing(p.bytes)) continue;
    const w = p.bytes * scale,
      c = p.role < 0 ? GREY : roleColor(view, p.role),
      box = { x: at, y, width: Math.max(0.5, w), height: 12, fill: hatched(c), stroke: c, "stroke-width": 0.6 };
    marks.push(mark("rect", { ...box, class: "hf-predicted", "data-part": p.label }));
    at += w;
  }
  if (!isMissing(m.exists_bytes)) {
    const lx = x + m.exists_bytes * scale;
    marks.push(mark("line", { x1: lx, x2: lx, y1: y - 3, y2: y + 15, class: "hf-edge", "stroke-width": 1.6 }));
  }
  const over = !isMissing(m.asked_bytes) && !isMissing(m.exists_bytes) && m.asked_bytes > m.exists_bytes,
    of = isMissing(m.exists_bytes) ? "" : ` of ${fmtBytes(m.exists_bytes)}`,
    text = isMissing(m.asked_bytes) ? "memory not predicted" : fmtBytes(m.asked_bytes) + of + (over ? ", too much" : "");
  marks.push(mark("text", { x, y: y + 24, "font-size": 10, class: "hf-sub" }, text));
  const rows = [
    ...m.parts.map((p) => [p.label, fmtBytes(p.bytes)]),
    ["in all, at most", fmtBytes(m.asked_bytes)],
    ["the device has", fmtBytes(m.exists_bytes)],
  ];
  const name = { class: "hf-plan-memory hf-mark", "data-pool": pool.name, "data-bytes": m.asked_bytes };
  return group(name, marks, { heading: `pool ${pool.name}: memory of its fullest device (predicted)`, rows });
}

// ---- layout of the step
function stepLayout(view, c, width) {
  const known = c.calls.filter((q) => !isMissing(q.start_s) && !isMissing(q.seconds)),
    X = (s) => PLAN_LEFT + (s / view.scale_s) * (width - PLAN_LEFT - PLAN_RIGHT),
    lanes = [...new Set(known.map((q) => q.lane))].sort((a, b) => a - b),
    bands = phaseBands(known),
    top = 4 + 15 * (bands.length ? 1 + Math.max(...bands.map((b) => b.row)) : 0),
    height = top + lanes.length * LANE_HEIGHT + 34,
    yOf = (lane) => top + lanes.indexOf(lane) * LANE_HEIGHT;
  return {
    width,
    height,
    words: `The step as predicted: ${known.map((q) => `${q.call} ${fmtSeconds(q.seconds)}`).join(", ")}`,
    marks: [
      ...bands.flatMap((b) => planBandMarks(view, b, X)),
      ...lanes.flatMap((lane) => planLaneMarks(c, lane, yOf(lane), X)),
      ...known.map((q) => planCallMark(view, c, q, yOf(q.lane), X)),
      ...planAxisMarks(c, X, height - 30, width),
    ],
  };
}
// phases as bands above the lanes, each in the first row where it meets no other
function phaseBands(known) {
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
function planBandMarks(view, b, X) {
  const p = view.phase_colors[b.phase] || GREY,
    x = X(b.start),
    y = 2 + 15 * b.row,
    width = Math.max(1, X(b.end) - x);
  return [
    mark("rect", { x, y, width, height: 12, fill: alpha(p, 0.2) }),
    mark("rect", { x, y: y + 11, width, height: 2, fill: p }),
    mark("text", { x: x + 4, y: y + 9.5, "font-size": 10, class: "hf-sub" }, fitText(b.phase, width)),
  ];
}
function planLaneMarks(c, lane, y, X) {
  const label = mark("text", { x: 8, y: y + 14, class: "hf-fg" }, shorten(c.lanes[lane], 18));
  if (isMissing(c.step_s)) return [label];
  const box = { x: X(0), y, width: Math.max(0, X(c.step_s) - X(0)), height: CALL_HEIGHT + PARTS_HEIGHT + 1 };
  return [label, mark("rect", { ...box, class: "hf-idlefill", "fill-opacity": 0.55 })];
}
function planCallMark(view, c, q, y, X) {
  const x = X(q.start_s),
    w = Math.max(1, X(q.start_s + q.seconds) - x),
    own = roleColor(view, q.role),
    box = { x, y, width: w, height: CALL_HEIGHT, rx: 2 },
    text = fitText(q.call, w);
  const marks = [
    mark("rect", { ...box, class: "hf-paper" }),
    mark("rect", { ...box, fill: hatched(own), stroke: own }),
    ...q.parts
      .filter((p) => !isMissing(p.start_s) && !isMissing(p.seconds))
      .map((p) => {
        const tone = MOVES.includes(p.name) ? MOVE_COLOR : shade(own, PART_TONES[p.name] || 0),
          width = Math.max(0.8, X(p.start_s + p.seconds) - X(p.start_s)),
          look = { fill: hatched(tone), stroke: tone, "stroke-width": 0.6, "data-part": p.name };
        return mark("rect", { x: X(p.start_s), y: y + CALL_HEIGHT + 1, width, height: PARTS_HEIGHT, ...look });
      }),
  ];
  if (text)
    marks.push(
      mark("rect", { x: x + 2, y: y + 4, width: text.length * 5.8 + 4, height: 12, class: "hf-paper" }),
      mark("text", { x: x + 4, y: y + 14, "font-size": 10, class: "hf-fg" }, text),
    );
  const rows = [
    ["row", String(q.row)],
    ["pool", c.lanes[q.lane]],
    ["phase", q.phase || "–"],
    ["start", fmtSeconds(q.start_s)],
    ["seconds", fmtSeconds(q.seconds)],
    ["of the step", isMissing(c.step_s) || !c.step_s ? null : fmtShare(q.seconds / c.step_s)],
    ...q.parts.map((p) => [p.name, fmtSeconds(p.seconds)]),
  ];
  const name = { class: "hf-plan-call hf-predicted hf-mark", "data-row": q.row, "data-call": q.call, "data-seconds": q.seconds };
  return group(name, marks, { heading: `${q.call} (predicted)`, rows });
}
function planAxisMarks(c, X, y, width) {
  const marks = [
    mark("line", { x1: X(0), x2: width - PLAN_RIGHT, y1: y, y2: y, class: "hf-grid" }),
    mark("text", { x: X(0), y: y + 22, "font-size": 10, class: "hf-sub" }, "0 s"),
  ];
  if (isMissing(c.step_s)) return marks;
  const band = bandText(c),
    x = X(c.step_s),
    place = { x: Math.min(x, width - 6), y: y + 22, "text-anchor": x > width * 0.6 ? "end" : "middle", "font-size": 10 };
  const end = mark("text", { ...place, class: "hf-fg" }, `${fmtStep(c.step_s)}${band ? ` (${band})` : ""}`);
  return [...marks, ...whiskerMarks(c, X, y, 5), end];
}
// the seconds as a dot, their band as an error bar
function whiskerMarks(c, X, y, h) {
  const dot = mark("circle", { cx: X(c.step_s), cy: y, r: 3, class: "hf-paper hf-edge", "stroke-width": 1.4 });
  if (isMissing(c.low_s) || isMissing(c.high_s)) return [dot];
  const end = (s) => mark("line", { x1: X(s), x2: X(s), y1: y - h, y2: y + h, class: "hf-edge", "stroke-width": 1.2 }),
    band = { x1: X(c.low_s), x2: X(c.high_s), y1: y, y2: y, class: "hf-edge hf-band", "stroke-width": 1.6 };
  return [mark("line", band), end(c.low_s), end(c.high_s), dot];
}
// the seconds of a plan in its row of the table
function planBarMarks(view, c, barWidth) {
  if (isMissing(c.step_s)) return [];
  const X = (s) => 3 + (s / view.scale_s) * (barWidth - 6),
    main = view.roles.length ? "#3b76c4" : GREY,
    box = { x: 3, y: 3, width: Math.max(1, X(c.step_s) - 3), height: 8, rx: 1, fill: hatched(main), stroke: main };
  return [mark("rect", { ...box, "stroke-width": 0.6, class: "hf-predicted" }), ...whiskerMarks(c, X, 7, 4)];
}
function planLegend(view) {
  const waits = { d: "M1,6 h14 M1,2 v8 M15,2 v8", class: "hf-edge", fill: "none", "stroke-width": 1.4 };
  return [
    ...view.roles.map((r) => [r.name, [sample({ rx: 2, fill: r.color })]]),
    ["predicted", [planned("#77808a", { rx: 2 })]],
    ["moving data", [planned(MOVE_COLOR, { rx: 2 })]],
    ["its pool waits", [sample({ rx: 2, class: "hf-idlefill" })]],
    ["band of the prediction", [mark("path", waits)]],
  ];
}

// ---- draw; what has a tip is returned as [element, mark]
function drawPlanPart({ width, height, words, marks }, host) {
  const size = { width, height, viewBox: `0 0 ${width} ${height}` },
    svg = S("svg", { ...size, role: "img", "font-size": 11, "aria-label": words });
  const tips = paint(marks, svg, hatches(svg));
  host.replaceChildren(svg);
  return tips;
}
// the plans that lost; `select` shows another
function drawPlans(view, chosen, width, host, select) {
  const priced = view.choices.some((c) => !isMissing(c.dollars_step)),
    run = view.choices.some((c) => !isMissing(c.dollars_run)),
    costs = [...(priced ? ["a step costs"] : []), ...(run ? [`${view.steps} steps cost`] : [])],
    heads = ["plan", "pools", "a step takes", "", ...costs, "why not"],
    body = tableOf(null, heads, (k, word) => k < 2 || word === "why not"),
    barWidth = width < NARROW ? 80 : 130,
    money = (row, x) => H("td", isMissing(x) ? { class: "hf-missing" } : {}, row, fmtMoney(x) || "–");
  const tips = view.choices.map((c, i) => {
    const look = { style: "cursor:pointer" + (i === chosen ? ";background:var(--hf-panel)" : "") },
      row = H("tr", { class: "hf-plan-row", "data-row": i, "aria-current": i === chosen ? "true" : null, ...look }, body),
      pressed = { "aria-pressed": String(i === chosen), "aria-label": `show plan ${i + 1}`, "data-lm-suppress-shortcuts": "true" };
    const b = H("button", { type: "button", ...pressed }, H("td", { class: "hf-left" }, row), String(i + 1));
    row.onclick = () => select(i, b === document.activeElement);
    H("td", { class: "hf-wrap hf-left", style: "max-width:330px" }, row, c.text);
    H("td", { class: "hf-num" + (isMissing(c.step_s) ? " hf-missing" : "") }, row, fmtStep(c.step_s) || "–");
    const bar = drawPlanBar(view, c, barWidth, H("td", {}, row));
    if (priced) money(row, c.dollars_step);
    if (run) money(row, c.dollars_run);
    const why = (c.close && i ? "too close to call. " : "") + (c.why || (i ? "" : "the plan"));
    H("td", { class: "hf-wrap hf-left hf-why" }, row, why);
    const rows = [
      ["a step takes", fmtStep(c.step_s)],
      ["band", bandText(c)],
      ["too close to call", c.close ? "yes" : "no"],
    ];
    return [bar, { tip: { heading: `plan ${i + 1}`, rows } }];
  });
  host.replaceChildren(body.parentNode);
  return tips;
}
function drawPlanBar(view, c, width, host) {
  const words = { role: "img", "aria-label": bandText(c) || "no band", class: "hf-plan-bar hf-mark" },
    svg = S("svg", { width, height: 14, ...words, style: `min-width:${width}px` }, host);
  paint(planBarMarks(view, c, width), svg, hatches(svg));
  return svg;
}
function drawPlanWords(view, host) {
  host.replaceChildren();
  const small = { style: "margin:4px 0" };
  if (view.close) H("p", { class: "hf-plan-close hf-busy", ...small }, host, view.close);
  for (const s of view.rejected) H("p", { class: "hf-plan-rejected", ...small }, host, s);
  if (view.sensitivity.length) {
    const ul = H("ul", { class: "hf-plan-sensitivity", style: "margin:4px 0;padding-left:20px" }, host);
    for (const s of view.sensitivity) H("li", {}, ul, s);
  }
  for (const text of [view.band_words, view.family, view.searched]) if (text) H("p", { class: "hf-dim", ...small }, host, text);
  legend(host, planLegend(view));
}
function drawPlanCalls(c, host) {
  const isLeft = (i) => i < 2 || i > 4,
    body = tableOf(null, ["call", "pool", "start", "seconds", "of the step", "its parts"], isLeft);
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
    cells.forEach((x, i) => {
      const names = (isLeft(i) ? "hf-left" : "") + (i > 4 ? " hf-wrap" : "") + (x === null ? " hf-missing" : "");
      H("td", { class: names }, row, x === null ? "–" : x);
    });
  }
  host.replaceChildren(body.parentNode);
}

// draws into `host`; `draw(view)` shows a view, keeping which of its plans is looked at where that plan is still there
export function planBoard(f, host) {
  const pools = H("div", { class: "hf-plan-pools" }, host),
    line = H("div", { class: "hf-plan-step" }, host),
    table = H("div", { class: "hf-plan-table", style: "overflow-x:auto" }, host),
    words = H("div", { class: "hf-plan-words" }, host),
    calls = H("details", {}, host);
  H("summary", {}, calls, "Calls of the step");
  const callsBody = H("div", {}, calls);
  let view = null,
    chosen = 0,
    current = -1,
    marks = [],
    width = 0;
  const choice = () => view.choices[chosen],
    wide = () => roomOf(f, 520, 1180);

  function drawAll() {
    width = wide();
    marks = [];
    for (const part of [pools, line, table, words, calls]) part.hidden = !view.choices.length;
    if (!view.choices.length) return;
    marks = [
      ...drawPlanPart(poolsLayout(view, choice(), width), pools),
      ...drawPlanPart(stepLayout(view, choice(), width), line),
      ...drawPlans(view, chosen, width, table, select),
    ];
    marks.forEach(([node], i) => hovered(f, node, (x, y) => point(i, x, y, false)));
    drawPlanWords(view, words);
    drawPlanCalls(choice(), callsBody);
    if (current >= marks.length) current = -1;
  }
  function point(i, x, y, spoken) {
    const { heading, rows } = marks[i][1].tip;
    f.showTip(x, y, heading, rows, spoken);
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
      for (const [node] of marks) node.classList.remove("hf-current-mark");
      if (!marks[current]) return;
      const [node] = marks[current],
        r = node.getBoundingClientRect();
      node.classList.add("hf-current-mark");
      point(current, r.left + r.width / 2, r.top + r.height / 2, true);
    },
  };
}
