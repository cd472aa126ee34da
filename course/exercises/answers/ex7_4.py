import triton
import triton.language as tl


@triton.jit
def attend(Q, K, V, O, Tq, Tk, tau,
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
        S_ij = tau * tl.dot(Q_i, tl.trans(K_j), input_precision="ieee")
        S_ij = tl.where(j[None, :] < Tk, S_ij, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(S_ij, axis=1))
        P_ij = tl.exp(S_ij - m_new[:, None])
        rescale = tl.exp(m_i - m_new)
        l_i = rescale * l_i + tl.sum(P_ij, axis=1)
        O_i = rescale[:, None] * O_i + tl.dot(P_ij, V_j, input_precision="ieee")
        m_i = m_new
    tl.store(O + i[:, None] * D + d[None, :], O_i / l_i[:, None], mask=i[:, None] < Tq)
