// Charts: every figure.chart has its numbers as JSON, or their address. `description` is
// the lines in words.
//   {"x": [...], "lines": [{"name", "values", "low"?, "high"?, "color"?, "faint"?}], "unit"?, "share"?, "description"?}
"use strict";
(() => {
  const charts = new Map();
  const styled = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const number = (value) => {
    if (value == null) return "–";
    const size = Math.abs(value);
    if (size && (size < 1e-4 || size >= 1e7)) return value.toExponential(2);
    if (size >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
    return String(Number(value.toPrecision(3)));
  };

  // Ticks have as many digits as their distance needs.
  function onAxis(ticks, distance, share) {
    const unit = share ? 100 : 1, largest = Math.max(...ticks.map(Math.abs)) * unit;
    let digits = 0;
    for (let far = distance * unit; digits < 12 && Math.abs(far - Math.round(far)) > 1e-6 * far; far *= 10) digits += 1;
    const words = (value) => {
      if (!value) return "0";
      const power = Math.floor(Math.log10(Math.abs(value)) + 1e-9);
      if (largest < 1e-2 || largest >= 1e6) return value.toExponential(Math.max(0, power + digits)).replace("e+", "e");
      return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
    };
    return ticks.map((tick) => words(tick * unit) + (share ? "%" : ""));
  }

  function smoothed(values, weight) {
    if (!weight) return values;
    let mean = null, share = 0;
    return values.map((value) => {
      if (value == null) return null;
      share = share * weight + (1 - weight);
      mean = (mean == null ? 0 : mean) * weight + value * (1 - weight);
      return mean / share;
    });
  }

  // Single points are visible if there are too few for a line.
  const isShort = (chart, place) => chart.data[place].filter((value) => value != null).length < 3;

  function draw(figure, told) {
    const body = figure.querySelector(".body");
    const old = charts.get(figure);
    const weight = Number(figure.dataset.smooth || 0);
    const data = [told.x], series = [{}], bands = [];
    told.lines.forEach((line, place) => {
      const color = styled(`--c${(line.color ?? place) % 8}`);
      if (line.low) {
        data.push(line.high, line.low);
        series.push({ stroke: "transparent", label: "", points: { show: false } }, { stroke: "transparent", label: "", points: { show: false } });
        bands.push({ series: [series.length - 2, series.length - 1], fill: `color-mix(in srgb, ${color} 16%, transparent)` });
      }
      if (weight) {
        data.push(line.values);
        series.push({ stroke: `color-mix(in srgb, ${color} 28%, transparent)`, width: 1, points: { show: false }, label: "" });
      }
      data.push(smoothed(line.values, weight));
      series.push({ stroke: color, width: 1.6, label: line.name, spanGaps: true, points: { show: isShort, size: 5 } });
    });
    const axis = { stroke: styled("--soft"), grid: { stroke: styled("--line"), width: 1 }, ticks: { show: false }, font: `11px ${styled("--sans")}`, gap: 4 };
    const whole = !told.time && told.x.every((value) => value == null || Number.isInteger(value));
    const show = (value) => (figure.told.share ? `${number(value * 100)}%` : number(value));
    const options = {
      width: body.clientWidth, height: body.clientHeight, legend: { show: false }, padding: [6, 20, 0, 0],
      cursor: { y: false, drag: { x: true, y: false }, points: { size: 6 }, sync: figure.dataset.sync ? { key: figure.dataset.sync } : undefined },
      scales: { x: { time: Boolean(told.time) }, y: told.share ? { range: [-0.02, 1.02] } : { range: (chart, low, high) => span(low, high) } },
      axes: [{ ...axis, size: 22, ...(whole ? { incrs: WHOLE } : {}) }, { ...axis, size: (chart, words) => Math.max(46, 8 + 6.2 * Math.max(...(words || []).map((one) => one.length))), values: (chart, ticks, place, room, distance) => onAxis(ticks, distance, told.share) }],
      series, bands,
      hooks: { setCursor: [(chart) => read(figure, body, chart, show)], ready: [(chart) => lead(figure, chart)] },
    };
    body.title = "";
    // If only the numbers of the chart changed, the reader's cursor and zoom stay.
    const form = JSON.stringify([series, axis, told.share, told.time, told.name_of_x, whole, told.lines.map((line) => Boolean(line.low))]);
    if (old && old.form === form) {
      const [first, last] = [old.data[0][0], old.data[0].at(-1)];
      const { min, max } = old.scales.x;
      const closer = (min > first || max < last) && told.x.some((value) => value >= min && value <= max);
      old.setData(data, !closer);
      if (closer) old.redraw();
      return;
    }
    if (old) old.destroy();
    body.replaceChildren();
    const chart = new uPlot(options, data, body);
    chart.form = form;
    sizes.observe(body);
    charts.set(figure, chart);
  }

  const WHOLE = [1, 2, 5].flatMap((first) => Array.from({ length: 13 }, (_, power) => first * 10 ** power)).sort((a, b) => a - b);

  function span(low, high) {
    if (low == null) return [0, 1];
    if (low >= 0 && high - low <= high * 0.02) return [0, high ? high * 1.25 : 1];
    const least = Math.max(Math.abs(low), Math.abs(high)) * 0.02 || 1;
    const room = Math.max(high - low, least) * 0.08;
    return high - low < least ? [low - least / 2, high + least / 2] : [low - room, high + room];
  }

  function read(figure, body, chart, show) {
    const told = figure.told;
    let label = body.querySelector(".reading");
    const place = chart.cursor.idx;
    if (place == null || chart.cursor.left < 0) { if (label) label.remove(); return; }
    if (!label) { label = document.createElement("div"); label.className = "reading"; body.append(label); }
    const values = told.lines.filter((line) => line.values[place] != null)
      .map((line) => (told.lines.length > 1 ? `${line.name} ${show(line.values[place])}` : show(line.values[place])));
    label.textContent = `${told.name_of_x || "step"} ${number(told.x[place])} · ${values.slice(0, 6).join(" · ")}${leads(figure, told) && body.matches(":hover") ? " · click: its groups" : ""}`;
    // in the half without the mouse, so that it does not hide its own points
    const isLeft = chart.cursor.left < chart.over.clientWidth / 2;
    label.style.left = isLeft ? "auto" : `${chart.over.offsetLeft + 4}px`;
    label.style.right = isLeft ? "4px" : "auto";
    label.style.top = "4px";
  }

  // A click on a point opens the groups of its step; dragging zooms in, a double click resets, touch only reads values.
  const DOUBLE_MS = 300;
  const leads = (figure, told) => figure.dataset.steps && (told.name_of_x || "step") === "step";
  function lead(figure, chart) {
    if (!leads(figure, figure.told)) return;
    let from = null, going = null;
    chart.over.style.cursor = "pointer";
    chart.over.addEventListener("mousedown", (event) => { from = event.clientX; });
    chart.over.addEventListener("click", (event) => {
      const step = figure.told.x[chart.cursor.idx];
      if (step == null || from == null || Math.abs(event.clientX - from) > 3 || (event.pointerType && event.pointerType !== "mouse")) return;
      clearTimeout(going);
      if (event.detail === 1) going = setTimeout(() => location.assign(`${figure.dataset.steps}${step}`), DOUBLE_MS);
    });
  }

  async function fill(figure) {
    const inside = figure.querySelector("script[type='application/json']");
    let told = null;
    const turn = figure.turn = (figure.turn || 0) + 1;
    if (figure.dataset.from) {
      const answer = await fetch(figure.dataset.from, { credentials: "same-origin" });
      if (answer.ok) told = await answer.json();
    } else if (inside) told = JSON.parse(inside.textContent);
    if (told && figure.isConnected && figure.turn === turn) { figure.told = told; draw(figure, told); update(figure, told); }
  }
  function update(figure, told) {
    if (told.description) figure.querySelector(".body").setAttribute("aria-label", told.description);
    const last = figure.querySelector(".last");
    if (!last || told.lines.length !== 1) return;
    const values = told.lines[0].values.filter((value) => value != null);
    if (values.length) last.textContent = told.share ? `${number(values.at(-1) * 100)}%` : number(values.at(-1));
  }

  const inView = new Set(), begun = new WeakSet();
  // A chart is drawn when it comes into view: a page may have hundreds.
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      seen.unobserve(entry.target);
      inView.add(entry.target);
      fill(entry.target).catch(() => {});
    }
  }, { rootMargin: "200px" });
  const all = () => [...document.querySelectorAll("figure.chart")];
  function begin() {
    for (const figure of [...inView]) if (!figure.isConnected) { charts.get(figure)?.destroy(); charts.delete(figure); inView.delete(figure); }
    for (const figure of all()) if (!begun.has(figure)) { begun.add(figure); seen.observe(figure); }
  }
  const again = () => { for (const figure of all()) if (figure.told) draw(figure, figure.told); };
  function fit() {
    for (const [figure, chart] of charts) {
      const { clientWidth: width, clientHeight: height } = figure.querySelector(".body");
      if (width && height && (width !== chart.width || height !== chart.height)) chart.setSize({ width, height });
    }
  }
  let waiting = null;
  const sizes = new ResizeObserver(() => { clearTimeout(waiting); waiting = setTimeout(fit, 120); });
  document.addEventListener("theme", again);
  document.addEventListener("swapped", begin);
  document.addEventListener("news", () => { for (const figure of inView) if (figure.dataset.from) fill(figure).catch(() => {}); });
  document.addEventListener("input", (event) => {
    if (!event.target.matches("[data-smooths]")) return;
    for (const figure of all()) figure.dataset.smooth = event.target.value;
    again();
  });
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin); else begin();
})();
