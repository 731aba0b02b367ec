// The timeline: bars of every rank, with a window on the time axis that zooms and pans.

class Timeline {
  constructor(data, colours) {
    this.data = data;
    this.colours = colours;
    this.chooser = new Chooser("Timeline of all ranks",
      "Arrow keys go from box to box, plus and minus zoom, page up and page down pan, 0 shows all.");
    this.svg = this.chooser.svg;
    this.chosen = null;
    const span = data.minibatches[data.shown] || [0, 0, data.seconds];
    this.home = this.padded(span[1], span[2]);
    [this.from, this.to] = this.home;
    this.listen();
  }

  padded(from, to) {
    const edge = 0.01 * (to - from || 1);
    return [Math.max(0, from - edge), Math.min(this.data.seconds, to + edge)];
  }

  panel() {
    const many = this.data.minibatches.length > 1;
    const button = (label, spoken, action) => {
      const made = el("button", { type: "button", "aria-label": spoken }, label);
      made.addEventListener("click", action);
      return made;
    };
    const tools = el("div", { class: "tools", role: "toolbar", "aria-label": "Timeline window" },
      button("+", "zoom in", () => this.zoom(0.5)),
      button("−", "zoom out", () => this.zoom(2)),
      button("◀", "earlier", () => this.pan(-0.5)),
      button("▶", "later", () => this.pan(0.5)),
      button("all", "show all of the timeline", () => this.look(0, this.data.seconds)));
    if (many) tools.append(this.picker());
    const used = new Set(this.data.lanes.flatMap((lane) => lane.bars.map((bar) => bar[0])));
    const legend = this.data.kinds.map((kind, n) => [kind, n]).filter(([, n]) => used.has(n)).map(([kind]) => {
      const name = kind.replaceAll(" ", "-");
      const fills = [this.colours[name], ...(many ? [this.colours[`${name}-odd`]] : [])];
      return [fills, kind];
    });
    const hints = [`Numbers are those of the ${this.data.numbered}; grey is idle.`];
    if (many) hints.push("Dark and light: even and odd minibatches; other minibatches than the chosen one are faint.");
    return section("timeline", "Timeline", tools, this.chooser.frame, this.chooser.said,
      keys(legend), note(hints.join(" ")));
  }

  picker() {
    const select = el("select", { "aria-label": "minibatch" });
    this.data.minibatches.forEach(([number], i) => {
      select.append(el("option", { value: i, ...(i === this.data.shown ? { selected: "" } : {}) }, `minibatch ${number}`));
    });
    select.addEventListener("change", () => {
      this.data.shown = Number(select.value);
      const [, from, to] = this.data.minibatches[this.data.shown];
      this.look(...this.padded(from, to));
    });
    return select;
  }

  // -- the window ---------------------------------------------------------------------------

  look(from, to) {
    const most = this.data.seconds || 1;
    const length = Math.min(Math.max(to - from, most * 1e-5), most);
    this.from = Math.max(0, Math.min(from, most - length));
    this.to = this.from + length;
    this.draw();
  }

  zoom(factor, at = (this.from + this.to) / 2) {
    const length = (this.to - this.from) * factor;
    const part = (at - this.from) / (this.to - this.from);
    this.look(at - part * length, at + (1 - part) * length);
  }

  pan(part) {
    const by = part * (this.to - this.from);
    this.look(this.from + by, this.to + by);
  }

  listen() {
    const svg = this.svg;
    let drag = null;
    svg.addEventListener("pointerdown", (event) => { drag = [event.clientX, this.from]; });
    svg.addEventListener("pointerup", () => { drag = null; });
    svg.addEventListener("pointermove", (event) => {
      if (drag && event.buttons) {
        const length = this.to - this.from;
        const from = drag[1] - (event.clientX - drag[0]) / this.room * length;
        this.look(from, from + length);
      } else {
        this.point(event);
      }
    });
    svg.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
      event.preventDefault();
      if (event.shiftKey) this.pan(Math.sign(event.deltaY || event.deltaX) * 0.1);
      else this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.time(event));
    }, { passive: false });
    svg.addEventListener("keydown", (event) => this.key(event));
    atWidth(svg.parentNode, () => this.draw());
  }

  key(event) {
    const acts = {
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
      PageUp: () => this.pan(-0.5), PageDown: () => this.pan(0.5),
      0: () => this.look(0, this.data.seconds), Home: () => this.look(...this.home),
      ArrowLeft: () => this.step(0, -1), ArrowRight: () => this.step(0, 1),
      ArrowUp: () => this.step(-1, 0), ArrowDown: () => this.step(1, 0),
    };
    if (!acts[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    acts[event.key]();
  }

  // -- choosing -----------------------------------------------------------------------------

  time(event) {
    const x = event.clientX - this.svg.getBoundingClientRect().left - this.margin;
    return this.from + x / this.room * (this.to - this.from);
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const y = event.clientY - box.top;
    const at = this.time(event);
    const n = this.tops.findIndex((top) => y >= top && y < top + this.height);
    const bar = n < 0 ? null : this.data.lanes[n].bars.findLast((one) => one[5] <= at);
    if (!bar || at > bar[5] + bar[6]) { this.chooser.tip.hidden = true; return; }
    this.chooser.tell(this.describe(n, bar), event.clientX - box.left, y, false);
  }

  describe(lane, bar) {
    const [kind, stage, minibatch, microbatch, , start, length] = bar;
    const of = microbatch >= 0 ? ` of microbatch ${microbatch}` : "";
    return `${this.data.kinds[kind]}${of}, minibatch ${minibatch}, stage ${stage}, rank ${this.data.lanes[lane].rank}: `
      + `starts at ${seconds(start)}, takes ${seconds(length)}`;
  }

  step(lanes, bars) {
    let [n, i] = this.chosen || [0, -1];
    if (!this.chosen) {
      n = 0;
      i = Math.max(0, this.data.lanes[0].bars.findIndex((bar) => bar[5] >= this.from));
    } else if (lanes) {
      const start = this.data.lanes[n].bars[i][5];
      n = Math.max(0, Math.min(this.data.lanes.length - 1, n + lanes));
      i = this.data.lanes[n].bars.findIndex((bar) => bar[5] + bar[6] > start);
      if (i < 0) i = this.data.lanes[n].bars.length - 1;
    } else {
      i = Math.max(0, Math.min(this.data.lanes[n].bars.length - 1, i + bars));
    }
    const bar = this.data.lanes[n].bars[i];
    if (!bar) return;
    this.chosen = [n, i];
    if (bar[5] < this.from) this.look(bar[5], bar[5] + this.to - this.from);
    else if (bar[5] + bar[6] > this.to) this.look(bar[5] + bar[6] - (this.to - this.from), bar[5] + bar[6]);
    else this.draw();
    this.chooser.tell(this.describe(n, bar), this.x(bar[5]), this.tops[n] + this.height, true);
  }

  // -- drawing ------------------------------------------------------------------------------

  get height() {
    return this.data.lanes.length > 24 ? 14 : 26;
  }

  x(time) {
    return this.margin + (time - this.from) / (this.to - this.from) * this.room;
  }

  draw() {
    const width = this.svg.parentNode.clientWidth;
    if (!width) return;
    this.margin = width < 640 ? 52 : 64;
    this.room = width - this.margin - 6;
    this.tops = [];
    let y = 4;
    for (const _ of this.data.lanes) {
      this.tops.push(y);
      y += this.height + 4;
    }
    this.svg.setAttribute("viewBox", `0 0 ${width} ${y + 22}`);
    this.svg.setAttribute("height", y + 22);
    const drawn = this.data.lanes.flatMap((lane, n) => this.lane(lane, n));
    const marks = ticks(this.from, this.to, this.room / 100, TIMES).flatMap(([time, label]) => [
      shape("line", { class: "tick", x1: this.x(time), x2: this.x(time), y1: y - 2, y2: y + 3 }),
      shape("text", { x: this.x(time), y: y + 16, class: "quiet", "text-anchor": this.x(time) > width - 32 ? "end" : "middle" }, label),
    ]);
    this.svg.replaceChildren(...drawn, ...marks);
  }

  lane(lane, n) {
    const [top, height, shown] = [this.tops[n], this.height, []];
    const current = (this.data.minibatches[this.data.shown] || [0])[0];
    shown.push(words(0, top + height / 2 + 4, `rank ${lane.rank}`, "quiet"));
    shown.push(shape("rect", { class: "idle", x: this.margin, y: top, width: this.room, height }));
    let drawnTo = -1;
    lane.bars.forEach((bar, i) => {
      const [kind, , minibatch, , number, start, length] = bar;
      if (start > this.to || start + length < this.from) return;
      const left = Math.max(this.margin, this.x(start));
      const right = Math.min(this.margin + this.room, this.x(start + length));
      const chosen = this.chosen && this.chosen[0] === n && this.chosen[1] === i;
      if (right < drawnTo + 0.3 && !chosen) return; // thinner than what can be seen
      drawnTo = right;
      const name = this.data.kinds[kind].replaceAll(" ", "-");
      const other = this.data.minibatches.length > 1 && minibatch !== current;
      const odd = this.data.minibatches.length > 1 && minibatch % 2 ? "-odd" : "";
      shown.push(shape("rect", {
        class: `bar${right - left < 3 ? " thin" : ""}${other ? " other" : ""}${chosen ? " chosen" : ""}`,
        x: left, y: top, width: Math.max(right - left, 0.5), height, fill: this.colours[name + odd],
      }));
      const label = number >= 0 ? String(number) : "";
      if (label && right - left >= 7 * label.length + 4 && height > 12) {
        shown.push(words((left + right) / 2, top + height / 2 + 4, label, "number"));
      }
    });
    return shown;
  }
}
