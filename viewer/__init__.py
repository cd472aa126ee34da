"""What explain.py shows: the attention of a model at work, from its own q, k and v.

document.py     the contract: what is computed, and what is shown
maps.py         the q, k, v of a run, the attention of every head, the backend against manual
tiles.py        the trace of attention/tiled.py
caches.py       one decode step through each KV cache
cost.py         bytes, FLOPs, the roofline: closed formulas
ring.py         attention/ring.py, with threads in place of processes
text.py         the document in a terminal
page.py         the document as one HTML file
"""
