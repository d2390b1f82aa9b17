// A page without a browser: the elements of dom.js, that hear events and are found by selectors here; frames and timers follow
// a clock of their own. Nothing is laid out: an element is where its attributes say.
const PAGE_WIDTH = 1216;
const COMPOUND = /\.[\w-]+|\[[^\]]+\]|:not\([^)]*\)|:nth-child\(\d+\)|^[\w-]+/g;
const SELECTOR = /(?:\[[^\]]*\]|:not\([^)]*\)|[^\s>,[])+|[>,]/g;
const BLOCKS = ["dd", "details", "div", "dl", "dt", "li", "p", "summary", "table", "td", "th", "tr", "ul"];
const UNREAD = ["script", "style"];
let now = 0,
  queued = [],
  timers = [],
  handles = 0;

function matches(e, compound) {
  return compound.match(COMPOUND).every((part) => {
    if (part[0] === ".") return e.classList.contains(part.slice(1));
    if (part.startsWith(":not(")) return !matches(e, part.slice(5, -1));
    if (part.startsWith(":nth-child(")) return e.parentNode.children.indexOf(e) + 1 === Number(/\d+/.exec(part)[0]);
    if (part[0] !== "[") return e.tag === part;
    const [, name, value] = /^\[([\w-]+)(?:=["']?([^"']*?)["']?)?\]$/.exec(part),
      own = name === "hidden" ? (e.hidden ? "" : undefined) : e.attributes[name];
    return value === undefined ? own !== undefined : own !== undefined && String(own) === value;
  });
}
function fits(e, parts) {
  if (!matches(e, parts[parts.length - 1])) return false;
  if (parts.length === 1) return true;
  const direct = parts[parts.length - 2] === ">",
    rest = parts.slice(0, direct ? -2 : -1);
  for (let up = e.parentNode; up; up = direct ? null : up.parentNode) if (fits(up, rest)) return true;
  return false;
}
function found(root, selector) {
  const chains = [[]];
  for (const part of selector.match(SELECTOR)) part === "," ? chains.push([]) : chains[chains.length - 1].push(part);
  return [...root.descendants()].filter((e) => chains.some((chain) => fits(e, chain)));
}
const isShown = (e) => !e || (!e.hidden && e.style.display !== "none" && isShown(e.parentNode));
function readText(node) {
  if (!(node instanceof PaperElement)) return node.textContent;
  if (node.hidden || node.style.display === "none" || UNREAD.includes(node.tag)) return "";
  const text = node.childNodes.map(readText).join("");
  return BLOCKS.includes(node.tag) ? `\n${text}\n` : text;
}
const optionValue = (o) => o.attributes.value ?? o.textContent;
const center = (e) => {
  const n = (name) => Number(e.attributes[name] ?? 0);
  return [n("cx") || n("x") + n("width") / 2, n("cy") || n("y") + n("height") / 2];
};

Object.defineProperties(PaperElement.prototype, {
  querySelectorAll: { value(selector) { return found(this, selector); } },
  querySelector: { value(selector) { return found(this, selector)[0] ?? null; } },
  closest: { value(selector) { return fits(this, [selector]) ? this : (this.parentNode?.closest(selector) ?? null); } },
  contains: { value(other) { return other === this || (other?.parentNode ? this.contains(other.parentNode) : false); } },
  addEventListener: { value(type, hear) { this.heard ??= {}; (this.heard[type] ??= []).push(hear); } },
  removeEventListener: { value(type, hear) { if (this.heard?.[type]) this.heard[type] = this.heard[type].filter((h) => h !== hear); } },
  setPointerCapture: { value() {} },
  getBoundingClientRect: {
    value() {
      const width = Number(this.attributes.width ?? PAGE_WIDTH), height = Number(this.attributes.height ?? 20);
      return { left: 0, top: 0, right: width, bottom: height, width, height };
    },
  },
  focus: {
    value() {
      const before = document.activeElement;
      if (before === this) return;
      document.activeElement = this;
      if (before) dispatch(before, "blur");
    },
  },
  innerText: { get() { return readText(this).replace(/\n\s*\n/g, "\n").trim(); } },
  dataset: {
    get() {
      const all = this.attributes,
        dashed = (name) => `data-${name.replace(/[A-Z]/g, (c) => `-${c.toLowerCase()}`)}`,
        named = () => Object.keys(all).filter((n) => n.startsWith("data-")).map((n) => n.slice(5).replace(/-(.)/g, (_, c) => c.toUpperCase()));
      return new Proxy({}, {
        get: (_, name) => all[dashed(name)],
        set(_, name, value) { all[dashed(name)] = String(value); return true; },
        ownKeys: named,
        getOwnPropertyDescriptor: (_, name) => ({ configurable: true, enumerable: true, value: all[dashed(name)] }),
      });
    },
  },
  disabled: { get() { return this.attributes.disabled !== undefined; } },
  value: {
    get() {
      if (this.given !== undefined) return this.given;
      if (this.tag !== "select") return this.attributes.value ?? "";
      const chosen = this.options.find((o) => o.selected) ?? this.options[0];
      return chosen ? optionValue(chosen) : "";
    },
    set(value) { this.given = String(value); },
  },
  selectedIndex: {
    get() { return this.options.findIndex((o) => optionValue(o) === this.value); },
    set(k) { this.given = optionValue(this.options[k]); },
  },
});

function dispatch(target, type, more = {}) {
  let stopped = false;
  const alone = ["blur", "pointerleave", "mouseleave", "toggle"].includes(type);
  const event = {
    type, target, clientX: 0, clientY: 0, button: 0, pointerId: 1, timeStamp: now, prevented: false, ...more,
    preventDefault() { this.prevented = true; },
    stopPropagation() { stopped = true; },
  };
  for (let e = target; e && !stopped; e = alone ? null : e.parentNode) {
    e[`on${type}`]?.(event);
    for (const hear of e.heard?.[type] ?? []) hear(event);
  }
  return event;
}
function drawFrames() {
  for (let k = 0; queued.length; k++) {
    if (k === 1000) throw new Error("a frame after each frame: it never ends");
    const due = queued;
    queued = [];
    now += 16;
    for (const [, draw] of due) draw(now);
  }
}
function passTime(ms) {
  const end = now + ms;
  for (;;) {
    drawFrames();
    const next = timers.filter((t) => t.at <= end).sort((a, b) => a.at - b.at)[0];
    if (!next) break;
    timers = timers.filter((t) => t !== next);
    now = Math.max(now, next.at);
    next.run();
  }
  now = Math.max(now, end);
}
let under = [];
function hover(target) {
  const chain = [];
  for (let e = target; e; e = e.parentNode) chain.push(e);
  for (const e of under) if (!chain.includes(e)) for (const type of ["pointerleave", "mouseleave"]) dispatch(e, type);
  under = chain;
  const [clientX, clientY] = center(target);
  for (const type of ["pointermove", "mousemove"]) dispatch(target, type, { clientX, clientY });
}
function press(key) {
  const target = document.activeElement ?? root;
  if (key === "Tab") {
    document.activeElement = null;
    dispatch(target, "blur");
    return;
  }
  if (dispatch(target, "keydown", { key }).prevented) return;
  const by = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[key];
  if (target.tag === "button" && key === "Enter") dispatch(target, "click");
  else if (target.attributes.type === "range" && by) {
    const { min = 0, max = 100, step = 1 } = { ...target.attributes, ...target };
    fill(target, Number(Math.max(min, Math.min(max, Number(target.value) + by * step)).toFixed(9)));
  } else if ([...key].length === 1 && target.tag === "input") fill(target, target.value + key);
}
function fill(input, value) {
  input.value = value;
  for (const type of ["input", "change"]) dispatch(input, type);
}

furnish(globalThis, PAGE_WIDTH);
const root = new PaperElement("body", false);
Object.assign(document, {
  paper: false, activeElement: null, body: root,
  querySelectorAll: (selector) => found(root, selector), querySelector: (selector) => found(root, selector)[0] ?? null,
});
Object.assign(globalThis, {
  performance: { now: () => now },
  requestAnimationFrame(draw) { queued.push([++handles, draw]); return handles; },
  cancelAnimationFrame(handle) { queued = queued.filter(([h]) => h !== handle); },
  setTimeout(run, ms = 0) { timers.push({ handle: ++handles, at: now + ms, run }); return handles; },
  clearTimeout(handle) { timers = timers.filter((t) => t.handle !== handle); },
});

let state, sent, changed, statusHeard, interrupts, leave;
const kernel = {
  statusChanged: { connect(hear) { statusHeard = hear; }, disconnect() { statusHeard = null; } },
  interrupt() { interrupts++; },
};
const model = {
  get: (name) => state[name],
  set(name, value) { state[name] = value; },
  on(type, hear) { (changed[type] ??= []).push(hear); },
  off(type, hear) { changed[type] = (changed[type] ?? []).filter((h) => h !== hear); },
  send(message) { sent.push(message); },
  save_changes() {},
};
function narrowed(all, step) {
  if (step.css !== undefined) return all.flatMap((e) => found(e, step.css));
  if (step.text !== undefined) return all.filter((e) => e.textContent.toLowerCase().includes(step.text.toLowerCase()));
  if (step.label !== undefined)
    return all.flatMap((e) => [...e.descendants()].filter((d) => {
      const label = d.attributes["aria-label"] ?? "";
      return step.exact ? label === step.label : label.includes(step.label);
    }));
  if (step.role !== undefined)
    return all.flatMap((e) => found(e, step.role).filter((d) => (d.attributes["aria-label"] ?? d.textContent).includes(step.name)));
  return all.slice(step.nth, step.nth === -1 ? undefined : step.nth + 1);
}
const only = (all, steps) => {
  if (all.length !== 1) throw new Error(`${all.length} elements, not one, are ${JSON.stringify(steps)}`);
  return all[0];
};
const ACTIONS = {
  open({ view, live }) {
    [state, sent, changed, interrupts] = [{ view, ...live?.state }, [], {}, 0];
    if (live) model.widget_manager = { kernel };
    leave = picture.render({ model, el: root });
  },
  view({ view }) {
    state.view = view;
    for (const hear of changed["change:view"] ?? []) hear();
  },
  kernel({ status }) { statusHeard?.(kernel, status); },
  pass({ ms }) { passTime(ms); },
  close() { leave(); },
  press({ key }) { press(key); },
  away() { hover(root); },
  sent: () => [sent, interrupts],
  listeners: () => Object.values(changed).flat().length,
  evaluate({ steps, script, all, argument }) {
    const chosen = steps ? steps.reduce(narrowed, [root]) : null,
      call = (0, eval)(`(${script})`);
    if (!steps) return typeof call === "function" ? call(argument) : call;
    return call(all ? chosen : only(chosen, steps), argument);
  },
  act({ steps, action, value }) {
    const target = only(steps.reduce(narrowed, [root]), steps);
    if (action === "click") {
      if (!isShown(target) || target.disabled) throw new Error("what is clicked is hidden or disabled");
      hover(target);
      const [clientX, clientY] = center(target);
      if (target.tag === "button" || target.attributes.tabindex !== undefined) target.focus();
      dispatch(target, "click", { clientX, clientY });
      if (target.tag === "summary") {
        target.parentNode.open = !target.parentNode.open;
        dispatch(target.parentNode, "toggle");
      }
    } else if (action === "hover") hover(target);
    else if (action === "fill") fill(target, value);
    else if (action === "focus") target.focus();
    else if (action === "select") {
      const at = target.options.findIndex((o, k) => k === value || optionValue(o) === value || o.textContent === value);
      if (at < 0) throw new Error(`no option ${value} among ${target.options.map((o) => o.textContent)}`);
      fill(target, optionValue(target.options[at]));
    }
  },
};
globalThis.act = (json) => {
  const { name, ...given } = JSON.parse(json),
    answer = ACTIONS[name](given);
  if (name !== "evaluate") drawFrames();
  return JSON.stringify(answer === undefined ? null : answer);
};
