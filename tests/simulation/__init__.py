"""A deterministic simulator of whole jobs.

It runs the scheduler's real machine and driver, the workers' real client and the real codec on one seeded
queue with delay, loss, repeats, partitions, kills, crashes at each commit, failing disks, drains and spares,
and judges from outside::

    python -m tests.simulation --seeds 20000          play seeds, print those that break a promise
    python -m tests.simulation --replay 4711          print all that happens in one seed
    python -m tests.simulation --mutants --seeds 2000 prove that every planted bug is caught
    python -m tests.simulation --schedulers           the same with three schedulers on a simulated etcd
"""
