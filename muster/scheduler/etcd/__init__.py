"""Several schedulers with one leader: the election and the journal, both in etcd."""
