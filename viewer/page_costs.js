// 4 cost: the roofline by length.

const BOTH = ["manual", "tiled"];
const cost = { row: 0 };

function buildCosts() {
  cost.row = costs.rows.findIndex((r) => r.T >= 4096);
  $("cost-about").textContent = `One layer of this model's attention, forward, batch 1, `
    + `${many(H, "head")} of ${about.head_dim}, in ${costs.dtype}, on ${costs.gpu}: `
    + `${scaled(costs.peak, "FLOP/s")} (${costs.peak_source}), ${scaled(costs.bandwidth, "B/s")} `
    + `(${costs.bandwidth_source}). Tiles of ${costs.block_m} × ${costs.block_n}, the largest `
    + `that fit into ${scaled(costs.fast_memory, "B")}.`;
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
}

/** Both axes are logarithmic. */
function drawRoofline(row) {
  const rate = (c) => c.flops / c.seconds;
  const points = costs.rows.flatMap((r) => [r.manual, r.tiled]);
  const at = [...points.map((c) => c.intensity), costs.ridge];
  const [low, high] = [Math.min(...at) / 3, Math.max(...at) * 3];
  const [least, most] = [Math.min(...points.map(rate)) / 3, costs.peak * 2];
  const [width, height] = [Math.max($("roofline").clientWidth, 240), 300];
  const [left, right, top, bottom] = [58, width - 14, 22, height - 42];
  const X = (v) => left + (Math.log(v / low) / Math.log(high / low)) * (right - left);
  const Y = (v) => bottom + (Math.log(v / least) / Math.log(most / least)) * (top - bottom);
  const root = h("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img",
    "aria-label": `Roofline of ${costs.gpu}: at ${row.T} tokens manual has `
      + `${row.manual.intensity.toFixed(1)} FLOP a byte and tiled `
      + `${row.tiled.intensity.toFixed(1)}; the ridge is at ${costs.ridge.toFixed(1)}` });
  const add = (...what) => root.append(h(...what));
  const line = (kind, x1, y1, x2, y2) => add("line", { class: kind, x1, y1, x2, y2 });
  const text = (x, y, said, kind = "tick", anchor = "middle") => add("text",
    { x, y, class: kind, "text-anchor": anchor }, said);
  const path = (kind, ...ends) => add("path", { class: kind,
    d: `M${ends.map(([a, b]) => `${X(a).toFixed(1)} ${Y(b).toFixed(1)}`).join("L")}` });
  /** Powers of ten, about `n` of them. */
  const ticks = (from, to, n) => {
    const first = Math.ceil(Math.log10(from) - 1e-9);
    const count_ = Math.floor(Math.log10(to) + 1e-9) - first + 1;
    const every = Math.ceil(count_ / n);
    return Array.from({ length: Math.ceil(count_ / every) }, (_, k) => 10 ** (first + k * every));
  };
  for (const v of ticks(low, high, width / 75)) {
    line("grid", X(v), top, X(v), bottom);
    text(X(v), bottom + 16, scaled(v, "").trim());
  }
  for (const v of ticks(least, most, height / 36)) {
    line("grid", left, Y(v), right, Y(v));
    text(left - 6, Y(v) + 4, scaled(v, ""), "tick", "end");
  }
  text((left + right) / 2, height - 6, "FLOP a byte", "");
  text(2, 10, "FLOP/s", "tick", "start");
  const begin = Math.max(low, least / costs.bandwidth); // where the slanted roof enters the picture
  path("roof", [begin, begin * costs.bandwidth], [costs.ridge, costs.peak], [high, costs.peak]);
  path("dash", [costs.ridge, least], [costs.ridge, costs.peak]);
  text(X(costs.ridge) - 6, Y(least) - 6, `ridge ${costs.ridge.toFixed(0)}`, "tick halo", "end");
  /** A round mark is manual's, a square one tiled's. */
  const mark = (name, c, kind, r) => {
    const [x, y] = [X(c.intensity), Y(rate(c))];
    const of = { class: `${name}${kind} dot` };
    if (name === "manual") add("circle", { ...of, cx: x, cy: y, r });
    else add("rect", { ...of, x: x - r, y: y - r, width: 2 * r, height: 2 * r });
    return [x, y];
  };
  for (const [name, dx, dy, anchor] of [["manual", -11, -8, "end"], ["tiled", 11, 18, "start"]]) {
    costs.rows.forEach((r) => mark(name, r[name], " small", 2.5));
    const [x, y] = mark(name, row[name], "", 6);
    text(x + dx, y + dy, name, `${name} halo`, anchor);
  }
  $("roofline").replaceChildren(root);
}
