"use strict";
(function () {
  const form = document.getElementById("controls"), plot = document.getElementById("plot"), root = document.documentElement;
  const message = document.getElementById("message"), system = window.matchMedia("(prefers-color-scheme: dark)");
  const points = { regression: [], classification: [] }, history = { log_evidence: [], effective_parameters: [] };
  const LOGARITHMS = ["precision", "noise"], NEAR = 10, REMEMBERED = 60;
  let latest = null, waiting = false, running = false, seed = 0, clicked = -1000;

  const field = (name) => form.elements[name];
  const task = () => field("task").value;
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const short = (value) => (value === null || value === undefined ? "–" : Number(value.toPrecision(3)).toString());

  function wish() {
    return {
      task: task(), points: points[task()], layers: Number(field("layers").value), units: Number(field("units").value),
      activation: field("activation").value, structure: field("structure").value, link: field("link").value,
      tune: field("tune").checked, precision: 10 ** Number(field("precision").value), noise: 10 ** Number(field("noise").value),
      seed: seed,
    };
  }

  function example() {
    const found = [];
    const noise = (i) => { const value = 43758.5453 * Math.sin(12.9898 * (i + 1)); return 2 * (value - Math.floor(value)) - 1; };
    if (task() === "regression") {
      for (let i = 0; i < 24; i++) {
        const x = i < 12 ? -2.8 + 0.13 * i : 0.9 + 0.13 * (i - 12);
        found.push([x, Math.sin(1.7 * x) + 0.3 * noise(i)]);
      }
    } else {
      for (let i = 0; i < 40; i++) {
        const group = i % 2, angle = (Math.PI * Math.floor(i / 2)) / 19, sign = group ? -1 : 1;
        found.push([1.5 * (Math.cos(angle) - 0.5 * sign) + 0.3 * noise(i), 1.5 * sign * (Math.sin(angle) - 0.3) + 0.3 * noise(i + 50), group]);
      }
    }
    points[task()] = found;
  }

  function say(text, wrong) {
    message.textContent = text;
    message.classList.toggle("error", Boolean(wrong));
  }

  async function ask() {
    if (running) { waiting = true; return; }
    if (!points[task()].length) { latest = null; say("Click into the plot to draw points."); draw(); return; }
    running = true;
    const asked = wish();
    try {
      const reply = await fetch("fit", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(asked) });
      const found = await reply.json();
      if (!reply.ok) throw new Error(found.error);
      latest = { ...found, task: asked.task };
      if (asked.tune) for (const name of LOGARITHMS) if (found[name] !== null) field(name).value = Math.log10(found[name]);
      for (const name of Object.keys(history)) history[name] = [...history[name], found[name]].slice(-REMEMBERED);
      for (const name of ["log_evidence", "precision", "noise"]) document.getElementById(name).textContent = short(found[name]);
      document.getElementById("effective_parameters").textContent = short(found.effective_parameters) + " of " + found.weights;
      say(found.notes.length ? found.notes[0] : `${asked.points.length} points, ${found.weights} weights, ${Math.round(1000 * found.seconds)} ms`);
    } catch (error) {
      say(error.message || "The playground does not answer.", true);
    }
    running = false;
    draw();
    if (waiting) { waiting = false; ask(); }
  }

  function colours() {
    const style = getComputedStyle(root), of = (name) => style.getPropertyValue(name).trim();
    return isDark()
      ? { of: of, blue: "#56B4E9", orange: "#F0884A", fill: "86,180,233", middle: "#14171c" }
      : { of: of, blue: "#0072B2", orange: "#D55E00", fill: "0,114,178", middle: "#ffffff" };
  }

  function layout(colour, more) {
    const font = { family: getComputedStyle(document.body).fontFamily, color: colour.of("--ink"), size: 13 };
    const lines = { gridcolor: colour.of("--grid"), zerolinecolor: colour.of("--grid"), linecolor: colour.of("--line") };
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: font, dragmode: false, showlegend: false,
      margin: { l: 40, r: 12, t: 10, b: 34 }, hoverlabel: { bgcolor: colour.of("--panel"), font: font },
      ...more, xaxis: { ...lines, ...more.xaxis }, yaxis: { ...lines, ...more.yaxis },
      ...(more.yaxis2 ? { yaxis2: { ...lines, ...more.yaxis2 } } : {}),
    };
  }

  function band(x, centre, width, fill) {
    return {
      type: "scatter", mode: "lines", x: [...x, ...[...x].reverse()], fill: "toself", fillcolor: fill, hoverinfo: "skip",
      y: [...centre.map((m, i) => m + 1.96 * width[i]), ...centre.map((m, i) => m - 1.96 * width[i]).reverse()], line: { width: 0 },
    };
  }

  function traces(colour) {
    const own = points[task()], found = latest && latest.task === task() ? latest : null, result = [];
    const edge = { color: colour.of("--paper"), width: 1 };
    if (task() === "regression") {
      if (found) {
        result.push(band(found.x, found.mean, found.std, `rgba(${colour.fill},0.15)`));
        result.push(band(found.x, found.mean, found.function_std, `rgba(${colour.fill},0.28)`));
        result.push({ type: "scatter", mode: "lines", x: found.x, y: found.mean, line: { color: colour.blue }, name: "mean" });
      }
      result.push({ type: "scatter", mode: "markers", x: own.map((p) => p[0]), y: own.map((p) => p[1]), name: "point", marker: { color: colour.of("--ink"), size: 9, line: edge } });
      return result;
    }
    if (found) {
      result.push({
        type: "heatmap", x: found.x, y: found.x, z: found.probability, zmin: 0, zmax: 1, zsmooth: "best", showscale: false,
        colorscale: [[0, colour.blue], [0.5, colour.middle], [1, colour.orange]], opacity: 0.75, hovertemplate: "P(B) = %{z:.2f}<extra></extra>",
      });
      result.push({ type: "contour", x: found.x, y: found.x, z: found.probability, showscale: false, hoverinfo: "skip",
        contours: { start: 0.5, end: 0.5, size: 1, coloring: "none" }, line: { color: colour.of("--ink"), width: 1.5 } });
    }
    for (const group of [0, 1]) {
      const some = own.filter((p) => p[2] === group);
      result.push({ type: "scatter", mode: "markers", x: some.map((p) => p[0]), y: some.map((p) => p[1]), name: group ? "B" : "A",
        marker: { color: group ? colour.orange : colour.blue, size: 11, line: { color: colour.of("--ink"), width: 2 } } });
    }
    return result;
  }

  function draw() {
    root.dataset.drawn = isDark() ? "dark" : "light";
    document.body.dataset.task = task();
    for (const name of ["units", ...LOGARITHMS]) {
      const input = field(name), value = Number(input.value);
      input.nextElementSibling.value = LOGARITHMS.includes(name) ? short(10 ** value) : value;
      if (LOGARITHMS.includes(name)) input.disabled = field("tune").checked;
    }
    const colour = colours(), config = { responsive: true, displayModeBar: false };
    const range = task() === "regression" ? [-3, 3] : [-4, 4];
    Plotly.react(plot, traces(colour), layout(colour, { xaxis: { range: [-4, 4], fixedrange: true }, yaxis: { range: range, fixedrange: true } }), config);
    const steps = history.log_evidence.map((_, i) => i + 1);
    Plotly.react("history", [
      { type: "scatter", mode: "lines+markers", x: steps, y: history.log_evidence, name: "log evidence", line: { color: colour.blue } },
      { type: "scatter", mode: "lines+markers", x: steps, y: history.effective_parameters, name: "effective parameters", yaxis: "y2", line: { color: colour.orange } },
    ], layout(colour, {
      showlegend: true, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" }, margin: { l: 44, r: 44, t: 30, b: 30 },
      xaxis: { title: { text: "change" } }, yaxis: { automargin: true }, yaxis2: { overlaying: "y", side: "right", showgrid: false, automargin: true },
    }), config);
  }

  plot.addEventListener("click", (event) => {
    if (event.timeStamp - clicked < 100) return; // plotly sends a second click after a mouse's own
    clicked = event.timeStamp;
    const axes = plot._fullLayout, box = plot.getBoundingClientRect(), size = axes._size;
    const left = event.clientX - box.left - size.l, top = event.clientY - box.top - size.t;
    if (left < 0 || top < 0 || left > size.w || top > size.h) return;
    const own = points[task()];
    const hit = own.findIndex((p) => Math.hypot(axes.xaxis.l2p(p[0]) - left, axes.yaxis.l2p(p[1]) - top) < NEAR);
    if (hit >= 0) own.splice(hit, 1);
    else own.push([axes.xaxis.p2l(left), axes.yaxis.p2l(top), ...(task() === "classification" ? [Number(field("class").value)] : [])]);
    draw();
    ask();
  });

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => {
    if (event.target.name === "task") {
      history.log_evidence = [];
      history.effective_parameters = [];
      if (!points[task()].length) example();
    }
    draw();
    if (event.target.name !== "class") ask();
  });
  document.getElementById("example").addEventListener("click", () => { example(); draw(); ask(); });
  document.getElementById("clear").addEventListener("click", () => { points[task()] = []; ask(); });
  document.getElementById("seed").addEventListener("click", () => { seed += 1; ask(); });
  document.getElementById("theme").addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; draw(); });
  system.addEventListener("change", draw);
  example();
  draw();
  ask();
})();
