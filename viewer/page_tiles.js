// 2 tiles: the player of the trace. page_board.js draws the picture beside it.

const N = tiles.steps.length; // of the grid; of these the mask leaves VISITED to compute
const VISITED = tiles.steps.filter((s) => !s.skipped).length;
const M = tiles.block_m;
const B = tiles.block_n;

const block = () => (player.done > 0 ? tiles.steps[player.done - 1].i : -1);
const player = Object.assign(transport(N, N > 100 ? 8 : 2, drawPlayer, {
  PageUp: () => goTo(Math.max(block() - 1, 0) * tiles.n_cols + 1),
  PageDown: () => goTo((block() + 1) * tiles.n_cols + 1),
}), { head: null });
const { goTo } = player;

/** The last computed tile at or before n in its row of tiles, or null. */
function visitedUpTo(n) {
  for (let k = n; k >= 0 && tiles.steps[k].i === tiles.steps[n].i; k--) {
    if (!tiles.steps[k].skipped) return tiles.steps[k];
  }
  return null;
}

/** Row r after tile n: m, l, whether m grew, and the scores and rescale of a computed tile. */
function rowState(head, n, r) {
  const step = tiles.steps[n];
  const value = (packed, s) => unpack(packed)[s.at * M + r];
  const last = visitedUpTo(n);
  const state = last === null ? { m: -Infinity, l: 0 }
    : { m: value(head.m, last), l: value(head.l, last) };
  if (step.skipped) return { ...state, scores: [], rescale: null, grew: false };
  const old = step.first ? null : visitedUpTo(n - 1);
  const first = (step.at * M + r) * B;
  const scores = unpack(head.scores).subarray(first, first + step.cols[1] - step.cols[0]);
  return { ...state, scores, rescale: value(head.rescale, step),
    grew: state.m > (old === null ? -Infinity : value(head.m, old)) };
}

function buildPlayer() {
  $("tile-head").append(...tiles.heads.map((_, n) => h("option", { value: n }, `${n}`)));
  $("tile-head").addEventListener("change", () => choosePlayed(Number($("tile-head").value)));
  $("matrix").addEventListener("click", (e) => {
    const [i, j] = cellAt(e, board);
    if (i !== null && j !== null) goTo(Math.floor(i / M) * tiles.n_cols + Math.floor(j / B) + 1);
  });
}

function choosePlayed(head) {
  player.head = tiles.heads[head];
  $("tile-head").value = head;
  player.image = null;
  drawPlayer();
}

const range = ([from, to], one, more) => (to - from === 1 ? `${one} ${from}`
  : `${more} ${from} to ${to - 1}`);

function tileText(step) {
  const queries = range(step.rows, "query", "queries");
  const keys = range(step.cols, "key", "keys");
  if (step.skipped) {
    const why = step.cols[0] >= step.rows[1] ? "later than"
      : about.segments === null ? "outside the window of" : "hidden from";
    return `Skipped: ${keys}, ${why} ${queries}.`;
  }
  const scores = unpack(player.head.scores).subarray(step.at * M * B, (step.at + 1) * M * B);
  return (step.first ? `Q is read for ${queries}. ` : "") + `K and V are read for ${keys}. `
    + (scores.includes(-Infinity) ? "Partly masked." : "No entry is masked.")
    + (step.last ? " Last tile of the row: O is divided by l and written." : "");
}

function drawTile() {
  const { head, done } = player;
  const [top, body] = [$("tile-rows").tHead, $("tile-rows").tBodies[0]];
  if (done === 0) {
    $("tile-title").textContent = "Before the first tile";
    const skipped = N > VISITED ? ` and ${int(N - VISITED)} skipped` : "";
    $("tile-text").textContent = `A tile is ${M} queries by ${B} keys. Of ${many(N, "tile")} `
      + `${int(VISITED)} will be computed${skipped}.`;
    [top, body].forEach((e) => e.replaceChildren());
    return;
  }
  const step = tiles.steps[done - 1];
  const which = step.skipped ? "A skipped tile" : `Tile ${step.at + 1} of ${VISITED}`;
  $("tile-title").textContent = `${which}: Q block ${step.i}, K and V block ${step.j}`;
  $("tile-text").textContent = tileText(step);
  const rows = step.rows[1] - step.rows[0];
  $("tile-rows").classList.toggle("dense", B > 8); // colours only: numbers would not fit
  const keys = step.skipped ? [] : about.tokens.slice(...step.cols);
  top.replaceChildren(h("tr", {}, th("query"),
    keys.map((token, n) => th(h("b", {}, token.label), { title: `key ${step.cols[0] + n}` })),
    th("rescale"), th(h("var", {}, "m")), th(h("var", {}, "l"))));
  body.replaceChildren(...Array.from({ length: rows }, (_, r) => tileRow(step, r)));
}

function tileRow(step, r) {
  const { m, l, grew, scores, rescale } = rowState(player.head, player.done - 1, r);
  const { low, high } = scorePicture();
  const cells = Array.from(scores, (s) => {
    const seen = Number.isFinite(s);
    const cell = h("td", { class: seen ? "s" : "s mask hatch", title: real(s) }, real(s, 2));
    if (seen) {
      const rgb = shade((s - low) / (high - low || 1));
      cell.style.background = css(rgb);
      cell.style.color = inkOn(rgb);
    }
    return cell;
  });
  const i = step.rows[0] + r;
  const running = (x, more = "") => h("td", { class: `m ${more}` },
    x === null ? "" : num(x, real(x)));
  return h("tr", {}, rowHead(`${i} ${about.tokens[i].label}`), cells, running(rescale),
    running(m, grew ? "grew" : ""), running(l));
}

/** Manual's bytes at the same progress: it makes three passes, each a third of the way. */
function manualAt(progress) {
  const passes = tiles.manual;
  const k = Math.min(Math.floor(progress * passes.length), passes.length - 1);
  const pass = passes[k];
  const missing = k + 1 - progress * passes.length; // of this pass
  return {
    text: `pass ${k + 1} of ${passes.length}: ${pass.name.replace("^T", "ᵀ")}`,
    read: Math.round(pass.read_so_far - missing * pass.read),
    written: Math.round(pass.written_so_far - missing * pass.written),
  };
}

function drawCounters() {
  const { done } = player;
  const total = (s) => s.read_so_far + s.written_so_far;
  const end = { tiled: total(tiles.steps[N - 1]), manual: total(tiles.manual.at(-1)) };
  const bar = (x) => {
    const i = h("i");
    i.style.width = `${(100 * x) / Math.max(end.tiled, end.manual)}%`;
    return i;
  };
  const meter = (kind, read, written, text) => h("div", { class: `meter ${kind}` },
    h("b", {}, kind), h("div", { class: "bar", "aria-hidden": "true" }, bar(read), bar(written)),
    h("p", {}, count(read), " bytes read, ", count(written), " written", h("br"),
      done === 0 ? "nothing yet" : text));
  const step = done > 0 ? tiles.steps[done - 1]
    : { read: 0, written: 0, read_so_far: 0, written_so_far: 0 };
  const manual = manualAt(done / N);
  $("counters").replaceChildren(
    h("h3", {}, "To and from main memory"),
    hint(`All ${H} heads of one layer, ${tiles.size} bytes a number; darker: read. A tile needs `
      + `${int(tiles.fast_memory)} bytes on the chip.`),
    meter("tiled", step.read_so_far, step.written_so_far,
      `by this tile ${int(step.read)} read, ${int(step.written)} written`),
    meter("manual", manual.read, manual.written, manual.text),
    hint("Small tiles on a short text may move more than manual; page 5 of the course has long ones."));
}

function drawPlayer() {
  const { done } = player;
  player.show(`${int(VISITED)} tiles to compute, step ${done} of ${N}`);
  drawTile();
  drawBoard();
  boardLegend();
  drawCounters();
  $("outputs").replaceChildren(done < N ? "" : compared("difference",
    "The largest difference between the outputs of tiled and manual is ", "tiled", player.head));
}
