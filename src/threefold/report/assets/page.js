"use strict";
/* The charts of a run's page. In: the block of JSON `values` (report/document.py: points_of). Texts of files go into the
   page as text nodes only. A live page also takes new points, and parts that are drawn anew, from its own server. */
(() => {
  const values = JSON.parse(document.getElementById("values").textContent);
  const COLOURS = 8;
  const NUMBER = new Intl.NumberFormat("en", {maximumSignificantDigits: 6});
  const state = {
    smooth: 0, logX: false, logY: false, by: "step", zoom: null,
    ticked: (values.runs || []).map(() => true), hidden: new Set(), filter: "",
  };
  const charts = [];
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function element(name, attributes = {}, ...inside) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
      else if (value === true) made.setAttribute(key, "");
      else if (value !== false && value != null) made.setAttribute(key, value);
    }
    made.append(...inside);
    return made;
  }

  /* --- numbers --- */

  function told(value, unit) {
    if (value == null) return "-";
    if (typeof value === "string") return value;
    if (unit === "bytes") return `${NUMBER.format(value)} GiB`;
    return NUMBER.format(value) + (unit && unit !== "share of a step" ? ` ${unit}` : "");
  }

  function interpolated(table, step) {
    const {x, y} = table;
    if (!x.length) return null;
    let low = 0, high = x.length - 1;
    if (step <= x[0]) return y[0];
    if (step >= x[high]) return y[high];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (x[middle] <= step) low = middle; else high = middle;
    }
    return y[low] + (y[high] - y[low]) * (step - x[low]) / (x[high] - x[low]);
  }

  /* The pass in which a step was trained for good: the last one that began at it or before. */
  const passOf = (run, step) => run.passes.reduce((before, each) => each.first <= step ? each : before, run.passes[0]);

  /* Where steps are on the x axis; null: not known. Seconds are those of a pass, the one that counts unless it is given. */
  function placed(run, steps, pass) {
    if (state.by === "tokens") return steps.map((step) => interpolated(run.tokens, step));
    if (state.by === "step") return steps;
    return steps.map((step) => {
      const clock = pass || passOf(run, step);
      return clock ? interpolated(clock, step) : null;
    });
  }

  function smoothed(ys) {
    let kept = 0, weight = 0;
    return ys.map((y) => {
      if (y == null) return null;
      kept = state.smooth * kept + (1 - state.smooth) * y;
      weight = state.smooth * weight + (1 - state.smooth);
      return kept / weight;
    });
  }

  const drawable = (ys) => state.logY ? ys.map((y) => y > 0 ? y : null) : ys;
  const scaled = (ys, unit) => unit === "bytes" ? ys.map((y) => y == null ? y : y / 2 ** 30) : ys;

  /* One table of uPlot's for a curve; points whose place is not known, or is not after the one before, are left out. On an
     axis of time a curve is interrupted where the run was: while it was stopped, and where it went back. */
  function tableOf(run, x, y, unit, pass) {
    const xs = [], ys = [];
    const breaks = state.by === "seconds" ? run.marks.filter((mark) => mark.kind !== "best" && mark.seconds != null) : [];
    placed(run, x, pass).forEach((at, index) => {
      const last = xs.length ? xs[xs.length - 1] : -Infinity;
      if (at == null || at <= last || (state.logX && at <= 0)) return;
      const stop = breaks.find(({seconds}) => last < seconds && seconds < at);
      if (stop && xs.length) { xs.push(stop.seconds); ys.push(null); }
      xs.push(at); ys.push(y[index]);
    });
    return [xs, drawable(scaled(ys, unit))];
  }

  /* The series of a chart: of each run and each of its numbers the curve, its smoothed form, and what was replaced. */
  function linesOf(chart) {
    const lines = [];
    chart.keys = new Map(); // of each name its colour, of several runs none
    values.runs.forEach((run, number) => {
      if (!isShown(number)) return;
      chart.names.forEach((name, place) => {
        const curve = run.curves[name];
        if (!curve) return;
        const shade = (values.runs.length > 1 ? number : place) % COLOURS;
        const label = (values.runs.length > 1 ? `${run.name}: ` : "") + name;
        const dash = values.runs.length > 1 && place ? [6, 3] : undefined;
        chart.keys.set(name, values.runs.length > 1 ? null : shade);
        if (state.hidden.has(name)) return;
        for (const old of curve.old) {
          const pass = run.passes.find((each) => each.pass === old.pass);
          const table = tableOf(run, old.x, old.y, chart.unit, pass);
          lines.push({table, shade, faint: true, dash: [2, 4], label: `${label}, replaced`, run, name, curve: old});
        }
        const smooth = state.smooth > 0;
        lines.push({table: tableOf(run, curve.x, curve.y, chart.unit), shade, faint: smooth, dash, label, main: true, run, name, curve});
        if (smooth) {
          const {x, y} = curve.mean || curve;
          lines.push({table: tableOf(run, x, smoothed(y), chart.unit), shade, dash, label: `${label}, smoothed`});
        }
      });
    });
    return lines;
  }

  /* --- a chart --- */

  const SHORT = new Intl.NumberFormat("en", {maximumSignificantDigits: 4, notation: "compact"});
  const TINY = new Intl.NumberFormat("en", {maximumSignificantDigits: 3, notation: "scientific"});
  const short = (value) => value == null ? "" : value && Math.abs(value) < 1e-3 ? TINY.format(value) : SHORT.format(value);

  function axisOf() {
    const line = colour("--line");
    return {
      stroke: colour("--soft"), grid: {stroke: line, width: 1}, ticks: {stroke: line, width: 1},
      values: (_, splits) => splits.map(short),
    };
  }

  function marked(plot, chart) {
    const {ctx, bbox} = plot;
    chart.marks = [];
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    values.runs.forEach((run, number) => {
      if (!isShown(number)) return;
      const ratio = devicePixelRatio;
      ctx.fillStyle = colour("--hole");
      for (const holes of plot.names.map((name) => run.holes[name] || [])) {
        for (const [first, last] of holes) {
          const [from, to] = placed(run, [first, last]).map((at) => plot.valToPos(at, "x", true));
          ctx.fillRect(from - ratio, bbox.top, Math.max(3 * ratio, to - from + 2 * ratio), bbox.height);
        }
      }
      ctx.strokeStyle = values.runs.length > 1 ? colour(`--c${number % COLOURS}`) : colour("--mark");
      ctx.fillStyle = ctx.strokeStyle;
      ctx.lineWidth = ratio;
      ctx.font = `${11 * ratio}px system-ui, sans-serif`;
      let before = -Infinity;
      for (const mark of [...run.marks].sort((one, other) => one.step - other.step)) {
        const at = state.by === "seconds" && mark.seconds != null ? mark.seconds : placed(run, [mark.step])[0];
        if (mark.kind === "best" && !plot.names.includes("eval_loss")) continue;
        if (at == null || (state.logX && at <= 0)) continue;
        const x = Math.round(plot.valToPos(at, "x", true));
        if (x < bbox.left || x > bbox.left + bbox.width) continue;
        ctx.setLineDash(mark.kind === "best" ? [2 * ratio, 3 * ratio] : [5 * ratio, 3 * ratio]);
        chart.marks.push({at, kind: x - before > 44 * ratio ? mark.kind : ""});
        ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
        if (x - before > 44 * ratio) {
          const room = bbox.left + bbox.width - x;
          ctx.textAlign = room < 48 * ratio ? "right" : "left";
          ctx.fillText(mark.kind, x + (room < 48 * ratio ? -3 : 3) * ratio, bbox.top + 11 * ratio);
          before = x;
        }
      }
    });
    ctx.restore();
  }

  function readout(chart, index) {
    const read = chart.read;
    read.replaceChildren();
    const mains = chart.lines.map((line, number) => [line, number + 1]).filter(([line]) => line.main);
    const last = index == null;
    mains.forEach(([line, number]) => {
      const data = chart.plot.data, column = data[number];
      /* undefined: no point of this curve here, the one before counts; null: one that is not finite. */
      let at = last ? column.length - 1 : index;
      while (at > 0 && (column[at] === undefined || (last && column[at] === null))) at -= 1;
      const value = column[at];
      read.append(
        element("span", {class: `swatch k${line.shade}`}), ` ${line.label} `,
        element("strong", {}, value == null ? "NaN" : told(value, chart.unit)),
        value == null ? " " : ` at ${said(data[0][at])}  `);
    });
  }

  /* Of the points a few pixels around the pointer the nearest one: a spike among many points can be pointed at. */
  function nearest(chart, plot, index) {
    const {left, top, event} = plot.cursor;
    if (index == null || !event || left < 0) return index;
    const [xs] = plot.data;
    let found = index, least = Infinity;
    for (const way of [-1, 1]) {
      for (let at = index; at >= 0 && at < xs.length; at += way) {
        const dx = plot.valToPos(xs[at], "x") - left;
        if (Math.abs(dx) > 8) break;
        chart.lines.forEach((line, number) => {
          const y = line.main ? plot.data[number + 1][at] : null;
          if (y == null) return;
          const far = Math.hypot(dx, plot.valToPos(y, "y") - top);
          if (far < least) { least = far; found = at; }
        });
      }
    }
    return found;
  }

  function said(x) {
    if (state.by === "seconds") return `${NUMBER.format(x)} s`;
    return `${state.by === "step" ? "step" : "token"} ${NUMBER.format(Math.round(x))}`;
  }

  function draw(chart) {
    const cursor = chart.plot && chart.plot.cursor.left >= 0 ? chart.plot.cursor : null;
    const pointed = cursor && {x: chart.plot.posToVal(cursor.left, "x"), top: cursor.top};
    if (chart.plot) chart.plot.destroy();
    chart.lines = linesOf(chart);
    const tables = chart.lines.map((line) => line.table);
    const data = tables.length ? uPlot.join(tables, tables.map((table) => table.map(() => 1))) : [[]];
    const options = {
      width: chart.box.clientWidth || 400, height: 230, legend: {show: false},
      cursor: {
        sync: {key: "all"}, drag: {x: true, y: true, uni: 30, dist: 6, setScale: false}, points: {size: 7},
        dataIdx: (plot, series, index) => nearest(chart, plot, index),
      },
      scales: {
        x: {time: false, distr: state.logX ? 3 : 1, ...(state.zoom ? {min: state.zoom[0], max: state.zoom[1]} : {})},
        y: {distr: state.logY ? 3 : 1, ...(chart.y ? {auto: false, min: chart.y[0], max: chart.y[1]} : {})},
      },
      axes: [{...axisOf(), size: 36}, {...axisOf(), size: 64}],
      series: [{}, ...chart.lines.map((line) => ({
        label: line.label, stroke: colour(`--c${line.shade}`), width: line.faint ? 1 : 1.7, alpha: line.faint ? 0.35 : 1,
        dash: line.dash, points: {show: line.table[0].length < 40 && !line.faint, size: 4},
        spanGaps: false,
      }))],
      hooks: {
        draw: [(plot) => marked(plot, chart)],
        setCursor: [(plot) => readout(chart, nearest(chart, plot, plot.cursor.idx))],
        setSelect: [(plot) => selected(chart, plot)],
      },
    };
    chart.box.replaceChildren();
    chart.legend.replaceChildren(...legendOf(chart));
    const plot = new uPlot(options, data, chart.box);
    plot.names = chart.names;
    chart.plot = plot;
    plot.over.addEventListener("click", () => { if (!chart.dragged) choose(chart, nearest(chart, plot, plot.cursor.idx)); chart.dragged = false; });
    plot.over.addEventListener("mousedown", (event) => { chart.from = [event.clientX, event.clientY]; dragging = chart; held = true; });
    plot.over.addEventListener("mouseup", (event) => {
      chart.dragged = Math.hypot(event.clientX - chart.from[0], event.clientY - chart.from[1]) > 5;
    });
    plot.over.addEventListener("dblclick", showAll);
    readout(chart, null);
    if (pointed) plot.setCursor({left: plot.valToPos(pointed.x, "x"), top: pointed.top});
  }

  /* A button for each of a chart's numbers, if it has several: pressed, it is drawn. */
  function legendOf(chart) {
    if (chart.keys.size < 2) return [];
    return [...chart.keys].map(([name, shade]) => element("button", {
      type: "button", class: "curve", "aria-pressed": String(!state.hidden.has(name)), onclick: () => {
        if (!state.hidden.delete(name)) state.hidden.add(name);
        draw(chart);
        const again = [...chart.legend.children].find((each) => each.textContent === name);
        if (again) again.focus();
      },
    }, ...(shade == null ? [] : [element("span", {class: `swatch k${shade}`})]), name));
  }

  /* From the first to the last point of all that is shown. */
  function extent() {
    let first = Infinity, last = -Infinity;
    values.runs.forEach((run, number) => {
      if (!isShown(number)) return;
      for (const {x} of Object.values(run.curves)) {
        if (!x.length) continue;
        const [from, to] = placed(run, [x[0], x[x.length - 1]]);
        first = Math.min(first, from); last = Math.max(last, to);
      }
    });
    return first < last ? [first, last] : [first - 1, last + 1];
  }

  /* What was dragged over: a range of the x axis for all charts, and of the y axis for this one. */
  let dragging = null;
  function selected(chart, plot) {
    const {left, top, width, height} = plot.select;
    if (chart === dragging && (width > 5 || height > 5)) {
      const whole = {x: width < 6 || width >= plot.over.clientWidth, y: height < 6 || height >= plot.over.clientHeight};
      if (!whole.y) chart.y = [plot.posToVal(top + height, "y"), plot.posToVal(top, "y")];
      setZoom(whole.x ? state.zoom : [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
    }
    if (width || height) plot.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
  }

  function setZoom(range) {
    state.zoom = range;
    redraw();
  }

  function showAll() {
    for (const chart of charts) chart.y = null;
    setZoom(null);
  }

  /* Left and right move along the points, + and - zoom along x, up and down along y, 0 or Escape shows all, Enter chooses
     the step. */
  function keyed(chart, event) {
    const plot = chart.plot, [xs] = plot.data;
    if (!xs.length) return;
    const at = plot.cursor.idx ?? xs.length - 1, far = event.shiftKey ? 20 : 1;
    const middle = xs[at], {min, max} = plot.scales.x;
    const zoomTo = (factor) => {
      const half = (max - min) / 2 * factor;
      const [first, last] = extent(), wanted = [Math.max(first, middle - half), Math.min(last, middle + half)];
      setZoom(wanted[0] <= first && wanted[1] >= last ? null : wanted);
    };
    const stretch = (factor) => {
      const {min: low, max: high} = plot.scales.y;
      const column = chart.lines.findIndex((line) => line.main) + 1, y = (column && plot.data[column][at]) ?? (low + high) / 2;
      chart.y = [y - (y - low) * factor, y + (high - y) * factor];
      if (state.logY && chart.y[0] <= 0) chart.y[0] = low / 2;
      redraw();
    };
    const moves = {
      ArrowUp: () => stretch(0.5), ArrowDown: () => stretch(2),
      ArrowLeft: () => moveTo(at - far), ArrowRight: () => moveTo(at + far), Home: () => moveTo(0), End: () => moveTo(xs.length - 1),
      "+": () => zoomTo(0.5), "=": () => zoomTo(0.5), "-": () => zoomTo(2), 0: showAll, Escape: showAll,
      Enter: () => choose(chart, at),
    };
    const moveTo = (wanted) => {
      const index = Math.max(0, Math.min(xs.length - 1, wanted));
      const column = chart.lines.findIndex((line) => line.main) + 1;
      const y = plot.data[column] ? plot.data[column][index] : null;
      plot.setCursor({left: plot.valToPos(xs[index], "x"), top: y == null ? 5 : plot.valToPos(y, "y")});
      readout(chart, index);
    };
    const move = moves[event.key];
    if (move) { event.preventDefault(); move(); }
  }

  /* --- a step --- */

  function choose(chart, index) {
    if (index == null) return;
    const x = chart.plot.data[0][index];
    const lines = chart.lines.filter((line) => line.main);
    const run = (lines[0] || {}).run || values.runs[0];
    const curve = run.curves[(lines[0] || {}).name] || Object.values(run.curves)[0];
    const steps = curve.x, places = placed(run, steps);
    let nearest = 0;
    places.forEach((place, at) => { if (Math.abs(place - x) < Math.abs(places[nearest] - x)) nearest = at; });
    const step = steps[nearest];
    let box = document.getElementById("chosen");
    if (!box) {
      box = element("section", {id: "chosen", "aria-live": "polite", tabindex: "-1"});
      document.getElementById("curves").append(box);
    }
    const table = element("tbody", {});
    for (const each of values.runs) {
      for (const [name, {x: xs, y: ys}] of Object.entries(each.curves)) {
        const at = xs.indexOf(step);
        if (at >= 0) {
          const label = values.runs.length > 1 ? `${each.name}: ${name}` : name;
          table.append(element("tr", {}, element("th", {scope: "row"}, label), element("td", {}, ys[at] == null ? "not finite" : name.endsWith("_bytes") ? told(ys[at] / 2 ** 30, "bytes") : NUMBER.format(ys[at]))));
        }
      }
    }
    const batch = element("div", {});
    box.replaceChildren(
      element("h3", {}, `Step ${NUMBER.format(step)}`), element("table", {}, table), batch,
      element("p", {}, "Why, and all its rows: ", ...pasted(`threefold why ${quoted(run.path)} --step ${step}`)),
      element("button", {type: "button", onclick: () => { box.remove(); chart.focus.focus(); }}, "close"));
    if (run.batches[step]) showBatch(batch, run.batches[step]);
    else if (values.live) {
      fetch(`step/${step}?run=${encodeURIComponent(run.key)}`).then((answer) => answer.ok ? answer.json() : null)
        .then((found) => { if (found) showBatch(batch, found); else batch.append("What this step read is not known."); });
    }
    box.focus();
    box.scrollIntoView({block: "nearest"});
  }

  /* The rows of a step, the farthest from their like first, with the beginning of their text. */
  function showBatch(box, batch) {
    const pieces = batch.where ? [element("p", {}, `It read ${batch.where}, on ${batch.mesh}. Its rows, the largest outliers first:`)] : [];
    for (const row of batch.rows) {
      const name = row.row == null ? `the row at place ${row.place}` : `row ${row.row}`;
      const rank = batch.dp > 1 ? ` (dp rank ${row.place % batch.dp})` : "";
      const source = row.source === "source" ? "" : ` of ${row.source}`;
      const loss = row.loss == null ? "" : `: loss ${told(row.loss, "")} over ${NUMBER.format(row.targets)} targets`;
      const like = row.like == null || row.loss == null ? "" : `, others ${told(row.like, "")} (${NUMBER.format(Math.round(row.score * 10) / 10)} deviations)`;
      const documents = row.documents.length ? `, document${row.documents.length > 1 ? "s" : ""} ${row.documents.slice(0, 6).join(", ")}` : "";
      const files = row.files.length ? ` of ${row.files.slice(0, 3).join(", ")}` : "";
      pieces.push(element("p", {}, element("strong", {}, name), `${source}${rank}${loss}${like}${documents}${files}`));
      if (row.text) pieces.push(element("pre", {}, element("bdi", {}, row.text)));
    }
    if (batch.more) pieces.push(element("p", {}, `and ${NUMBER.format(batch.more)} more rows`));
    box.replaceChildren(...pieces);
  }

  const quoted = (text) => /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\"'\"'")}'`;

  function pasted(command) {
    return [element("code", {}, command), element("button", {type: "button", class: "copy", "aria-label": `copy: ${command}`}, "copy")];
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest && event.target.closest("button.copy");
    if (!button) return;
    const code = button.previousElementSibling;
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "selected";
    }
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });

  /* --- controls --- */

  const controls = {};
  function makeControls() {
    const box = document.getElementById("controls");
    const check = (label, name) => element("label", {}, element("input", {type: "checkbox", checked: state[name], onchange: (event) => { state[name] = event.target.checked; redraw(); }}), label);
    controls.reset = element("button", {type: "button", disabled: true, onclick: showAll}, "show all");
    const by = element("select", {onchange: (event) => { state.by = event.target.value; state.zoom = null; redraw(); }},
      element("option", {value: "step"}, "steps"));
    if (values.runs.some((run) => run.tokens.x.length)) by.append(element("option", {value: "tokens"}, "tokens"));
    if (values.runs.some((run) => run.passes.length)) by.append(element("option", {value: "seconds"}, "seconds"));
    box.append(
      element("label", {}, "smoothing", element("input", {type: "range", min: 0, max: 0.99, step: 0.01, value: state.smooth,
        oninput: (event) => { state.smooth = Number(event.target.value); redraw(); }})),
      check("log y", "logY"), check("log x", "logX"), element("label", {}, "by", by), controls.reset);
    by.value = state.by;
    if (values.runs.length > 1) {
      const runs = element("fieldset", {}, element("legend", {}, "runs"));
      values.runs.forEach((run, number) => runs.append(element("label", {},
        element("input", {type: "checkbox", checked: true, onchange: (event) => { state.ticked[number] = event.target.checked; redraw(); }}),
        element("span", {class: `swatch k${number % COLOURS}`}), run.name)));
      box.append(runs, filterBox());
    }
    box.after(element("p", {class: "key"}, "Drag along an axis, or over an area, to zoom; double-click shows all; click a point to see its step. ",
      "With the keyboard: left, right, Home and End move, + and - zoom, up and down zoom along y, 0 shows all, Enter chooses the step. ",
      "Dotted: steps that were trained again later. A coloured band: NaN or infinite."));
  }

  /* Not while a range is being dragged: that would end it. */
  let waiting = false, held = false;
  function redraw() {
    if (waiting) return;
    waiting = true;
    if (!held) requestAnimationFrame(() => { waiting = false; charts.forEach(draw); remember(); });
  }
  addEventListener("mouseup", () => setTimeout(() => {
    held = false;
    if (waiting) { waiting = false; redraw(); }
  }));

  function makeCharts(kept) {
    const grid = document.getElementById("charts");
    grid.replaceChildren();
    charts.length = 0;
    values.charts.forEach((described, number) => {
      const chart = {...described, box: element("div", {class: "plot"}), read: element("div", {class: "read"}), legend: element("div", {class: "legend"}), y: null};
      const title = element("h3", {id: `chart-${number}`}, described.title + (described.unit === "bytes" ? " (GiB)" : ""));
      chart.focus = element("div", {tabindex: "0", role: "application", "aria-labelledby": `chart-${number}`,
        "aria-roledescription": "chart", onkeydown: (event) => keyed(chart, event)}, chart.box);
      grid.append(element("div", {class: "chart"}, element("div", {class: "top"}, title, saveButtons(chart)), chart.legend, chart.focus, chart.read));
      chart.y = rangeOf(kept.get(`y${number}`));
      charts.push(chart);
    });
    charts.forEach(draw);
    remember();
  }

  /* --- a chart as a file --- */

  function saveButtons(chart) {
    const button = (kind, make) => element("button", {
      type: "button", class: "save", "aria-label": `${chart.title} as ${kind}`, onclick: () => make(chart),
    }, kind);
    return element("span", {class: "saves"}, button("CSV", saveCsv), button("SVG", saveSvg), button("PNG", savePng));
  }

  function save(chart, kind, blob) {
    const name = (values.runs.length === 1 ? `${values.runs[0].name} ` : "") + chart.title;
    const link = element("a", {download: `${name.replaceAll(/[^\w.-]+/g, "-")}.${kind}`, href: URL.createObjectURL(blob)});
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  }

  /* The points of all curves that are drawn, a line each. A text that a spreadsheet would compute is made a text. */
  function saveCsv(chart) {
    const cell = (text) => `"${(/^[=+@\t\r-]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;
    const lines = ["run,number,pass,step,seconds,value"];
    for (const {run, name, curve, main} of chart.lines) {
      if (!main && !(curve && curve.pass)) continue; // a smoothed one
      curve.x.forEach((step, at) => {
        const clock = run.passes.find((each) => each.pass === curve.pass) || passOf(run, step);
        const seconds = clock ? interpolated(clock, step) : "";
        lines.push([cell(run.name), cell(name), curve.pass ?? (clock ? clock.pass : ""), step, seconds, curve.y[at] ?? "nan"].join(","));
      });
    }
    save(chart, "csv", new Blob([lines.join("\n") + "\n"], {type: "text/csv"}));
  }

  const NS = "http://www.w3.org/2000/svg";
  function drawing(name, attributes, ...inside) {
    const made = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) if (value != null) made.setAttribute(key, value);
    made.append(...inside);
    return made;
  }

  /* The chart as it is on the page, drawn anew as paths: axes, curves, marks, and which curve is which. */
  function saveSvg(chart) {
    const plot = chart.plot, {clientWidth: width, clientHeight: height} = plot.over;
    const mains = chart.lines.filter((line) => line.main), left = 64, top = 28 + 16 * mains.length;
    const font = {"font-family": "system-ui, sans-serif", "font-size": 11, fill: colour("--text")};
    const at = (value, scale) => Math.round(plot.valToPos(value, scale) * 100) / 100;
    const inside = drawing("g", {"clip-path": "url(#inside)", fill: "none"});
    for (const mark of chart.marks) {
      inside.append(drawing("path", {d: `M${at(mark.at, "x")} 0V${height}`, stroke: colour("--mark"), "stroke-dasharray": "5 3"}),
        drawing("text", {...font, fill: colour("--mark"), x: at(mark.at, "x") + 3, y: 11}, mark.kind));
    }
    for (const line of chart.lines) {
      let begun = false;
      const [xs, ys] = line.table;
      const path = xs.map((x, index) => {
        if (ys[index] == null) { begun = false; return ""; }
        const piece = `${begun ? "L" : "M"}${at(x, "x")} ${at(ys[index], "y")}`;
        begun = true;
        return piece;
      }).join("");
      if (path) inside.append(drawing("path", {d: path, stroke: colour(`--c${line.shade}`), "stroke-width": line.faint ? 1 : 1.7, opacity: line.faint ? 0.35 : 1, "stroke-dasharray": line.dash && line.dash.join(" ")}));
    }
    const axes = drawing("g", {});
    const grid = (d) => axes.append(drawing("path", {d, stroke: colour("--line")}));
    const [x, y] = plot.axes;
    (x._splits || []).forEach((value) => {
      grid(`M${at(value, "x")} 0V${height}`);
      axes.append(drawing("text", {...font, x: at(value, "x"), y: height + 16, "text-anchor": "middle"}, short(value)));
    });
    (y._splits || []).forEach((value) => {
      grid(`M0 ${at(value, "y")}H${width}`);
      axes.append(drawing("text", {...font, x: -6, y: at(value, "y") + 4, "text-anchor": "end"}, short(value)));
    });
    const keys = mains.map(({label, shade}, number) => drawing("text", {...font, x: left, y: 40 + 16 * number, fill: colour(`--c${shade}`)}, label));
    const whole = drawing("svg", {xmlns: NS, width: width + left + 16, height: height + top + 40},
      drawing("rect", {width: "100%", height: "100%", fill: colour("--back")}),
      drawing("clipPath", {id: "inside"}, drawing("rect", {width, height})),
      drawing("text", {...font, "font-size": 14, x: left, y: 20}, `${chart.title} by ${state.by}`), ...keys,
      drawing("g", {transform: `translate(${left} ${top})`}, axes, inside));
    save(chart, "svg", new Blob([new XMLSerializer().serializeToString(whole)], {type: "image/svg+xml"}));
  }

  function savePng(chart) {
    const from = chart.plot.ctx.canvas, ratio = devicePixelRatio, mains = chart.lines.filter((line) => line.main);
    const head = (24 + 16 * mains.length) * ratio;
    const canvas = element("canvas", {width: from.width, height: from.height + head}), pen = canvas.getContext("2d");
    pen.fillStyle = colour("--back");
    pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.drawImage(from, 0, head);
    pen.fillStyle = colour("--text");
    pen.font = `${14 * ratio}px system-ui, sans-serif`;
    pen.fillText(`${chart.title} by ${state.by}`, 8 * ratio, 18 * ratio);
    pen.font = `${11 * ratio}px system-ui, sans-serif`;
    mains.forEach(({label, shade}, number) => {
      pen.fillStyle = colour(`--c${shade}`);
      pen.fillText(label, 8 * ratio, (34 + 16 * number) * ratio);
    });
    canvas.toBlob((blob) => save(chart, "png", blob), "image/png");
  }

  /* --- a view as a link: what is chosen, after the # of the address --- */

  const KEPT = ["smooth", "logX", "logY", "by"];
  function remember() {
    const kept = Object.fromEntries(KEPT.filter((name) => state[name] && state[name] !== "step").map((name) => [name, state[name]]));
    if (state.zoom) kept.x = state.zoom.join("~");
    charts.forEach((chart, number) => { if (chart.y) kept[`y${number}`] = chart.y.join("~"); });
    const text = new URLSearchParams(kept).toString();
    if (text !== location.hash.slice(1)) history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
    controls.reset.disabled = !state.zoom && !charts.some((chart) => chart.y);
  }

  const rangeOf = (text) => {
    const [low, high] = (text || "").split("~").map(Number);
    return Number.isFinite(low) && Number.isFinite(high) && low < high ? [low, high] : null;
  };

  function recall() {
    const kept = new URLSearchParams(location.hash.slice(1));
    const smooth = Number(kept.get("smooth"));
    if (smooth > 0 && smooth <= 0.99) state.smooth = smooth;
    for (const name of ["logX", "logY"]) state[name] = kept.get(name) === "true";
    if (["tokens", "seconds"].includes(kept.get("by"))) state.by = kept.get("by");
    state.zoom = rangeOf(kept.get("x"));
    return kept;
  }

  /* --- runs: sorted by a column, filtered by words --- */

  const FILTER = "words; or KEY=VALUE, KEY<NUMBER, KEY>NUMBER";
  function filterBox() {
    const input = element("input", {type: "search", placeholder: "lr>0.001 llama", "aria-label": `filter runs: ${FILTER}`, title: FILTER,
      oninput: (event) => { state.filter = event.target.value; arrange(); if (values.runs) redraw(); }});
    return element("label", {class: "filter"}, "filter runs", input);
  }

  const numberOf = (text) => {
    const match = String(text).replaceAll(",", "").match(/^\s*[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?/i);
    return match ? Number(match[0]) : null;
  };

  /* Whether a run fits all words of the filter. A key is one of the run's figures or keys, or the end of its name. */
  function fits(cells) {
    return state.filter.split(/\s+/).filter(Boolean).every((word) => {
      const asked = word.match(/^(.+?)(<=|>=|!=|=|<|>)(.+)$/);
      if (!asked) return Object.values(cells).some((text) => String(text).toLowerCase().includes(word.toLowerCase()));
      const [, key, sign, wanted] = asked;
      const name = Object.keys(cells).find((each) => each === key) || Object.keys(cells).find((each) => each.endsWith(`.${key}`));
      if (!name) return false;
      const [one, other] = [numberOf(cells[name]), numberOf(wanted)];
      if (sign === "=" || sign === "!=") {
        const same = one != null && other != null ? one === other : String(cells[name]).toLowerCase() === wanted.toLowerCase();
        return same === (sign === "=");
      }
      if (one == null || other == null) return false;
      return {"<": one < other, ">": one > other, "<=": one <= other, ">=": one >= other}[sign];
    });
  }

  const isShown = (number) => {
    const run = values.runs[number];
    return state.ticked[number] && fits({run: run.name, state: run.state, ...run.config});
  };

  /* Tables of runs: a click on a head sorts by it, and rows that the filter leaves out are hidden. */
  const order = {column: null, down: false};
  function arrange() {
    for (const table of document.querySelectorAll("[data-part=list] table, [data-part=compared] table")) {
      const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
      if (!heads[0].querySelector("button")) {
        heads.forEach((head, at) => {
          const column = head.textContent;
          if (body.rows[0] && body.rows[0].cells[at].querySelector("input")) return; // boxes to tick have no order
          const sort = () => { order.down = order.column === column && !order.down; order.column = column; arrange(); };
          head.replaceChildren(element("button", {type: "button", class: "sort", onclick: sort}, column));
        });
      }
      heads.forEach((head) => {
        const sorted = head.textContent === order.column ? (order.down ? "descending" : "ascending") : null;
        if (sorted) head.setAttribute("aria-sort", sorted); else head.removeAttribute("aria-sort");
      });
      const rows = [...body.rows].map((row) => ({row, texts: [...row.cells].map((cell) => cell.textContent)}));
      for (const {row, texts} of rows) {
        const cells = Object.fromEntries(heads.map((head, at) => [head.textContent, texts[at]]));
        const run = (values.runs || []).find((each) => each.name === texts[0]);
        row.hidden = !fits({...cells, ...(run ? run.config : {})});
      }
      const at = heads.findIndex((head) => head.textContent === order.column);
      if (at < 0) continue;
      const compared = (one, other) => {
        const [a, b] = [numberOf(one.texts[at]), numberOf(other.texts[at])];
        if (a != null && b != null) return a - b;
        if (a != null || b != null) return a != null ? -1 : 1;
        return one.texts[at].localeCompare(other.texts[at]);
      };
      rows.sort((one, other) => (order.down ? -1 : 1) * compared(one, other));
      body.append(...rows.map(({row}) => row));
    }
  }

  /* --- a live page --- */

  const query = () => new URLSearchParams((values.runs || []).map((run) => ["run", run.key])).toString();

  function renewed(found) {
    const names = JSON.stringify(values.charts);
    values.runs = found.runs;
    values.charts = found.charts;
    if (JSON.stringify(found.charts) !== names) makeCharts(new URLSearchParams()); else redraw();
  }

  const FOCUSED = "a, button, input, summary, [tabindex]";
  const focusable = (part) => [...part.querySelectorAll(FOCUSED)];
  const keyOf = (each) => each.value || each.getAttribute("href") || each.getAttribute("aria-label") || each.textContent;

  /* Puts a part in the place of the one before: what is open, ticked, focused or scrolled in it stays so. */
  function replace(before, parsed) {
    for (const details of before.querySelectorAll("details[open]")) {
      const same = parsed.querySelector(`[data-keep="${details.dataset.keep}"]`);
      if (same) same.open = true;
    }
    const ticked = new Set([...before.querySelectorAll("input:checked")].map((input) => input.value));
    for (const input of parsed.querySelectorAll("input")) input.checked = ticked.has(input.value);
    const active = before.contains(document.activeElement) ? document.activeElement : null;
    const scrolled = [...before.querySelectorAll(".wide")].map((each) => [each.scrollLeft, each.scrollTop]);
    before.replaceWith(parsed);
    arrange();
    parsed.querySelectorAll(".wide").forEach((each, number) => {
      const [left, top] = scrolled[number] || [];
      if (left || top) each.scrollTo({left, top, behavior: "instant"});
    });
    const next = active && focusable(parsed).find((each) => keyOf(each) === keyOf(active));
    if (next) next.focus({preventScroll: true});
  }

  /* Puts the parts of a box in their places: one that is already on the page as it is said stays, one in which text is
     selected waits until it is not. */
  const latest = new Map(), onPage = new Map();
  for (const part of document.querySelectorAll("[data-box] > [data-part]")) {
    onPage.set(`${part.parentElement.dataset.box} ${part.dataset.part}`, part.outerHTML);
  }
  function place(box, parts) {
    const order = Object.keys(parts);
    const inside = document.querySelector(`[data-box="${box}"]`);
    if (!inside) return;
    const there = new Map([...inside.children].map((part) => [part.dataset.part, part]));
    for (const [name, part] of there) if (!order.includes(name)) part.remove();
    for (const name of order) {
      const before = there.get(name), selection = getSelection(), key = `${box} ${name}`;
      if (before && latest.get(key) === parts[name]) continue;
      const parsed = new DOMParser().parseFromString(parts[name], "text/html").body.firstElementChild;
      if (before && !selection.isCollapsed && before.contains(selection.anchorNode)) continue;
      latest.set(key, parts[name]);
      if (before && onPage.get(key) === parsed.outerHTML) continue;
      onPage.set(key, parsed.outerHTML);
      if (before) {
        replace(before, parsed);
      } else {
        const next = order.slice(order.indexOf(name) + 1).map((later) => inside.querySelector(`[data-part="${later}"]`)).find(Boolean);
        inside.insertBefore(parsed, next || null);
      }
    }
  }

  /* Asks for the parts as they are now, and for points of another version than this page has. */
  let version = "";
  async function ask() {
    const answer = await fetch(`values?${query()}&${new URLSearchParams({version})}`);
    if (!answer.ok) throw new Error(answer.statusText);
    const found = await answer.json();
    version = found.version;
    for (const [box, parts] of Object.entries(found.parts)) place(box, parts);
    if (found.values) renewed(found.values);
  }

  async function follow() {
    const status = document.getElementById("live");
    let wait = values.runs ? 500 : 2000;
    const began = performance.now();
    try {
      await ask();
      status.textContent = "following";
      /* A page that takes long to make is asked for less often, and one that nobody sees too. */
      wait = Math.max(document.hidden ? 5000 : wait, 4 * (performance.now() - began));
    } catch {
      status.textContent = "no answer: asking again";
      wait = 2000;
    }
    setTimeout(follow, wait);
  }

  if (values.live) follow();

  if (document.getElementById("charts") && values.runs) {
    const kept = recall();
    makeControls();
    makeCharts(kept);
    let width = innerWidth;
    addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    /* On paper in the colours of paper, two beside one another. */
    addEventListener("beforeprint", () => {
      document.documentElement.dataset.paper = "yes";
      for (const chart of charts) { draw(chart); chart.plot.setSize({width: 330, height: 180}); }
    });
    addEventListener("afterprint", () => { delete document.documentElement.dataset.paper; redraw(); });
  }
  const list = document.querySelector("[data-box=list]");
  if (list) list.before(filterBox());
  arrange();
  document.documentElement.dataset.ready = "yes";
})();
