// One row through the tiles: the recurrence of attention/tiled.py for one query, key tile by key tile.

const scores = unpack(tiles.scores);
const values = unpack(tiles.v);
const outputs = unpack(tiles.out);
const [N, C] = tiles.out.shape.slice(2); // tokens, components of v and of the output
const player = { at: 0, size: 4, timer: null };
const score = (layer, head, i, j) => (j > i ? -Infinity
  : scores[(layer * H + head) * packedRow(N) + packedRow(i) + j]);
const sum = (xs) => xs.reduce((a, b) => a + b, 0);

/** The states after each tile in which the query sees a key. */
function frames(layer, head, i, size) {
  const kv = layer * about.n_kv_head + Math.floor((head * about.n_kv_head) / H);
  let [m, l, O] = [-Infinity, 0, Array(C).fill(0)];
  const found = [];
  for (let first = 0; first < N; first += size) {
    const s = Array.from({ length: Math.min(size, N - first) },
      (_, n) => score(layer, head, i, first + n));
    if (Math.max(...s) === -Infinity) continue; // wholly masked: skipped
    const old = { m, l, O };
    m = Math.max(m, ...s);
    const p = s.map((x) => Math.exp(x - m));
    const rescale = Math.exp(old.m - m);
    l = rescale * l + sum(p);
    O = O.map((x, c) => rescale * x
      + sum(p.map((y, n) => y * values[(kv * N + first + n) * C + c])));
    found.push({ first, s, p, rescale, m, l, O, old });
  }
  return found;
}

const shown = (x) => (Number.isFinite(x) ? num(x, x.toFixed(3).replace("-", "−")) : "−∞");
const cell = (x) => h("td", {}, typeof x === "number" ? shown(x) : x);
const bold = (x) => h("td", { class: "now" }, shown(x));
const row = (name, ...cells) => h("tr", {}, h("th", {}, name), ...cells);
const heads = (...names) => names.map((name) => h("th", {}, name));

function drawTiles() {
  const { layer, head } = map;
  const query = Math.min(map.query, N - 1);
  const all = frames(layer, head, query, player.size);
  player.at = Math.min(player.at, all.length);
  const last = player.at === all.length; // after the tiles: the division
  const now = all[last ? player.at - 1 : player.at];
  const { first, s, p, rescale, m, l, O, old } = now;
  Object.assign($("tiles-at"), { max: all.length, value: player.at });
  $("tiles-back").disabled = player.at === 0;
  $("tiles-next").disabled = last;
  $("tiles-play").textContent = player.timer === null ? "Play" : "Pause";
  const cut = map.query < N ? "" : " (of later queries the page has no scores)";
  const stop = first + s.length - 1;
  let change = "The first tile sets m.";
  if (player.at > 0) {
    change = rescale < 1 ? `m rises, so the old l and O shrink by the factor ${rescale.toFixed(3)}.`
      : "m stays, so the factor is 1.";
  }
  const keys = stop > first ? `keys ${first} to ${stop}` : `key ${stop}`;
  const step = last ? "After the last tile O is divided by l."
    : `Tile ${player.at + 1} of ${all.length}, ${keys}. ${change}`;
  $("tiles-title").textContent = `Query ${query}, ${quote(about.tokens[query])}${cut}. ${step}`;
  drawBars(query, all.slice(0, player.at + 1), now, last);
  const seen = [...s.keys()].filter((n) => s[n] > -Infinity);
  $("tiles-keys").replaceChildren(...(last ? [] : [
    row("key", ...heads(...seen.map((n) => about.tokens[first + n].label))),
    row("s = q · k / √D", ...seen.map((n) => cell(s[n]))),
    row("p = e^(s − m)", ...seen.map((n) => cell(p[n])))]));
  const output = (c) => outputs[((layer * H + head) * N + query) * C + c];
  $("tiles-state").replaceChildren(...(last ? [
    row("", ...heads("O", "l", "O / l", `output of ${about.backend}`)),
    ...O.map((x, c) => row(`O[${c}]`, cell(x), cell(l), bold(x / l), cell(output(c)))),
  ] : [
    row("", ...heads("before", "× e^(m before − m)", "+ this tile", "now")),
    row("m", cell(old.m), cell(""), cell(""), bold(m)),
    row("l", cell(old.l), cell(rescale), cell(sum(p)), bold(l)),
    ...O.map((x, c) => row(`O[${c}]`, cell(old.O[c]), cell(rescale), cell(x - rescale * old.O[c]),
      bold(x))),
  ]));
}

/** e^(s - m) of each key so far, with today's m: a new maximum shrinks the earlier bars. */
function drawBars(query, past, now, last) {
  const canvas = $("tiles");
  const width = Math.min(canvas.parentElement.parentElement.clientWidth, 620);
  const [high, wide] = [110, Math.min(width / N, 34)];
  const c = fresh(canvas, Math.floor(wide * N), high + 24);
  for (let j = 0; j < N; j++) {
    if (score(map.layer, map.head, query, j) === -Infinity) hatch(c, j * wide, 0, wide, high);
  }
  past.forEach((tile) => tile.s.forEach((s, n) => {
    if (s === -Infinity) return;
    const p = Math.exp(s - now.m) * (high - 6);
    c.fillStyle = colour(tile === now && !last ? "accent" : "strong");
    c.fillRect((tile.first + n) * wide + wide * 0.1, high - p, wide * 0.8, Math.max(p, 1));
  }));
  if (!last) outline(c, now.first * wide + 1, 1, now.s.length * wide - 2, high - 2, "accent", 2);
  c.fillStyle = colour("muted");
  c.fillRect(0, high, wide * N, 1);
  Object.assign(c, { textAlign: "center", textBaseline: "top" });
  const every = wide >= 8 ? 1 : Math.ceil(14 / wide);
  for (let j = 0; j < N; j += every) {
    c.font = `${j === query ? "bold " : ""}${clamp(wide, 8, 12)}px ui-monospace, monospace`;
    c.fillStyle = colour(j === query ? "accent" : "muted");
    const room = Math.max(Math.floor((every * wide) / 7.3), 1);
    c.fillText([...about.tokens[j].label].slice(0, room).join(""), (j + 0.5) * wide, high + 7);
  }
  canvas.setAttribute("aria-label", `e to the power of s minus m for each key so far, m = ${now.m}`);
}

function goToTile(at) {
  player.at = Math.max(at, 0);
  drawTiles();
  if (player.at === Number($("tiles-at").max)) pause();
}

function pause() {
  clearInterval(player.timer);
  player.timer = null;
  $("tiles-play").textContent = "Play";
}

function play() {
  const atEnd = player.at === Number($("tiles-at").max);
  player.timer = setInterval(() => goToTile(player.at + 1), 1200);
  goToTile(atEnd ? 0 : player.at);
}

function chooseTab(id) {
  for (const name of ["map", "tiles"]) {
    $(`${name}-panel`).hidden = name !== id;
    $(`${name}-tab`).setAttribute("aria-selected", String(name === id));
    $(`${name}-tab`).tabIndex = name === id ? 0 : -1;
  }
  pause();
  lookAt(map.pinned);
}

function listenToTiles() {
  $("tiles-legend").append(
    entry(h("i", { class: "earlier" }), "e^(s − m) of earlier tiles, with the m of now"),
    entry(h("i", { class: "current" }), "of this tile"),
    entry(h("i", { class: "hatch" }), "masked"));
  for (const id of ["map", "tiles"]) $(`${id}-tab`).addEventListener("click", () => chooseTab(id));
  const other = () => {
    const id = $("map-panel").hidden ? "map" : "tiles";
    chooseTab(id);
    $(`${id}-tab`).focus();
  };
  onKeys($("tabs"), { ArrowLeft: other, ArrowRight: other });
  const act = (at) => { pause(); goToTile(at); };
  $("tiles-back").addEventListener("click", () => act(player.at - 1));
  $("tiles-next").addEventListener("click", () => act(player.at + 1));
  $("tiles-at").addEventListener("input", (e) => act(Number(e.target.value)));
  $("tiles-play").addEventListener("click", () => (player.timer === null ? play() : pause()));
  $("tiles-size").addEventListener("change", (e) => {
    player.size = Number(e.target.value);
    act(0);
  });
  chooseTab("map");
}
