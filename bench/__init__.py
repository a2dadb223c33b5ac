"""What the product's figures come from: each benchmark measures, checks its numbers, and writes JSON."""
