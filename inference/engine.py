"""Generate text with a KV cache.

    prefill   all tokens of the prompts at once; their keys and values go into the cache
    decode    one token of each row, with the cached keys and values

Rows are independent: padding is masked. GPT-2 has learned vectors for block_size
positions. A longer text slides as in nanoGPT: the model reads its last block_size tokens. This
moves every position, so nothing can be cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache as memoize
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from inference import decode, serve
from inference.cache import DynamicCache, DynamicStep, StaticCache, StaticStep, bucket
from inference.decode import Decoder, Launched, Row, to_host
from inference.sampling import ENDED, Generators, Options, Prompt, check_prompt, in_range

if TYPE_CHECKING:
    from model import GPT

CacheKey = tuple[int, int, torch.dtype, torch.device]
F = TypeVar("F", bound=Callable[..., object])
KV_CACHES = ("none", "dynamic", "static", "paged")


@torch.no_grad()
def generate(
    model: GPT, idx: Tensor | Sequence[Prompt], max_new_tokens: int, **options: Any
) -> Tensor | list[Tensor]:
    """Append up to `max_new_tokens` tokens to each prompt; arguments as in stream().

    Returns (B, T + n) int64 for a tensor, where rows that ended early repeat their last token, and
    a list of (T_i + n_i,) int64 for a list.
    """
    prompts = _tensors(model, idx)
    drawn = list(stream(model, prompts, max_new_tokens, **options))
    new = torch.stack(drawn) if drawn else torch.empty(0, len(prompts), dtype=torch.int64)
    counts = (new != ENDED).sum(0).tolist()
    rows = new.to(model.transformer.wte.weight.device).unbind(1)
    texts = [torch.cat([p, row[:n]]) for p, row, n in zip(prompts, rows, counts, strict=True)]
    if not isinstance(idx, Tensor):
        return texts
    longest = idx.shape[1] + len(new)
    return torch.stack([torch.cat([t, t[-1:].expand(longest - len(t))]) for t in texts])


@torch.no_grad()
def stream(
    model: GPT,
    idx: Tensor | Sequence[Prompt],
    max_new_tokens: int,
    *,
    generator: Generators | None = None,
    kv_cache: str = "dynamic",
    compile: bool = False,
    page_size: int = 16,
    **options: Any,
) -> Iterator[Tensor]:
    """Sample tokens one at a time.

    Args:
        idx: (B, T) int64, or a list of prompts of any lengths, each (T,).
        generator: one for each row, or one for all. None: PyTorch's own.
        compile: one graph a decode step, on CUDA a CUDA graph; needs kv_cache="static".
        options: as sampling.Options.

    Yields (B,) int64 on the CPU, the next token of each row; ENDED (-1) for a row that has ended.
    Raises ValueError: an option is out of range, a prompt is empty, or no match is short enough.
    """
    if kv_cache not in KV_CACHES:
        raise ValueError(f"kv_cache must be one of {', '.join(KV_CACHES)}, got {kv_cache!r}")
    if compile and kv_cache != "static":
        raise ValueError(f"compile needs kv_cache=static, got {kv_cache}")
    prompts = _tensors(model, idx)
    if not prompts:
        raise ValueError("expected at least one prompt of at least one token")
    how = Options(**options)
    given = how.constraint
    if isinstance(given, Sequence) and len(given) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts need as many constraints, got {len(given)}")
    max_new_tokens = in_range("max_new_tokens", max_new_tokens, 0)
    if kv_cache == "paged":
        options |= {"generator": generator, "page_size": page_size}
        yield from serve.batch(model, prompts, max_new_tokens, **options)
        return
    batch = _Batch(model, prompts, max_new_tokens, generator, kv_cache, compile, how)
    try:
        yield from batch.tokens()
    finally:  # the static cache can be reused
        _idle.setdefault(model, {}).update(batch.lent)


def _tensors(model: GPT, prompts: Tensor | Sequence[Prompt]) -> list[Tensor]:
    device = model.transformer.wte.weight.device
    for index, row in enumerate(prompts):
        check_prompt(index, row, model.config.vocab_size)
    return [torch.as_tensor(row, dtype=torch.int64, device=device) for row in prompts]


class _Batch(Decoder[Row]):
    """The texts of one call. All end in column n: row b is ids[b, pad[b] : n]. ::

    pad = (2, 0)    . . a b c | d e
                    f g h i j | k l
                              n = 5, then 6, 7
    """

    def __init__(
        self,
        model: GPT,
        prompts: Sequence[Tensor],
        max_new_tokens: int,
        generator: Generators | None,
        kv_cache: str,
        compile: bool,
        options: Options,
    ) -> None:
        super().__init__(model, options)
        self.max_new_tokens, self.kv_cache, self.compile = max_new_tokens, kv_cache, compile
        lengths = [len(prompt) for prompt in prompts]
        self.rows = [Row(b, max_new_tokens) for b in range(len(prompts))]
        self.B, self.T = len(prompts), max(lengths)
        self.pad = [self.T - T for T in lengths]
        self.pads = torch.tensor(self.pad, device=self.device)[:, None]  # (B, 1)
        width = self.T + max_new_tokens
        width = bucket(width, max(128, 2 * width)) if compile else width
        # Other places repeat the row's first token: harmless to processors of sets of tokens.
        self.ids = torch.stack([p[0] for p in prompts])[:, None].repeat(1, width)
        for row, pad, prompt in zip(self.ids, self.pad, prompts, strict=True):
            row[pad : self.T] = prompt
        self.random = self.uniform(self.B, generator)
        self.state: Tensor | None = None  # (B, 2), of the constraint
        if self.constraint is not None:
            self.state = self.constraint.start(range(self.B), [max_new_tokens] * self.B)
        self.token: Tensor | None = None  # (B,), the last one drawn
        self.cache: DynamicCache | StaticCache | None = None
        self.lent: dict[CacheKey, StaticCache] = {}
        if kv_cache != "none" and max_new_tokens > 1 and self.block_size > self.T:
            self.cache = self._new_cache()

    def tokens(self) -> Iterator[Tensor]:
        for got in self.steps():
            if got:  # else launched before the last row was known to have ended
                yield torch.tensor([row.new[-1] if row in got else ENDED for row in self.rows])

    def launch(self) -> Iterator[Launched[Row]]:
        for n in range(self.T, self.T + self.max_new_tokens):
            going = [not row.ended for row in self.rows]
            if not any(going):
                return
            longest = n - min(pad for pad, on in zip(self.pad, going, strict=True) if on)
            if longest > self.block_size:  # a text slides: the cached positions are wrong
                self.cache = None
            drawn, self.state, over = self._next(n, going)
            self.token = drawn.clamp(min=0)  # INVALID is for the host
            stats = self.options.stats
            stats.cache_bytes = max(stats.cache_bytes, self.cache.nbytes if self.cache else 0)
            self.ids[:, n] = self.token
            yield self.rows, to_host(drawn, over)

    def _next(self, n: int, going: Sequence[bool]) -> decode.Drawn:
        def run(function: F) -> F:
            decoding = self.cache is not None and self.token is not None
            return compiled(function, self.device.type) if self.compile and decoding else function

        if self.cache is None or self.token is None:
            idx, last, step = self._prefill(n)
        else:
            step = self.cache.reserve(1, [int(on) for on in going])
            idx, last = self.token[:, None], None
        u = None if self.random is None else self.random.next()
        read = self.model, idx, last, step, self.options.vocab_size
        how = self.params, self.constraint, self.state, u
        if self.options.logits_processor is None or self.in_step:
            drawn = run(decode.next_token)(read, how, self._texts(n))
        else:  # two graphs, Python between them
            logits = run(decode.next_logits)(*read)
            logits = self.processed(logits, self.ids, [(pad, n) for pad in self.pad])
            drawn = run(decode.sample_step)(logits, how)
        if step is not None:
            step.advance()
        return drawn

    def _texts(self, n: int) -> decode.Texts | None:
        """The texts from their first column on, for a processor in the step."""
        if self.options.logits_processor is None:
            return None
        at = self.pads + torch.arange(self.ids.shape[1], device=self.device)
        tokens = self.ids.gather(1, at % self.ids.shape[1]) if any(self.pad) else self.ids
        return self.options.logits_processor, tokens, n - self.pads[:, 0]

    def _prefill(self, n: int) -> tuple[Tensor, Tensor | None, DynamicStep | StaticStep | None]:
        """The last block_size tokens of each text, for next_logits()."""
        T = min(n, self.block_size)
        idx, last, step = self.ids[:, n - T : n], None, None
        if isinstance(self.cache, DynamicCache):  # its rows end together
            return idx, last, self.cache.reserve(T)
        if any(self.pad):  # pad on the right instead, which causal attention does not see
            begin = self.pads.clamp(min=n - self.block_size)  # (B, 1)
            at = begin + torch.arange(T, device=self.device)
            idx, last = self.ids[:, :n].gather(1, at.clamp(max=n - 1)), n - 1 - begin
        if self.cache is not None:
            step = self.cache.reserve(T, [n - pad for pad in self.pad])
        return idx, last, step

    def _new_cache(self) -> DynamicCache | StaticCache:
        model, config = self.model, self.model.config
        device, L = self.device, config.n_layer
        if self.kv_cache == "dynamic":
            limit, windows = self.block_size, config.windows
            return DynamicCache(L, max_len=limit, windows=windows, pad=self.pad, device=device)
        # Rounded up, so that other lengths reuse the compiled graphs.
        max_len = bucket(min(self.T + self.max_new_tokens, self.block_size), self.block_size)
        dtype, heads = getattr(torch, model.phase().dtype), (config.kv_heads, config.head_dim)
        key = self.B, max_len, dtype, device
        static = _idle.setdefault(model, {}).pop(key, None) if self.compile else None
        if static is not None:
            static.reset()
        else:  # tensors of inference mode cannot be written to outside it
            with torch.inference_mode(False):
                static = StaticCache(
                    L, self.B, max_len, *heads, windows=config.windows,
                    in_order=config.position == "alibi", dtype=dtype, device=device,
                )  # fmt: skip
        if self.compile:
            self.lent[key] = static
            model.plan(self.B, cache="static", compiled=True)
            for t in (*static.k, *static.v, static.start, static.count):
                torch._dynamo.mark_static_address(t, guard=False)  # a CUDA graph writes there
        return static


# Static caches not in use. A CUDA graph holds the addresses of its cache and is never freed: a new
# cache for each call would mean a new graph.
_idle: WeakKeyDictionary[GPT, dict[CacheKey, StaticCache]] = WeakKeyDictionary()


@memoize
def compiled(function: F, device: str) -> F:
    """torch.compile for fixed shapes; results are copied out of the graph's memory."""
    torch._dynamo.config.cache_size_limit = max(64, torch._dynamo.config.cache_size_limit)
    mode = "reduce-overhead" if device == "cuda" else None  # CUDA graphs
    graph = torch.compile(function, fullgraph=True, dynamic=False, mode=mode)

    def run(*args: object) -> object:
        if device == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        copied: object = tree_map_only(Tensor, Tensor.clone, graph(*args))
        return copied

    return cast(F, run)
