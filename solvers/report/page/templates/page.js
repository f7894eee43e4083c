"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const map = data.map;
  const PAGE_ROWS = 25;
  const byId = (id) => document.getElementById(id);

  // Texts of plans enter the page as text alone, never as markup.
  const element = (name, attributes = {}, ...children) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  };

  // Colours of the page ------------------------------------------------------------------------

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

  // The map of tables --------------------------------------------------------------------------

  const shown = { order: map.rows.map((_, at) => at), first: 0, column: null, down: true, words: "" };
  const texts = map.rows.map((row) => row.map((cell) => cell[1]).join(" ").toLowerCase());

  const matching = () => shown.order.filter((at) => texts[at].includes(shown.words));

  const compare = (column, down) => (a, b) => {
    const [left, right] = [map.rows[a][column][0], map.rows[b][column][0]];
    if (left === right) return a - b;
    if (left === null) return 1;
    if (right === null) return -1;
    const before = typeof left === "string"
      ? left.localeCompare(right, "en", { numeric: true })
      : left - right;
    return down ? -before : before;
  };

  const sortBy = (column) => {
    shown.down = shown.column === column ? !shown.down : map.columns[column].number;
    shown.column = column;
    shown.order.sort(compare(column, shown.down));
    shown.first = 0;
    drawMap();
  };

  const counted = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

  const inWords = (bytes) => {
    let unit = 0;
    while (bytes >= 1024 && unit < 4) { bytes /= 1024; unit += 1; }
    return `${Number(bytes.toPrecision(3))} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
  };

  const strip = (at) => {
    const count = map.devices.length;
    const cell = Math.max(2, Math.min(16, Math.floor(288 / count)));
    const canvas = element("canvas", { role: "img", "aria-label": "devices " + devicesOf(at) });
    const scale = window.devicePixelRatio || 1;
    canvas.width = count * cell * scale;
    canvas.height = 20 * scale;
    canvas.style.width = `${count * cell}px`;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.fillStyle = colour("faint");
    pen.fillRect(0, 9.5, count * cell, 1);
    for (const start of map.hosts) pen.fillRect(start * cell, 0, 1, 20);
    for (const [first, last, hbm, dram] of map.strips[at]) {
      const width = (last - first + 1) * cell - (cell > 3 ? 1 : 0);
      if (hbm) { pen.fillStyle = colour("hbm"); pen.fillRect(first * cell + 0.5, 0, width, 9); }
      if (dram) { pen.fillStyle = colour("dram"); pen.fillRect(first * cell + 0.5, 11, width, 9); }
    }
    canvas.addEventListener("mousemove", (event) => {
      const device = Math.min(count - 1, Math.max(0, Math.floor(event.offsetX / cell)));
      const run = map.strips[at].find(([first, last]) => first <= device && device <= last);
      const what = run ? `${inWords(run[2])} in HBM, ${inWords(run[3])} in DRAM` : "nothing";
      canvas.title = `${map.devices[device]}: ${what}`;
    });
    return canvas;
  };

  const keyed = Object.fromEntries(map.columns.map((one, at) => [one.key, at]));
  const devicesOf = (at) => map.rows[at][keyed.devices][1];
  const LEFT_OUT = new Set(["devices"]);  // The strip has them, and the drawer.

  const drawHead = () => {
    const cells = map.columns.map((column, at) => {
      if (LEFT_OUT.has(column.key)) return null;
      const button = element("button", { type: "button" }, column.title);
      button.addEventListener("click", () => sortBy(at));
      const sorted = shown.column !== at ? "none" : shown.down ? "descending" : "ascending";
      const cell = element("th", { scope: "col", "aria-sort": sorted, "data-column": column.key }, button);
      if (column.number) cell.className = "number";
      return cell;
    });
    const devices = element("th", { scope: "col" }, counted(map.devices.length, "GPU"));
    const head = byId("map").tHead;
    const active = document.activeElement?.closest?.("th")?.dataset.column;
    head.replaceChildren(element("tr", {}, ...cells.filter(Boolean), devices));
    if (active) head.querySelector(`th[data-column="${CSS.escape(active)}"] button`)?.focus();
  };

  const drawMap = () => {
    const found = matching();
    shown.first = Math.max(0, Math.min(shown.first, found.length - 1));
    const page = found.slice(shown.first, shown.first + PAGE_ROWS);
    drawHead();
    const rows = page.map((at) => {
      const cells = map.columns.map((column, number) => {
        const [value, text] = map.rows[at][number];
        if (LEFT_OUT.has(column.key)) return null;
        if (number === 0) {
          const button = element("button", { type: "button", title: text, "aria-haspopup": "dialog" }, text);
          button.addEventListener("click", () => openDrawer(at));
          return element("th", { scope: "row" }, button);
        }
        const cell = element("td", { "data-key": column.key }, text);
        if (column.number) {
          cell.className = "number";
          cell.dataset.value = value === null ? "" : JSON.stringify(value);
        }
        return cell;
      });
      return element("tr", { "data-table": at }, ...cells.filter(Boolean), element("td", {}, strip(at)));
    });
    byId("map").tBodies[0].replaceChildren(...rows);
    const last = shown.first + page.length;
    byId("status").textContent = found.length
      ? `${shown.first + 1}–${last} of ${counted(found.length, "table")}`
      : "no table matches";
    byId("previous").disabled = shown.first === 0;
    byId("next").disabled = last >= found.length;
  };

  byId("search").addEventListener("input", (event) => {
    shown.words = event.target.value.trim().toLowerCase();
    shown.first = 0;
    drawMap();
  });
  byId("previous").addEventListener("click", () => { shown.first -= PAGE_ROWS; drawMap(); });
  byId("next").addEventListener("click", () => { shown.first += PAGE_ROWS; drawMap(); });

  // The drawer of one table ----------------------------------------------------------------------

  const drawer = byId("drawer");

  const factsOf = (at) => {
    const pairs = map.columns.slice(1).map((column, number) =>
      element("div", {}, element("dt", {}, column.title), element("dd", {}, map.rows[at][number + 1][1])));
    return element("dl", { class: "facts" }, ...pairs);
  };

  const shardsOf = (at) => {
    const row = (name, cells) => element("tr", {}, ...cells.map((cell) => element(name, {}, cell)));
    const table = element("table", {}, element("caption", {}, "Shards"),
      element("thead", {}, row("th", map.heads)),
      element("tbody", {}, ...map.shards[at].map((cells) => row("td", cells))));
    return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Shards" }, table);
  };

  const curveOf = (at) => {
    const [rows, lookups] = map.curves[map.curve[at]];
    const value = (key) => (key in keyed ? map.rows[at][keyed[key]][0] : null);
    const text = (key) => map.rows[at][keyed[key]][1];
    const [hot, served] = [value("hot_row_share"), value("hbm_lookup_share")];
    const split = hot > 0 && hot < 1 && served !== null;
    const words = split
      ? `${text("hot_row_share")} of its rows are in HBM and serve ${text("hbm_lookup_share")} of its lookups.`
      : "It is not split between HBM and DRAM.";
    const place = element("div", { class: "chart", role: "img", "aria-label": "Access curve. " + words });
    const traces = [{ type: "scatter", mode: "lines", name: "lookups", x: rows, y: lookups,
      line: { color: "#0072B2", width: 2 }, hovertemplate: "%{x:.3%} of rows: %{y:.1%}<extra></extra>" }];
    if (split) {
      traces.push({ type: "scatter", mode: "markers", name: "split", x: [hot], y: [served],
        marker: { color: "#D55E00", size: 12, symbol: "diamond" },
        hovertemplate: "%{x:.3%} of rows in HBM: %{y:.1%} of lookups<extra></extra>" });
    }
    const layout = { xaxis: { type: "log", title: { text: "share of rows, hottest first" }, tickformat: "~%", nticks: 5 },
      yaxis: { title: { text: "share of lookups" }, tickformat: ".0%", range: [0, 1.04] } };
    return [element("h3", {}, "How it is read"), element("p", { class: "words" }, words), place,
      () => draw(place, traces, layout)];
  };

  const openDrawer = (at) => {
    byId("drawer-title").textContent = "Table " + map.rows[at][0][1];
    const [title, words, place, drawCurve] = curveOf(at);
    const told = byId("explanation-" + at);
    const why = told ? told.content.cloneNode(true) : element("p", { class: "words" },
      "What its alternatives cost: placer show PLAN --explain TABLE, or this page with --explain.");
    byId("drawer-body").replaceChildren(factsOf(at), shardsOf(at), title, words, place,
      element("h3", {}, "Why it is where it is"), why);
    drawer.showModal();
    drawer.scrollTop = 0;
    drawCurve();
  };
  drawer.addEventListener("click", (event) => { if (event.target === drawer) drawer.close(); });

  // Charts ---------------------------------------------------------------------------------------

  const layoutOf = (own, bars, narrow) => {
    const axis = { gridcolor: colour("faint"), zeroline: false, linecolor: colour("faint"), automargin: true,
      fixedrange: true };
    return {
      ...own,
      autosize: true,
      barmode: "stack",
      bargap: bars > 32 ? 0 : bars > 1 ? 0.12 : 0.7,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour("ink"), size: narrow ? 11 : 13, family: getComputedStyle(document.body).fontFamily },
      margin: { l: 8, r: 8, t: 8, b: 8, pad: 2 },
      hovermode: "x unified",
      hoverlabel: { bgcolor: colour("card"), bordercolor: colour("faint"), font: { color: colour("ink") } },
      legend: { orientation: "h", x: 0, y: 1.02, xanchor: "left", yanchor: "bottom", traceorder: "normal" },
      xaxis: { ...axis, showgrid: own.xaxis.type !== "category", ...own.xaxis },
      yaxis: { ...axis, rangemode: "tozero", ...own.yaxis },
    };
  };

  const draw = (place, traces, layout) => {
    if (!window.Plotly) return;
    window.Plotly.react(place, traces, layoutOf(layout, traces[0].x.length, place.clientWidth < 500),
      { displayModeBar: false, responsive: true, displaylogo: false });
  };

  // Plotly takes markup in names, and long ones leave no room for bars.
  const label = (name) =>
    (name.length > 28 ? `${name.slice(0, 20)}…${name.slice(-7)}` : name)
      .replaceAll("&", "&amp;").replaceAll("<", "&lt;");

  // Bars differ without colours, too.
  const PATTERNS = ["", "/", ".", "\\", "x", "-", "+", "|"];

  const drawBars = (place, chart) => {
    const bars = chart.bars.map(label);
    const traces = chart.parts.map((part, at) => ({
      type: "bar", name: label(part.name), x: bars, y: part.values, customdata: part.texts,
      hovertemplate: "%{x}<br>%{fullData.name}: %{customdata}<extra></extra>",
      marker: part.name === "waits" ? { color: colour("faint"), line: { width: 0 } } : {
        color: data.colours[at % PATTERNS.length], line: { width: 0 },
        pattern: { shape: PATTERNS[at % PATTERNS.length], fillmode: "overlay", size: 7, solidity: 0.2, fgcolor: "#ffffff" },
      },
    })).filter((bar) => bar.y.some(Boolean));
    const shapes = chart.lines.map(({ name, value }, at) => ({
      type: "line", name, showlegend: true, xref: "paper", x0: 0, x1: 1, y0: value, y1: value,
      line: { color: colour("ink"), width: 2.5, dash: ["solid", "dash", "dot"][at] },
    }));
    draw(place, traces, { xaxis: { type: "category", nticks: 24 }, yaxis: { title: { text: chart.unit } }, shapes });
  };

  const drawCharts = () => {
    for (const place of document.querySelectorAll("[data-chart]")) drawBars(place, data.charts[place.dataset.chart]);
  };

  const unpack = async (text) => {
    const packed = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  };

  const begin = async () => {
    const source = byId("plotly");
    document.head.append(element("script", {}, await unpack(source.textContent)));
    source.remove();
    drawCharts();
    document.documentElement.dataset.ready = "yes";
  };

  drawMap();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawMap(); drawCharts(); });
  // The words are painted before the charts are made.
  requestAnimationFrame(() => setTimeout(begin, 0));
})();
