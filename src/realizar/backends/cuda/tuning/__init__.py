"""Measuring tiles and splits of matmuls: the sweep behind `realizar tune`."""
