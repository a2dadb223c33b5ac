"""Benchmarks of torch programs whose processes live on when ranks are lost."""
