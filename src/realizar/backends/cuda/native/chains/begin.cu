  // How a chain's kernel begins, behind its segments.
  __shared__ Shared shared;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  let_next_start();
