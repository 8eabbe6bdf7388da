"use strict";
/* The charts of a run's page. In: the block of JSON `values` (report/document.py: points_of). Texts of files go into the
   page as text nodes only. A live page also takes new points, and parts that are drawn anew, from its own server. */
(() => {
  const values = JSON.parse(document.getElementById("values").textContent);
  const COLOURS = 8;
  const NUMBER = new Intl.NumberFormat("en", {maximumSignificantDigits: 6});
  const state = {smooth: 0, logX: false, logY: false, by: "step", shown: (values.runs || []).map(() => true), zoom: null};
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

  function placed(run, steps) {
    const table = state.by === "step" ? null : run[state.by];
    return table ? steps.map((step) => interpolated(table, step)) : steps;
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

  /* One table of uPlot's for a curve; points whose place is not known, or is not after the one before, are left out. */
  function tableOf(run, x, y, unit) {
    const xs = [], ys = [];
    placed(run, x).forEach((at, index) => {
      const last = xs.length ? xs[xs.length - 1] : -Infinity;
      if (at == null || at <= last || (state.logX && at <= 0)) return;
      xs.push(at); ys.push(y[index]);
    });
    return [xs, drawable(scaled(ys, unit))];
  }

  /* The series of a chart: of each run and each of its numbers the curve, its smoothed form, and what was replaced. */
  function linesOf(chart) {
    const lines = [];
    values.runs.forEach((run, number) => {
      if (!state.shown[number]) return;
      chart.names.forEach((name, place) => {
        const curve = run.curves[name];
        if (!curve) return;
        const shade = (values.runs.length > 1 ? number : place) % COLOURS;
        const label = (values.runs.length > 1 ? `${run.name}: ` : "") + name;
        const dash = values.runs.length > 1 && place ? [6, 3] : undefined;
        for (const old of curve.old) {
          lines.push({table: tableOf(run, old.x, old.y, chart.unit), shade, faint: true, dash: [2, 4], label: `${label}, replaced`});
        }
        const smooth = state.smooth > 0;
        lines.push({table: tableOf(run, curve.x, curve.y, chart.unit), shade, faint: smooth, dash, label, main: true, run, name});
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

  function marked(plot) {
    const {ctx, bbox} = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    values.runs.forEach((run, number) => {
      if (!state.shown[number]) return;
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
        const [at] = placed(run, [mark.step]);
        if (mark.kind === "best" && !plot.names.includes("eval_loss")) continue;
        if (at == null || (state.logX && at <= 0)) continue;
        const x = Math.round(plot.valToPos(at, "x", true));
        if (x < bbox.left || x > bbox.left + bbox.width) continue;
        ctx.setLineDash(mark.kind === "best" ? [2 * ratio, 3 * ratio] : [5 * ratio, 3 * ratio]);
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
        sync: {key: "all"}, drag: {x: true, y: false, dist: 6}, points: {size: 7},
        dataIdx: (plot, series, index) => nearest(chart, plot, index),
      },
      scales: {
        x: {time: false, distr: state.logX ? 3 : 1, ...(state.zoom ? {min: state.zoom[0], max: state.zoom[1]} : {})},
        y: {distr: state.logY ? 3 : 1},
      },
      axes: [{...axisOf(), size: 36}, {...axisOf(), size: 64}],
      series: [{}, ...chart.lines.map((line) => ({
        label: line.label, stroke: colour(`--c${line.shade}`), width: line.faint ? 1 : 1.7, alpha: line.faint ? 0.35 : 1,
        dash: line.dash, points: {show: line.table[0].length < 40 && !line.faint, size: 4},
        spanGaps: false,
      }))],
      hooks: {
        draw: [marked],
        setCursor: [(plot) => readout(chart, nearest(chart, plot, plot.cursor.idx))],
        setScale: [(plot, key) => { if (key === "x" && chart.ready) zoomed(chart); }],
      },
    };
    chart.ready = false;
    chart.box.replaceChildren();
    const plot = new uPlot(options, data, chart.box);
    plot.names = chart.names;
    chart.plot = plot;
    plot.over.addEventListener("click", () => { if (!chart.dragged) choose(chart, nearest(chart, plot, plot.cursor.idx)); chart.dragged = false; });
    plot.over.addEventListener("mousedown", (event) => { chart.from = event.clientX; held = true; });
    plot.over.addEventListener("mouseup", (event) => { chart.dragged = Math.abs(event.clientX - chart.from) > 5; });
    plot.over.addEventListener("dblclick", () => setZoom(null));
    readout(chart, null);
    if (pointed) plot.setCursor({left: plot.valToPos(pointed.x, "x"), top: pointed.top});
    requestAnimationFrame(() => { chart.ready = true; });
  }

  /* From the first to the last point of all that is shown. */
  function extent() {
    let first = Infinity, last = -Infinity;
    values.runs.forEach((run, number) => {
      if (!state.shown[number]) return;
      for (const {x} of Object.values(run.curves)) {
        if (!x.length) continue;
        const [from, to] = placed(run, [x[0], x[x.length - 1]]);
        first = Math.min(first, from); last = Math.max(last, to);
      }
    });
    return first < last ? [first, last] : [first - 1, last + 1];
  }

  let zooming = false;
  function zoomed(chart) {
    if (zooming) return;
    const {min, max} = chart.plot.scales.x;
    if (min == null || (state.zoom && state.zoom[0] === min && state.zoom[1] === max)) return;
    const [first, last] = extent();
    setZoom(min <= first && max >= last ? null : [min, max], chart);
  }

  function setZoom(range, from) {
    state.zoom = range;
    zooming = true;
    const [min, max] = range || extent();
    for (const chart of charts) {
      if (chart !== from && chart.plot.data[0].length) chart.plot.setScale("x", {min, max});
    }
    requestAnimationFrame(() => { zooming = false; });
    controls.reset.disabled = !range;
  }

  /* Arrow keys move along the points, + and - zoom, 0 or Escape shows all, Enter chooses the step. */
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
    const moves = {
      ArrowLeft: () => moveTo(at - far), ArrowRight: () => moveTo(at + far), Home: () => moveTo(0), End: () => moveTo(xs.length - 1),
      "+": () => zoomTo(0.5), "=": () => zoomTo(0.5), "-": () => zoomTo(2), 0: () => setZoom(null), Escape: () => setZoom(null),
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
      pieces.push(element("p", {}, element("strong", {}, name), `${source}${rank}${loss}${like}${documents}`));
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
    const check = (label, name) => element("label", {}, element("input", {type: "checkbox", onchange: (event) => { state[name] = event.target.checked; redraw(); }}), label);
    controls.reset = element("button", {type: "button", disabled: true, onclick: () => setZoom(null)}, "show all");
    const by = element("select", {onchange: (event) => { state.by = event.target.value; state.zoom = null; redraw(); }},
      element("option", {value: "step"}, "steps"));
    if (values.runs.some((run) => run.tokens.x.length)) by.append(element("option", {value: "tokens"}, "tokens"));
    if (values.runs.some((run) => run.seconds.x.length)) by.append(element("option", {value: "seconds"}, "seconds"));
    box.append(
      element("label", {}, "smoothing", element("input", {type: "range", min: 0, max: 0.99, step: 0.01, value: 0,
        oninput: (event) => { state.smooth = Number(event.target.value); redraw(); }})),
      check("log y", "logY"), check("log x", "logX"), element("label", {}, "by", by), controls.reset);
    if (values.runs.length > 1) {
      const runs = element("fieldset", {}, element("legend", {}, "runs"));
      values.runs.forEach((run, number) => runs.append(element("label", {},
        element("input", {type: "checkbox", checked: true, onchange: (event) => { state.shown[number] = event.target.checked; redraw(); }}),
        element("span", {class: `swatch k${number % COLOURS}`}), run.name)));
      box.append(runs);
    }
    box.after(element("p", {class: "key"}, "Drag to zoom, double-click to show all, click a point to see its step. ",
      "With the keyboard: arrows, Home and End move, + and - zoom, 0 shows all, Enter chooses the step. ",
      "Dotted: steps that were trained again later. A coloured band: NaN or infinite."));
  }

  /* Not while a range is being dragged: that would end it. */
  let waiting = false, held = false;
  function redraw() {
    if (waiting) return;
    waiting = true;
    if (!held) requestAnimationFrame(() => { waiting = false; charts.forEach(draw); });
  }
  addEventListener("mouseup", () => setTimeout(() => {
    held = false;
    if (waiting) { waiting = false; redraw(); }
  }));

  function makeCharts() {
    const grid = document.getElementById("charts");
    grid.replaceChildren();
    charts.length = 0;
    values.charts.forEach((described, number) => {
      const chart = {...described, box: element("div", {class: "plot"}), read: element("div", {class: "read"})};
      const title = element("h3", {id: `chart-${number}`}, described.title + (described.unit === "bytes" ? " (GiB)" : ""));
      chart.focus = element("div", {tabindex: "0", role: "application", "aria-labelledby": `chart-${number}`,
        "aria-roledescription": "chart", onkeydown: (event) => keyed(chart, event)}, chart.box);
      grid.append(element("div", {class: "chart"}, title, chart.focus, chart.read));
      charts.push(chart);
    });
    charts.forEach(draw);
  }

  /* --- a live page --- */

  const query = () => new URLSearchParams((values.runs || []).map((run) => ["run", run.key])).toString();

  function renewed(found) {
    const names = JSON.stringify(values.charts);
    values.runs = found.runs;
    values.charts = found.charts;
    if (JSON.stringify(found.charts) !== names) makeCharts(); else redraw();
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
    makeControls();
    makeCharts();
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
  document.documentElement.dataset.ready = "yes";
})();
