"""Parallel modes: divides a module among ranks by a plan, which a search finds.

``planning`` is pure: it decides and describes, and imports neither torch nor anything that communicates.
``trace`` records a forward pass, ``eager`` refuses what a record would leave out; ``mesh_communicator``,
``operators``, ``gradients`` and ``module`` run a plan with torch; users call ``api`` and ``command``.
"""
