// As much of a document as the pictures use, for rendering one into a file, where no browser is.
const ALWAYS = () => {};

class TextNode {
  constructor(text) {
    this.text = text;
  }
  get textContent() {
    return this.text;
  }
}

class Classes {
  constructor(element) {
    this.element = element;
  }
  get names() {
    const text = this.element.attributes.class;
    return text ? text.split(" ") : [];
  }
  contains(name) {
    return this.names.includes(name);
  }
  add(name) {
    const text = this.element.attributes.class;
    if (!text) this.element.attributes.class = name;
    else if (!this.contains(name)) this.element.attributes.class = text + " " + name;
  }
  remove(name) {
    if (this.contains(name)) this.element.attributes.class = this.names.filter((n) => n !== name).join(" ");
  }
  toggle(name, on = !this.contains(name)) {
    if (on) this.add(name);
    else this.remove(name);
  }
}

// "tag.class[data-x="1"]", no combinators
function matches(element, selector) {
  const [, tag, classes, attributes] = /^([\w-]*)((?:\.[\w-]+)*)((?:\[[^\]]+\])*)$/.exec(selector);
  return (
    (!tag || element.tag === tag) &&
    (classes.match(/[\w-]+/g) || []).every((c) => element.classList.contains(c)) &&
    [...attributes.matchAll(/\[([\w-]+)(?:="?([^"\]]*)"?)?\]/g)].every(([, name, value]) =>
      value === undefined ? element.attributes[name] !== undefined : String(element.attributes[name]) === value,
    )
  );
}

const dashed = (name) => name.replace(/[A-Z]/g, (c) => "-" + c.toLowerCase());

export class PaperElement {
  constructor(tag, isSvg) {
    this.tag = tag;
    this.isSvg = isSvg;
    this.attributes = {};
    this.childNodes = [];
    this.parentNode = null;
    this.hidden = false;
  }
  get isConnected() {
    return true;
  }
  get clientWidth() {
    return PaperElement.width;
  }
  get classList() {
    return new Classes(this);
  }
  get style() {
    this.ownStyle ??= {};
    return this.ownStyle;
  }
  get dataset() {
    return new Proxy(this.attributes, {
      get: (all, name) => all["data-" + dashed(name)],
      set(all, name, value) {
        all["data-" + dashed(name)] = String(value);
        return true;
      },
    });
  }
  setAttribute(name, value) {
    this.attributes[name] = String(value);
    if (name === "hidden") this.hidden = true;
    if (name === "style")
      for (const [, key, text] of String(value).matchAll(/([\w-]+)\s*:\s*([^;]+)/g))
        this.style[key.replace(/-(.)/g, (_, c) => c.toUpperCase())] = text.trim();
  }
  getAttribute(name) {
    return this.attributes[name] ?? null;
  }
  removeAttribute(name) {
    delete this.attributes[name];
  }
  get children() {
    return this.childNodes.filter((n) => n instanceof PaperElement);
  }
  get options() {
    return this.children.filter((n) => n.tag === "option");
  }
  get firstChild() {
    return this.childNodes[0] ?? null;
  }
  get lastChild() {
    return this.childNodes[this.childNodes.length - 1] ?? null;
  }
  get textContent() {
    return this.childNodes.map((n) => n.textContent).join("");
  }
  set textContent(text) {
    this.replaceChildren(...(text === "" ? [] : [String(text)]));
  }
  append(...nodes) {
    for (const node of nodes) this.insertBefore(node, null);
  }
  appendChild(node) {
    if (node.parentNode) node.remove();
    node.parentNode = this;
    this.childNodes.push(node);
    return node;
  }
  insertBefore(given, before) {
    const node = typeof given === "string" ? new TextNode(given) : given;
    if (node.parentNode) node.remove();
    const at = before === null ? this.childNodes.length : this.childNodes.indexOf(before);
    this.childNodes.splice(at, 0, node);
    if (node instanceof PaperElement) node.parentNode = this;
    return node;
  }
  replaceChildren(...nodes) {
    for (const child of this.children) child.parentNode = null;
    this.childNodes = [];
    this.append(...nodes);
  }
  remove() {
    const siblings = this.parentNode.childNodes;
    siblings.splice(siblings.indexOf(this), 1);
    this.parentNode = null;
  }
  *descendants() {
    for (const child of this.children) {
      yield child;
      yield* child.descendants();
    }
  }
  querySelectorAll(selector) {
    return [...this.descendants()].filter((e) => matches(e, selector));
  }
  querySelector(selector) {
    for (const e of this.descendants()) if (matches(e, selector)) return e;
    return null;
  }
  getBoundingClientRect() {
    return { left: 0, top: 0, right: 0, bottom: 0, width: 0, height: 0 };
  }
  addEventListener() {}
  removeEventListener() {}
  focus() {}
  scrollIntoView() {}
}

// What a picture finds around it: nothing moves, nothing is asked, and every element is as wide as the paper.
export function furnish(world, width) {
  PaperElement.width = width;
  const observer = class {
    observe() {}
    disconnect() {}
  };
  Object.assign(world, {
    document: {
      paper: true,
      createElement: (tag) => new PaperElement(tag, false),
      createElementNS: (_, tag) => new PaperElement(tag, true),
    },
    window: { addEventListener: ALWAYS, removeEventListener: ALWAYS, innerHeight: 0 },
    matchMedia: () => ({ matches: true }),
    ResizeObserver: observer,
    performance: { now: () => 0 },
    requestAnimationFrame: ALWAYS,
    cancelAnimationFrame: ALWAYS,
    setTimeout: ALWAYS,
    clearTimeout: ALWAYS,
    setInterval: ALWAYS,
    clearInterval: ALWAYS,
    TextDecoder: class {
      decode(bytes) {
        return utf8(bytes);
      }
    },
  });
}

// what is not UTF-8 becomes U+FFFD, as in a browser
function utf8(bytes) {
  let text = "";
  for (let i = 0; i < bytes.length; i++) {
    const first = bytes[i],
      more =
        first < 0x80
          ? 0
          : first >= 0xc2 && first < 0xe0
            ? 1
            : first >= 0xe0 && first < 0xf0
              ? 2
              : first >= 0xf0 && first < 0xf5
                ? 3
                : -1;
    const rest = [...bytes.slice(i + 1, i + 1 + Math.max(0, more))];
    if (more < 0 || rest.length < more || rest.some((b) => (b & 0xc0) !== 0x80)) {
      text += "\ufffd";
      continue;
    }
    const code = rest.reduce((n, b) => (n << 6) | (b & 0x3f), more ? first & (0x3f >> more) : first);
    text += code <= 0x10ffff && (code < 0xd800 || code > 0xdfff) ? String.fromCodePoint(code) : "\ufffd";
    i += more;
  }
  return text;
}
