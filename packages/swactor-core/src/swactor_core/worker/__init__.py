"""The harness of the worker process (spec sections 28 to 33): `python -m swactor_core.worker`.

Four parts: `adapter` (NDJSON lines in and out), `rings` (ring ends between shared memory and device), `steps`
(role code) and `harness` (performs the worker machine's effects with them). Rules live in
`machines/{worker,ingress,egress}.py`; a device and a model come from a worker plug-in.
"""
