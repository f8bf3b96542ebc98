"""Assembly of a node process: data plane, worker process, stage host, control service, boot."""
