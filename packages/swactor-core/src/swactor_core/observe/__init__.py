"""The event stream of a process and its sinks."""
