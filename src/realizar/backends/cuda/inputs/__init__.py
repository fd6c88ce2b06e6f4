"""What a step's blocks begin with, made of its tokens alone: the residual stream, and an input of each layer."""
