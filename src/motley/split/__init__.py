"""How a graph is spread over unequal devices.

placement   where weights go, from the proportions asked for (apportion: whole units, without drift)
infer       from there, the state of every tensor and where devices must talk (transitions: what that costs)
localize    one device's share as an ordinary graph (collectives: the ops that talk)
"""
