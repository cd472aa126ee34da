import triton
import triton.language as tl


@triton.jit
def scores(Q, K, S, Tq, Tk, tau,
           D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, D)
    Q_i = tl.load(Q + i[:, None] * D + d[None, :], mask=i[:, None] < Tq, other=0.0)
    K_j = tl.load(K + j[:, None] * D + d[None, :], mask=j[:, None] < Tk, other=0.0)
    S_ij = tau * tl.dot(Q_i, tl.trans(K_j), input_precision="ieee")
    inside = (i[:, None] < Tq) & (j[None, :] < Tk)
    tl.store(S + i[:, None] * Tk + j[None, :], S_ij, mask=inside)
