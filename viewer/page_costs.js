// 4 cost: the roofline, and the table behind it.

const BOTH = ["manual", "tiled"];
const cost = { row: 0 };

function buildCosts() {
  cost.row = costs.rows.findIndex((r) => r.T >= 4096);
  $("cost-about").textContent = `One layer of this model's attention, forward, batch 1, `
    + `${many(H, "head")} of ${about.head_dim}, in ${costs.dtype}, on ${costs.gpu}: `
    + `${scaled(costs.peak, "FLOP/s")} (${costs.peak_source}), ${scaled(costs.bandwidth, "B/s")} `
    + `(${costs.bandwidth_source}). Tiles of ${costs.block_m} × ${costs.block_n}, the largest `
    + `that fit into ${scaled(costs.fast_memory, "B", 1024)}.`;
  $("length").max = costs.rows.length - 1;
  $("length").value = cost.row;
  $("length").addEventListener("input", () => {
    cost.row = Number($("length").value);
    drawCosts();
  });
}

function drawCosts() {
  const row = costs.rows[cost.row];
  $("length").setAttribute("aria-valuetext", `${row.T} tokens`);
  const said = BOTH.flatMap((name) => {
    const { flops, bytes, intensity, bound, seconds: least } = row[name];
    return [named(name), ": ", num(flops, scaled(flops, "FLOP")), ", ",
      num(bytes, scaled(bytes, "B")), " moved, ", num(intensity, intensity.toFixed(1)),
      ` FLOP a byte, bound by ${bound}, at least `, num(least, seconds(least)), ". "];
  });
  $("cost-said").replaceChildren(h("b", {}, `T = ${int(row.T)}. `), ...said,
    `At best tiled is ${(row.manual.seconds / row.tiled.seconds).toFixed(1)} times as fast.`);
  drawRoofline(row);
  drawCostRows();
}

function drawRoofline(row) {
  const points = costs.rows.flatMap((r) => [r.manual, r.tiled]);
  const rate = (c) => c.flops / c.seconds;
  const at = [...points.map((c) => c.intensity), costs.ridge];
  const x = [Math.min(...at) / 3, Math.max(...at) * 3];
  const y = [Math.min(...points.map(rate)) / 3, costs.peak * 2];
  const { X, Y, text, path, dot } = logChart($("roofline"), {
    x, y, xName: "FLOP a byte", yName: "FLOP/s", height: 300,
    xTick: (v) => scaled(v, "").trim(), yTick: (v) => scaled(v, ""),
    label: `Roofline of ${costs.gpu}: at ${row.T} tokens manual has `
      + `${row.manual.intensity.toFixed(1)} FLOP a byte and tiled `
      + `${row.tiled.intensity.toFixed(1)}; the ridge is at ${costs.ridge.toFixed(1)}`,
  });
  const begin = Math.max(x[0], y[0] / costs.bandwidth); // where the slanted roof enters the picture
  path([[begin, begin * costs.bandwidth], [costs.ridge, costs.peak], [x[1], costs.peak]], "roof");
  path([[costs.ridge, y[0]], [costs.ridge, costs.peak]], "dash");
  text(X(costs.ridge) - 6, Y(y[0]) - 6, `ridge ${costs.ridge.toFixed(0)}`, "tick halo", "end");
  for (const name of BOTH) {
    costs.rows.forEach((r) => dot(r[name].intensity, rate(r[name]), `${name} small`, 2.5));
    dot(row[name].intensity, rate(row[name]), name, 6);
    const [dx, dy, anchor] = name === "manual" ? [-11, -8, "end"] : [11, 18, "start"];
    text(X(row[name].intensity) + dx, Y(rate(row[name])) + dy, name, `${name} halo`, anchor);
  }
}

/** Axes with logarithmic scales in a box; gives what draws on them. */
function logChart(box, { x, y, xName, yName, xTick, yTick, height, label }) {
  const width = Math.max(box.clientWidth, 240);
  const [left, right, top, bottom] = [58, width - 14, 22, height - 42];
  const scale = ([low, high], from, to) => (v) => from + (Math.log(v / low) / Math.log(high / low))
    * (to - from);
  const X = scale(x, left, right);
  const Y = scale(y, bottom, top);
  const root = h("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img",
    "aria-label": label });
  const line = (kind, x1, y1, x2, y2) => root.append(h("line", { class: kind, x1, y1, x2, y2 }));
  const text = (at, down, said, kind = "tick", anchor = "middle") => root.append(
    h("text", { x: at, y: down, class: kind, "text-anchor": anchor }, said));
  const ticks = ([low, high], most) => {
    const first = Math.ceil(Math.log10(low) - 1e-9);
    const n = Math.floor(Math.log10(high) + 1e-9) - first + 1;
    const every = Math.ceil(n / most);
    return Array.from({ length: Math.ceil(n / every) }, (_, k) => 10 ** (first + k * every));
  };
  for (const v of ticks(x, width / 75)) {
    line("grid", X(v), top, X(v), bottom);
    text(X(v), bottom + 16, xTick(v));
  }
  for (const v of ticks(y, height / 36)) {
    line("grid", left, Y(v), right, Y(v));
    text(left - 6, Y(v) + 4, yTick(v), "tick", "end");
  }
  text((left + right) / 2, height - 6, xName, "");
  text(2, 10, yName, "tick", "start");
  const path = (points, kind) => {
    const d = points.map(([a, b]) => `${X(a).toFixed(1)} ${Y(b).toFixed(1)}`).join("L");
    root.append(h("path", { class: kind, d: `M${d}` }));
  };
  /** A round mark is manual's, a square one tiled's. */
  const dot = (a, b, kind, r) => root.append(kind.startsWith("manual")
    ? h("circle", { class: `${kind} dot`, cx: X(a), cy: Y(b), r })
    : h("rect", { class: `${kind} dot`, x: X(a) - r, y: Y(b) - r, width: 2 * r, height: 2 * r }));
  box.replaceChildren(root);
  return { X, Y, text, path, dot };
}

function drawCostRows() {
  const names = ["computes", "moves", "FLOP a byte", "bound by", "at least"];
  const edge = (n) => (n === 0 ? "edge" : null); // between the two algorithms
  const cells = (c) => [scaled(c.flops, "FLOP"), scaled(c.bytes, "B"), c.intensity.toFixed(1),
    c.bound, seconds(c.seconds)].map((text, n) => h("td", { class: edge(n) }, text));
  const above = BOTH.map((name) => h("th", { scope: "colgroup", colspan: names.length,
    class: `${name}-text edge` }, name));
  const below = BOTH.flatMap(() => names.map((name, n) => th(name, { class: edge(n) })));
  $("cost-rows").replaceChildren(
    h("thead", {}, h("tr", {}, td(), above), h("tr", {}, th("T"), below)),
    h("tbody", {}, costs.rows.map((r, n) => h("tr", { class: n === cost.row ? "now" : null },
      rowHead(int(r.T)), cells(r.manual), cells(r.tiled)))));
}
