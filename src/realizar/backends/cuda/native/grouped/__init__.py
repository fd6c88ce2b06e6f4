"""Matmuls of rows with the experts that each goes to: a sort by expert, then tiles of one expert each.

Read in this order:

1. `sort.cu`, `route.cu` and, for many pairs, `route_many.cu`: the sort. `work.cu`: what a matmul is given. `lay.cu`:
   rows copied in the order of tiles, where gate and up of Hopper read them so.
2. `wgmma.cu` and `mma_sync.cu`: the matmuls of Hopper, and of other cards from Ampere on, whose weights come through a
   ring in shared memory (`ring.cu`). `direct.cu`: those of few rows an expert, whose warps read weights for themselves.
3. Their ends: `wgmma_gated.cu`, `mma_sync_gated.cu` and `direct_gated.cu` for gate and up, `wgmma_pairs.cu`,
   `mma_sync_pairs.cu` and `direct_pairs.cu` for sums of pairs.
4. Launches of Hopper's: `wgmma_items.cu`, of one matmul; `fused.cu`, of gate and up and down of few pairs, which blocks
   sort for themselves (`lists.cu`).

`source.py` puts them together.
"""
