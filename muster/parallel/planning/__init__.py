"""Plans of parallel training: layouts, rules, costs, search. Pure: without torch, clocks and sockets.

``timeline`` and ``memory`` play a step through; ``parts`` says which elements of a parameter a rank holds.
Pipelines are not offered.
"""
