"""Text from a model, token by token: prefill, then decode steps that look back through a KV cache.

    prefill   all tokens of the prompts at once; their keys and values go into the cache
    decode    one token of each row: its query meets the keys of the cache, its logits give the next

Without a cache a token costs as much as the whole text before it (GPT.generate shows that loop);
with one it costs a reading of the weights and of the keys and values so far. For GPT-2 124M in
float32 that is 497 MB of weights and 74 kB for each token of context, so at batch 1 the weights are
what there is to wait for.

**The limit.** GPT-2 has a learned vector for each of its block_size positions and none beyond. A
text that gets there slides on as nanoGPT does, with the last block_size tokens, the first of them
at position 0: every token moves every position, so no key or value can be kept, and a token costs a
whole window. overflow="stop" ends it there.

**Rows are alone.** No row's tokens depend on its neighbours: shorter prompts are padded with tokens
that nothing sees, and each row can have a random generator of its own.

**The host never waits** for the device to decide what to do next. Lengths are counted on the host,
sampling is tensor operations, and on CUDA what was drawn is copied back beside the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache as memoize
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from inference import serve
from inference.cache import DynamicCache, StaticCache, bucket
from inference.sampling import (
    ENDED,
    Copy,
    Generators,
    Options,
    SamplingParams,
    Uniform,
    behind,
    each_alone,
    next_logits,
    sample_step,
)

if TYPE_CHECKING:
    from model import GPT

KV_CACHES = ("none", "dynamic", "static", "paged")


@torch.no_grad()
def generate(
    model: GPT, idx: Tensor | Sequence[Any], max_new_tokens: int, **options: Any
) -> Tensor | list[Tensor]:
    """Append up to `max_new_tokens` tokens to each prompt; arguments as in stream().

    Returns:
        The prompts and what was drawn. For a tensor (B, T + n) int64, n = max_new_tokens unless
        every row ended before; a row that ended before the others repeats its last token. For a
        list, a list of (T_i + n_i,) tensors.
    """
    device = model.transformer.wte.weight.device
    prompts = [torch.as_tensor(row, dtype=torch.int64, device=device) for row in idx]
    drawn = list(stream(model, prompts, max_new_tokens, **options))
    new = torch.stack(drawn) if drawn else torch.empty(0, len(prompts), dtype=torch.int64)
    counts = (new != ENDED).sum(0).tolist()
    rows = new.to(device).unbind(1)
    texts = [torch.cat([p, row[:n]]) for p, row, n in zip(prompts, rows, counts, strict=True)]
    if not isinstance(idx, Tensor):
        return texts
    longest = idx.shape[1] + len(new)
    return torch.stack([torch.cat([t, t[-1:].expand(longest - len(t))]) for t in texts])


@torch.no_grad()
def stream(
    model: GPT,
    idx: Tensor | Sequence[Any],
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
        idx: (B, T) int64, prompts of one length; or a list of prompts of any lengths, each (T,).
        generator: a list of one for each row, or one for all. None: PyTorch's own.
        compile: torch.compile each decode step, sampling included, to one graph; on CUDA a CUDA
            graph. With kv_cache="static".
        options: those of sampling.Options.

    Yields:
        (B,) int64 on the CPU, the next token of each row; ENDED (-1) for a row that has ended.

    Raises:
        ValueError: an option that means nothing, an empty prompt, or one longer than block_size
            where overflow="stop", or no room for a text that matches the constraint.
    """
    if kv_cache not in KV_CACHES:
        raise ValueError(f"kv_cache must be one of {', '.join(KV_CACHES)}, got {kv_cache!r}")
    if compile and kv_cache != "static":
        raise ValueError(f"compile needs kv_cache=static, got {kv_cache}")
    device = model.transformer.wte.weight.device
    prompts = [torch.as_tensor(row, dtype=torch.int64, device=device) for row in idx]
    if not prompts:
        raise ValueError("there must be a prompt, of at least one token")
    if kv_cache == "paged":
        more = {"generator": generator, "page_size": page_size, **options}
        yield from serve.batch(model, prompts, max_new_tokens, **more)
        return
    how = Options(**options)
    batch = _Batch(model, prompts, max_new_tokens, generator, kv_cache, compile, how)
    try:
        yield from batch.tokens()
    finally:  # its static cache is for the next call that needs one of its size
        _idle.setdefault(model, {}).update(batch.lent)


class _Batch:
    """The texts of one call, and how far each of them is.

    Texts end together, in column n: row b's is ids[b, pad[b] : n]. ::

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
        self.model, self.max_new_tokens, self.kv_cache = model, max_new_tokens, kv_cache
        self.options, self.device = options, model.transformer.wte.weight.device
        self.block_size = model.config.block_size
        lengths = [len(prompt) for prompt in prompts]
        room = [options.room(b, T, max_new_tokens, self.block_size) for b, T in enumerate(lengths)]
        self.B, self.T = len(prompts), max(lengths)
        self.pad = [self.T - T for T in lengths]
        self.ends = [self.T + n for n in room]  # the column behind each text, as far as is known
        self.pads = torch.tensor(self.pad, device=self.device)[:, None]  # (B, 1)
        width = self.T + max_new_tokens
        self.ids = torch.zeros(self.B, width, dtype=torch.int64, device=self.device)
        for row, pad, prompt in zip(self.ids, self.pad, prompts, strict=True):
            row[pad : self.T] = prompt
        greedy = options.temperature == 0
        self.uniform = None if greedy else Uniform(self.B, self.device, generator)
        self.params = SamplingParams.on(self.device, options)
        constraint = options.constraint
        self.state = None if constraint is None else constraint.start(room)  # (B, 2)
        self.token: Tensor | None = None  # (B,) the last that was drawn, in memory of its own
        self.cache: Any = None
        self.lent: dict[Any, StaticCache] = {}  # to be given back
        if kv_cache != "none" and max_new_tokens > 1 and self.block_size > self.T:
            self.cache = self._new_cache(compile)
        # Compiled or not, they are called alike; a processor is Python and runs between two graphs.
        self.decode, self.sample, self.decode_and_sample = next_logits, sample_step, _next_token
        if compile and options.logits_processor is None:
            self.decode_and_sample = compiled(_next_token, self.device.type)
        elif compile:
            self.decode = compiled(next_logits, self.device.type)
            self.sample = compiled(sample_step, self.device.type)

    # --- the loop ---

    def tokens(self) -> Iterator[Tensor]:
        """The next token of each row on the CPU, ENDED for what follows a row's end."""
        stops = self.options.ends()
        new: list[list[int]] = [[] for _ in range(self.B)]
        ahead = 1 if self.device.type == "cuda" else 0  # steps launched before a token is read
        for column, drawn in enumerate(behind(self.launch(), ahead), self.T):
            ids = [ENDED] * self.B
            for row, (token, *over) in enumerate(drawn.wait()):
                if column < self.ends[row]:
                    ids[row] = token
                    new[row].append(token)
                    if any(over) or stops(row, new[row]):
                        self.ends[row] = column + 1
            if all(id_ == ENDED for id_ in ids):
                return  # launched before the last row was known to have ended
            yield torch.tensor(ids)

    def launch(self) -> Iterator[Copy]:
        """The next token of each row, and with a constraint whether the text is over with it: on
        the device, not waited for."""
        for n in range(self.T, self.T + self.max_new_tokens):
            going = [pad for pad, end in zip(self.pad, self.ends, strict=True) if n < end]
            if not going:
                return
            if n - min(going) > self.block_size:  # it slides: no position in the cache still holds
                self.cache = None  # its memory can go
            self.token, self.state, over = self._next(n)
            if self.cache is not None:
                stats = self.options.stats
                stats.cache_bytes = max(stats.cache_bytes, self.cache.nbytes)
            self.ids[:, n] = self.token
            yield Copy(self.token, over)

    # --- one token ---

    def _next(self, n: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Draw what follows the first n columns: see sample_step()."""
        processor = self.options.logits_processor
        u = None if self.uniform is None else self.uniform.next()
        how = self.params, self.options.constraint, u, self.state
        if self.cache is None or self.token is None:
            idx, last, step = self._prefill(n)
            decode, decode_and_sample = next_logits, _next_token
        else:
            step = self.cache.reserve(1, [int(n < end) for end in self.ends])
            idx, last = self.token[:, None], None
            decode, decode_and_sample = self.decode, self.decode_and_sample
        read = self.model, idx, last, step, self.options.vocab_size
        if processor is None:
            drawn = decode_and_sample(*read, *how)
        else:
            logits = decode(*read)
            if any(self.pad):  # it never sees padding
                rows = zip(self.ids, self.pad, self.ends, strict=True)
                texts = [ids[pad:n] if n < end else None for ids, pad, end in rows]
                logits = each_alone(processor, texts, logits)
            else:
                logits = processor(self.ids[:, :n], logits)
            drawn = self.sample(logits, *how)
        if step is not None:
            step.advance()
        return drawn

    def _prefill(self, n: int) -> tuple[Tensor, Tensor | None, Any]:
        """All of the texts, or their last block_size tokens: as next_logits() takes them."""
        T = min(n, self.block_size)
        idx, last, step = self.ids[:, n - T : n], None, None
        if self.cache is not None and self.kv_cache == "dynamic":  # its rows end together
            return idx, last, self.cache.reserve(T)
        if any(self.pad):  # rows that begin together: no token sees the padding on its right
            begin = self.pads.clamp(min=n - self.block_size)  # (B, 1)
            at = begin + torch.arange(T, device=self.device)
            idx, last = self.ids[:, :n].gather(1, at.clamp(max=n - 1)), n - 1 - begin
        if self.cache is not None:
            step = self.cache.reserve(T, [n - pad for pad in self.pad])
        return idx, last, step

    def _new_cache(self, compile: bool) -> DynamicCache | StaticCache:
        model, config = self.model, self.model.config
        # A static cache is empty when the prompts are read: plain attention, as any backend can.
        kind = "dynamic" if self.kv_cache == "dynamic" else "none"
        _, spec = model.attention(False, (self.B, self.T), kind)
        device, L = self.device, config.n_layer
        if self.kv_cache == "dynamic":
            limit, window = self.block_size, spec.window
            return DynamicCache(L, max_len=limit, window=window, pad=self.pad, device=device)
        # Rounded up, so that texts of other lengths find the graphs that were compiled.
        max_len = bucket(min(self.T + self.max_new_tokens, self.block_size), self.block_size)
        dtype, heads = getattr(torch, spec.dtype), (config.kv_heads, config.head_dim)
        key = self.B, max_len, dtype, device
        static = _idle.setdefault(model, {}).pop(key, None) if compile else None
        if static is not None:
            static.reset()
        else:  # a tensor of inference mode could not be written to outside it
            with torch.inference_mode(False):
                static = StaticCache(L, self.B, max_len, *heads, dtype=dtype, device=device)
        if compile:
            self.lent[key] = static
            model.attention(False, (self.B, 1), "static", compiled=True)  # cannot be traced
            for t in (*static.k, *static.v, static.start, static.count):
                torch._dynamo.mark_static_address(t, guard=False)  # a CUDA graph writes there
        return static


# The caches of compiled steps that no call uses now. A CUDA graph is recorded for the addresses of
# one cache and never given up: with a new cache for each call there would be new graphs, too.
_idle: WeakKeyDictionary[GPT, dict[Any, StaticCache]] = WeakKeyDictionary()


def _next_token(
    model: GPT, idx: Tensor, last: Tensor | None, step: Any, vocab_size: int | None, *how: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """next_logits() and the draw, as sample_step() gives it: one graph where it is compiled."""
    return sample_step(next_logits(model, idx, last, step, vocab_size), *how)


@memoize
def compiled(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """torch.compile for fixed shapes, with results in memory of their own; kept, since compiling
    takes long."""
    torch._dynamo.config.cache_size_limit = max(64, torch._dynamo.config.cache_size_limit)
    mode = "reduce-overhead" if device == "cuda" else None  # CUDA graphs
    graph = torch.compile(function, fullgraph=True, dynamic=False, mode=mode)

    def run(*args: Any) -> Any:
        if device == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        results = graph(*args)
        if isinstance(results, Tensor):
            return results.clone()
        return tuple(None if t is None else t.clone() for t in results)

    return run
