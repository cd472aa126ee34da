import triton
import triton.language as tl


@triton.jit
def backward(Q, K, V, dO, L, Delta, dK, dV, Tq, Tk, tau, scale,
             D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    j = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, D)
    K_j = tl.load(K + j[:, None] * D + d[None, :], mask=j[:, None] < Tk, other=0.0)
    V_j = tl.load(V + j[:, None] * D + d[None, :], mask=j[:, None] < Tk, other=0.0)
    dK_j = tl.zeros((BLOCK_N, D), tl.float32)
    dV_j = tl.zeros((BLOCK_N, D), tl.float32)
    for i0 in range(0, Tq, BLOCK_M):
        i = i0 + tl.arange(0, BLOCK_M)
        Q_i = tl.load(Q + i[:, None] * D + d[None, :], mask=i[:, None] < Tq, other=0.0)
        dO_i = tl.load(dO + i[:, None] * D + d[None, :], mask=i[:, None] < Tq, other=0.0)
        L_i = tl.load(L + i, mask=i < Tq, other=0.0)
        delta_i = tl.load(Delta + i, mask=i < Tq, other=0.0)
        S_ij = scale * tl.dot(Q_i, tl.trans(K_j), input_precision="ieee")
        seen = j[None, :] <= i[:, None] + Tk - Tq
        P_ij = tl.where(seen, tl.exp2(S_ij - L_i[:, None]), 0.0)
        dV_j += tl.dot(tl.trans(P_ij), dO_i, input_precision="ieee")
        dP_ij = tl.dot(dO_i, tl.trans(V_j), input_precision="ieee")
        dS_ij = P_ij * (dP_ij - delta_i[:, None])
        dK_j += tl.dot(tl.trans(dS_ij), Q_i, input_precision="ieee")
    tl.store(dK + j[:, None] * D + d[None, :], tau * dK_j, mask=j[:, None] < Tk)
    tl.store(dV + j[:, None] * D + d[None, :], dV_j, mask=j[:, None] < Tk)
