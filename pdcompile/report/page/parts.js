// Helpers of all panels. Texts of a plan only ever become text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  for (const child of children) {
    // A number stays on the line of its percent sign.
    node.append(typeof child === "string" ? child.replace(/(\d) %/g, "$1\u00a0%") : child);
  }
  return node;
}

function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function shape(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function words(x, y, text, kind = "") {
  return shape("text", { x, y, class: kind }, text);
}

const TIMES = [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 1e-9]];
const SIZES = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]];

// Three digits: 1.25 ms.
function inUnits(value, units, zero) {
  if (!value) return zero;
  const [unit, size] = units.find(([, size]) => Math.abs(value) >= 0.9995 * size) || units[units.length - 1];
  const scaled = value / size;
  const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(scaled)) + 1e-9));
  return `${scaled.toFixed(Math.min(digits, 2))} ${unit}`;
}

const seconds = (value) => inUnits(value, TIMES, "0 s");
const bytes = (value) => inUnits(value, SIZES, "0 B");

// Round numbers between two ends and their labels, all in one unit: 0 ms, 20 ms, 40 ms.  They are
// 1, 2 or 5 x 10^n apart, at most so many such steps (or three).
function ticks(from, to, most, units) {
  if (!(to > from)) return [[from, inUnits(from, units, `0 ${units.find(([, size]) => size === 1)[0]}`)]];
  const rough = (to - from) / Math.max(Math.floor(most), 3);
  let exponent = Math.floor(Math.log10(rough));
  let digit = [1, 2, 5, 10].find((n) => n * 10 ** exponent >= rough * (1 - 1e-9));
  if (digit === 10) [digit, exponent] = [1, exponent + 1];
  const step = digit * 10 ** exponent;
  const [unit, size] = units.find(([, size]) => to >= size) || units[units.length - 1];
  const decimals = Math.max(0, Math.round(Math.log10(size)) - exponent);
  const found = [];
  for (let n = Math.ceil(from / step * (1 - 1e-12)); n * step <= to * (1 + 1e-12); n++) {
    found.push([n * step, `${(n * step / size).toFixed(n ? decimals : 0)} ${unit}`]);
  }
  return found;
}

function section(id, title, ...content) {
  const heading = el("h2", { id: `${id}-title` }, title);
  return el("section", { id, "aria-labelledby": `${id}-title` }, heading, ...content);
}

// What draws for the first time once all panels are in the page, and have a width.
const FIRST = [];

// Draw then, and whenever a node has another width, after the browser has laid out the page.
function atWidth(node, draw) {
  let known = 0;
  FIRST.push(() => {
    known = node.clientWidth;
    draw();
  });
  new ResizeObserver(() => {
    if (node.clientWidth === known) return;
    known = node.clientWidth;
    requestAnimationFrame(draw);
  }).observe(node);
}

function note(text) {
  return text ? el("p", { class: "note" }, text) : "";
}

function keys(pairs) {
  const entries = pairs.map(([fills, label]) => {
    const entry = el("li");
    for (const colour of fills) {
      const swatch = el("span", { class: "swatch", "aria-hidden": "true" });
      swatch.style.background = colour;
      entry.append(swatch);
    }
    entry.append(label);
    return entry;
  });
  return el("ul", { class: "keys" }, ...entries);
}

const LONG = 16; // rows of a table that is folded

function table(grid, caption) {
  const cells = (tag, row) => row.map((text, i) => {
    const cell = el(tag, grid.numbers[i] ? { class: "number" } : {}, text);
    if (tag === "th") cell.setAttribute("scope", "col");
    return cell;
  });
  const scroll = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", {},
      el("caption", {}, caption),
      el("thead", {}, el("tr", {}, ...cells("th", grid.head))),
      el("tbody", {}, ...grid.rows.map((row) => el("tr", {}, ...cells("td", row))))));
  if (grid.rows.length <= LONG) return el("div", {}, scroll);
  const summary = el("summary", {}, `${caption} (${grid.rows.length} rows)`);
  return el("details", {}, summary, scroll);
}

function strips(data, label) {
  const rows = data.strips.flatMap((strip) => {
    const bar = el("span", { class: "fill" });
    bar.style.width = `${Math.min(100, 100 * strip.fraction)}%`;
    bar.style.background = strip.colour === "idle" ? "var(--muted)" : `var(--${strip.colour})`;
    return [
      el("div", {}, strip.label),
      el("div", { class: "track", "aria-hidden": "true" }, bar),
      el("div", { class: "said-of" }, strip.value),
    ];
  });
  return el("div", {}, el("div", { class: "strips", role: "group", "aria-label": label }, ...rows), note(data.note));
}

// A drawing in which pointer and keys choose one thing, that is told and shown beside it.
class Chooser {
  constructor(label, help) {
    this.svg = shape("svg", { tabindex: "0", role: "img", "aria-label": `${label}. ${help}` });
    this.tip = el("div", { class: "tip", hidden: "", "aria-hidden": "true" });
    this.said = el("p", { class: "said", "aria-live": "polite" }, help);
    this.frame = el("div", { class: "frame" }, this.svg, this.tip);
    this.svg.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    this.svg.addEventListener("blur", () => { this.tip.hidden = true; });
  }

  // Show a text at a place of the drawing; `aloud` where a key has chosen it.
  tell(text, x, y, aloud) {
    this.tip.textContent = text;
    this.tip.hidden = false;
    const room = this.frame.clientWidth - this.tip.offsetWidth - 4;
    this.tip.style.left = `${Math.max(0, Math.min(x + 10, room))}px`;
    this.tip.style.top = `${y + 14}px`;
    if (aloud) this.said.textContent = text;
  }
}
