// Panel by panel, from the data that is embedded in the page.

function opening(data) {
  const tiles = data.tiles.map((tile) => el("div", { class: "tile" },
    el("dt", {}, tile.label),
    el("dd", {}, el("div", { class: `value ${tile.tone}` }, tile.value), el("div", { class: "hint" }, tile.note))));
  return [
    el("header", {}, el("h1", {}, data.title), el("p", { class: "muted" }, data.subtitle)),
    el("dl", { class: "tiles", id: "tiles" }, ...tiles),
    section("limits", "What limits this plan", el("p", {}, data.limits)),
    section("proof", "How good it is", el("p", {}, data.certificate)),
  ];
}

function bindingPanel(data) {
  return section("binding", "What binds, and the next-best cuts",
    el("p", {}, data.sentence),
    data.stages ? table(data.stages, "What a microbatch takes of each stage") : "",
    data.cuts ? table(data.cuts, "For each cut, the cheapest other one and what it would cost") : "");
}

function show() {
  const data = JSON.parse(document.getElementById("report").textContent);
  const main = document.getElementById("main");
  main.replaceChildren(
    ...opening(data),
    new Timeline(data.timeline, data.colours).panel(),
    section("critical", "The critical path of a step", el("p", {}, `${data.critical.sentence}.`),
      strips(data.critical, "Parts of the critical path"),
      note("The chain of work and messages of which each began as soon as the one before it ended: only what shortens it makes a step shorter.")),
    bindingPanel(data.binding),
    section("stages", "Stages", table(data.stages, "Times and bytes of a microbatch")),
    memoryPanel(data.memory, data.colours),
    section("traffic", "Traffic of each link", el("p", {}, data.traffic.sentence), strips(data.traffic, "How busy each link is")),
    ...(data.notes.length ? [section("notes", "Notes", el("ul", {}, ...data.notes.map((text) => el("li", {}, text))))] : []),
  );
  for (const draw of FIRST) draw();
}

show();
