// The head of the page, and the beginning of it all; the other files come before this one.

function opening() {
  $("prompt").textContent = about.prompt;
  const shared = about.n_kv_head < H
    ? `, which share ${many(about.n_kv_head, "key/value head")}` : "";
  const parameters = scaled(about.n_params, "").replace(" ", "");
  $("lede").append(`A GPT of ${many(L, "layer")} and ${many(H, "head")} a layer${shared}, with `
    + `${parameters} parameters, has read these ${many(T, "token")}. What follows was computed in `
    + "that run, by the same code that trains and runs such a model: no number on this page was "
    + "typed in.");
  const check = (good, text) => h("li", { class: good ? "good" : "bad" }, text);
  const agreeing = maps.layers.filter((a) => a.agrees).length;
  const close = tiles.heads.filter((t) => t.error <= t.allowed).length;
  $("checks").append(
    check(agreeing === L, `${about.backend} agrees with the formula in ${agreeing} of ${L} layers`),
    check(close === tiles.heads.length, `tiled gives the right output in ${close} of `
      + `${many(tiles.heads.length, "head")} played`),
    check(ring.error <= ring.allowed, `${many(ring.n, "process", "processes")} of a ring give the `
      + "same output"),
    check(caches.agree, `${caches.steps.length} caches give the logits that no cache gives`));
  for (const [where, notes] of [["notes", about.notes], ["tile-notes", tiles.notes],
    ["cache-notes", caches.notes]]) {
    $(where).append(...notes.map((note) => h("p", { class: "note" }, note)));
  }
  $("notes").append(...about.refused.map(refusal));
  const facts = {
    weights: about.source, tokens: `${about.tokenizer}, vocabulary ${int(about.vocab_size)}`,
    model: `${L} layers, ${H} heads of ${about.head_dim}, ${int(about.n_embd)} channels, `
      + `${int(about.block_size)} tokens at most, ${int(about.n_params)} parameters`,
    "keys and values": `${about.n_kv_head} heads`,
    "a query sees": about.window === null ? "all tokens up to itself"
      : `the last ${about.window} tokens, itself included`,
    device: `${about.device}, ${about.dtype}, PyTorch ${about.torch}`,
    attention: about.announced,
    kernels: about.kernels.join(", ") || "none by name",
  };
  for (const [name, fact] of Object.entries(facts)) {
    $("about").querySelector("dl").append(h("dt", {}, name), h("dd", {}, fact));
  }
  $("colophon").textContent = "Made by explain.py of nanoattn. One file: it loads nothing, and "
    + "sends nothing.";
}

opening();
const thumbs = thumbnails();
const strip = tokenStrip($("map-tokens"), about.tokens, "Tokens of the prompt",
  (i) => lookAt(i), T - 1, about.segments);
listenToMap();
$("to-player").addEventListener("click", () => {
  choosePlayed(map.layer, map.head);
  $("player").scrollIntoView();
  $("player").focus({ preventScroll: true });
});
buildPlayer();
buildCaches();
buildCosts();

/** All that depends on the width or on the colours. */
function draw() {
  mapLegend();
  drawMaps();
  if (player.head === null) choosePlayed(about.layer, about.head);
  else drawPlayer();
  drawCosts();
  drawRing();
}
draw();

let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== width) draw(); // on a phone the height changes as the address bar hides
  width = innerWidth;
});
dark.addEventListener("change", () => {
  player.image = null;
  thumbs.forEach((button, n) => mapPicture(Math.floor(n / H), n % H, button.firstChild));
  draw();
});
