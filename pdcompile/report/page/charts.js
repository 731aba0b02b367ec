// The model as a graph, and memory over time.

class ModelMap {
  constructor(data, fills) {
    this.data = data;
    this.fills = fills;
    this.chooser = new Chooser("The model's modules by stage, and what is sent between stages",
      "Arrow keys go from box to box.");
    this.chosen = null;
    this.chooser.svg.addEventListener("keydown", (event) => this.key(event));
  }

  panel() {
    this.draw();
    const sent = this.data.edges.filter((edge) => edge.label).map((edge) => [
      this.data.nodes[edge.source].name, this.data.nodes[edge.target].name, edge.label, edge.detail,
    ]);
    const list = el("details", {}, el("summary", {}, `What crosses stages (${sent.length})`),
      table({ head: ["from", "to", "bytes", "values"], numbers: [false, false, true, false], rows: sent, note: "" },
        "Values and gradients that are sent between stages, a microbatch"));
    const scroll = el("div", { class: "scroll" }, this.chooser.frame);
    return section("model", "The model, cut into stages", scroll, this.chooser.said,
      keys([[this.fills.length > 8 ? [this.fills[0], this.fills.at(-1)] : this.fills, "stages, from the first to the last"], [["var(--link)"], "sent between stages: bytes of a microbatch, values and gradients"]]),
      note(this.data.note), sent.length ? list : "");
  }

  draw() {
    const [wide, high, gapX, gapY, head] = [158, 26, 84, 12, 46];
    const rows = Math.max(3, ...this.data.nodes.map((node) => node.row + 1));
    const width = this.data.columns.length * (wide + gapX) - gapX + 32;
    const height = head + rows * (high + gapY) + 12;
    const x = (node) => 8 + node.stage * (wide + gapX);
    const y = (node) => head + node.row * (high + gapY);
    const svg = this.chooser.svg;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.style.width = `${width}px`;
    svg.style.maxWidth = "none";
    this.places = this.data.nodes.map((node) => [x(node) + wide / 2, y(node)]);
    const columns = this.data.columns.flatMap(([name, holds], stage) => [
      shape("rect", { class: "column", x: 2 + stage * (wide + gapX), y: 2, width: wide + 12, height: height - 4, rx: 6 }, shape("title", {}, holds)),
      words(8 + stage * (wide + gapX), 18, name, "head"),
      words(8 + stage * (wide + gapX), 34, clipped(holds, 25), "quiet"),
    ]);
    const lines = [];
    const labels = [];
    const taken = [];
    for (const edge of this.data.edges) {
      const [a, b] = [this.data.nodes[edge.source], this.data.nodes[edge.target]];
      lines.push(shape("path", { class: edge.label ? "cut" : "edge", d: this.route(a, b, x, y, wide, high) }));
      if (!edge.label) continue;
      const [middle, level] = this.spot(edge, x, y, wide, high, gapX, taken);
      labels.push(shape("text", { class: "label", x: middle, y: level, "text-anchor": "middle" }, edge.label, shape("title", {}, edge.detail)));
    }
    const boxes = this.data.nodes.flatMap((node, n) => {
      const box = shape("rect", {
        class: `bar${this.chosen === n ? " chosen" : ""}`, x: x(node), y: y(node), width: wide, height: high, rx: 4, fill: this.fills[node.stage],
      });
      box.addEventListener("pointermove", () => this.tell(n, false));
      return [box, words(x(node) + 6, y(node) + 17, clipped(node.name, 24), "on")];
    });
    svg.replaceChildren(...columns, ...lines, ...boxes, ...labels);
  }

  // Where the label of an edge goes: beside the middle of its line, below those that are there.
  spot(edge, x, y, wide, high, gapX, taken) {
    const [a, b] = [this.data.nodes[edge.source], this.data.nodes[edge.target]];
    const near = b.stage === a.stage + 1;
    const middle = near ? (x(a) + wide + x(b)) / 2 : x(a) + wide + gapX / 2;
    let level = near ? (y(a) + y(b) + high) / 2 : y(a) + high / 2 - 4;
    while (taken.some(([at, height]) => at === middle && Math.abs(height - level) < 14)) level += 14;
    taken.push([middle, level]);
    return [middle, level];
  }

  route(a, b, x, y, wide, high) {
    if (a.stage === b.stage) {
      const middle = x(a) + wide / 2;
      if (b.row === a.row + 1) return `M${middle},${y(a) + high}V${y(b)}`;
      const out = x(a) + wide;
      return `M${out},${y(a) + high / 2}C${out + 20},${y(a) + high / 2} ${out + 20},${y(b) + high / 2} ${out},${y(b) + high / 2}`;
    }
    const [from, to] = [x(a) + wide, x(b)];
    if (b.stage > a.stage + 1) { // above the boxes between them
      const [near, top] = [40, 41];
      return `M${from},${y(a) + high / 2}C${from + near},${y(a) + high / 2} ${from},${top} ${from + near},${top}`
        + `H${to - near}C${to},${top} ${to - near},${y(b) + high / 2} ${to},${y(b) + high / 2}`;
    }
    const bend = Math.max(30, (to - from) / 3);
    return `M${from},${y(a) + high / 2}C${from + bend},${y(a) + high / 2} ${to - bend},${y(b) + high / 2} ${to},${y(b) + high / 2}`;
  }

  tell(n, aloud) {
    const [left, top] = this.places[n];
    this.chooser.tell(this.data.nodes[n].detail, left, top + 20, aloud);
  }

  key(event) {
    const last = this.data.nodes.length - 1;
    const here = this.data.nodes[this.chosen ?? 0];
    const aside = (by) => {
      const others = this.data.nodes.map((node, n) => [node, n]).filter(([node]) => node.stage === here.stage + by);
      const near = others.filter(([node]) => node.row <= here.row).pop();
      return near ? near[1] : this.chosen;
    };
    const goals = {
      ArrowDown: () => Math.min(last, this.chosen + 1), ArrowUp: () => Math.max(0, this.chosen - 1),
      ArrowRight: () => aside(1), ArrowLeft: () => aside(-1),
    };
    if (!goals[event.key]) return;
    event.preventDefault();
    this.chosen = this.chosen === null ? 0 : goals[event.key]();
    this.draw();
    this.tell(this.chosen, true);
  }
}

function clipped(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

// -- memory -----------------------------------------------------------------------------------

function memoryPanel(data, colours) {
  const fills = data.groups.map((group) => colours[group.replaceAll(" ", "-")]);
  const curved = data.lanes.filter((lane) => lane.points.length);
  const curves = curved.map((lane) => memoryCurve(data, lane, fills));
  return section("memory", "Memory",
    keys(data.groups.map((group, n) => [[fills[n]], group])),
    el("h3", {}, "At its peak, of the limit"), memoryBars(data, fills),
    el("h3", {}, "Over time"), el("div", { class: "curves" }, ...curves), note(data.note),
    el("details", {}, el("summary", {}, "All figures"), table(data.ledger, "Memory of each rank at its peak")));
}

function memoryBars(data, fills) {
  const most = Math.max(...data.lanes.map((lane) => Math.max(total(lane.peak_bytes), lane.limit_bytes || 0)), 1);
  const high = 26;
  const svg = shape("svg", { role: "img", "aria-label": "Peak memory of each rank: the figures are in the table below" });
  const frame = el("div", { class: "frame" }, svg);
  const draw = () => {
    const width = frame.clientWidth;
    if (!width) return;
    const room = width - 64 - (width < 640 ? 8 : 176);
    svg.setAttribute("viewBox", `0 0 ${width} ${high * data.lanes.length + 4}`);
    svg.setAttribute("height", high * data.lanes.length + 4);
    svg.replaceChildren(...data.lanes.flatMap((lane, n) => {
      const y = n * high + 3;
      let x = 64;
      const shown = [words(0, y + 15, `rank ${lane.rank}`, "quiet")];
      lane.peak_bytes.forEach((size, i) => {
        const length = room * size / most;
        shown.push(shape("rect", { class: "bar", x, y, width: length, height: 20, fill: fills[i] },
          shape("title", {}, `${data.groups[i]}: ${bytes(size)}`)));
        x += length;
      });
      if (lane.limit_bytes) {
        const at = 64 + room * lane.limit_bytes / most;
        shown.push(shape("line", { class: "limit", x1: at, x2: at, y1: y - 3, y2: y + 23 }));
      }
      const says = lane.share ? `${lane.peak} (${lane.share})` : lane.peak;
      const inside = width < 640;
      shown.push(shape("text", {
        x: inside ? 70 : width - 2, y: y + 15, class: inside ? "on" : lane.over ? "limit" : "", "text-anchor": inside ? "start" : "end",
      }, inside ? says : lane.share ? `${lane.peak}: ${lane.share} of ${lane.limit}` : `${lane.peak}, no limit`));
      return shown;
    }));
  };
  atWidth(frame, draw);
  return frame;
}

function total(parts) {
  return parts.reduce((sum, part) => sum + part, 0);
}

function memoryCurve(data, lane, fills) {
  const [high, left, top] = [130, 58, 14];
  const peak = Math.max(...lane.points.map((point) => total(point.slice(1))), 1);
  const near = lane.limit_bytes && lane.limit_bytes < 4 * peak;
  const most = Math.max(peak, near ? lane.limit_bytes : 0) * 1.06;
  const says = lane.limit_bytes ? `limit ${lane.limit}` : "no limit";
  const chooser = new Chooser(`Memory of rank ${lane.rank} over time, peak ${lane.peak}, ${says}`, "Left and right arrow keys go through time.");
  const svg = chooser.svg;
  let width = 0;
  let chosen = 0;
  const x = (time) => left + time / (data.seconds || 1) * (width - left - 8);
  const y = (size) => top + (1 - size / most) * (high - top - 20);
  const tell = (aloud) => {
    const point = lane.points[chosen];
    const parts = data.groups.map((group, i) => [group, point[i + 1]]).filter(([, size]) => size);
    chooser.tell(`rank ${lane.rank} at ${seconds(point[0])}: ${bytes(total(point.slice(1)))}; `
      + parts.map(([group, size]) => `${group} ${bytes(size)}`).join(", "), x(point[0]), 30, aloud);
  };
  const draw = () => {
    width = chooser.frame.clientWidth;
    if (!width) return;
    svg.setAttribute("viewBox", `0 0 ${width} ${high}`);
    svg.setAttribute("height", high);
    const under = new Array(lane.points.length).fill(0);
    const areas = data.groups.map((group, i) => {
      const below = lane.points.map((point, n) => [point[0], under[n]]);
      lane.points.forEach((point, n) => { under[n] += point[i + 1]; });
      const above = lane.points.map((point, n) => [point[0], under[n]]);
      return shape("path", { d: `${steps(above, x, y, data.seconds)}${back(below, x, y, data.seconds)}Z`, fill: fills[i] });
    });
    const scale = ticks(0, most, 4, SIZES).flatMap(([size, label]) => [
      shape("line", { class: "tick", x1: left - 4, x2: left, y1: y(size), y2: y(size) }),
      shape("text", { class: "quiet", x: left - 6, y: y(size) + 4, "text-anchor": "end" }, label),
    ]);
    const times = ticks(0, data.seconds, (width - left) / 100, TIMES).map(([time, label]) => shape("text",
      { class: "quiet", x: x(time), y: high - 4, "text-anchor": x(time) > width - 32 ? "end" : time ? "middle" : "start" }, label));
    const limit = near ? [
      shape("line", { class: "limit", x1: left, x2: width - 8, y1: y(lane.limit_bytes), y2: y(lane.limit_bytes) }),
      shape("text", { class: "limit label", x: width - 10, y: y(lane.limit_bytes) - 3, "text-anchor": "end" }, says),
    ] : [];
    svg.replaceChildren(...areas, ...scale, ...times, ...limit);
  };
  svg.addEventListener("pointermove", (event) => {
    const time = (event.clientX - svg.getBoundingClientRect().left - left) / (width - left - 8) * data.seconds;
    chosen = Math.max(0, lane.points.findLastIndex((point) => point[0] <= time));
    tell(false);
  });
  svg.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    chosen = Math.max(0, Math.min(lane.points.length - 1, chosen + by));
    tell(true);
  });
  atWidth(chooser.frame, draw);
  chooser.said.textContent = "";
  chooser.said.className = "unseen"; // the tip shows it
  const title = `rank ${lane.rank}: peak ${lane.peak}, ${says}${lane.share && !near ? ` (${lane.share} used)` : ""}`;
  return el("div", {}, el("h3", {}, title), chooser.frame, chooser.said);
}

// A curve that stays where it is until the next point, forwards and back.
function steps(points, x, y, end) {
  const parts = [`M${x(points[0][0])},${y(points[0][1])}`];
  for (const [time, size] of points.slice(1)) parts.push(`H${x(time).toFixed(1)}V${y(size).toFixed(1)}`);
  return `${parts.join("")}H${x(end)}`;
}

function back(points, x, y, end) {
  const parts = [`V${y(points[points.length - 1][1])}`];
  for (let n = points.length - 1; n > 0; n--) parts.push(`H${x(points[n][0]).toFixed(1)}V${y(points[n - 1][1]).toFixed(1)}`);
  return `${parts.join("")}H${x(points[0][0])}`;
}
