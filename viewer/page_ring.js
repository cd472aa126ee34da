// 5 ring: the processes of attention/ring.py, step by step.

const { ring } = doc;
const C = ring.chunk;
const owner = ring.chunks.flat().map((_, a) => ring.chunks.findIndex((pair) => pair.includes(a)));
const circle = Object.assign(transport("ring-player", "step", ring.n, 1, drawRing, {
  ArrowUp: () => chooseQuery(circle.query - 1),
  ArrowDown: () => chooseQuery(circle.query + 1),
}), { query: T - 1 });

function chooseQuery(i) {
  circle.query = clamp(i, 0, T - 1);
  drawRing();
}

/** An element in the colour of the process whose tokens it is about. */
function coloured(e, rank) {
  e.style.setProperty("--hue", (25 + (360 * rank) / ring.n) % 360);
  e.classList.add("home");
  return e;
}

const ofChunk = (a) => (a * C >= T ? "filling" : range([a * C, Math.min((a + 1) * C, T)], "token",
  "tokens"));
const sentUpTo = (rank) => ring.sent.slice(0, circle.done).reduce((sum, at) => sum + at[rank], 0);

function stepText(step) {
  const whose = step === 0 ? "Each process computes with its own keys and values"
    : `Each process has the keys and values that began ${many(step, "place")} before it`;
  return whose + (step + 1 < ring.n ? ", and sends them on meanwhile."
    : ". It has met all; nothing more is sent.");
}

function drawProcess(pair, rank) {
  const step = Math.max(circle.done - 1, 0);
  const home = ring.homes[step][rank];
  const mine = ring.tiles.filter((t) => t.step === step && t.rank === rank);
  const masked = mine.filter((t) => t.masked).length;
  const work = `${many(mine.length, "pair")} of chunks computed`
    + `${masked ? `, ${masked} masked` : ""}; ${4 - mine.length} skipped`;
  const here = `K, V of process ${home}: ${ring.chunks[home].map(ofChunk).join("; ")}`;
  return h("article", {}, coloured(h("h4", {}, `Process ${rank}`), rank),
    h("p", {}, `Q, O, L: ${pair.map(ofChunk).join("; ")}`), coloured(h("p", {}, here), home),
    h("p", {}, circle.done === 0 ? "nothing computed yet" : work),
    h("p", {}, count(sentUpTo(rank)), " bytes sent"));
}

function drawRing() {
  const { done } = circle;
  circle.show(`step ${done} of ${ring.n}`);
  $("step-title").textContent = done === 0 ? "Before the first step" : `Step ${done - 1}`;
  $("step-text").textContent = done > 0 ? stepText(done - 1)
    : `${many(T, "token")} in ${2 * ring.n} chunks of ${C}. Each process has one early and one `
      + "late chunk, and so far its own keys and values.";
  $("processes").replaceChildren(...ring.chunks.map(drawProcess));
  drawPairs();
  drawGrowing();
  const all = ring.chunks.reduce((sum, _, rank) => sum + sentUpTo(rank), 0);
  $("ring-sent").replaceChildren(hint("Together they have sent ", count(all), " bytes: keys and "
    + `values of all heads of layer ${ring.layer}${about.segments ? ", and documents" : ""}.`),
  done < ring.n ? "" : compared("ring-verdict", `Head ${ring.head}: the largest difference between the ring's `
      + "output and manual's is ", "the ring", ring));
}

/** Chunks of queries by chunks of keys. */
function drawPairs() {
  const { done } = circle;
  const crowded = owner.length > 10;
  const head = (a, kind) => coloured(h("b", {}, crowded ? `${a}` : kind + a), owner[a]);
  const cells = owner.flatMap((_, a) => [head(a, "Q"), ...owner.map((__, b) => {
    const tile = ring.tiles.find((t) => t.queries === a && t.keys === b);
    const kinds = tile === undefined ? "hatch" : `${tile.masked ? "part " : ""}`
      + (tile.step < done - 1 ? "done" : tile.step === done - 1 ? "now" : "");
    const said = tile === undefined ? "skipped" : `process ${tile.rank}, step ${tile.step}`;
    return h("i", { class: kinds, title: `Q${a}, K and V ${b}: ${said}` },
      tile === undefined ? "" : String(tile.step));
  })]);
  $("pairs").style.setProperty("--across", owner.length);
  $("pairs").replaceChildren(h("b"), ...owner.map((_, b) => head(b, "K")), ...cells);
}

/** How (O, L) of the chosen query grows, tile by tile. */
function drawGrowing() {
  const { done, query: i } = circle;
  const D = ring.O.shape[2];
  const [part, now, O] = [ring.part, ring.L, ring.O].map(unpack);
  let before = -Infinity;
  const rows = ring.tiles.flatMap((t, n) => {
    if (t.queries !== Math.floor(i / C) || t.step >= done) return [];
    const at = n * C + (i % C);
    const old = Number.isFinite(now[at]) ? 1 / (1 + Math.exp(part[at] - before)) : 1;
    before = now[at];
    const length = Math.hypot(...O.subarray(at * D, (at + 1) * D));
    const cells = [part[at], now[at], old, length].map((x) => td(num(x, real(x))));
    return [h("tr", {}, rowHead(`${t.step}`), td(ofChunk(t.keys)), cells)];
  });
  $("query-name").textContent = `Query ${i}, ${quote(about.tokens[i])}, of process `
    + `${owner[Math.floor(i / C)]}: (O, L) as it grows`;
  $("growing").replaceChildren(h("thead", {}, h("tr", {}, ["step", "keys", "L of these alone",
    "L so far", "share of the old O", "length of O"].map((text) => th(text)))),
  h("tbody", {}, rows));
}
