"""Text from a model, token by token: prefill, then decode steps that look back through a KV cache.

    prefill   all tokens of the prompts at once; their keys and values go into the cache
    decode    one token of each row: its query meets the keys of the cache, its logits give the next

Without a cache a token costs as much as the whole text before it; with one it costs a reading of
the weights and of the keys and values so far. For GPT-2 124M in float32 that is 497 MB of weights
and 74 kB for each token of context, so at batch 1 the weights are what there is to wait for.

    kv_cache   what it is                                    when
    none       the whole text through the model each time    to compare with
    dynamic    buffers that double                           the default; every backend
    static     fixed shapes, lengths on the device           with compile=True: a graph a step
    paged      pages from a pool (inference/pages.py)        many rows of different lengths; more
                                                             prompts than rows: inference/serve.py

**The limit.** GPT-2 has a learned vector for each of its block_size positions and none beyond. What
happens to a text that gets there is the same for every cache: overflow="slide" goes on as nanoGPT
does, with the last block_size tokens, of which the first is at position 0. Every token then moves
every position, so no key or value can be kept, and from there on a token costs a whole window, as
without a cache. (Into a paged cache each window is written anew: attention over pages computes
nothing without one.) overflow="stop" ends a text that has block_size tokens.

**Rows are alone.** No row's tokens depend on its neighbours: shorter prompts are padded with tokens
that nothing sees, and each row can have a random generator of its own.

**The host never waits** for the device to decide what to do next. Lengths are counted on the host,
sampling is tensor operations, and what was drawn is copied back only where somebody reads it: on
CUDA beside the next step, which has been launched by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache as memoize
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inference.cache import DynamicCache, PagedCache, StaticCache, bucket

if TYPE_CHECKING:
    from inference.constrain import Automaton
    from model import GPT

ENDED = -1  # in the place of a token: this row's text has ended before
KV_CACHES = ("none", "dynamic", "static", "paged")
OVERFLOWS = ("slide", "stop")

Processor = Callable[[Tensor, Tensor], Tensor]
Stop = int | Iterable[int] | Callable[[int, list[int]], bool]
Generators = torch.Generator | Sequence[torch.Generator]


@dataclass
class Stats:
    """What a call of generate() or stream() notes for its caller."""

    cache_bytes: int = 0  # keys and values, the most that were allocated at once
    # Of inference/serve.py's:
    pages: int = 0  # the most that were in use at once
    all_pages: int = 0  # in the pool
    shared_pages: int = 0  # that a prompt found there, computed for another: not taken again


@torch.no_grad()
def generate(
    model: GPT, idx: Tensor | Sequence[Any], max_new_tokens: int, **options: Any
) -> Tensor | list[Tensor]:
    """Append up to `max_new_tokens` tokens to each prompt; see stream() for the options.

    Args:
        idx: (B, T) int64, prompts of one length; or a list of prompts of any lengths, each (T,).

    Returns:
        The prompts and what was drawn. For a tensor (B, T + n) int64, n = max_new_tokens unless
        every row ended before; a row that ended before the others repeats its last token. For a
        list, a list of (T_i + n_i,) tensors.
    """
    run = _Run(model, idx, max_new_tokens, **options)
    if run.stop is None and run.constraint is None:
        deque(run.tokens(), maxlen=0)  # nobody looks at the tokens before the end
    else:
        deque(run.read(), maxlen=0)
    return run.result(as_list=not isinstance(idx, Tensor))


@torch.no_grad()
def stream(
    model: GPT, idx: Tensor | Sequence[Any], max_new_tokens: int, **options: Any
) -> Iterator[Tensor]:
    """Sample tokens one at a time.

    Args:
        idx: (B, T) int64, prompts of one length; or a list of prompts of any lengths, each (T,).
        max_new_tokens: for each row.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw from the k likeliest tokens only.
        top_p: then from the fewest likeliest tokens whose probabilities sum to at least p.
        generator: the source of randomness, one for all rows or a list of one for each row. None:
            PyTorch's own.
        vocab_size: draw from the first so many tokens only: those beyond the tokenizer's pad the
            vocabulary.
        kv_cache: "none", "dynamic", "static" or "paged".
        overflow: "slide" or "stop", where a text reaches block_size tokens.
        logits_processor: (input_ids, logits) -> logits, called before each draw with the text so
            far, (B, T) int64, prompts included, and (B, V). Prompts of different lengths: it is
            called for each row by itself, so that it never sees padding.
        constraint: what the new text must match (constrain.py), on the model's device. Its mask
            comes last, after the logits_processor; a row ends where its match does. Where
            overflow="stop" the room is what block_size leaves.
        stop: a row ends with this token, or with one of these; or a function of the row's number
            and its new tokens that says whether it ends here.
        compile: torch.compile each decode step, sampling included, to one graph; on CUDA a CUDA
            graph. With kv_cache="static".
        page_size: tokens a page, of the paged cache.
        stats: is filled in.

    Yields:
        (B,) int64 on the CPU, the next token of each row; ENDED (-1) for a row that has ended.

    Raises:
        ValueError: an option that means nothing, an empty prompt, or one longer than block_size
            where overflow="stop", or no room for a text that matches the constraint.
    """
    yield from _Run(model, idx, max_new_tokens, **options).read()


@dataclass
class _Run:
    """One call of generate() or stream(): the texts so far, and how far each of them is."""

    model: GPT
    idx: Tensor | Sequence[Any]
    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    generator: Generators | None = None
    vocab_size: int | None = None
    kv_cache: str = "dynamic"
    overflow: str = "slide"
    logits_processor: Processor | None = None
    constraint: Automaton | None = None
    stop: Stop | None = None
    compile: bool = False
    page_size: int = 16
    stats: Stats = field(default_factory=Stats)

    def __post_init__(self) -> None:
        check_options(self.temperature, self.top_k, self.top_p, self.overflow, self.kv_cache,
                      self.compile)  # fmt: skip
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be at least 0, got {self.max_new_tokens}")
        self.device = self.model.transformer.wte.weight.device
        self.block_size = self.model.config.block_size
        prompts, self.pad = _padded(self.idx, self.device)
        self.B, self.T = prompts.shape
        # Texts end together, in column n: row b's is ids[b, pad[b] : n].
        self.ids = prompts.new_zeros(self.B, self.T + self.max_new_tokens)
        self.ids[:, : self.T] = prompts
        self.pads = torch.tensor(self.pad, device=self.device)[:, None]  # (B, 1)
        self.ends: list[int | None] = [None] * self.B  # the column behind the text, once it ended
        longest = self.T - min(self.pad)
        if self.overflow == "stop" and longest > self.block_size:
            raise ValueError(
                f"a prompt of {longest} tokens does not fit into block_size {self.block_size}"
            )
        self.uniform = Uniform(self.B, self.device, self.generator)
        self.how = on_device(self.temperature, self.top_k, self.top_p, self.device)
        self.state: Tensor | None = None  # (B, 2) of the constraint
        if self.constraint is not None:
            self.room = [
                min(self.max_new_tokens, self.block_size - self.T + pad)
                if self.overflow == "stop" else self.max_new_tokens
                for pad in self.pad
            ]  # fmt: skip
            self.state = self.constraint.start(self.room)
        self.token: Tensor | None = None  # (B,) the last that was drawn, in memory of its own
        self.cache: Any = None
        self.rows: list[int] = []  # in a paged cache
        kept = self.max_new_tokens > 1 and longest < self.block_size
        if (kept and self.kv_cache != "none") or self.kv_cache == "paged":
            self.cache = self._new_cache(longest)

    # --- the loop ---

    def tokens(self) -> Iterator[Tensor]:
        """The next token of each row, (B,) int64 on the device: launched, not waited for."""
        for n in range(self.T, self.T + self.max_new_tokens):
            if self.overflow == "stop":
                for row in self._going():
                    if n - self.pad[row] >= self.block_size:
                        self._end(row, n)
            if not self._going():
                return
            self.token = self._next(n)
            if self.cache is not None:
                self.stats.cache_bytes = max(self.stats.cache_bytes, self.cache.nbytes)
            self.ids[:, n] = self.token
            yield self.token

    def read(self) -> Iterator[Tensor]:
        """The same on the CPU, ENDED for what follows a row's end; the test for `stop` is here."""
        stops = as_function(self.stop)
        matched = self.constraint.stop(self.room) if self.constraint is not None else None
        new: list[list[int]] = [[] for _ in range(self.B)]
        on_the_way: deque[Copy] = deque()
        ahead = 1 if self.device.type == "cuda" else 0  # steps launched before a token is read
        column = self.T
        launched = self.tokens()
        while True:
            token = next(launched, None)
            if token is not None:
                on_the_way.append(Copy(token))
            if not on_the_way:
                return
            if token is not None and len(on_the_way) <= ahead:
                continue
            ids = on_the_way.popleft().wait()
            for row, id_ in enumerate(ids):
                end = self.ends[row]
                if end is not None and column >= end:
                    ids[row] = ENDED
                    continue
                new[row].append(id_)
                ended = matched is not None and matched(row, new[row])
                if ended or (stops is not None and stops(row, new[row])):
                    self._end(row, column + 1)
            if all(id_ == ENDED for id_ in ids):
                return  # launched before the last row was known to have ended
            column += 1
            yield torch.tensor(ids)

    def result(self, as_list: bool) -> Tensor | list[Tensor]:
        """The texts, prompts included; see generate()."""
        full = self.T + self.max_new_tokens
        ends = [full if end is None else end for end in self.ends]
        if as_list:
            texts = zip(self.ids, self.pad, ends, strict=True)
            return [row[pad:end].clone() for row, pad, end in texts]
        for row, end in enumerate(ends):
            self.ids[row, end:] = self.ids[row, end - 1]
        return self.ids[:, : max(ends)]

    def _going(self) -> list[int]:
        return [row for row, end in enumerate(self.ends) if end is None]

    def _end(self, row: int, column: int) -> None:
        self.ends[row] = column
        if self.kv_cache == "paged":
            self._new_pages(row)
        elif self.cache is not None:
            self.cache.end(row)

    # --- one token ---

    def _next(self, n: int) -> Tensor:
        """Draw what follows the first n columns: (B,) int64."""
        longest = n - min((self.pad[row] for row in self._going()), default=0)
        slides = longest > self.block_size  # the positions in the cache no longer hold
        if slides and self.kv_cache != "paged":
            self.cache = None  # its memory can go
        u = None if self.temperature == 0 else self.uniform.next()
        if self.cache is None:
            logits = self._window_logits(n)
        elif self.token is None or slides:
            logits = self._prefill(n, anew=slides)
        else:
            step = self._reserve([1] * self.B)
            last = self.model, step, self.token, self.vocab_size
            if self.compile and self.logits_processor is None:
                drawn = self._graph(
                    _decode_and_draw, *last, u, *self.how, self.constraint, self.state
                )
                step.advance()
                return self._drawn(drawn)
            logits = self._graph(_decode, *last) if self.compile else _decode(*last)
            step.advance()
        if self.logits_processor is not None:
            logits = self._processed(n, logits)
            if self.compile:
                return self._drawn(
                    self._graph(draw, logits, u, *self.how, self.constraint, self.state)
                )
        return self._drawn(draw(logits, u, *self.how, self.constraint, self.state))

    def _drawn(self, drawn: tuple[Tensor, Tensor | None]) -> Tensor:
        token, self.state = drawn
        return token

    def _window_logits(self, n: int) -> Tensor:
        """Without a cache: the last block_size tokens of each row through the model."""
        idx, last = self._from_the_left(n, self.block_size)
        return last_logits(self.model, self.model.hidden(idx), last, self.vocab_size)

    def _prefill(self, n: int, anew: bool = False) -> Tensor:
        """All prompts through the model, into the cache; `anew`: in the place of what it holds."""
        if self.kv_cache == "dynamic":  # it wants them to end together
            idx, last = self.ids[:, :n], None
            step = self.cache.reserve(n)
        else:
            if anew:
                for row in range(self.B):
                    self._new_pages(row)
            idx, last = self._from_the_left(n, self.block_size)
            step = self._reserve([min(n - pad, self.block_size) for pad in self.pad])
        x = self.model.hidden(idx, None, step)
        step.advance()
        return last_logits(self.model, x, last, self.vocab_size)

    def _from_the_left(self, n: int, most: int) -> tuple[Tensor, Tensor | None]:
        """The last `most` tokens of each row, rows beginning together; where each row ends.

        Padding on the right needs no mask: no token sees what comes after it.
        """
        T = min(n - min(self.pad), most)
        if len(set(self.pad)) == 1:
            return self.ids[:, n - T : n], None
        begin = self.pads.clamp(min=n - most)  # (B, 1)
        at = begin + torch.arange(T, device=self.device)
        return self.ids[:, :n].gather(1, at.clamp(max=n - 1)), n - 1 - begin

    def _processed(self, n: int, logits: Tensor) -> Tensor:
        assert self.logits_processor is not None
        if len(set(self.pad)) == 1:
            return self.logits_processor(self.ids[:, self.pad[0] : n], logits)
        rows = [
            logits[row : row + 1] if self.ends[row] is not None
            else self.logits_processor(self.ids[row : row + 1, pad:n], logits[row : row + 1])
            for row, pad in enumerate(self.pad)
        ]  # fmt: skip
        return torch.cat(rows)

    # --- the cache ---

    def _new_cache(self, longest: int) -> Any:
        model, config = self.model, self.model.config
        most = min(longest + self.max_new_tokens, self.block_size)  # places in a row
        _, spec = model.attention(
            False, (self.B, longest), *prefill_of(self.kv_cache, self.page_size)
        )
        sizes = {"dtype": getattr(torch, spec.dtype), "device": self.device}
        if self.kv_cache == "dynamic":
            return DynamicCache(config.n_layer, max_len=self.block_size, window=spec.window,
                                pad=self.pad, device=self.device)  # fmt: skip
        if self.kv_cache == "static":
            # Rounded up, so that texts of other lengths find the graphs that were compiled.
            static = StaticCache(config.n_layer, self.B, bucket(most, self.block_size),
                                 config.kv_heads, config.head_dim, **sizes)  # fmt: skip
            if self.compile:
                model.attention(False, (self.B, 1), "static", compiled=True)  # cannot be traced
                for t in (*static.k, *static.v, static.start, static.count):
                    torch._dynamo.mark_static_address(t, guard=False)  # a CUDA graph writes there
            return static
        full = self.T + self.max_new_tokens
        pages = sum(-(-min(full - pad, self.block_size) // self.page_size) for pad in self.pad)
        paged = paged_cache(model, pages + 1, self.page_size)
        self.rows = [paged.pool.new() for _ in range(self.B)]
        return paged

    def _new_pages(self, row: int) -> None:
        """Give back that row's pages: what it stores from here on begins at position 0."""
        self.cache.pool.free(self.rows[row])
        self.rows[row] = self.cache.pool.new()

    def _reserve(self, counts: list[int]) -> Any:
        """A step of the cache with so many tokens of each row."""
        if self.kv_cache == "dynamic":
            return self.cache.reserve(max(counts))
        if self.kv_cache == "static":
            return self.cache.reserve(max(counts), counts)
        going = [count if end is None else 0 for count, end in zip(counts, self.ends, strict=True)]
        return self.cache.reserve(self.rows, going)

    # --- torch.compile ---

    def _graph(self, function: Callable[..., Any], *args: Any) -> Any:
        """The compiled function's results, in memory of their own."""
        if self.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        results = compiled(function, self.device.type)(*args)
        if isinstance(results, Tensor):
            return results.clone()
        return tuple(None if t is None else t.clone() for t in results)


def paged_cache(model: GPT, n_pages: int, page_size: int) -> PagedCache:
    """A paged cache for all layers of the model, on its device; the null page is one of n_pages."""
    config = model.config
    _, spec = model.attention(False, None, "paged", page_size)
    return PagedCache(config.n_layer, config.kv_heads, config.head_dim, n_pages=n_pages,
                      page_size=page_size, dtype=getattr(torch, spec.dtype),
                      device=model.transformer.wte.weight.device)  # fmt: skip


def prefill_of(kv_cache: str, page_size: int = 16) -> tuple[str, int | None]:
    """The cache and its page size that the prompts are read with, as Spec has them.

    A static cache is empty then, and any backend may read the prompts.
    """
    if kv_cache == "paged":
        return "paged", page_size
    return ("dynamic" if kv_cache == "dynamic" else "none"), None


def _decode(model: GPT, step: Any, token: Tensor, vocab_size: int | None) -> Tensor:
    """One decode step: (B,) the last tokens -> (B, V) the logits of the next."""
    return model.head(model.hidden(token[:, None], None, step)[:, -1])[:, :vocab_size]


def _decode_and_draw(model: GPT, step: Any, token: Tensor, vocab_size: int | None,
                     *how: Any) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """One decode step and the draw: (B,) the last tokens -> (B,) the next, (B, 2) the state."""
    return draw(_decode(model, step, token, vocab_size), *how)


def draw(logits: Tensor, u: Tensor | None, temperature: Tensor, top_k: int | None,
         top_p: Tensor | None, constraint: Automaton | None,
         state: Tensor | None) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """pick() among the tokens that the constraint allows, and its state after the token."""
    if constraint is None or state is None:
        return pick(logits, u, temperature, top_k, top_p), None
    token = pick(constraint(logits, state), u, temperature, top_k, top_p)
    return token, constraint.advance(state, token)


@memoize
def compiled(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """torch.compile for fixed shapes; kept, since compiling takes long."""
    torch._dynamo.config.cache_size_limit = max(64, torch._dynamo.config.cache_size_limit)
    mode = "reduce-overhead" if device == "cuda" else None  # CUDA graphs
    return torch.compile(function, fullgraph=True, dynamic=False, mode=mode)


def last_logits(model: GPT, x: Tensor, last: Tensor | None, vocab_size: int | None) -> Tensor:
    """The logits of each row's last token: x (B, T, C), last (B, 1), None: T - 1 -> (B, V)."""
    if last is None:
        return model.head(x[:, -1])[:, :vocab_size]
    x = x.gather(1, last[:, :, None].expand(-1, 1, x.shape[2]))  # (B, 1, C)
    return model.head(x[:, 0])[:, :vocab_size]


# --- sampling ---


def check_options(temperature: float, top_k: int | None, top_p: float | None,
                  overflow: str = "slide", kv_cache: str = "dynamic",
                  compile: bool = False) -> None:  # fmt: skip
    """Raises: ValueError for an option of stream() that means nothing."""
    for name, got, allowed in (
        ("kv_cache", kv_cache, KV_CACHES),
        ("overflow", overflow, OVERFLOWS),
    ):
        if got not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {got!r}")
    if compile and kv_cache != "static":
        raise ValueError(f"compile needs kv_cache=static, got {kv_cache}")
    if temperature < 0:
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")


def on_device(
    temperature: float, top_k: int | None, top_p: float | None, device: torch.device
) -> tuple[Tensor, int | None, Tensor | None]:
    """Three of draw()'s arguments; as tensors, for a number would be compiled into the graph."""
    nucleus = None if top_p is None or top_p == 1 else torch.tensor(top_p, device=device)
    return torch.tensor(float(temperature), device=device), top_k, nucleus


def sample_next(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw one token from each row of logits.

    Args:
        logits: (B, V).
        temperature, top_k, top_p: as in stream().

    Returns:
        (B,) int64.
    """
    u = None
    if temperature != 0:
        u = Uniform(len(logits), logits.device, generator, block=1).next()
    return pick(logits, u, temperature, top_k, top_p)


def pick(
    logits: Tensor,
    u: Tensor | None,
    temperature: Tensor | float = 1.0,
    top_k: int | None = None,
    top_p: Tensor | float | None = None,
) -> Tensor:
    """The token that the number u stands for, by the inverse of the distribution function.

    The tokens share the interval [0, 1), each as wide as it is likely; u falls into one of them.
    So one random number is drawn for a token, where the Gumbel trick draws one for every entry of
    the vocabulary; and in float64 the shares of the rarest tokens are right too. A CUDA graph can
    hold it: nothing here depends on a value on the host.

    Args:
        logits: (B, V).
        u: (B,) in [0, 1); None takes the likeliest token.
        top_k: of equals no more than k stay.
        top_p: nucleus sampling (Holtzman et al. 2020, arXiv 1904.09751).

    Returns:
        (B,) int64.
    """
    if u is None:
        return logits.argmax(dim=-1)
    logits = logits.float() / temperature
    order = None
    if top_k is not None and top_k < logits.shape[-1]:
        logits, order = logits.topk(top_k, dim=-1)  # sorted
        probs = logits.softmax(dim=-1)
    elif top_p is not None:
        probs, order = _likeliest(logits.softmax(dim=-1), top_p)
    else:
        probs = logits.softmax(dim=-1)
    upto = probs.cumsum(dim=-1, dtype=u.dtype)  # (B, V) the mass of a token and all before it
    total = upto[:, -1:]
    if top_p is not None:
        likelier = upto - probs
        total = upto.masked_fill(likelier >= top_p, 0.0).amax(dim=-1, keepdim=True)
    # The first whose `upto` is larger: never one of probability 0, and u < 1 keeps it below total.
    at = torch.searchsorted(upto, u[:, None] * total, right=True)  # (B, 1)
    return (at if order is None else order.gather(1, at))[:, 0]


def _likeliest(probs: Tensor, top_p: Tensor | float) -> tuple[Tensor, Tensor]:
    """The likeliest tokens in falling order, as many as sum to top_p and maybe more.

    On the CPU, where a look at a value costs nothing, a few are sorted before all of them are: of
    GPT-2's 50,257 tokens a top_p of 0.9 often needs no more than hundreds.

    Args:
        probs: (B, V).

    Returns:
        (B, k) their probabilities, (B, k) int64 which they are.
    """
    V = probs.shape[-1]
    if probs.device.type == "cpu" and not torch.compiler.is_compiling():
        for k in (64, 1024, 16384):
            if 2 * k > V:
                break
            some, order = probs.topk(k, dim=-1)  # sorted
            mass = some.sum(dim=-1, dtype=torch.float64)
            if (mass >= top_p + 1e-9).all():
                return some, order
            if (mass < top_p / 10).any():
                break  # so flat that most of the vocabulary is needed
    return probs.sort(dim=-1, descending=True)


class Uniform:
    """Random numbers in [0, 1), one for each row and step, drawn many steps at a time.

    Args:
        generator: one for all rows, a list of one for each, or None: PyTorch's own.
        block: steps at a time. A fixed number, so that a longer text begins like a shorter one.
    """

    def __init__(self, B: int, device: torch.device, generator: Generators | None,
                 block: int = 64) -> None:  # fmt: skip
        if isinstance(generator, Sequence) and len(generator) != B:
            raise ValueError(f"{B} rows need as many generators, got {len(generator)}")
        self.B, self.device, self.generator, self.block = B, device, generator, block
        self.left: list[Tensor] = []

    def next(self) -> Tensor:
        """(B,) float64, float32 on MPS."""
        if not self.left:
            if isinstance(self.generator, Sequence):
                drawn = torch.stack([self._draw((self.block,), g) for g in self.generator], dim=1)
            else:
                drawn = self._draw((self.block, self.B), self.generator)
            self.left = list(drawn.unbind())[::-1]
        return self.left.pop()

    def _draw(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        on = self.device if generator is None else generator.device
        return torch.rand(shape, generator=generator, dtype=dtype, device=on).to(self.device)


# --- prompts, stops, copies ---


def _padded(idx: Tensor | Sequence[Any], device: torch.device) -> tuple[Tensor, list[int]]:
    """Prompts -> (B, T) int64 with padding (0) on the left, and how much of it each row has."""
    if isinstance(idx, Tensor):
        rows, T = idx.to(device), idx.shape[1]
        pad = [0] * len(idx)
    else:
        tensors = [torch.as_tensor(row, dtype=torch.int64, device=device) for row in idx]
        T = max(map(len, tensors), default=0)
        pad = [T - len(row) for row in tensors]
        rows = torch.zeros(len(tensors), T, dtype=torch.int64, device=device)
        for row, p, text in zip(rows, pad, tensors, strict=True):
            row[p:] = text
    if not len(rows) or T in pad or not T:
        raise ValueError("each prompt must have at least one token, and there must be a prompt")
    return rows, pad


def as_function(stop: Stop | None) -> Callable[[int, list[int]], bool] | None:
    """`stop` in each of its forms -> a function of the row and its new tokens."""
    if stop is None or callable(stop):
        return stop
    ids = {stop} if isinstance(stop, int) else set(stop)
    return lambda row, new: new[-1] in ids


class Copy:
    """A copy to the host that has been started; on CUDA it runs beside the next step."""

    def __init__(self, token: Tensor) -> None:
        self.event = None
        self.host = token
        if token.is_cuda:
            self.host = torch.empty(token.shape, dtype=token.dtype, pin_memory=True)
            self.host.copy_(token, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def wait(self) -> list[int]:
        """The tokens, (B,): the one place where the host waits for the device."""
        if self.event is not None:
            self.event.synchronize()
        return self.host.tolist()
