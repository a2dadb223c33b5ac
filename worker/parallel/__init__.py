"""Parallel modes: how a module is divided among ranks, found by search, shown as a plan, and run.

``layouts``, ``graph``, ``rules``, ``costs``, ``problem``, ``search``, ``plan`` and ``page`` are pure: they
decide and describe, and import neither torch nor anything that communicates. ``trace``, ``fabric``,
``operators``, ``gradients`` and ``module`` run a plan with torch; users call ``api`` and ``command``.
"""
