// 4 cost: the roofline, the least time, and the table of both.

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
  drawTimes(row);
  drawCostRows();
}

function drawRoofline(row) {
  const points = costs.rows.flatMap((r) => [r.manual, r.tiled]);
  const rate = (c) => c.flops / c.seconds;
  const x = around([...points.map((c) => c.intensity), costs.ridge], 3);
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

function drawTimes(row) {
  const least = costs.rows.flatMap((r) => [r.manual.seconds, r.tiled.seconds]);
  const { X, Y, left, right, text, path, dot } = logChart($("times"), {
    x: around(costs.rows.map((r) => r.T), 1.3), y: around(least, 2),
    xName: "T, tokens", yName: "seconds", height: 300, xTick: int, yTick: seconds,
    label: `Least time: at ${row.T} tokens ${seconds(row.manual.seconds)} for manual, `
      + `${seconds(row.tiled.seconds)} for tiled`,
  });
  for (const name of BOTH) {
    path(costs.rows.map((r) => [r.T, r[name].seconds]), name);
    dot(row.T, row[name].seconds, name, 6);
    const [at, down] = [X(row.T), Y(row[name].seconds)];
    const said = [`${name} ${seconds(row[name].seconds)}`, `${name} halo`];
    // Both lines rise: above them there is room on the left, below them on the right.
    if (name === "manual" && at > left + 105) text(at - 11, down - 8, ...said, "end");
    if (name === "tiled" && at < right - 105) text(at + 11, down + 18, ...said, "start");
  }
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
