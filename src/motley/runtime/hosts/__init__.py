"""Crews whose devices are in several processes, on one host or on several.

* `protocol`: authenticated messages over a TCP connection, the control connection of rank 0 and a worker
* `messages`: what these messages contain: steps, shifts, parts of the cache
* `mesh`: the connections between all processes (torch.distributed, Gloo), and collectives over them
* `wire`, `shared`: how parts travel: in fewer bits, or in memory that processes of one machine share
* `opening`: the model, the crew and the cache that a worker is asked to run
* `remote`: rank 0's side, a `RemoteWorker` for each worker process
* `serving`: the worker's side
"""
