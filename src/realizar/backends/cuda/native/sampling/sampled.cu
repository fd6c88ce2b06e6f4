// Records of the sampled tokens of a step all of whose rows sample, one each, made on the device: a captured sampler
// needs nothing of the host but what a row sent when it opened, and the indices of its masks.

// Grid: blocks of 128 tokens. One without a row, or of a plain greedy one, has no flags: other kernels pass it.
extern "C" __global__ void __launch_bounds__(128) list_sampled(const Tables* tables, Sampled* tokens, int count) {
  begin();
  const int at = blockIdx.x * 128 + threadIdx.x;
  if (at >= count) return;
  const Tables& t = *tables;
  Sampled c{at, t.selected_rows[at], 0, 0, 0, NO_MASK, 0, 0};
  if (c.row >= 0) {
    const Row& row = t.rows[c.row];
    c.position = t.contexts[at];
    c.num_output = c.position - row.num_prompt;
    c.flags = row.kinds | (row.num_ends && c.num_output < row.min_tokens ? ADJUST : 0);
    const int mask = t.mask_indices[at];
    if (mask >= 0) {
      c.mask = mask;
      c.flags |= ADJUST;
    } else if (mask == DEFERRED) {
      c.flags = 0;
    }
  }
  tokens[at] = c;
}
