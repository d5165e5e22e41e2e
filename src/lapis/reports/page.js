"use strict";
(function () {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const lighter = {
    "#0072B2": "#56B4E9", "#D55E00": "#F0884A", "#009E73": "#2FC49A", "#CC79A7": "#E39BC3", "#56B4E9": "#9CD3F5",
    "#8A8A8A": "#9AA3AE", "rgba(0,114,178": "rgba(86,180,233",
  };

  const BUTTONS = [["zoom2d", "pan2d", "resetScale2d", "toImage"]]; // none that could send data away

  function isDark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
  }

  function coloured(value, dark) {
    if (typeof value === "string") {
      if (!dark) return value;
      for (const [from, to] of Object.entries(lighter)) if (value.startsWith(from)) return value.replace(from, to);
      return value;
    }
    if (Array.isArray(value)) return typeof value[0] === "object" ? value.map((entry) => coloured(entry, dark)) : value;
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, entry]) => [key, coloured(entry, dark)]));
    }
    return value;
  }

  function draw() {
    const style = getComputedStyle(root), of = (name) => style.getPropertyValue(name).trim(), dark = isDark();
    const font = { family: getComputedStyle(document.body).fontFamily, color: of("--ink"), size: 13 };
    const lines = { gridcolor: of("--grid"), linecolor: of("--line"), zerolinecolor: of("--line"), automargin: true };
    const narrow = window.innerWidth < 640;
    for (const [name, chart] of Object.entries(charts)) {
      const layout = {
        ...chart.layout,
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: font, autosize: true,
        margin: { l: narrow ? 44 : 60, r: 12, t: 34, b: 44 },
        legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
        hoverlabel: { bgcolor: of("--panel"), bordercolor: of("--line"), font: font },
        modebar: { bgcolor: "rgba(0,0,0,0)", color: of("--muted"), activecolor: of("--accent") },
        xaxis: { ...chart.layout.xaxis, ...lines },
        yaxis: { ...chart.layout.yaxis, ...lines },
        dragmode: narrow ? false : "zoom",
      };
      const config = { responsive: true, displaylogo: false, displayModeBar: narrow ? false : "hover", modeBarButtons: BUTTONS };
      Plotly.react("chart-" + name, coloured(chart.data, dark), layout, config);
    }
    root.dataset.drawn = dark ? "dark" : "light";
  }

  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    draw();
  });
  system.addEventListener("change", draw);
  window.matchMedia("(max-width: 639px)").addEventListener("change", draw);
  draw();
})();
