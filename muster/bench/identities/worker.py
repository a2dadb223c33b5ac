"""A worker of ``bench identities``: trains like workers of the soak, each step has one right result."""

from muster.bench.soak.job import train

if __name__ == "__main__":
    train()
