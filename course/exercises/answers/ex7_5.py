import triton
import triton.language as tl


@triton.jit
def forward(Q, K, V, O, L, Tq, Tk, scale,
            D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    Q_i = tl.load(Q + i[:, None] * D + d[None, :], mask=i[:, None] < Tq, other=0.0)
    O_i = tl.zeros((BLOCK_M, D), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    m_i = tl.full((BLOCK_M,), -1e30, tl.float32)
    for j0 in range(0, Tk, BLOCK_N):
        j = j0 + tl.arange(0, BLOCK_N)
        K_j = tl.load(K + j[:, None] * D + d[None, :], mask=j[:, None] < Tk, other=0.0)
        V_j = tl.load(V + j[:, None] * D + d[None, :], mask=j[:, None] < Tk, other=0.0)
        S_ij = scale * tl.dot(Q_i, tl.trans(K_j), input_precision="ieee")
        seen = j[None, :] <= i[:, None] + Tk - Tq
        S_ij = tl.where(seen, S_ij, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(S_ij, axis=1))
        P_ij = tl.exp2(S_ij - m_new[:, None])
        rescale = tl.exp2(m_i - m_new)
        l_i = rescale * l_i + tl.sum(P_ij, axis=1)
        O_i = rescale[:, None] * O_i + tl.dot(P_ij, V_j, input_precision="ieee")
        m_i = m_new
    tl.store(O + i[:, None] * D + d[None, :], O_i / l_i[:, None], mask=i[:, None] < Tq)
    tl.store(L + i, m_i + tl.log2(l_i), mask=i < Tq)
