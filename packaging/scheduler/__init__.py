"""So that ``python -m scheduler`` starts Muster's scheduler."""
