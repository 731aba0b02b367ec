"""The page of a plan: its data says what the plan says, and a browser draws all of it."""

from __future__ import annotations

import html as entities
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from pdcompile.cluster import Cluster
from pdcompile.passes.simulate import simulate, simulate_drained
from pdcompile.plan import Plan
from pdcompile.problem import Item, PartitionProblem, StageLimits, Traffic
from pdcompile.report.page import html, page_data
from pdcompile.report.page.panels import MOST_POINTS, lanes, thinned
from pdcompile.report.timeline import bars
from tests.helpers.report_data import plan
from tests.helpers.schedules import make_plan, plans

HOSTILE = "</script><img src=x onerror=alert(1)><!--&\u2028"
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)


def with_problem(num_items: int = 6, name: str = "blocks.{}.up", stages: int = 2) -> Plan:
    """Equal items in a chain, over stages of equal length."""
    items = tuple(
        Item(name.format(i), (f"op_{i}",), 1e-3, 2e-3, 1000, 1000, 100) for i in range(num_items)
    )
    traffic = tuple(Traffic(f"v{i}", i, (i + 1,), 2_000, 2_000) for i in range(num_items - 1))
    problem = PartitionProblem(
        items, traffic, (StageLimits(memory_bytes=4_000_000),) * stages,
        num_microbatches=4, objective="flush",
    )  # fmt: skip
    made, share = make_plan("1f1b", stages, 4), num_items // stages
    held = tuple(
        replace(
            stage,
            ops=tuple(f"op_{i}" for i in range(s * share, (s + 1) * share)),
            forward_seconds=share * 1e-3,
            backward_seconds=share * 2e-3,
        )
        for s, stage in enumerate(made.stages)
    )
    edges = tuple(replace(edge, bytes=2_000) for edge in made.edges)
    cluster = Cluster.local(stages, memory="4 MB").to_toml()
    return replace(
        made, stages=held, edges=edges, cluster=cluster, problem=problem, model="GPT",
        certificate=plan().certificate,
    )  # fmt: skip


def data_of(made: Plan, steps: int = 1) -> dict[str, Any]:
    steady, drawn = simulate(made), simulate_drained(made, steps)
    return page_data(made, steady, drawn, title="plan.json", date="25 November 2026")


def embedded(document: str) -> Any:
    (text,) = re.findall(r'<script type="application/json" id="report">(.*?)</script>', document)
    return json.loads(text)


# -- the document ------------------------------------------------------------------------------


def test_the_page_is_whole_and_loads_nothing() -> None:
    document = html(data_of(with_problem()))
    assert document.startswith("<!doctype html>")
    assert not re.findall(
        r"(?:src=|href=|@import|url\(|https?://(?!www\.w3\.org/2000/svg))", document
    )
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', document)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    assert not re.findall(r"\son\w+=", document)


@pytest.mark.parametrize("place", ["notes", "model", "fqn", "title", "costs"])
def test_texts_of_a_plan_are_never_markup(place: str) -> None:
    made = with_problem()
    if place == "notes":
        made = replace(made, notes=(HOSTILE,))
    elif place == "costs":
        made = replace(made, costs=HOSTILE)
    elif place == "model":
        made = replace(made, model=HOSTILE)
    elif place == "fqn":
        stages = (replace(made.stages[0], parameters=(HOSTILE,)), *made.stages[1:])
        made = replace(made, stages=stages)
    steady, drawn = simulate(made), simulate_drained(made, 1)
    title = HOSTILE if place == "title" else "plan"
    made = replace(made, model="") if place == "title" else made
    document = html(page_data(made, steady, drawn, title=title, date="today"))
    assert document.count("</script>") == 2
    assert "<img" not in document
    assert HOSTILE in json.dumps(embedded(document), ensure_ascii=False)


def test_the_numbers_are_those_of_the_plan() -> None:
    made = replace(with_problem(), costs="estimated costs")
    data = data_of(made)
    tiles = {tile["label"]: tile for tile in data["tiles"]}
    assert data["title"] == "GPT on 2 ranks"
    assert "25 November 2026" in data["subtitle"]
    assert "2 × cpu of 4.00 MB" in data["subtitle"]
    assert (
        tiles["step time"]["value"] == "45.0 ms"
    )  # 3 ms + 6 ms a microbatch, and one more of them
    assert tiles["step time"]["note"] == "forecast from estimated costs"
    assert tiles["idle"]["value"] == "20.0 %"
    assert tiles["gap"]["value"] == "0 %"
    assert "of 4.00 MB on rank" in tiles["peak memory"]["note"]
    assert data["limits"].startswith("Computing of stage")
    for part in ("certificate: optimal", "lower bound", "gap", "among all plans"):
        assert part in data["certificate"]
    assert data["binding"]["stages"] is not None
    assert len(data["binding"]["stages"]["rows"]) == 2


def test_a_plan_over_its_limit_says_so() -> None:
    made = with_problem()
    made = replace(made, stages=tuple(replace(s, parameter_bytes=5_000_000) for s in made.stages))
    data = data_of(replace(made, problem=None))
    assert [tile["tone"] for tile in data["tiles"] if tile["label"] == "peak memory"] == ["bad"]
    assert all(lane["over"] for lane in data["memory"]["lanes"])
    assert "does not hold the problem" in data["binding"]["sentence"]


@settings(max_examples=12, deadline=None)
@given(plans(several=True))
def test_any_plan_has_a_page(made: Plan) -> None:
    made = replace(made, cluster=Cluster.local(made.num_columns).to_toml())
    found = embedded(html(data_of(made, steps=2)))
    assert found["tiles"]
    assert found["limits"]
    assert len(found["memory"]["lanes"]) == made.num_columns
    assert sum(strip["fraction"] for strip in found["critical"]["strips"]) <= 1 + 1e-9
    for strip in found["traffic"]["strips"]:
        assert -1e-9 <= strip["fraction"] <= 1 + 1e-6


# -- the timeline ------------------------------------------------------------------------------


def test_the_page_opens_with_one_full_minibatch() -> None:
    events = simulate_drained(make_plan("2bw", 3, 4), 3).timeline
    found = lanes(events)
    assert sum(len(lane["bars"]) for lane in found["lanes"]) == len(bars(events))
    assert [number for number, _, _ in found["minibatches"]] == [0, 1, 2]
    assert found["shown"] == 1
    assert found["numbered"] == "microbatch"


# -- memory ------------------------------------------------------------------------------------


def test_thinned_curves_keep_their_peak() -> None:
    made = with_problem()
    data = data_of(made)
    for lane in data["memory"]["lanes"]:
        assert len(lane["points"]) <= MOST_POINTS
        assert max(sum(point[1:]) for point in lane["points"]) == sum(lane["peak_bytes"])
    assert thinned([]) == ()


def test_of_many_ranks_the_fullest_have_curves() -> None:
    made = make_plan("1f1b", 10, 2, saved_bytes=1000)
    data = data_of(replace(made, cluster=Cluster.local(10).to_toml()))
    ranks = data["memory"]["lanes"]
    fullest = sorted(ranks, key=lambda lane: sum(lane["peak_bytes"]), reverse=True)[:8]
    drawn = [lane["rank"] for lane in ranks if lane["points"]]
    assert drawn == sorted(lane["rank"] for lane in fullest)
    assert "2 others are left out" in data["memory"]["note"]


# -- in a browser ------------------------------------------------------------------------------

PANELS = ("tiles", "limits", "proof", "timeline", "critical", "binding", "stages",
          "memory", "traffic")  # fmt: skip


def browsed(document: str, folder: Path, width: int, *, dark: bool = False) -> tuple[str, str]:
    """State of the page in Chromium, and what its console said."""
    path = folder / "report.html"
    path.write_text(document, encoding="utf-8")
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            f"--user-data-dir={folder / 'profile'}", f"--window-size={width},1200", *scheme,
            "--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom", path.as_uri(),
        ],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return done.stdout, "\n".join(said)


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no chromium on the PATH")
@pytest.mark.parametrize(
    ("case", "width", "dark"),
    [("flush", 1440, False), ("stream", 480, True), ("interleaved", 480, False),
     ("replicas", 1440, True), ("hostile", 1440, False)],
)  # fmt: skip
def test_a_browser_draws_every_panel(case: str, width: int, dark: bool, tmp_path: Path) -> None:
    steps, made = 1, with_problem()
    if case == "stream":
        made, steps = make_plan("2bw", 4, 8, saved_bytes=100), 3
    elif case == "interleaved":
        made = make_plan("interleaved", 4, 4, per_rank=2)
    elif case == "replicas":
        made = make_plan("1f1b", 2, 4, replicas=(2, 1), trainable_bytes=8, parameter_bytes=8)
    elif case == "hostile":
        made = replace(made, notes=(HOSTILE,), model=HOSTILE)
    if not made.cluster:
        made = replace(made, cluster=Cluster.local(made.num_ranks).to_toml())
    dom, console = browsed(html(data_of(made, steps)), tmp_path, width, dark=dark)
    assert console == ""
    panels = dict(
        re.findall(r'<(?:section|dl)[^>]* id="(\w+)"[^>]*>(.*?)</(?:section|dl)>', dom, re.S)
    )
    assert {*panels} & {*PANELS} == {*PANELS}
    for name in PANELS:
        text = entities.unescape(re.sub(r"<[^>]*>", " ", panels[name]))
        assert len(text.split()) >= 5, name
    timeline = panels["timeline"]
    assert timeline.count('class="bar') >= 2 * made.num_ranks
    assert panels["memory"].count("<path") >= 6 * made.num_ranks
    assert "NaN" not in dom
    assert "undefined" not in dom
    assert re.search(r"<img", dom.split("</main>")[0]) is None


KEYS = """
setTimeout(() => {
  const press = (id, ...keys) => {
    const svg = document.querySelector(`#${id} svg[tabindex]`);
    for (const key of keys) svg.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
    return document.querySelector(`#${id} [aria-live]`).textContent;
  };
  const drawn = () => document.querySelectorAll("#timeline .bar").length;
  const found = [press("timeline", "ArrowRight", "ArrowRight"), press("timeline", "ArrowDown"),
    press("memory", "ArrowRight")];
  const all = drawn();
  press("timeline", "+", "+", "+");
  found.push(drawn() < all);
  press("timeline", "0");
  found.push(drawn() === all);
  document.body.append(Object.assign(document.createElement("pre"), {textContent: JSON.stringify(found)}));
}, 1500);
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no chromium on the PATH")
def test_keys_go_through_the_drawings(tmp_path: Path) -> None:
    document = html(data_of(with_problem()))
    document = re.sub(r"<meta http-equiv[^>]*>", "", document)  # it would refuse this script
    document = document.replace("</body>", f"<script>{KEYS}</script></body>")
    dom, console = browsed(document, tmp_path, 1000)
    assert console == ""
    (text,) = re.findall(r"<pre>(.*?)</pre>", dom)
    bar, below, memory, closer, back = json.loads(entities.unescape(text))
    start = "starts at 3.00 ms, takes 3.00 ms"
    assert bar == f"forward of microbatch 1, minibatch 0, stage 0, rank 0: {start}"
    assert below == f"forward of microbatch 0, minibatch 0, stage 1, rank 1: {start}"
    assert re.match(r"rank 0 at [\d.]+ ms: [\d.]+ k?B; ", memory)
    assert (closer, back) == (True, True)


SCALES = {  # the last time in seconds, so many steps at most: the labels
    (0.0748, 5): "0 ms, 20 ms, 40 ms, 60 ms",
    (1.23, 8): "0 s, 0.2 s, 0.4 s, 0.6 s, 0.8 s, 1.0 s, 1.2 s",
    (9.9e-5, 8): "0 us, 20 us, 40 us, 60 us, 80 us",
    (3600.0, 7): "0 s, 1000 s, 2000 s, 3000 s",
    (1e-9, 5): "0 ns, 0.2 ns, 0.4 ns, 0.6 ns, 0.8 ns, 1.0 ns",
    (0.3, 3): "0 ms, 100 ms, 200 ms, 300 ms",
    (0, 4): "0 s",
}


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no chromium on the PATH")
def test_axes_of_the_page_have_round_times(tmp_path: Path) -> None:
    script = f"""
        const made = {json.dumps([*SCALES])}.map(([last, most]) => ticks(0, last, most, TIMES));
        made.push(ticks(1.2345, 1.2361, 4, TIMES), ticks(0, 34e6, 4, SIZES));
        document.body.append(Object.assign(document.createElement("pre"),
          {{textContent: JSON.stringify(made)}}));
    """
    document = re.sub(r"<meta http-equiv[^>]*>", "", html(data_of(with_problem())))
    document = document.replace("</body>", f"<script>{script}</script></body>")
    dom, console = browsed(document, tmp_path, 1000)
    assert console == ""
    (text,) = re.findall(r"<pre>(.*?)</pre>", dom)
    *scales, inside, sizes = json.loads(text)
    units = {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
    for expected, found in zip(SCALES.values(), scales, strict=True):
        assert ", ".join(label for _, label in found) == expected
        for time, label in found:
            number, unit = label.split()
            assert time == pytest.approx(float(number) * units[unit])
    assert [label for _, label in inside] == ["1.2345 s", "1.2350 s", "1.2355 s", "1.2360 s"]
    assert [label for _, label in sizes] == ["0 MB", "10 MB", "20 MB", "30 MB"]
    axes = re.findall(r"<text[^>]*>([\d.]+ (?:ms|us|s))</text>", dom)
    assert {"0 ms", "10 ms"} <= set(axes)
    assert all(re.fullmatch(r"0|[125]0*|\d+0|\d+", time.split()[0]) for time in axes), axes
