"""How context features travel from the target to the draft (DESIGN section 5).

Nothing is imported here: `base`, `ring`, `records`, `tensors` and the transports need torch, and a
process without it may still import this package's settings from `options`.
"""
