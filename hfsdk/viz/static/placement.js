// Who lives where: nodes > devices as columns, in each a stack of shards and its memory, planned against measured.
function render({ model, el }) {
  const f = frame(el, "placement");
  let marks = [], current = -1;

  const rowsOf = (shard, role, device) => [
    ["row", String(shard.row)],
    ["model", role.model || "a function"],
    ["device", `${device.number} (${device.name})`], ["pool", device.pool],
    ["rank", String(shard.rank)],
    ["coordinates", shard.place],
    ...(role.shadow_of ? [["shadow of", role.shadow_of]] : []),
    ...(role.weights ? [["weights", role.weights]] : []),
    ...(shard.rollout_replica === null ? [] : [["rollout", `${role.rollout}, replica ${shard.rollout_replica}`]]),
    ["layout", role.train || "none"],
    ["dtype", role.dtype],
    ["state", role.state],
    ["memory predicted", fmtBytes(shard.planned_bytes)],
    ["memory measured", fmtBytes(shard.measured_bytes)],
  ];

  function point(i, x, y, spoken) {
    const m = marks[i];
    if (!m) return;
    f.showTip(x, y, m.heading, m.rows, spoken);
    for (const other of marks) other.node.classList.toggle("hf-faded", m.role !== null && other.role !== m.role);
  }
  function leave() {
    f.hideTip();
    for (const m of marks) m.node.classList.remove("hf-faded");
  }
  function addMark(node, info) {
    node.classList.add("hf-mark");
    const i = marks.push({ node, ...info }) - 1;
    node.addEventListener("mousemove", (ev) => point(i, ev.clientX, ev.clientY, false));
    node.addEventListener("mouseleave", leave);
  }

  // solid, or hollow for a shadow
  const bar = (parent, x, y, width, height, role) => role.shadow_of
    ? S("rect", { x: x + 0.5, y: y + 0.5, width, height: height - 1, rx: 1.5, class: "hf-paper", stroke: role.color }, parent)
    : S("rect", { x, y, width, height, rx: 1.5, fill: role.color }, parent);

  function memory(svg, hatch, g, device, view, y) {
    const scale = g.inner / Math.max(1, view.memory_scale_bytes), x0 = g.x + g.pad, h = view.density === "full" ? 9 : 5;
    const shards = device.shards, labels = view.density === "full";
    const lane = (top, part, draw) => {
      S("rect", { x: x0, y: top, width: g.inner, height: h, rx: 2, class: "hf-paper hf-grid" }, svg);
      let x = x0;
      for (const s of shards) {
        const bytes = s[part];
        if (isMissing(bytes)) continue;
        draw(S("rect", { x, y: top, width: Math.max(0.5, bytes * scale), height: h, "data-row": s.row }, svg), view.roles[s.role]);
        x += bytes * scale;
      }
      return x;
    };
    const planned = shards.reduce((n, s) => n + (s.planned_bytes || 0), 0);
    if (labels) S("text", { x: x0, y: y + 9, "font-size": 9.5, class: "hf-sub" }, svg, "predicted " + fmtBytes(planned));
    if (labels && device.memory_bytes !== null)
      S("text", { x: x0 + g.inner, y: y + 9, "font-size": 9.5, "text-anchor": "end", class: "hf-sub" }, svg, "of " + fmtBytes(device.memory_bytes));
    y += labels ? 13 : 0;
    lane(y, "planned_bytes", (r, role) => { r.setAttribute("fill", hatch(role.color)); r.setAttribute("stroke", role.color); });
    if (device.memory_bytes !== null) {
      const x = x0 + Math.min(g.inner, device.memory_bytes * scale);
      S("line", { x1: x, x2: x, y1: y - 2, y2: y + h + 2, class: "hf-edge", "stroke-width": 1.5 }, svg);
    }
    y += h + (labels ? 4 : 2);
    const perShard = shards.some((s) => s.measured_bytes !== null), used = device.used_bytes;
    if (labels) {
      const text = used !== null ? "measured " + fmtBytes(used) + " in the process" : perShard ? "measured" : "not measured";
      S("text", { x: x0, y: y + 9, "font-size": 9.5, class: "hf-sub", "font-style": text === "not measured" ? "italic" : null }, svg, text);
      y += 13;
    }
    if (!perShard && used === null) {
      S("rect", { x: x0, y, width: g.inner, height: h, rx: 2, fill: "none", class: "hf-edge hf-nomeasure", "stroke-dasharray": "3 3" }, svg);
    } else {
      const end = lane(y, "measured_bytes", (r, role) => r.setAttribute("fill", role.color));
      const rest = used === null ? 0 : x0 + used * scale - end;
      if (rest > 0) {
        const r = S("rect", { x: end, y, width: Math.min(rest, x0 + g.inner - end), height: h, fill: "#8b949e" }, svg);
        addMark(r, { role: null, col: g.col, heading: `device ${device.number}: process memory`, rows: [
          ["process", device.pid === null ? null : String(device.pid)], ["measured", fmtBytes(used)], ["limit", fmtBytes(device.memory_bytes)]] });
      }
    }
    return y + h;
  }

  function draw() {
    const v = model.get("view"), L = v.geometry;
    marks = [];
    f.title.textContent = v.title;
    const svg = S("svg", { viewBox: `0 0 ${L.width} ${L.height}`, width: L.width, height: L.height, role: "img", "aria-label": v.summary, "font-size": 11 });
    S("title", {}, svg, v.title);
    S("desc", {}, svg, v.summary);
    const hatch = hatches(svg), full = v.density === "full", tiny = v.density === "tiny";
    let col = 0;
    v.nodes.forEach((node, n) => {
      const box = L.nodes[n];
      S("rect", { x: box.x, y: box.y, width: box.width, height: box.height, rx: 6, class: "hf-panel hf-grid" }, svg);
      S("text", { x: box.x + 8, y: box.y + 14, "font-weight": 600, class: "hf-fg" }, svg, node.name);
      for (const p of node.pools) {
        const x = box.x + L.gap + p.first * (L.column + L.gap), width = p.num_devices * (L.column + L.gap) - L.gap;
        const bracket = S("g", { class: "hf-pool", "data-pool": p.pool }, svg);
        S("title", {}, bracket, `pool ${p.pool}`);
        S("text", { x: x + 2, y: box.y + 29, "font-size": 10, class: "hf-sub" }, bracket, p.text);
        S("rect", { x, y: box.y + 32.5, width, height: 2, class: "hf-sub" }, bracket);
      }
      node.devices.forEach((device, d) => {
        const g = { x: box.x + L.gap + d * (L.column + L.gap), y: box.y + L.top, pad: tiny ? 3 : 6, col: col++ };
        g.inner = L.column - 2 * g.pad;
        S("rect", { x: g.x, y: g.y, width: L.column, height: box.height - L.top - L.gap, rx: 4, class: "hf-paper hf-grid hf-device", "data-device": device.number }, svg);
        S("text", { x: g.x + g.pad, y: g.y + 13, class: "hf-fg", "font-size": tiny ? 9 : 11 }, svg, tiny ? String(device.number) : `device ${device.number}`);
        if (full) S("text", { x: g.x + L.column - g.pad, y: g.y + 13, "text-anchor": "end", "font-size": 9.5, class: "hf-sub" }, svg, device.name);
        if (full) S("text", { x: g.x + g.pad, y: g.y + 25, "font-size": 9.5, class: "hf-sub" }, svg, device.pid !== null ? `process ${device.pid}` : v.predicted ? "" : "no process");
        let y = g.y + L.header;
        for (const s of device.shards) {
          const role = v.roles[s.role], card = S("g", { "data-row": s.row, "data-role": role.name, class: "hf-shard" }, svg);
          S("rect", { x: g.x + g.pad, y, width: g.inner, height: L.card, rx: 3, fill: alpha(role.color, 0.16), stroke: role.color, "stroke-dasharray": role.state === "declared" ? "4 3" : null }, card);
          bar(card, g.x + g.pad, y, tiny ? 3 : 5, L.card, role);
          const tx = g.x + g.pad + (tiny ? 6 : 10), right = g.x + g.pad + g.inner - 4;
          if (full) {
            S("text", { x: tx, y: y + 14, "font-weight": 600, class: "hf-fg" }, card, role.name);
            S("text", { x: right, y: y + 14, "text-anchor": "end", "font-size": 10, class: "hf-sub" }, card, role.state === "declared" ? "declared" : `rank ${s.rank}`);
            S("text", { x: tx, y: y + 28, "font-size": 10, class: "hf-fg" }, card, s.place);
            if (s.note) S("text", { x: right, y: y + 28, "text-anchor": "end", "font-size": 10, class: "hf-sub" }, card, s.note);
          } else {
            S("text", { x: tx, y: y + L.card - 4, "font-size": tiny ? 8.5 : 10, class: "hf-fg" }, card, tiny ? role.letter : role.short);
            S("text", { x: right, y: y + L.card - 4, "text-anchor": "end", "font-size": tiny ? 8.5 : 9.5, class: "hf-sub" }, card, s.short);
          }
          addMark(card, { role: role.name, col: g.col, heading: `${role.name} on device ${device.number}`, rows: rowsOf(s, role, device) });
          y += L.card + L.card_gap;
        }
        if (!device.shards.length) S("text", { x: g.x + g.pad, y: y + 12, "font-size": 10, "font-style": "italic", class: "hf-sub" }, svg, tiny ? "–" : "no role here");
        memory(svg, hatch, g, device, v, box.y + L.memory_top);
      });
    });
    f.host.replaceChildren(svg);
    f.below.replaceChildren();
    const legend = H("div", { class: "hf-legend" }, f.below);
    for (const role of v.roles) swatch(legend, role.label, (s) => {
      S("rect", { x: 1, y: 1, width: 14, height: 9, rx: 2, fill: alpha(role.color, 0.16), stroke: role.color, "stroke-dasharray": role.state === "declared" ? "4 3" : null }, s);
      bar(s, 1, 1, 4, 9, role);
    });
    const marksLegend = H("div", { class: "hf-legend" }, f.below);
    swatch(marksLegend, "predicted memory", (s) => S("rect", { x: 1, y: 1, width: 14, height: 8, fill: hatches(s)("#77808a"), stroke: "#77808a" }, s));
    swatch(marksLegend, "measured memory", (s) => S("rect", { x: 1, y: 1, width: 14, height: 8, fill: "#77808a" }, s));
    swatch(marksLegend, "not measured", (s) => S("rect", { x: 1, y: 1, width: 14, height: 8, fill: "none", class: "hf-edge", "stroke-dasharray": "3 2" }, s));
    if (tiny) H("span", {}, marksLegend, "numbers are tp.pp.dp");
    if (current >= 0) mark();
  }

  function mark() {
    marks.forEach((m, i) => (m.node.tagName === "g" ? m.node.firstChild : m.node).classList.toggle("hf-current", i === current));
  }
  function step(dx, dy) {
    if (current < 0 || current >= marks.length) { current = 0; return; }
    const cols = [...new Set(marks.map((m) => m.col))], here = marks[current].col;
    const inCol = (c) => marks.map((m, i) => [m, i]).filter(([m]) => m.col === c).map(([, i]) => i);
    const depth = inCol(here).indexOf(current);
    if (dy) { const next = inCol(here)[depth + dy]; if (next !== undefined) current = next; }
    if (dx) {
      const c = cols[cols.indexOf(here) + dx];
      if (c !== undefined) { const list = inCol(c); current = list[Math.min(depth, list.length - 1)]; }
    }
  }
  function show() {
    mark();
    const m = marks[current];
    if (!m) return;
    const r = m.node.getBoundingClientRect();
    point(current, r.left + r.width / 2, r.top + r.height / 2, true);
  }
  keyboard(f.host, { step, show, keys: { Escape: leave } });
  f.host.addEventListener("blur", leave);

  const request = coalesced(draw);
  draw();
  model.on("change:view", request);
  return () => model.off("change:view", request);
}
export default { render };
