"""The state of a job during and after its run (processes, rounds, failures), and its presentation."""
