"""`make fuzz`: random and hostile requests, connections and files against a real server, with healthy streams beside.

What is sent follows from a seed: request i of a run is the same on every machine, however fast.
"""
