import triton
import triton.language as tl


@triton.jit
def softmax(S, P, Tk, BLOCK_N: tl.constexpr):
    i = tl.program_id(0)
    j = tl.arange(0, BLOCK_N)
    s = tl.load(S + i * Tk + j, mask=j < Tk, other=float("-inf"))  # weight 0
    p = tl.exp(s - tl.max(s, axis=0))
    tl.store(P + i * Tk + j, p / tl.sum(p, axis=0), mask=j < Tk)
