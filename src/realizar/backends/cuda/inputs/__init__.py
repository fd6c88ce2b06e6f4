"""What a step's blocks begin with, made of its tokens alone: the residual stream, and an input of each layer.

`draft_chain.py`: what a drafter's step begins with: the tokens and states of the steps before it.
"""
