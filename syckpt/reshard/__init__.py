"""Where the parts of a distributed tensor are, who writes which, and which bytes a reader needs.

`layout` (placements -> boxes), `owners` (pieces -> ranks) and `plan` (boxes -> regions -> blocks) are arithmetic: no torch, no
communication, the same answer on every rank. `tensors` is torch's side: what a live tensor's layout is, and views of its local parts.
"""
