"""Plans of parallel training: layouts, rules, costs, search. Pure: without torch, clocks and sockets."""
