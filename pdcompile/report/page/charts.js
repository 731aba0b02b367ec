// Memory at its peak and over time.

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
