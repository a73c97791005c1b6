"""Splitting a graph over unequal devices.

placement   where weights go, from the requested shares (apportion: whole units, no accumulated rounding)
infer       from the placement, the state of every tensor and the collectives (transitions: their cost)
localize    one device's part as an ordinary graph (collectives: the communication ops)
"""
