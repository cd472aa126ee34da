// The head of the page. page.py puts the other files before this one.

function opening() {
  $("prompt").textContent = about.prompt;
  const shared = about.n_kv_head < H
    ? `, which share ${many(about.n_kv_head, "key/value head")}` : "";
  const parameters = scaled(about.n_params, "").replace(" ", "");
  $("lede").append(`${about.source}: a GPT of ${many(L, "layer")}, ${many(H, "head")} of `
    + `${about.head_dim} a layer${shared}, and ${parameters} parameters in ${about.dtype} on `
    + `${about.device}, with ${many(T, "token")}. ${about.announced}.`);
  const check = (good, text) => h("li", { class: good ? "good" : "bad" }, text);
  const agreeing = maps.layers.filter((a) => a.agrees).length;
  const close = tiles.heads.filter((t) => t.error <= t.allowed).length;
  $("checks").append(
    check(agreeing === L, `${about.backend} agrees with the formula in ${agreeing} of ${L} layers`),
    check(close === tiles.heads.length, `tiled gives the right output in ${close} of `
      + `${many(tiles.heads.length, "head")} of layer ${about.layer}`),
    check(caches.agree, `${caches.steps.length} caches give the logits that no cache gives`));
  $("notes").append(...about.notes.map((note) => h("p", { class: "note" }, note)),
    ...about.refused.map(refusal));
  $("colophon").textContent = "Made by explain.py of nanoattn. Loads nothing, sends nothing.";
}

opening();
const thumbs = thumbnails();
const strip = tokenStrip($("map-tokens"), about.tokens, "Tokens of the prompt",
  (i) => lookAt(i), T - 1, about.segments);
listenToMap();
$("to-player").addEventListener("click", () => {
  choosePlayed(map.head);
  $("player").scrollIntoView();
  $("player").focus({ preventScroll: true });
});
buildPlayer();
buildCaches();

/** Everything that depends on the width or the colours. */
function draw() {
  mapLegend();
  drawMaps();
  if (player.head === null) choosePlayed(about.head);
  else drawPlayer();
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
