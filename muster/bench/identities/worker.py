"""A worker of ``bench identities``: trains as those of the soak do, each step with one right result."""

from muster.bench.soak.job import train

if __name__ == "__main__":
    train()
