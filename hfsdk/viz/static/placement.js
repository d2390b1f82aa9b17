// Who lives where: nodes > devices as columns, in each a stack of shards and its memory, planned against measured.
import { alpha, coalesced, fitText, fmtBytes, frame, H, hatches, isMissing, keyboard, S, shorten, swatch } from "./core.js";

function render({ model, el }) {
  const f = frame(el, "placement", model);
  let marks = [],
    current = -1,
    meshRole = "",
    meshOrder = 0,
    past = false;
  const toggle = f.button("before the move", "show what was before the last move", () => {
    past = !past;
    draw();
  });
  const shown = () => {
    const v = model.get("view");
    return past && v.before ? v.before : v;
  };
  // where a role was before, or is now: "device 0, 1"
  function elsewhere(role) {
    const v = model.get("view"),
      other = past ? v : v.before;
    if (!v.before) return [];
    const at = other.nodes
      .flatMap((n) => n.devices)
      .filter((d) => d.shards.some((s) => other.roles[s.role].name === role.name))
      .map((d) => d.number);
    return [
      [
        past ? "after the move" : "before the move",
        at.length ? "device " + (at.length > 8 ? at.slice(0, 7).join(", ") + ", …" : at.join(", ")) : "not there",
      ],
    ];
  }

  const rowsOf = (shard, role, device) => [
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
    ...groupRows(shard, role),
    ...elsewhere(role),
    ["dtype", role.dtype],
    ["state", role.state],
    ["memory predicted", fmtBytes(shard.planned_bytes)],
    ["memory measured", fmtBytes(shard.measured_bytes)],
  ];

  // ranks that differ from this one along one axis only: its group on that axis
  const AXES = ["tp", "pp", "dp"],
    DASHES = { tp: null, pp: "5 2", dp: "1.5 2.5" };
  const along = (a, b) => {
    const differ = AXES.filter((k) => a[k] !== b[k]);
    return differ.length === 1 ? differ[0] : null;
  };
  const shardsOf = (role) => marks.filter((m) => m.shard && m.role === role.name).map((m) => m.shard);
  function groupRows(shard, role) {
    return !role.train
      ? []
      : AXES.map((axis) => {
          const ranks = shardsOf(role)
            .filter((o) => o.rank === shard.rank || along(o, shard) === axis)
            .map((o) => o.rank)
            .sort((a, b) => a - b);
          return ranks.length > 1
            ? [`${axis} group`, "ranks " + (ranks.length > 12 ? ranks.slice(0, 11).join(" ") + " …" : ranks.join(" "))]
            : null;
        }).filter(Boolean);
  }
  function point(i, x, y, spoken) {
    const m = marks[i];
    if (!m) return;
    f.showTip(x, y, m.heading, typeof m.rows === "function" ? m.rows() : m.rows, spoken);
    for (const other of marks) {
      other.node.classList.toggle("hf-faded", m.role !== null && other.role !== m.role);
      const axis = m.shard && other.shard && other.role === m.role && other !== m ? along(m.shard, other.shard) : null;
      outline(other, m.shard && other.shard === m.shard ? "self" : axis);
    }
  }
  // the group a mark shares with the one looked at, told by the dashes of its outline
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
  function leave() {
    f.hideTip();
    for (const m of marks) {
      m.node.classList.remove("hf-faded");
      outline(m, null);
    }
  }

  // one role's ranks as a mesh: a column per pipeline stage, a row per replica (dp), in each the tp ranks side by side
  function mesh(view, host) {
    const roles = view.roles.filter((r) => r.train && shardsOf(r).length > 1);
    if (!roles.length) return;
    const details = H("details", { class: "hf-mesh", ...(view.density === "tiny" ? {} : { open: "" }) }, host);
    H("summary", {}, details, "Mesh: who stands where in a role's layout");
    const pick = H("select", { "aria-label": "role", "data-lm-suppress-shortcuts": "true" }, details);
    for (const r of roles) H("option", { value: r.name }, pick, `${r.name} ${r.train}`);
    const order = H("select", { "aria-label": "order of the ranks", "data-lm-suppress-shortcuts": "true" }, details);
    for (const text of ["ranks here (tp, dp, pp)", "G numbers of the paper (tp, pp, dp)"]) H("option", {}, order, text);
    if (!roles.some((r) => r.name === meshRole)) meshRole = roles[0].name;
    pick.value = meshRole;
    order.selectedIndex = meshOrder;
    const place = H("div", {}, details);
    const again = () => {
      meshRole = pick.value;
      meshOrder = order.selectedIndex;
      const role = roles.find((r) => r.name === meshRole),
        mine = marks.filter((m) => m.shard && m.role === meshRole);
      const size = (k) => 1 + Math.max(...mine.map((m) => m.shard[k])),
        [tp, pp, dp] = AXES.map(size);
      const w = tp * pp > 32 ? 15 : 30,
        h = tp * pp > 32 ? 13 : 20,
        stage = tp * w + 14,
        width = 64 + pp * stage,
        height = 20 + dp * (h + 6);
      const svg = S("svg", {
        width,
        height,
        viewBox: `0 0 ${width} ${height}`,
        role: "img",
        "font-size": w < 20 ? 7.5 : 10,
        "aria-label": `${meshRole}: ${pp} stages of ${tp} ranks, ${dp} times`,
      });
      for (let p = 0; p < pp; p++)
        S("text", { x: 64 + p * stage, y: 12, class: "hf-sub", "font-size": 10 }, svg, pp > 1 ? `pp ${p}` : "tp 0 …");
      for (let d = 0; d < dp; d++)
        S("text", { x: 4, y: 20 + d * (h + 6) + h * 0.7, class: "hf-sub", "font-size": 10 }, svg, `dp ${d}`);
      for (const m of marks) m.cell = null;
      for (const m of mine) {
        const s = m.shard,
          x = 64 + s.pp * stage + s.tp * w,
          y = 20 + s.dp * (h + 6),
          g = S("g", { class: "hf-mark hf-cell", "data-rank": s.rank, "data-row": s.row }, svg);
        m.cell = S(
          "rect",
          {
            x,
            y,
            width: w - 2,
            height: h,
            rx: 2,
            fill: alpha(role.color, 0.16 + (0.5 * s.tp) / Math.max(1, tp)),
            stroke: role.color,
          },
          g,
        );
        const paper = "G" + (1 + s.dp * pp * tp + s.pp * tp + s.tp);
        S(
          "text",
          { x: x + (w - 2) / 2, y: y + h * 0.7, "text-anchor": "middle", class: "hf-fg" },
          g,
          meshOrder ? paper : String(s.rank),
        );
        const i = marks.indexOf(m);
        g.addEventListener("mousemove", (ev) => point(i, ev.clientX, ev.clientY, false));
        g.addEventListener("mouseleave", leave);
      }
      place.replaceChildren(svg);
    };
    pick.onchange = order.onchange = again;
    again();
    const legend = H("div", { class: "hf-legend" }, details);
    for (const axis of AXES)
      swatch(legend, `same ${axis} group`, (s) =>
        S(
          "rect",
          { x: 1, y: 1, width: 14, height: 9, rx: 2, fill: "none", class: "hf-current", "stroke-dasharray": DASHES[axis] },
          s,
        ),
      );
  }
  function addMark(node, info) {
    node.classList.add("hf-mark");
    const i = marks.push({ node, ...info }) - 1;
    node.addEventListener("mousemove", (ev) => point(i, ev.clientX, ev.clientY, false));
    node.addEventListener("mouseleave", leave);
  }

  // solid, or hollow for a shadow
  const bar = (parent, x, y, width, height, role) =>
    role.shadow_of
      ? S("rect", { x: x + 0.5, y: y + 0.5, width, height: height - 1, rx: 1.5, class: "hf-paper", stroke: role.color }, parent)
      : S("rect", { x, y, width, height, rx: 1.5, fill: role.color }, parent);

  function memory(svg, hatch, g, device, view, y) {
    const scale = g.inner / Math.max(1, view.memory_scale_bytes),
      x0 = g.x + g.pad,
      h = view.density === "full" ? 9 : 5;
    const shards = device.shards,
      labels = view.density === "full";
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
      S(
        "text",
        { x: x0 + g.inner, y: y + 9, "font-size": 9.5, "text-anchor": "end", class: "hf-sub" },
        svg,
        "of " + fmtBytes(device.memory_bytes),
      );
    y += labels ? 13 : 0;
    lane(y, "planned_bytes", (r, role) => {
      r.setAttribute("fill", hatch(role.color));
      r.setAttribute("stroke", role.color);
    });
    if (device.memory_bytes !== null) {
      const x = x0 + Math.min(g.inner, device.memory_bytes * scale);
      S("line", { x1: x, x2: x, y1: y - 2, y2: y + h + 2, class: "hf-edge", "stroke-width": 1.5 }, svg);
    }
    y += h + (labels ? 4 : 2);
    const perShard = shards.some((s) => s.measured_bytes !== null),
      used = device.used_bytes;
    if (labels) {
      const text = used !== null ? "measured " + fmtBytes(used) + " in the process" : perShard ? "measured" : "not measured";
      S(
        "text",
        { x: x0, y: y + 9, "font-size": 9.5, class: "hf-sub", "font-style": text === "not measured" ? "italic" : null },
        svg,
        text,
      );
      y += 13;
    }
    if (!perShard && used === null) {
      S(
        "rect",
        { x: x0, y, width: g.inner, height: h, rx: 2, fill: "none", class: "hf-edge hf-nomeasure", "stroke-dasharray": "3 3" },
        svg,
      );
    } else {
      const end = lane(y, "measured_bytes", (r, role) => r.setAttribute("fill", role.color));
      const rest = used === null ? 0 : x0 + used * scale - end;
      if (rest > 0) {
        const r = S("rect", { x: end, y, width: Math.min(rest, x0 + g.inner - end), height: h, fill: "#8b949e" }, svg);
        addMark(r, {
          role: null,
          col: g.col,
          heading: `device ${device.number}: process memory`,
          rows: [
            ["process", device.pid === null ? null : String(device.pid)],
            ["measured", fmtBytes(used)],
            ["limit", fmtBytes(device.memory_bytes)],
          ],
        });
      }
    }
    return y + h;
  }

  function draw() {
    const v = shown(),
      L = v.geometry;
    marks = [];
    toggle.hidden = !model.get("view").before;
    toggle.setAttribute("aria-pressed", String(past));
    f.title.textContent =
      v.title + (v.nodes.length ? "" : ": no devices") + (past && model.get("view").before ? ", before the move" : "");
    const svg = S("svg", {
      viewBox: `0 0 ${L.width} ${L.height}`,
      width: L.width,
      height: L.height,
      role: "img",
      "aria-label": v.summary,
      "font-size": 11,
    });
    S("title", {}, svg, v.title);
    S("desc", {}, svg, v.summary);
    const hatch = hatches(svg),
      full = v.density === "full",
      tiny = v.density === "tiny";
    let col = 0;
    v.nodes.forEach((node, n) => {
      const box = L.nodes[n];
      S("rect", { x: box.x, y: box.y, width: box.width, height: box.height, rx: 6, class: "hf-panel hf-grid" }, svg);
      S(
        "text",
        { x: box.x + 8, y: box.y + 14, "font-weight": 600, class: "hf-fg" },
        svg,
        shorten(node.name, Math.floor((box.width - 16) / 7.4)),
      );
      for (const p of node.pools) {
        const x = box.x + L.gap + p.first * (L.column + L.gap),
          width = p.num_devices * (L.column + L.gap) - L.gap;
        const bracket = S("g", { class: "hf-pool", "data-pool": p.pool }, svg);
        S("title", {}, bracket, `pool ${p.pool}`);
        S(
          "text",
          { x: x + 2, y: box.y + 29, "font-size": 10, class: "hf-sub" },
          bracket,
          shorten(p.text, Math.max(2, Math.floor(width / 5.2))),
        );
        S("rect", { x, y: box.y + 32.5, width, height: 2, class: "hf-sub" }, bracket);
      }
      node.devices.forEach((device, d) => {
        const g = { x: box.x + L.gap + d * (L.column + L.gap), y: box.y + L.top, pad: tiny ? 3 : 6, col: col++ };
        g.inner = L.column - 2 * g.pad;
        S(
          "rect",
          {
            x: g.x,
            y: g.y,
            width: L.column,
            height: box.height - L.top - L.gap,
            rx: 4,
            class: "hf-paper hf-grid hf-device",
            "data-device": device.number,
          },
          svg,
        );
        S(
          "text",
          { x: g.x + g.pad, y: g.y + 13, class: "hf-fg", "font-size": tiny ? 9 : 11 },
          svg,
          tiny ? String(device.number) : `device ${device.number}`,
        );
        if (full)
          S(
            "text",
            { x: g.x + L.column - g.pad, y: g.y + 13, "text-anchor": "end", "font-size": 9.5, class: "hf-sub" },
            svg,
            device.name,
          );
        if (full)
          S(
            "text",
            { x: g.x + g.pad, y: g.y + 25, "font-size": 9.5, class: "hf-sub" },
            svg,
            device.pid !== null ? `process ${device.pid}` : v.predicted ? "" : "no process",
          );
        let y = g.y + L.header;
        for (const s of device.shards) {
          const role = v.roles[s.role],
            card = S("g", { "data-row": s.row, "data-role": role.name, class: "hf-shard" }, svg);
          S(
            "rect",
            {
              x: g.x + g.pad,
              y,
              width: g.inner,
              height: L.card,
              rx: 3,
              fill: alpha(role.color, 0.16),
              stroke: role.color,
              "stroke-dasharray": role.state === "declared" ? "4 3" : null,
            },
            card,
          );
          bar(card, g.x + g.pad, y, tiny ? 3 : 5, L.card, role);
          const tx = g.x + g.pad + (tiny ? 6 : 10),
            right = g.x + g.pad + g.inner - 4;
          if (full) {
            const name = S("text", { x: tx, y: y + 14, class: "hf-fg" }, card);
            S("tspan", { "font-weight": 600 }, name, shorten(role.name, 15));
            if (role.lora && role.name.length < 10)
              S("tspan", { "font-size": 9.5, class: "hf-sub" }, name, ` ${role.lora.replace(/ rank (\d+).*/, " $1")}`);
            S(
              "text",
              { x: right, y: y + 14, "text-anchor": "end", "font-size": 10, class: "hf-sub" },
              card,
              role.state === "declared" ? "declared" : `rank ${s.rank}`,
            );
            const left = Math.floor((right - tx) / 5.25) - (s.note || "").length - 1;
            S("text", { x: tx, y: y + 28, "font-size": 10, class: "hf-fg" }, card, shorten(s.place, Math.max(4, left)));
            if (s.note) S("text", { x: right, y: y + 28, "text-anchor": "end", "font-size": 10, class: "hf-sub" }, card, s.note);
          } else {
            S(
              "text",
              { x: tx, y: y + L.card - 4, "font-size": tiny ? 8.5 : 10, class: "hf-fg" },
              card,
              tiny ? role.letter : fitText(role.short, g.inner - s.short.length * 5.4),
            );
            S(
              "text",
              { x: right, y: y + L.card - 4, "text-anchor": "end", "font-size": tiny ? 8.5 : 9.5, class: "hf-sub" },
              card,
              s.short,
            );
          }
          addMark(card, {
            role: role.name,
            col: g.col,
            shard: s,
            heading: `${role.name} on device ${device.number}`,
            rows: () => rowsOf(s, role, device),
          });
          y += L.card + L.card_gap;
        }
        if (!device.shards.length)
          S(
            "text",
            { x: g.x + g.pad, y: y + 12, "font-size": 10, "font-style": "italic", class: "hf-sub" },
            svg,
            tiny ? "–" : "no role here",
          );
        memory(svg, hatch, g, device, v, box.y + L.memory_top);
      });
    });
    f.host.replaceChildren(svg);
    f.below.replaceChildren();
    const legend = H("div", { class: "hf-legend" }, f.below);
    for (const role of v.roles)
      swatch(legend, role.label, (s) => {
        S(
          "rect",
          {
            x: 1,
            y: 1,
            width: 14,
            height: 9,
            rx: 2,
            fill: alpha(role.color, 0.16),
            stroke: role.color,
            "stroke-dasharray": role.state === "declared" ? "4 3" : null,
          },
          s,
        );
        bar(s, 1, 1, 4, 9, role);
      });
    const marksLegend = H("div", { class: "hf-legend" }, f.below);
    swatch(marksLegend, "predicted memory", (s) =>
      S("rect", { x: 1, y: 1, width: 14, height: 8, fill: hatches(s)("#77808a"), stroke: "#77808a" }, s),
    );
    swatch(marksLegend, "measured memory", (s) => S("rect", { x: 1, y: 1, width: 14, height: 8, fill: "#77808a" }, s));
    swatch(marksLegend, "not measured", (s) =>
      S("rect", { x: 1, y: 1, width: 14, height: 8, fill: "none", class: "hf-edge", "stroke-dasharray": "3 2" }, s),
    );
    if (tiny) H("span", {}, marksLegend, "numbers are tp.pp.dp");
    mesh(v, f.below);
    if (current >= 0) mark();
  }

  function mark() {
    marks.forEach((m, i) => (m.node.tagName === "g" ? m.node.firstChild : m.node).classList.toggle("hf-current", i === current));
  }
  function step(dx, dy) {
    if (current < 0 || current >= marks.length) {
      current = 0;
      return;
    }
    const cols = [...new Set(marks.map((m) => m.col))],
      here = marks[current].col;
    const inCol = (c) =>
      marks
        .map((m, i) => [m, i])
        .filter(([m]) => m.col === c)
        .map(([, i]) => i);
    const depth = inCol(here).indexOf(current);
    if (dy) {
      const next = inCol(here)[depth + dy];
      if (next !== undefined) current = next;
    }
    if (dx) {
      const c = cols[cols.indexOf(here) + dx];
      if (c !== undefined) {
        const list = inCol(c);
        current = list[Math.min(depth, list.length - 1)];
      }
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
  return () => {
    model.off("change:view", request);
    f.leave();
  };
}
export default { render };
