// Who lives where: nodes > devices as columns, in each a stack of shards and its memory, planned against measured.
import { group, hatched, legend, mark, paint, planned, redrawn, sample } from "./chart.js";
import { alpha, coalesced, fitText, fmtBytes, frame, H, hatches, isMissing, keyboard, S, shorten, titledSvg } from "./core.js";

const AXES = ["tp", "pp", "dp"],
  DASHES = { tp: null, pp: "5 2", dp: "1.5 2.5" },
  GREY = "#77808a";
// the one axis along which two ranks differ, or null
function along(a, b) {
  const differ = AXES.filter((k) => a[k] !== b[k]);
  return differ.length === 1 ? differ[0] : null;
}

// ---- layout: marks of every node; the tip of a shard has {role, owner, col, shard, device, heading}, that of a process {col, heading, rows}
function layout(view) {
  let col = 0;
  return view.nodes.flatMap((node, n) => {
    const box = view.geometry.nodes[n];
    return [
      ...nodeMarks(view, node, box),
      ...node.devices.flatMap((device, d) => deviceMarks(view, device, placeOf(view, box, d, col++))),
    ];
  });
}
function placeOf({ geometry: L, density }, box, d, col) {
  const pad = density === "tiny" ? 3 : 6;
  return { x: box.x + L.gap + d * (L.column + L.gap), y: box.y + L.top, pad, col, inner: L.column - 2 * pad, box };
}
function nodeMarks({ geometry: L }, node, box) {
  const name = shorten(node.name, Math.floor((box.width - 16) / 7.4));
  const pools = node.pools.map((p) => {
    const x = box.x + L.gap + p.first * (L.column + L.gap),
      width = p.num_devices * (L.column + L.gap) - L.gap,
      text = shorten(p.text, Math.max(2, Math.floor(width / 5.2)));
    return group({ class: "hf-pool", "data-pool": p.pool }, [
      mark("title", {}, `pool ${p.pool}`),
      mark("text", { x: x + 2, y: box.y + 29, "font-size": 10, class: "hf-sub" }, text),
      mark("rect", { x, y: box.y + 32.5, width, height: 2, class: "hf-sub" }),
    ]);
  });
  return [
    mark("rect", { x: box.x, y: box.y, width: box.width, height: box.height, rx: 6, class: "hf-panel hf-grid" }),
    mark("text", { x: box.x + 8, y: box.y + 14, "font-weight": 600, class: "hf-fg" }, name),
    ...pools,
  ];
}
function deviceMarks(view, device, g) {
  const { geometry: L, density } = view,
    full = density === "full",
    tiny = density === "tiny",
    left = g.x + g.pad,
    frameOf = { x: g.x, y: g.y, width: L.column, height: g.box.height - L.top - L.gap, rx: 4 },
    name = tiny ? String(device.number) : `device ${device.number}`,
    small = { "font-size": 9.5, class: "hf-sub" };
  const marks = [
    mark("rect", { ...frameOf, class: "hf-paper hf-grid hf-device", "data-device": device.number }),
    mark("text", { x: left, y: g.y + 13, class: "hf-fg", "font-size": tiny ? 9 : 11 }, name),
  ];
  if (full) {
    const process = device.pid !== null ? `process ${device.pid}` : view.predicted ? "" : "no process";
    marks.push(mark("text", { x: g.x + L.column - g.pad, y: g.y + 13, "text-anchor": "end", ...small }, device.name));
    marks.push(mark("text", { x: left, y: g.y + 25, ...small }, process));
  }
  let y = g.y + L.header;
  for (const shard of device.shards) {
    marks.push(shardMark(view, device, shard, g, y));
    y += L.card + L.card_gap;
  }
  const none = { x: left, y: y + 12, "font-size": 10, "font-style": "italic", class: "hf-sub" };
  if (!device.shards.length) marks.push(mark("text", none, tiny ? "–" : "no role here"));
  return [...marks, ...memoryMarks(view, device, g, g.box.y + L.memory_top)];
}
// solid, or hollow for a shadow
const barMark = (x, y, width, height, role) =>
  role.shadow_of
    ? mark("rect", { x: x + 0.5, y: y + 0.5, width, height: height - 1, rx: 1.5, class: "hf-paper", stroke: role.color })
    : mark("rect", { x, y, width, height, rx: 1.5, fill: role.color });
const cardLook = (role) => ({
  fill: alpha(role.color, 0.16),
  stroke: role.color,
  "stroke-dasharray": role.state === "declared" ? "4 3" : null,
});
function shardMark(view, device, shard, g, y) {
  const { card } = view.geometry,
    role = view.roles[shard.role],
    tiny = view.density === "tiny",
    words = view.density === "full" ? fullWords : shortWords,
    x = g.x + g.pad;
  const marks = [
    mark("rect", { x, y, width: g.inner, height: card, rx: 3, ...cardLook(role) }),
    barMark(x, y, tiny ? 3 : 5, card, role),
    ...words(shard, role, { tx: x + (tiny ? 6 : 10), right: x + g.inner - 4, y, card, tiny, room: g.inner }),
  ];
  const tip = { role: role.name, owner: role, col: g.col, shard, device, heading: `${role.name} on device ${device.number}` };
  return group({ "data-row": shard.row, "data-role": role.name, class: "hf-shard hf-mark" }, marks, tip);
}
function fullWords(shard, role, { tx, right, y }) {
  const name = [mark("tspan", { "font-weight": 600 }, shorten(role.name, 15))],
    end = (top) => ({ x: right, y: top, "text-anchor": "end", "font-size": 10, class: "hf-sub" }),
    room = Math.floor((right - tx) / 5.25) - (shard.note || "").length - 1;
  if (role.lora && role.name.length < 10)
    name.push(mark("tspan", { "font-size": 9.5, class: "hf-sub" }, ` ${role.lora.replace(/ rank (\d+).*/, " $1")}`));
  return [
    mark("text", { x: tx, y: y + 14, class: "hf-fg" }, name),
    mark("text", end(y + 14), role.state === "declared" ? "declared" : `rank ${shard.rank}`),
    mark("text", { x: tx, y: y + 28, "font-size": 10, class: "hf-fg" }, shorten(shard.place, Math.max(4, room))),
    ...(shard.note ? [mark("text", end(y + 28), shard.note)] : []),
  ];
}
function shortWords(shard, role, { tx, right, y, card, tiny, room }) {
  const name = tiny ? role.letter : fitText(role.short, room - shard.short.length * 5.4),
    end = { x: right, y: y + card - 4, "text-anchor": "end", "font-size": tiny ? 8.5 : 9.5, class: "hf-sub" };
  return [
    mark("text", { x: tx, y: y + card - 4, "font-size": tiny ? 8.5 : 10, class: "hf-fg" }, name),
    mark("text", end, shard.short),
  ];
}

// ---- layout: a device's memory, planned above measured
function memoryMarks(view, device, g, top) {
  const full = view.density === "full",
    m = { x: g.x + g.pad, h: full ? 9 : 5, scale: g.inner / Math.max(1, view.memory_scale_bytes) },
    known = device.memory_bytes !== null,
    small = { "font-size": 9.5, class: "hf-sub" },
    marks = [];
  if (full) {
    const all = device.shards.reduce((n, s) => n + (s.planned_bytes || 0), 0),
      end = { x: m.x + g.inner, y: top + 9, "font-size": 9.5, "text-anchor": "end", class: "hf-sub" };
    marks.push(mark("text", { x: m.x, y: top + 9, ...small }, "predicted " + fmtBytes(all)));
    if (known) marks.push(mark("text", end, "of " + fmtBytes(device.memory_bytes)));
  }
  let y = top + (full ? 13 : 0);
  marks.push(
    ...laneMarks(view, device, g, m, y, "planned_bytes", (role) => ({ fill: hatched(role.color), stroke: role.color })).marks,
  );
  if (known) {
    const x = m.x + Math.min(g.inner, device.memory_bytes * m.scale);
    marks.push(mark("line", { x1: x, x2: x, y1: y - 2, y2: y + m.h + 2, class: "hf-edge", "stroke-width": 1.5 }));
  }
  y += m.h + (full ? 4 : 2);
  const perShard = device.shards.some((s) => s.measured_bytes !== null),
    used = device.used_bytes,
    none = !perShard && used === null;
  if (full) {
    const text = used !== null ? `measured ${fmtBytes(used)} in the process` : none ? "not measured" : "measured";
    marks.push(mark("text", { x: m.x, y: y + 9, ...small, "font-style": none ? "italic" : null }, text));
    y += 13;
  }
  const box = { x: m.x, y, width: g.inner, height: m.h, rx: 2, fill: "none", class: "hf-edge hf-nomeasure" };
  if (none) return [...marks, mark("rect", { ...box, "stroke-dasharray": "3 3" })];
  const { end, marks: lane } = laneMarks(view, device, g, m, y, "measured_bytes", (role) => ({ fill: role.color }));
  return [...marks, ...lane, ...processMark(device, g, m, y, end)];
}
// a bar of a device's shards; `end` is where it ends
function laneMarks(view, device, g, m, y, part, look) {
  const marks = [mark("rect", { x: m.x, y, width: g.inner, height: m.h, rx: 2, class: "hf-paper hf-grid" })];
  let x = m.x;
  for (const s of device.shards) {
    const bytes = s[part];
    if (isMissing(bytes)) continue;
    const box = { x, y, width: Math.max(0.5, bytes * m.scale), height: m.h, "data-row": s.row };
    marks.push(mark("rect", { ...box, ...look(view.roles[s.role]) }));
    x += bytes * m.scale;
  }
  return { end: x, marks };
}
// what a process holds beside its shards
function processMark(device, g, m, y, end) {
  const used = device.used_bytes,
    rest = used === null ? 0 : m.x + used * m.scale - end;
  if (!(rest > 0)) return [];
  const box = { x: end, y, width: Math.min(rest, m.x + g.inner - end), height: m.h, fill: "#8b949e", class: "hf-mark" },
    rows = [
      ["process", device.pid === null ? null : String(device.pid)],
      ["measured", fmtBytes(used)],
      ["limit", fmtBytes(device.memory_bytes)],
    ];
  const heading = `device ${device.number}: process memory`;
  return [mark("rect", box, undefined, { role: null, col: g.col, heading, rows })];
}

// ---- layout: one role's ranks as a mesh: a column per pipeline stage, a row per replica (dp), in each the tp ranks side by side
function meshOf(role, shards, inPaper) {
  const [tp, pp, dp] = AXES.map((k) => 1 + Math.max(...shards.map((s) => s[k]))),
    many = tp * pp > 32,
    w = many ? 15 : 30,
    h = many ? 13 : 20,
    stage = tp * w + 14,
    small = { class: "hf-sub", "font-size": 10 },
    marks = [];
  for (let p = 0; p < pp; p++) marks.push(mark("text", { x: 64 + p * stage, y: 12, ...small }, pp > 1 ? `pp ${p}` : "tp 0 …"));
  for (let d = 0; d < dp; d++) marks.push(mark("text", { x: 4, y: 20 + d * (h + 6) + h * 0.7, ...small }, `dp ${d}`));
  for (const s of shards) {
    const x = 64 + s.pp * stage + s.tp * w,
      y = 20 + s.dp * (h + 6),
      fill = alpha(role.color, 0.16 + (0.5 * s.tp) / Math.max(1, tp)),
      place = { x: x + (w - 2) / 2, y: y + h * 0.7, "text-anchor": "middle", class: "hf-fg" },
      name = inPaper ? "G" + (1 + s.dp * pp * tp + s.pp * tp + s.tp) : String(s.rank);
    const cell = [mark("rect", { x, y, width: w - 2, height: h, rx: 2, fill, stroke: role.color }), mark("text", place, name)];
    marks.push(group({ class: "hf-mark hf-cell", "data-rank": s.rank, "data-row": s.row }, cell, { shard: s }));
  }
  const words = `${role.name}: ${pp} stages of ${tp} ranks, ${dp} times`;
  return { width: 64 + pp * stage, height: 20 + dp * (h + 6), size: w < 20 ? 7.5 : 10, words, marks };
}

// ---- layout: words
function rowsOf(shard, role, device, others, elsewhere) {
  return [
    ["row", String(shard.row)],
    ["model", role.model || "a function"],
    ...(role.lora ? [["trained", role.lora]] : []),
    ...(shard.base_with ? [["base", `counted with ${shard.base_with}`]] : []),
    ...(shard.base_for ? [["base", `once, for ${shard.base_for} too`]] : []),
    ["device", `${device.number} (${device.name})`],
    ["pool", device.pool],
    ["rank", String(shard.rank)],
    ["coordinates", shard.place],
    ...(role.shadow_of ? [["shadow of", role.shadow_of]] : []),
    ...(role.weights ? [["weights", role.weights]] : []),
    ...(shard.rollout_replica === null ? [] : [["rollout", `${role.rollout}, replica ${shard.rollout_replica}`]]),
    ["layout", role.train || "none"],
    ...(role.train ? AXES.flatMap((axis) => groupRow(shard, others, axis)) : []),
    ...elsewhere,
    ["dtype", role.dtype],
    ["state", role.state],
    ["memory predicted", fmtBytes(shard.planned_bytes)],
    ["memory measured", fmtBytes(shard.measured_bytes)],
  ];
}
// ranks that differ from this one along one axis only: its group on that axis
function groupRow(shard, others, axis) {
  const ranks = others
    .filter((o) => o.rank === shard.rank || along(o, shard) === axis)
    .map((o) => o.rank)
    .sort((a, b) => a - b);
  if (ranks.length < 2) return [];
  return [[`${axis} group`, "ranks " + (ranks.length > 12 ? ranks.slice(0, 11).join(" ") + " …" : ranks.join(" "))]];
}
// where a role was before, or is now: "device 0, 1"
function elsewhereRows(view, past, role) {
  if (!view.before) return [];
  const other = past ? view : view.before,
    at = other.nodes
      .flatMap((n) => n.devices)
      .filter((d) => d.shards.some((s) => other.roles[s.role].name === role.name))
      .map((d) => d.number),
    text = at.length ? "device " + (at.length > 8 ? at.slice(0, 7).join(", ") + ", …" : at.join(", ")) : "not there";
  return [[past ? "after the move" : "before the move", text]];
}
const rolesLegend = (view) =>
  view.roles.map((role) => [role.label, [sample({ rx: 2, ...cardLook(role) }), barMark(1, 1, 4, 9, role)]]);
const marksLegend = () => [
  ["predicted memory", [planned(GREY, { height: 8 })]],
  ["measured memory", [sample({ height: 8, fill: GREY })]],
  ["not measured", [sample({ height: 8, fill: "none", class: "hf-edge", "stroke-dasharray": "3 2" })]],
];
const axesLegend = () =>
  AXES.map((axis) => [
    `same ${axis} group`,
    [sample({ rx: 2, fill: "none", class: "hf-current", "stroke-dasharray": DASHES[axis] })],
  ]);
// the tip that an arrow key comes to: up and down in a device's column, left and right to the next column
function stepped(tips, current, dx, dy) {
  if (current < 0 || current >= tips.length) return 0;
  const cols = [...new Set(tips.map((t) => t.col))],
    here = tips[current].col,
    inCol = (c) => [...tips.keys()].filter((i) => tips[i].col === c),
    depth = inCol(here).indexOf(current);
  if (dy) return inCol(here)[depth + dy] ?? current;
  const c = cols[cols.indexOf(here) + dx];
  if (c === undefined) return current;
  const list = inCol(c);
  return list[Math.min(depth, list.length - 1)];
}

// ---- draw
function drawDevices(view, host) {
  const svg = titledSvg(view, view.geometry.width, view.geometry.height),
    marks = paint(layout(view), svg, hatches(svg));
  host.replaceChildren(svg);
  return marks.map(([node, m]) => ({ node, cell: null, ...m.tip }));
}
const meshRoles = (view, marks) =>
  view.roles.filter((r) => r.train && marks.filter((m) => m.shard && m.role === r.name).length > 1);
// `mesh` is {role, order}, which its menus change; `drawn` is called with the cells of each drawing
function drawMesh(view, roles, marks, mesh, host, drawn) {
  const details = H("details", { class: "hf-mesh", ...(view.density === "tiny" ? {} : { open: "" }) }, host),
    quiet = { "data-lm-suppress-shortcuts": "true" };
  H("summary", {}, details, "Mesh: who stands where in a role's layout");
  const pick = H("select", { "aria-label": "role", ...quiet }, details);
  for (const r of roles) H("option", { value: r.name }, pick, `${r.name} ${r.train}`);
  const order = H("select", { "aria-label": "order of the ranks", ...quiet }, details);
  for (const text of ["ranks here (tp, dp, pp)", "G numbers of the paper (tp, pp, dp)"]) H("option", {}, order, text);
  if (!roles.some((r) => r.name === mesh.role)) mesh.role = roles[0].name;
  pick.value = mesh.role;
  order.selectedIndex = mesh.order;
  const place = H("div", {}, details);
  const again = () => {
    mesh.role = pick.value;
    mesh.order = order.selectedIndex;
    const role = roles.find((r) => r.name === mesh.role),
      shards = marks.filter((m) => m.shard && m.role === mesh.role).map((m) => m.shard),
      { width, height, size, words, marks: cells } = meshOf(role, shards, mesh.order > 0);
    const svg = S("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "font-size": size, "aria-label": words });
    drawn(paint(cells, svg, null));
    place.replaceChildren(svg);
  };
  pick.onchange = order.onchange = again;
  again();
  legend(details, axesLegend());
}
// the group that a mark shares with the one looked at is told by the dashes of its outline
function outline(m, axis) {
  if (!m.shard) return;
  for (const node of [m.node.firstChild, m.cell].filter(Boolean)) {
    node.classList.toggle("hf-current", axis !== null);
    if (axis) m.node.setAttribute("data-group", axis);
    else m.node.removeAttribute("data-group");
    if (node.dataset.dash === undefined) node.dataset.dash = node.getAttribute("stroke-dasharray") || "";
    const dash = axis && axis !== "self" ? DASHES[axis] : axis === "self" ? null : node.dataset.dash;
    if (dash) node.setAttribute("stroke-dasharray", dash);
    else node.removeAttribute("stroke-dasharray");
  }
}

function render({ model, el }) {
  const f = frame(el, "placement", model),
    mesh = { role: "", order: 0 };
  let marks = [],
    current = -1,
    past = false;
  const toggle = f.button("before the move", "show what was before the last move", () => {
    past = !past;
    draw();
  });
  const shown = (view) => (past && view.before ? view.before : view);

  function draw() {
    const view = model.get("view"),
      v = shown(view);
    toggle.hidden = !view.before;
    toggle.setAttribute("aria-pressed", String(past));
    f.title.textContent = v.title + (v.nodes.length ? "" : ": no devices") + (v === view ? "" : ", before the move");
    marks = drawDevices(v, f.host);
    marks.forEach((m, i) => listen(m.node, i));
    f.below.replaceChildren();
    legend(f.below, rolesLegend(v));
    const below = legend(f.below, marksLegend());
    if (v.density === "tiny") H("span", {}, below, "numbers are tp.pp.dp");
    const roles = meshRoles(v, marks);
    if (roles.length) drawMesh(v, roles, marks, mesh, f.below, takeCells);
    if (current >= 0) outlineCurrent();
  }
  function takeCells(cells) {
    for (const m of marks) m.cell = null;
    for (const [node, { tip }] of cells) {
      const i = marks.findIndex((m) => m.shard === tip.shard);
      marks[i].cell = node.firstChild;
      listen(node, i);
    }
  }

  // ---- interact
  function listen(node, i) {
    node.addEventListener("mousemove", (ev) => point(i, ev.clientX, ev.clientY, false));
    node.addEventListener("mouseleave", leave);
  }
  function tipRows(m) {
    if (!m.shard) return m.rows;
    const others = marks.filter((o) => o.shard && o.role === m.role).map((o) => o.shard);
    return rowsOf(m.shard, m.owner, m.device, others, elsewhereRows(model.get("view"), past, m.owner));
  }
  function point(i, x, y, spoken) {
    const m = marks[i];
    if (!m) return;
    f.showTip(x, y, m.heading, tipRows(m), spoken);
    for (const other of marks) {
      other.node.classList.toggle("hf-faded", m.role !== null && other.role !== m.role);
      const axis = m.shard && other.shard && other.role === m.role && other !== m ? along(m.shard, other.shard) : null;
      outline(other, m.shard && other.shard === m.shard ? "self" : axis);
    }
  }
  function leave() {
    f.hideTip();
    for (const m of marks) {
      m.node.classList.remove("hf-faded");
      outline(m, null);
    }
  }
  const outlineCurrent = () =>
    marks.forEach((m, i) => (m.node.tagName === "g" ? m.node.firstChild : m.node).classList.toggle("hf-current", i === current));
  keyboard(f.host, {
    step: (dx, dy) => {
      current = stepped(marks, current, dx, dy);
    },
    show: () => {
      outlineCurrent();
      if (!marks[current]) return;
      const r = marks[current].node.getBoundingClientRect();
      point(current, r.left + r.width / 2, r.top + r.height / 2, true);
    },
    keys: { Escape: leave },
  });
  f.host.addEventListener("blur", leave);
  draw();
  return redrawn({ model, f, onView: coalesced(draw) });
}
export default { render };
