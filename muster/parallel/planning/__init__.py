"""Plans parallel training: layouts, rules, costs, search. Pure: without torch, clocks and sockets.

``timeline`` and ``memory`` simulate a step; ``parts`` says which elements of a parameter a rank holds.
Pipeline parallelism is not offered.
"""
