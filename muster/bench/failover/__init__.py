"""Several schedulers on etcd: measures what their failures cost a job."""
