"""Inner loops as LLVM code: vector operations, dot products, tiles."""
