// One row through the tiles: the recurrence of attention/tiled.py for one query, key tile by key tile.

const scores = unpack(tiles.scores);
const values = unpack(tiles.v);
const outputs = unpack(tiles.out);
const [N, C] = tiles.out.shape.slice(2); // tokens, components of v and of the output
const player = { at: 0, size: 4, timer: null };
const score = (layer, head, i, j) => (j > i ? -Infinity
  : scores[(layer * H + head) * packedRow(N) + packedRow(i) + j]);
const component = (array, row, c) => array[row * C + c];
const sum = (xs) => xs.reduce((a, b) => a + b, 0);

/** The states after each tile in which the query sees a key: first, s, p, rescale, m, l, O. */
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
      + sum(p.map((y, n) => y * component(values, kv * N + first + n, c))));
    found.push({ first, s, p, rescale, m, l, O, old });
  }
  return found;
}

const shown = (x) => (Number.isFinite(x) ? num(x, x.toFixed(3).replace("-", "−")) : "−∞");
const tableRow = (name, ...cells) => h("tr", {}, h("th", {}, name), ...cells);
const cellOf = (x, kind = "") => h("td", { class: kind }, x);

function drawTiles() {
  const { layer, head } = map;
  const query = Math.min(map.query, N - 1);
  const all = frames(layer, head, query, player.size);
  player.at = Math.min(player.at, all.length);
  const last = player.at === all.length; // after the tiles: the division
  const now = all[last ? player.at - 1 : player.at];
  $("tiles-at").max = all.length;
  $("tiles-at").value = player.at;
  $("tiles-back").disabled = player.at === 0;
  $("tiles-next").disabled = last;
  $("tiles-play").textContent = player.timer === null ? "Play" : "Pause";
  const cut = map.query < N ? "" : ` (of later queries the page has no scores)`;
  const stop = now.first + now.s.length - 1;
  const said = now.rescale < 1 && player.at > 0
    ? `m rises, so the old l and O shrink by the factor ${now.rescale.toFixed(3)}.`
    : "m stays, so the factor is 1.";
  const step = last ? "After the last tile O is divided by l."
    : `Tile ${player.at + 1} of ${all.length}, `
      + (stop > now.first ? `keys ${now.first} to ${stop}. ` : `key ${stop}. `)
      + (player.at > 0 ? said : "The first tile sets m.");
  $("tiles-title").textContent = `Query ${query}, ${quote(about.tokens[query])}${cut}. ${step}`;
  drawBars(query, all.slice(0, player.at + 1), now, last);
  const seen = now.s.map((x, n) => n).filter((n) => now.s[n] > -Infinity);
  $("tiles-keys").replaceChildren(...(last ? [] : [
    tableRow("key", ...seen.map((n) => h("th", {}, about.tokens[now.first + n].label))),
    tableRow("s = q · k / √D", ...seen.map((n) => cellOf(shown(now.s[n])))),
    tableRow("p = e^(s − m)", ...seen.map((n) => cellOf(shown(now.p[n]))))]));
  const weighted = now.O.map((x, c) => x - now.rescale * now.old.O[c]);
  const state = (name, old, factor, added, x) => tableRow(name, cellOf(shown(old)),
    cellOf(factor), cellOf(added), cellOf(shown(x), "now"));
  const index = (layer * H + head) * N + query;
  const rows = last ? [
    tableRow("", ...["O", "l", "O / l", `output of ${about.backend}`].map((x) => h("th", {}, x))),
    ...now.O.map((x, c) => tableRow(`O[${c}]`, cellOf(shown(x)), cellOf(shown(now.l)),
      cellOf(shown(x / now.l), "now"), cellOf(shown(component(outputs, index, c))))),
  ] : [
    tableRow("", ...["before", "× e^(m before − m)", "+ this tile", "now"].map((x) => h("th", {}, x))),
    state("m", now.old.m, "", "", now.m),
    state("l", now.old.l, shown(now.rescale), shown(sum(now.p)), now.l),
    ...now.O.map((x, c) => state(`O[${c}]`, now.old.O[c], shown(now.rescale), shown(weighted[c]), x)),
  ];
  $("tiles-state").replaceChildren(...rows);
}

/** e^(s - m) of each key so far, with today's m: a new maximum shrinks the earlier bars. */
function drawBars(query, past, now, last) {
  const canvas = $("tiles");
  const width = Math.min(canvas.parentElement.parentElement.clientWidth, 620);
  const [high, cell] = [110, Math.min(width / N, 34)];
  const c = fresh(canvas, Math.floor(cell * N), high + 24);
  const bar = (j, p, name) => {
    c.fillStyle = colour(name);
    c.fillRect(j * cell + cell * 0.1, high - p * (high - 6), cell * 0.8, Math.max(p * (high - 6), 1));
  };
  for (let j = 0; j < N; j++) {
    if (j > query || score(map.layer, map.head, query, j) === -Infinity) hatch(c, j * cell, 0, cell, high);
  }
  past.forEach((tile) => tile.s.forEach((s, n) => {
    const current = tile === now && !last;
    if (s > -Infinity) bar(tile.first + n, Math.exp(s - now.m), current ? "accent" : "strong");
  }));
  if (!last) outline(c, now.first * cell + 1, 1, now.s.length * cell - 2, high - 2, "accent", 2);
  c.fillStyle = colour("muted");
  c.fillRect(0, high, cell * N, 1);
  c.textAlign = "center";
  c.textBaseline = "top";
  const every = cell >= 8 ? 1 : Math.ceil(14 / cell);
  for (let j = 0; j < N; j += every) {
    c.font = `${j === query ? "bold " : ""}${clamp(cell, 8, 12)}px ui-monospace, monospace`;
    c.fillStyle = colour(j === query ? "accent" : "muted");
    const label = [...about.tokens[j].label];
    const room = Math.max(Math.floor((every * cell) / 7.3), 1);
    c.fillText(label.slice(0, room).join(""), (j + 0.5) * cell, high + 7);
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
  lookAt(strip.pinned);
}

function listenToTiles() {
  $("tiles-legend").append(
    entry(h("i", { class: "bar earlier" }), "e^(s − m) of earlier tiles, with the m of now"),
    entry(h("i", { class: "bar current" }), "of this tile"),
    entry(h("i", { class: "hatch" }), "masked"));
  for (const id of ["map", "tiles"]) $(`${id}-tab`).addEventListener("click", () => chooseTab(id));
  $("tabs").addEventListener("keydown", (e) => {
    if (e.key !== "ArrowLeft" && e.key !== "ArrowRight") return;
    const id = $("map-panel").hidden ? "map" : "tiles";
    chooseTab(id);
    $(`${id}-tab`).focus();
  });
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
